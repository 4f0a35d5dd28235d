"""`dpfed client` with faults: `python faulty_client.py FAULTS FOLDER client.toml [...]`.

FAULTS are separated by commas. Fault n is used in the n-th round that the client is asked to train
in; "ok" means none. A repeated request for a round has the fault of that round again. FOLDER holds
files by which the client and the test signal each other.

Two faults apply from the start:

clock   the client's clock is ten years ahead
gate    the client connects only when FOLDER contains a file `gate`
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from federation_case import reply_of

from dpfed.federation import messages
from dpfed.federation.client.client import Client
from dpfed.federation.messages import Reply, ScoringRequest

TEN_YEARS = 10 * 365 * 86400.0
SLOW_SECONDS = 50.0
SECRET = "patient Smith, born 1950"


class Trap:
    """A pickle of this object makes a folder where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def changed(data: bytes, change: Callable[[torch.Tensor], torch.Tensor]) -> bytes:
    """Return an honest reply with another delta."""
    reply = reply_of(data)
    fields = {**reply.fields, "delta": change(reply.fields["delta"])}
    return messages.pack(Reply(reply.receipt, fields))


def with_nan(delta: torch.Tensor) -> torch.Tensor:
    delta[0] = float("nan")
    return delta


class Faults:
    """Replacements of two methods of a client."""

    def __init__(self, faults: list[str], folder: Path) -> None:
        self._faults = faults
        self._folder = folder
        self._fault_of_round: dict[int, str] = {}
        self._replies: dict[int, bytes] = {}
        self._answer = Client.answer
        self._compute = Client._compute
        self._now = ""

    def answer(self, client: Client, data: bytes) -> bytes:
        request = messages.unpack_request(data, 1 << 30)
        if isinstance(request, ScoringRequest):
            return self._answer(client, data)
        t = request.terms.round
        number = len(self._fault_of_round)
        fault = self._faults[number] if number < len(self._faults) else "ok"
        self._now = self._fault_of_round.setdefault(t, fault)
        if self._now == "raise":
            raise ValueError(SECRET)
        if self._now == "slow":
            time.sleep(SLOW_SECONDS)
        reply = self._answer(client, data)
        before = next((self._replies[i] for i in sorted(self._replies, reverse=True) if i < t), b"")
        self._replies[t] = reply
        makers: dict[str, Callable[[], bytes]] = {
            "nan": lambda: changed(reply, with_nan),
            "shape": lambda: changed(reply, lambda delta: delta[1:]),
            "norm": lambda: changed(reply, lambda delta: delta * 0 + 1e9),
            "old": lambda: before,
            "header": lambda: (2 << 30).to_bytes(8, "little") + b'{"delta":' + b" " * 1000,
            "pickle": lambda: pickle.dumps(Trap(self._folder / "trapped")),
        }
        return makers.get(self._now, lambda: reply)()

    def compute(self, client: Client, *arguments: Any) -> Any:
        """`hang`: charge and never compute; `wait`: compute when FOLDER contains a file `go`."""
        if self._now in ("hang", "wait"):
            (self._folder / f"{self._now}ing").touch()
            while self._now == "hang" or not (self._folder / "go").exists():
                time.sleep(0.05)
        return self._compute(client, *arguments)


def main() -> None:
    names = sys.argv[1].split(",")
    folder = Path(sys.argv[2])
    arguments = sys.argv[3:]
    faults = Faults([name for name in names if name not in ("clock", "gate")], folder)
    Client.answer = lambda self, data: faults.answer(self, data)  # type: ignore[method-assign]
    Client._compute = lambda self, *rest: faults.compute(self, *rest)  # type: ignore[method-assign]
    if "clock" in names:
        real = time.time
        time.time = lambda: real() + TEN_YEARS  # type: ignore[assignment]
    import dpfed.federation.flower.apps

    while "gate" in names and not (folder / "gate").exists():
        time.sleep(0.05)
    sys.argv = ["dpfed", "client", *arguments]
    from dpfed.cli.main import main as dpfed

    dpfed()


if __name__ == "__main__":
    main()
