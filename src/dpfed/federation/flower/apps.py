"""Flower's ClientApp (answers requests) and ServerApp (runs the server) for a dpfed federation.

Both dpfed's commands and Flower's own commands use these apps. With Flower's commands, a client
gives its client.toml in `--node-config`. The server gives its configuration, keys and folder in
Flower's run configuration (docs/federation.md).
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
from dpfed.federation.flower.envelope import (
    NONCE,
    envelope,
    greeting,
    header_value,
    payload_of,
    refusal,
)
from dpfed.federation.policy import public_text

Answer = Callable[[bytes], bytes]
CONFIG = "dpfed-config"
OUT = "dpfed-out"
KEYS = "dpfed-keys"
CLIENT = "dpfed-client"


def client_app(
    answer: Answer, name: str, log: Callable[[str], None], greets: bool = False, debug: bool = False
) -> ClientApp:
    """Return an app that answers every request with `answer`.

    If `answer` raises, the server gets only the text from `public_text`. With `greets`, the app
    tells its client name to any server that asks. Tests without keys need this.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        nonce = header_value(message.content, NONCE)
        try:
            data = payload_of(message.content)
            reply = answer(data)
            log(f"answered a request of {len(data):,} bytes with {len(reply):,}")
            return Message(envelope(reply, nonce), reply_to=message)
        except Exception as error:
            known = isinstance(error, DpfedError)
            if debug or not known:
                traceback.print_exc()
            log(f"did not answer: {error}" if known else f"failed: {type(error).__name__}: {error}")
            return Message(refusal(public_text(error), nonce), reply_to=message)

    if greets:

        @app.query()
        def query(message: Message, context: Context) -> Message:
            return Message(greeting(header_value(message.content, NONCE), name), reply_to=message)

    return app


@lru_cache(maxsize=1)
def _client_of(path: str) -> ClientApp:
    from dpfed.federation.client.client import Client
    from dpfed.federation.client_config import load_client
    from dpfed.registry import registry

    config, _ = load_client(Path(path), registry())
    own = Client(config, log=_to_stderr)
    return client_app(own.answer, config.client.name, _to_stderr)


def _to_stderr(line: str) -> None:
    print(f"dpfed: {line}", file=sys.stderr, flush=True)


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    """Answer a request under Flower's own SuperNode.

    The client's own option `--node-config` selects the client.toml. The server cannot select it.
    """
    path = context.node_config.get(CLIENT)
    try:
        if not isinstance(path, str):
            raise DpfedError(
                f"""start flower-supernode with --node-config '{CLIENT}="/path/to/client.toml"'"""
            )
        app = _client_of(path)
    except Exception as error:
        _to_stderr(str(error))
        nonce = header_value(message.content, NONCE)
        return Message(refusal(public_text(error), nonce), reply_to=message)
    return app(message, context)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server under Flower's own SuperLink.

    The clients' keys must be registered before, with `flwr supernode register`.
    """
    from dpfed.federation.server.serving import serve

    values = [context.run_config.get(key) for key in (CONFIG, OUT, KEYS)]
    config, out, keys = (value if isinstance(value, str) else "" for value in values)
    if not (config and out and keys):
        raise DpfedError(
            f"the run configuration must give {CONFIG}, {OUT} and {KEYS}: `flwr run --run-config`"
        )
    serve(config, Path(out), grid, Path(keys), _to_stderr)


def app_files() -> dict[str, bytes]:
    """Return the files of the app folder for `flwr run`, by name.

    The folder has no code, because server and clients use their own dpfed.
    """
    project = f"""\
[project]
name = "dpfed-federation"
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
    """Write the app folder for `flwr run`; raise DpfedError if the folder exists.

    The command for this is `python -m dpfed.federation.flower.apps DIR`.
    """
    if folder.exists():
        raise DpfedError(f"{folder} is there already: choose another folder")
    folder.mkdir(parents=True)
    for name, data in app_files().items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    write_app(Path(sys.argv[1]))
