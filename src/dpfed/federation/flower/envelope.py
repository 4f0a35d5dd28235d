"""Request and reply bytes in Flower's messages: one array of bytes, and a header with a nonce.

The nonce is a secret between the server and the client that got the request. Flower checks who is
connected, but not that a reply comes from the node that it names. A reply without the nonce is a
forgery.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from dpfed.federation.messages import MessageError
from dpfed.federation.policy import RefusedError

# Names of records in Flower's messages.
PAYLOAD = "dpfed.parcel"
HEADER = "dpfed.slip"
# Names of values in these records.
DATA = "data"
NONCE = "ticket"
REFUSED = "refused"
NAME = "name"
ARRAY_TYPE = "dpfed.bytes"
MAX_REFUSAL = 300


def envelope(data: bytes, nonce: str) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(data),), stype=ARRAY_TYPE, data=data)
    header = ConfigRecord({NONCE: nonce})
    return RecordDict({PAYLOAD: ArrayRecord({DATA: array}), HEADER: header})


def refusal(text: str, nonce: str) -> RecordDict:
    return RecordDict({HEADER: ConfigRecord({NONCE: nonce, REFUSED: text[:MAX_REFUSAL]})})


def greeting(nonce: str, name: str = "") -> RecordDict:
    """Return the question for a node's name, or its answer; used only without keys."""
    return RecordDict({HEADER: ConfigRecord({NONCE: nonce, NAME: name})})


def header_value(content: RecordDict, key: str) -> str:
    """Return a text of the header, or "" if there is none."""
    header: Any = content.config_records.get(HEADER, {})
    value = header.get(key, "")
    return value if isinstance(value, str) else ""


def payload_of(content: RecordDict) -> bytes:
    """Return the bytes in an envelope; raise RefusedError for a refusal."""
    reason = header_value(content, REFUSED)
    if reason:
        raise RefusedError(reason[:MAX_REFUSAL])
    try:
        data = content.array_records[PAYLOAD][DATA].data
    except (KeyError, AttributeError):
        data = None
    if not isinstance(data, bytes):
        raise MessageError("the message holds no bytes of dpfed: both sides need the same dpfed")
    return data
