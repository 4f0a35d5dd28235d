"""Log lines that also carry named values, which are separate fields in a log in JSON format."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

Log = Callable[[str], None]


class LogLine(str):
    """A text line for a log that also carries named values, such as the round and the client.

    event   name of the event
    fields  the values by name; each must be a JSON value
    """

    event: str
    fields: dict[str, Any]

    def __new__(cls, text: str, event: str, **fields: Any) -> LogLine:
        line = super().__new__(cls, text)
        line.event = event
        line.fields = fields
        return line


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def json_to_stderr(line: str) -> None:
    """Write a log line to stderr as a JSON object: time, event, message, and its named values."""
    fact: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="milliseconds")}
    if isinstance(line, LogLine):
        fact |= {"event": line.event, "message": str(line), **line.fields}
    else:
        fact |= {"event": "note", "message": line}
    print(json.dumps(fact), file=sys.stderr, flush=True)
