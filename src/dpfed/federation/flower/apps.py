"""The ClientApp and the ServerApp, for `dpfed client` / `dpfed server` and for Flower's own commands alike.

With Flower's own commands a ClientApp learns from `--node-config` which client.toml is its own, and a ServerApp from the
run configuration which configuration, keys and folder to use: `docs/federation.md`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from dpfed.errors import DpfedError
from dpfed.federation.flower.envelope import TICKET, hello, opened, parcel, refusal, slip
from dpfed.federation.policy import told

Answer = Callable[[bytes], bytes]
CONFIG, OUT, KEYS = "dpfed-config", "dpfed-out", "dpfed-keys"
CLIENT = "dpfed-client"


def client_app(
    answer: Answer, name: str, log: Callable[[str], None], greets: bool = False, debug: bool = False
) -> ClientApp:
    """Answers every request with `answer`; of an error the server hears only what `told` lets through.

    `greets`: says its name to whoever asks, for tests without keys.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        ticket = slip(message.content, TICKET)
        try:
            data = opened(message.content)
            reply = answer(data)
            log(f"answered a request of {len(data):,} bytes with {len(reply):,}")
            return Message(parcel(reply, ticket), reply_to=message)
        except Exception as error:
            if debug or not isinstance(error, DpfedError):
                traceback.print_exc()
            log(
                f"did not answer: {error}"
                if isinstance(error, DpfedError)
                else f"failed: {type(error).__name__}: {error}"
            )
            return Message(refusal(told(error), ticket), reply_to=message)

    if greets:

        @app.query()
        def query(message: Message, context: Context) -> Message:
            return Message(hello(slip(message.content, TICKET), name), reply_to=message)

    return app


@lru_cache(maxsize=1)
def _client_of(path: str) -> ClientApp:
    from dpfed.federation.client.client import Client
    from dpfed.federation.links import load_client
    from dpfed.registry import registry

    config, _ = load_client(Path(path), registry())
    own = Client(config, log=_to_stderr)
    return client_app(own.answer, config.client.name, _to_stderr)


def _to_stderr(line: str) -> None:
    print(f"dpfed: {line}", file=sys.stderr, flush=True)


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Under Flower's own SuperNode: which client this is, its `--node-config` says, and never the server."""
    path = context.node_config.get(CLIENT)
    ticket = slip(message.content, TICKET)
    try:
        if not isinstance(path, str):
            raise DpfedError(
                f"""start flower-supernode with --node-config '{CLIENT}="/path/to/client.toml"'"""
            )
        app = _client_of(path)
    except Exception as error:
        _to_stderr(str(error))
        return Message(refusal(told(error), ticket), reply_to=message)
    return app(message, context)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Under Flower's own SuperLink: keys by which clients are known are registered there by `flwr supernode register`."""
    from dpfed.federation.server.serving import serve

    given = {key: context.run_config.get(key) for key in (CONFIG, OUT, KEYS)}
    config, out, keys = (
        value if isinstance(value, str) and value else None for value in given.values()
    )
    if config is None or out is None or keys is None:
        raise DpfedError(
            f"the run configuration must give {CONFIG}, {OUT} and {KEYS}: `flwr run --run-config`"
        )
    resume = (Path(out) / "config.toml").exists()
    serve(config, [], Path(out), resume, grid, Path(keys), _to_stderr)


def app_files(name: str = "dpfed-federation") -> dict[str, bytes]:
    """The folder that `flwr run` takes; there is no code in it, as both sides run the dpfed they have installed."""
    project = f"""\
[project]
name = "{name}"
version = "1.0.0"
description = "A differentially private federation run by dpfed"
license = {{ file = "LICENSE" }}
dependencies = ["dpfed", "flwr>=1.41,<1.42"]

[tool.flwr.app]
publisher = "dpfed"

[tool.flwr.app.components]
serverapp = "dpfed.federation.flower.apps:server"
clientapp = "dpfed.federation.flower.apps:client"

[tool.flwr.app.config]
{CONFIG} = ""
{OUT} = ""
{KEYS} = ""
"""
    return {
        "pyproject.toml": project.encode(),
        "LICENSE": b"No rights are needed for this folder: it holds names only.\n",
        "README.md": b"# A federation run by dpfed\n",
    }


def write_app(folder: Path) -> None:
    """`python -m dpfed.federation.flower.apps DIR`"""
    if folder.exists():
        raise DpfedError(f"{folder} is there already: choose another folder")
    folder.mkdir(parents=True)
    for name, data in app_files().items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    write_app(Path(sys.argv[1]))
