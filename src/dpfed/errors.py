"""Errors that users can fix, and the names of options that error messages contain.

The command line prints a `DpfedError` as one sentence, without a traceback. An option has different
names on the command line and in Python. `phrase` returns the name in the interface that the user
uses.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

COMMAND_LINE = {
    "another out": "choose another --out",
    "replace": ", or --force to replace it",
    "classes": "data.classes",
    "clients": "data.clients",
    "task": "model.task",
    "merge": "--merge",
    "resume": "`dpfed run --resume {}`",
    "resume server": "`dpfed server --resume --out {}`",
    "a run folder": "give one that `dpfed run` has made",
    "compare": "dpfed compare",
    "algorithms": "--algorithms",
    "rates": "--lr",
    "preset": "--preset",
    "seeds": "--seeds",
    "search seeds": "--search-seeds",
    "plot": "--plot",
    "given metric": "given",
    "no target": "",
    "replace study": ", or --force to replace it (runs that both need are kept)",
}
PYTHON = {
    "another out": "choose another out",
    "replace": ", or remove that folder",
    "classes": "classes",
    "clients": "clients",
    "task": "task",
    "merge": "merge=True",
    "resume": "dpfed.fine_tune(..., out='{}', resume=True)",
    "resume server": "`dpfed server --resume --out {}`",
    "a run folder": "give one that dpfed.fine_tune or `dpfed run` has made",
    "compare": "dpfed.compare",
    "algorithms": "algorithms",
    "rates": "rates",
    "preset": "preset",
    "seeds": "seeds",
    "search seeds": "search_seeds",
    "plot": "plot",
    "given metric": "a function",
    "no target": " with epsilon=None",
    "replace study": ", or remove that folder",
}
_phrases: ContextVar[Mapping[str, str]] = ContextVar("phrases", default=COMMAND_LINE)


def phrase(name: str) -> str:
    """Return the text that names an option or a remedy in the interface that the user uses.

    name  a key of COMMAND_LINE, such as "clients"
    """
    return _phrases.get()[name]


@contextmanager
def python_phrases() -> Iterator[None]:
    """Context in which `phrase` returns names of Python arguments, not of command-line options."""
    token = _phrases.set(PYTHON)
    try:
        yield
    finally:
        _phrases.reset(token)


def counted(number: int, noun: str) -> str:
    """Return the number with its noun: "1 client", "2,000 clients"."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's class name if it has none.

    If this first line ends with a colon, the second line is added.
    """
    text = getattr(error, "strerror", None) or str(error).strip()
    lines = text.splitlines() or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:
        lines[0] += f" {lines[1].strip()}"
    return str(lines[0][:200].rstrip("."))


class DpfedWarning(UserWarning):
    """A warning of `dpfed.fine_tune` about a setting to change or a limit of the result."""


class DpfedError(Exception):
    """A mistake or condition that the user can fix; the message says how. Exit code 2."""

    code = 2


class StoppedError(DpfedError):
    """The run had to stop before its last round, and keeps its results so far. Exit code 3."""

    code = 3


class DivergedError(StoppedError):
    """Training diverged: a value of the training state is no longer finite. Exit code 3."""


class InterruptedRunError(DpfedError):
    """A signal stopped the run, which can resume. Exit code 128 + the signal's number."""

    def __init__(self, signal: str, number: int, sentence: str = "") -> None:
        super().__init__(sentence or f"stopped by {signal}")
        self.signal = signal
        self.number = number
        self.code = 128 + number


def warn_user(sentences: Sequence[str]) -> None:
    """Issue each sentence as a warning that points to the line of user code that called dpfed."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("dpfed."):
        level += 1
        frame = frame.f_back
    for sentence in sentences:
        warnings.warn(sentence, DpfedWarning, stacklevel=level)
