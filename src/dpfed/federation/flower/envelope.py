"""Put bytes and a header of short strings into Flower's messages, and read them again.

`header.py` has the keys of these strings, such as the nonce.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

# Names of the two records in a Flower message: the array of bytes, and the header.
PAYLOAD = "dpfed.parcel"
HEADER = "dpfed.slip"
# Name of the field with the bytes, and the type of their array.
DATA = "data"
ARRAY_TYPE = "dpfed.bytes"


def envelope(header: dict[str, str], data: bytes | None) -> RecordDict:
    """Return the content of a Flower message with this header; add `data` unless it is None."""
    content = RecordDict({HEADER: ConfigRecord({**header})})
    if data is not None:
        array = Array(dtype="uint8", shape=(len(data),), stype=ARRAY_TYPE, data=data)
        content[PAYLOAD] = ArrayRecord({DATA: array})
    return content


def opened(content: RecordDict) -> tuple[dict[str, str], bytes | None]:
    """Return the header and the bytes of a Flower message; None in place of missing bytes."""
    # Do not use Flower's properties `config_records` and `array_records`: they make reference
    # cycles, which keep large messages in memory until the garbage collector runs.
    header: Any = content.get(HEADER, {})
    texts = {key: value for key in header if isinstance(value := header[key], str)}
    try:
        record: Any = content[PAYLOAD]
        data = record[DATA].data
    except (KeyError, AttributeError):
        data = None
    return texts, data if isinstance(data, bytes) else None
