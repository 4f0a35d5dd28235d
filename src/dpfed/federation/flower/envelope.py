"""Request and reply bytes in Flower's messages: one array of bytes, which Flower cuts into pieces, and a ticket.

The ticket is a secret of the server and the one client it was sent to. Flower checks who is connected, but not that a
reply comes from the node it names; a reply that does not bring the ticket back comes from somebody else.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from dpfed.federation.messages import MessageError
from dpfed.federation.policy import RefusedError

PARCEL, SLIP, DATA, TICKET, REFUSED, NAME = (
    "dpfed.parcel",
    "dpfed.slip",
    "data",
    "ticket",
    "refused",
    "name",
)
BYTES = "dpfed.bytes"
LONGEST = 300


def parcel(data: bytes, ticket: str) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(data),), stype=BYTES, data=data)
    return RecordDict({PARCEL: ArrayRecord({DATA: array}), SLIP: ConfigRecord({TICKET: ticket})})


def refusal(text: str, ticket: str) -> RecordDict:
    return RecordDict({SLIP: ConfigRecord({TICKET: ticket, REFUSED: text[:LONGEST]})})


def hello(ticket: str, name: str = "") -> RecordDict:
    """Asks a node for its name, or says it. Only where there are no keys to know it by."""
    return RecordDict({SLIP: ConfigRecord({TICKET: ticket, NAME: name})})


def slip(content: RecordDict, key: str) -> str:
    """A word on the slip, "" where there is none."""
    found: Any = content.config_records.get(SLIP, {})
    word = found.get(key, "")
    return word if isinstance(word, str) else ""


def opened(content: RecordDict) -> bytes:
    """The bytes in a parcel as they are; RefusedError if a refusal came instead."""
    said = slip(content, REFUSED)
    if said:
        raise RefusedError(said[:LONGEST])
    try:
        data = content.array_records[PARCEL][DATA].data
    except (KeyError, AttributeError):
        raise MessageError(
            "the message holds no bytes of dpfed: both sides need the same dpfed"
        ) from None
    if not isinstance(data, bytes):
        raise MessageError("the message holds no bytes of dpfed: both sides need the same dpfed")
    return data
