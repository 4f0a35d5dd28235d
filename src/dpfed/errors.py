"""The one error type for mistakes a person can mend: it is printed as one sentence, never as a traceback.

Messages that name an option or a keyword take its name from `phrase`, to fit the interface in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

# One entry for everything that the command line and `dpfed.fine_tune` call differently.
COMMAND_LINE = {
    "another out": "choose another --out",
    "replace": ", or --force to replace it",
    "classes": "data.classes",
    "clients": "data.clients",
}
PYTHON = {
    "another out": "choose another out",
    "replace": ", or remove that folder",
    "classes": "classes",
    "clients": "clients",
}
_phrases: ContextVar[Mapping[str, str]] = ContextVar("phrases", default=COMMAND_LINE)


def phrase(name: str) -> str:
    """Return the words of the interface in use for an option, a keyword or a remedy."""
    return _phrases.get()[name]


@contextmanager
def python_phrases() -> Iterator[None]:
    """Make messages use the words of the Python interface."""
    token = _phrases.set(PYTHON)
    try:
        yield
    finally:
        _phrases.reset(token)


class DpfedWarning(UserWarning):
    """A warning of `dpfed.fine_tune`: what to change, or to know before using the result."""


class DpfedError(Exception):
    """A user's mistake or a condition outside the program; the message says what to do. Exit code 2."""

    code = 2


class StoppedError(DpfedError):
    """The run had to stop, and what was computed so far is kept. Exit code 3."""

    code = 3


class DivergedError(StoppedError):
    """Training left the finite numbers."""


class InterruptedRunError(DpfedError):
    """Somebody asked the run to stop with this signal; it can go on. Exit code 128 + the signal's number."""

    def __init__(self, signal: str, number: int, sentence: str = "") -> None:
        super().__init__(sentence or f"stopped by {signal}")
        self.signal, self.number, self.code = signal, number, 128 + number
