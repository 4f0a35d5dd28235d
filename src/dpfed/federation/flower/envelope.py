"""Put request and reply bytes into Flower's messages.

Each message has an array with the bytes, and a header with the nonce and other short texts.

The nonce is a random text in each request that only the server and this client know. Flower checks
the key of each connected node. It does not check that a reply comes from the node that the reply
names. The server therefore rejects a reply without the nonce as forged.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from dpfed.federation.messages import MessageError
from dpfed.federation.policy import RefusedError

# Names of the two records in a Flower message: the array of bytes, and the header.
PAYLOAD = "dpfed.parcel"
HEADER = "dpfed.slip"
# Names of the fields in these two records.
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
    """Return a message that asks a node for its client name; with `name`, return the answer.

    Such messages are used only in tests without keys.
    """
    return RecordDict({HEADER: ConfigRecord({NONCE: nonce, NAME: name})})


def header_value(content: RecordDict, key: str) -> str:
    """Return the text under `key` in the header of a message, or "" if it is missing."""
    # Flower's view `content.config_records` would be a reference cycle, which keeps messages in
    # memory until the garbage collector runs.
    header: Any = content.get(HEADER, {})
    value = header.get(key, "")
    return value if isinstance(value, str) else ""


def payload_of(content: RecordDict) -> bytes:
    """Return the request or reply bytes in a message; raise RefusedError if it is a refusal."""
    reason = header_value(content, REFUSED)
    if reason:
        raise RefusedError(reason[:MAX_REFUSAL])
    try:
        record: Any = content[PAYLOAD]
        data = record[DATA].data
    except (KeyError, AttributeError):
        data = None
    if not isinstance(data, bytes):
        raise MessageError("the message holds no bytes of dpfed: both sides need the same dpfed")
    return data
