"""Progress bars: drawn by the package rich on a terminal, and by tqdm in a notebook."""

from __future__ import annotations

import builtins
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from tqdm import TqdmWarning
from tqdm.auto import tqdm

# Name of the class of IPython's shell in a notebook. IPython's shell on a terminal has another
# class.
NOTEBOOK_SHELL = "ZMQInteractiveShell"
# Least number of seconds between two drawings of a notebook's bar.
REDRAW_S = 0.2


class Bar(Protocol):
    """A progress bar with named texts beside it."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def say(self, line: str) -> None:
        """Print a line above the bar."""

    def update(self, **fields: Any) -> None:
        """Change the number `completed`, the number `total` or named texts of the bar."""


class TerminalBar:
    """A progress bar on a terminal, with the given columns of the package rich."""

    def __init__(
        self, columns: Sequence[ProgressColumn], total: int | None, texts: dict[str, Any]
    ) -> None:
        self.progress = Progress(*columns, console=Console(stderr=True))
        self._task = self.progress.add_task("", total=total, **texts)

    def start(self) -> None:
        self.progress.start()

    def stop(self) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        self.progress.console.print(line, highlight=False, markup=False)

    def update(self, **fields: Any) -> None:
        self.progress.update(self._task, **fields)


class NotebookBar:
    """A progress bar in a notebook: a widget if ipywidgets is installed, else a line of text."""

    def __init__(self, total: int | None, texts: dict[str, Any]) -> None:
        self._total = total
        self._texts = dict(texts)
        self._bar: Any = None
        self._drawn = 0.0

    def start(self) -> None:
        with warnings.catch_warnings():
            # Hide tqdm's advice to install ipywidgets. If ipywidgets is missing, tqdm draws the bar
            # as a line of text.
            warnings.simplefilter("ignore", TqdmWarning)
            self._bar = tqdm(total=self._total, leave=True)

    def stop(self) -> None:
        self._bar.close()

    def say(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)

    def update(self, **fields: Any) -> None:
        self._bar.n = fields.pop("completed", self._bar.n)
        self._bar.total = fields.pop("total", self._bar.total)
        self._texts.update(fields)
        shown = [f"{name} {text}" for name, text in self._texts.items() if text]
        self._bar.set_postfix_str(", ".join(shown), refresh=False)
        now = time.monotonic()
        if now - self._drawn >= REDRAW_S:
            self._drawn = now
            self._bar.refresh()


def bar_for(
    columns: Sequence[ProgressColumn], total: int | None, texts: dict[str, Any]
) -> Bar | None:
    """Return a progress bar for a notebook or terminal; None if stderr is neither (a file)."""
    if in_notebook():
        return NotebookBar(total, texts)
    if Console(stderr=True).is_terminal:
        return TerminalBar(columns, total, texts)
    return None


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    shell = getattr(builtins, "get_ipython", None)
    return shell is not None and type(shell()).__name__ == NOTEBOOK_SHELL
