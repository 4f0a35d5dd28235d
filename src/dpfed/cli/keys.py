"""`dpfed keys`: make the keys and certificates with which server and clients prove who they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfed.cli.options import Debug
from dpfed.errors import DpfedError


def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a new folder for the keys")],
    server: Annotated[
        str | None, typer.Option(help="host name or address that clients connect to")
    ] = None,
    clients: Annotated[
        str, typer.Option(help="names of the clients, with commas between them")
    ] = "",
    client: Annotated[
        str | None, typer.Option(help="make only this client's own pair, on its own machine")
    ] = None,
    name: Annotated[
        str, typer.Option(help="name of the server, federation.server of its configuration")
    ] = "server",
    days: Annotated[
        int, typer.Option(min=1, max=3650, help="how long the certificates are valid")
    ] = 365,
    debug: Debug = False,
) -> None:
    """Make one folder per site, with keys and a client.toml to fill in.

    Example: dpfed keys keys --server 127.0.0.1 --clients clinic-a,clinic-b
    """
    from dpfed.federation.keys import make_all, make_client

    if client is not None:
        if server is not None or clients:
            raise DpfedError(
                "--client makes one pair on the client's own machine: "
                "leave out --server and --clients"
            )
        print(*make_client(folder, client), sep="\n")
        print(
            f"send {folder / client}.pub to the server's people; "
            "client.key stays here and is link.key in client.toml"
        )
        return
    if server is None:
        raise DpfedError("give the host that clients connect to: --server hub.example.org")
    names = [name.strip() for name in clients.split(",") if name.strip()]
    print(*make_all(folder, server, names, days, name), sep="\n")
    print(
        f"dpfed server cfg.toml --keys {folder}; "
        f"each client gets its own folder under {folder}, and nothing else"
    )
