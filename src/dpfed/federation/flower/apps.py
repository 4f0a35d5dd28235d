"""Flower's ClientApp and ServerApp for a dpfed federation.

Under `dpfed client` and `dpfed server` both apps only pass bytes through a socket (`relay.py`).
Flower starts a new process for each message. This process imports Flower, but not torch, which
would be slow.

With Flower's own commands the apps do the work themselves: a client gives its client.toml in
`--node-config`, and the server its configuration, keys and folder in the run configuration
(docs/federation/flower.md).
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from dpfed.errors import DpfedError
from dpfed.federation.flower import relay
from dpfed.federation.flower.app_folder import CLIENT, CONFIG, KEYS, OUT, RELAY
from dpfed.federation.flower.envelope import envelope, opened

client = ClientApp()
server = ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    return _answer("train", message, context)


@client.query()
def query(message: Message, context: Context) -> Message:
    return _answer("query", message, context)


def _answer(kind: str, message: Message, context: Context) -> Message:
    """Pass a message of the server to this machine's client, and return the client's reply.

    The path to the client comes from its own `--node-config`, never from the message.
    """
    header, data = opened(message.content)
    request = {"kind": kind, "header": header, "has_data": data is not None}
    path = context.node_config.get(RELAY)
    if isinstance(path, str):
        found, content = relay.call(path, request, data or b"")
    else:
        found, content = _own_client(context.node_config.get(CLIENT))(request, data or b"")
    reply = envelope(found["header"], content if found["has_data"] else None)
    return Message(reply, reply_to=message)


@lru_cache(maxsize=1)
def _own_client(path: object) -> relay.Handler:
    """Return a function that answers requests in this process, as the client of a client.toml."""
    from dpfed.federation.flower.answering import Answerer, failing

    if not isinstance(path, str):
        text = f"""start flower-supernode with --node-config '{CLIENT}="/path/to/client.toml"'"""
        return failing(DpfedError(text), _to_stderr)
    try:
        return Answerer.of_file(Path(path), _to_stderr)
    except Exception as error:
        return failing(error, _to_stderr)


def _to_stderr(line: str) -> None:
    print(f"dpfed: {line}", file=sys.stderr, flush=True)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Pass messages on for `dpfed server`, or run the server in this process.

    The server runs in this process if Flower's own commands have started it. The operator must then
    register the clients' keys before the start.
    """
    from dpfed.federation.flower.post import GridPost, serve_grid

    values = {key: context.run_config.get(key) for key in (RELAY, CONFIG, OUT, KEYS)}
    given = {key: value for key, value in values.items() if isinstance(value, str) and value}
    if RELAY in given:
        serve_grid(grid, given[RELAY])
        return
    if len(given) < 3:
        raise DpfedError(
            f"the run configuration must give {CONFIG}, {OUT} and {KEYS}: `flwr run --run-config`"
        )
    from dpfed.federation.server.serving import serve

    serve(given[CONFIG], Path(given[OUT]), GridPost(grid), Path(given[KEYS]), _to_stderr)
