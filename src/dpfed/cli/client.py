"""`dpfed client`: take part in a federation, by the rules of one's own client.toml."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpfed.errors import DpfedError

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

    from dpfed.federation.client_config import LinkSection
    from dpfed.federation.links import Address, Process
    from dpfed.training.interrupt import Stop

POLL = 0.1
TRIES = 5
LONGEST_WAIT = 30.0
UP = "SuperNode ID"


def client(
    config: Annotated[Path, typer.Argument(help="this client's client.toml")],
    insecure: Annotated[
        bool, typer.Option("--insecure", help="no TLS and no keys, for tests on this machine")
    ] = False,
    debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False,
) -> None:
    """Take part in a federation until stopped. Example: dpfed client client.toml"""
    from dpfed.federation.client_config import load_client
    from dpfed.federation.links import check_link, need_flower
    from dpfed.training.interrupt import on_signals

    need_flower()
    from dpfed.registry import registry

    with on_signals() as stop:
        settings, link = load_client(config, registry())
        address = check_link(link, insecure)
        from dpfed.federation.client.client import Client
        from dpfed.federation.flower.apps import client_app

        own = Client(settings, insecure=insecure, log=say)
        app = client_app(own.answer, settings.client.name, say, greets=insecure, debug=debug)
        say(
            f"{settings.client.name} takes part with {', '.join(settings.client.servers)} at {address}"
        )
        if own.on_gpu and settings.policy.isolation == "exact":
            say(
                "note: exact isolation was tested on CPUs; on a GPU it rests on deterministic kernels"
            )
        if insecure:
            say("INSECURE: no TLS and no keys, for tests on this machine only")
        stop.gently = True
        keep_going(
            address, Path(settings.client.state) / "flower", None if insecure else link, app, stop
        )


def keep_going(
    address: Address, home: Path, link: LinkSection | None, app: ClientApp, stop: Stop
) -> None:
    """A SuperNode that ends is started again; one that never came to the server gives up after some tries."""
    from dpfed.federation.links import last_line, supernode

    been_there, failed = False, 0
    while True:
        before = written(home)
        process, own, secret = supernode(address, home, link)
        try:
            work(process, own, secret, app, stop)
        finally:
            process.end()
        came = came_up(process.log, before)
        been_there, failed = been_there or came, 0 if came else failed + 1
        why = last_line(process.log, before)
        if failed >= TRIES and not been_there:
            raise DpfedError(
                f"{address} does not take this client ({why}): check link.address, link.ca and link.key"
            )
        wait = min(LONGEST_WAIT, 2.0 ** min(failed + 1, 6))
        say(f"the connection has ended ({why}); trying again in {wait:g} s")
        end = time.monotonic() + wait
        while time.monotonic() < end:
            stop()
            time.sleep(POLL)


def work(process: Process, own: Address, secret: str, app: ClientApp, stop: Stop) -> None:
    """Does what comes until the SuperNode ends."""
    import httpx

    from dpfed.federation.flower.node import Tasks
    from dpfed.federation.links import is_own, wait_open

    wait_open(own, process)
    if not is_own(own):
        say(f"port {own.port} was taken by another user's process: connecting anew")
        return
    tasks = Tasks(own, secret, app)
    try:
        while process.popen.poll() is None:
            stop()
            try:
                if tasks.next():
                    continue
            except httpx.HTTPError as error:
                if process.popen.poll() is None and not isinstance(error, httpx.ConnectError):
                    say(f"the SuperNode did not take an answer: {error}")
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                # What Flower raises for a message that is none. The SuperNode would wait for its answer for ever.
                say(
                    f"what came in is no message of Flower's ({type(error).__name__}): connecting anew"
                )
                return
            time.sleep(POLL)
    finally:
        tasks.close()


def written(home: Path) -> int:
    """Bytes in the SuperNode's log before it is started again."""
    log = home / "supernode.log"
    return log.stat().st_size if log.exists() else 0


def came_up(log: Path, before: int) -> bool:
    with log.open("rb") as file:
        file.seek(before)
        return UP.encode() in file.read()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
