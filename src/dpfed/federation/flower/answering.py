"""Answer the server's requests, which Flower's ClientApp passes on to the client.

If an error occurs, the reply contains only an error text that reveals nothing about the records.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dpfed.errors import DpfedError
from dpfed.federation.flower.header import MAX_TEXT, NAME, NONCE, REFUSED
from dpfed.federation.flower.relay import Handler, Header
from dpfed.federation.policy import public_text


@dataclass(frozen=True)
class Answerer:
    """A callable that answers every request of the server by calling `answer`.

    If `answer` raises an error, the server gets only the text from `public_text`.

    greets  True to tell the client's name to any server that asks, for tests without TLS keys
    debug   True to print the traceback of every error on this machine
    """

    answer: Callable[[bytes], bytes]
    name: str
    log: Callable[[str], None]
    greets: bool = False
    debug: bool = False

    def __call__(self, header: Header, data: bytes) -> tuple[Header, bytes]:
        nonce = {NONCE: str(header["header"].get(NONCE, ""))}
        if header["kind"] == "query":
            found = {**nonce, NAME: self.name} if self.greets else nonce
            return {"header": found, "has_data": False}, b""
        try:
            reply = self.answer(data)
            self.log(f"answered a request of {len(data):,} bytes with {len(reply):,}")
            return {"header": nonce, "has_data": True}, reply
        except Exception as error:
            if self.debug or not isinstance(error, DpfedError):
                traceback.print_exc()
            return failing(error, self.log)(header, data)

    @classmethod
    def of_file(cls, path: Path, log: Callable[[str], None]) -> Answerer:
        """Return the `Answerer` for the client that the client.toml at `path` describes."""
        from dpfed.federation.client.client import Client
        from dpfed.federation.client_config import load_client
        from dpfed.registry import registry

        config, _ = load_client(path, registry())
        return cls(Client(config, log=log).answer, config.client.name, log)


def failing(error: Exception, log: Callable[[str], None]) -> Handler:
    """Return a function that answers every request with a refusal, because of `error`."""

    def refuse(header: Header, data: bytes) -> tuple[Header, bytes]:
        known = isinstance(error, DpfedError)
        log(f"did not answer: {error}" if known else f"failed: {type(error).__name__}: {error}")
        nonce = str(header["header"].get(NONCE, ""))
        found = {NONCE: nonce, REFUSED: public_text(error)[:MAX_TEXT]}
        return {"header": found, "has_data": False}, b""

    return refuse
