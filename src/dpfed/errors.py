"""The one error type for mistakes a person can mend: it is printed as one sentence, never as a traceback."""


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
