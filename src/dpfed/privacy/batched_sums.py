"""Clipped sums of several runs in one pass: every run has a seat, and a pass is computed when all seats have asked.

A GPU that computes sixteen small runs one after another is mostly idle. Each run works in a thread of its own, with its
own plan, streams, noise and ledger; all that it shares is the pass in which gradients are computed, clipped by the run's
own C and summed for the run's own clients. What a seat is given are its own rows, not noised: only its oracle may ask.

A seat that has left is not waited for, so a run that ends, stops or fails holds up nobody. When half of the seats are
empty the union is made anew for those that are left, so that nothing is computed for empty seats.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfed.privacy.fixed_shape_sum import FixedSum
from dpfed.privacy.oracle import free, out_of_memory


@dataclass
class _Question:
    """What one seat asks, and what it is answered: sums, or why there are none."""

    theta: Tensor
    arrays: Mapping[str, np.ndarray]
    clip: float
    answer: tuple[Tensor, Tensor] | None = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.answer is not None or self.error is not None


class BatchedSums:
    """The union of `seats` runs with up to `clients` clients each.

    make  (seats) -> the fixed sum of so many runs: seats x clients rows of theta. Called when all have asked, so that
          nobody else is at work on the device; called again with fewer seats where there is no room for so many.
    """

    def __init__(self, seats: int, clients: int, make: Callable[[int], FixedSum]) -> None:
        self.clients, self._make = clients, make
        self._present = set(range(seats))
        self._asked: dict[int, _Question] = {}
        self._turn = threading.Condition()
        self._union: FixedSum | None = None
        self._most = seats  # in one pass: fewer than there are where more do not fit

    def batched_sum(self, number: int) -> BatchedSum:
        return BatchedSum(self, number)

    def ask(self, number: int, question: _Question) -> tuple[Tensor, Tensor]:
        """Waits until all that are present have asked; whoever asks last computes for all."""
        if len(question.theta) > self.clients:
            raise ValueError(f"a seat has {self.clients} rows, not {len(question.theta)}")
        with self._turn:
            if number not in self._present:
                raise RuntimeError(f"seat {number} has been left: it cannot ask")
            self._asked[number] = question
            self._answer_if_complete()
            try:
                while not question.done:
                    self._turn.wait()
            finally:
                if self._asked.get(number) is question:  # interrupted while it waited
                    del self._asked[number]
        if question.error is not None:
            raise question.error
        assert question.answer is not None
        return question.answer

    def leave(self, number: int) -> None:
        """From now on nobody waits for this seat; those that waited for it alone are answered now. May be repeated."""
        with self._turn:
            self._present.discard(number)
            self._asked.pop(number, None)
            self._answer_if_complete()
            if not self._present:
                self._drop()

    def _answer_if_complete(self) -> None:
        if not self._asked or set(self._asked) != self._present:
            return
        questions = [self._asked[number] for number in sorted(self._asked)]
        self._asked.clear()
        try:
            while waiting := [question for question in questions if not question.done]:
                self._answer_some(waiting, len(questions))
        except BaseException as error:
            for question in questions:
                if not question.done:
                    question.error = _for_each(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._turn.notify_all()

    def _answer_some(self, waiting: Sequence[_Question], present: int) -> None:
        """As many as a pass takes; where it fails, the next takes fewer, and in the end a run fails by itself.

        A lack of room is the usual reason, and others too come of the number of runs (a kernel's limits). Nothing is drawn
        again for it, and a pass has the same size whatever was drawn.
        """
        size = min(present, self._most)
        try:
            size = self._size(present)
            part = waiting[:size]
            for question, answer in zip(part, self._together(part), strict=True):
                question.answer = answer
            return
        except Exception as error:
            if size == 1:
                waiting[0].error = _for_each(error)
        self._most = (size + 1) // 2  # outside the handler, where the failed pass is no longer held
        self._drop()
        free(waiting[0].theta.device)

    def _size(self, present: int) -> int:
        """How many runs a pass takes now; the union is made, or made smaller, if need be."""
        wanted = min(present, self._most)
        if self._union is None or 2 * wanted <= self._union.clients // self.clients:
            self._drop()  # first, so that two are never held
            self._union = self._make(wanted)
        return self._union.clients // self.clients

    def _drop(self) -> None:
        """Gives back the union's buffers, and on a GPU its captured pass, once it has been computed to its end."""
        if self._union is not None:
            self._union.wait()
        self._union = None

    def _together(self, questions: Sequence[_Question]) -> list[tuple[Tensor, Tensor]]:
        """One union: rows of theta and records one run after another, rows that nobody has are named by no record."""
        assert self._union is not None
        columns: dict[str, list[np.ndarray]] = {name: [] for name in questions[0].arrays}
        for place, question in enumerate(questions):
            self._union.load(question.theta, question.clip, place * self.clients)
            for name, column in question.arrays.items():
                columns[name].append(column + place * self.clients if name == "client" else column)
        total, count = self._union.loaded_sums(
            {name: np.concatenate(parts) for name, parts in columns.items()}
        )
        rows = [
            slice(p * self.clients, p * self.clients + len(q.theta))
            for p, q in enumerate(questions)
        ]
        return [(total[mine], count[mine]) for mine in rows]


class BatchedSum:
    """One run's place in a union; to its oracle it is a `FixedSum`."""

    def __init__(self, shared: BatchedSums, number: int) -> None:
        self._shared, self._number = shared, number

    def sums(
        self, theta: Tensor, arrays: Mapping[str, np.ndarray], clip: float
    ) -> tuple[Tensor, Tensor]:
        """Not noised: only the oracle may call this."""
        return self._shared.ask(self._number, _Question(theta, arrays, clip))

    def leave(self) -> None:
        self._shared.leave(self._number)


def _for_each(error: BaseException) -> BaseException:
    """A lack of memory is told without its traceback, which would hold what the failed pass had taken."""
    return torch.OutOfMemoryError(str(error)) if out_of_memory(error) else error
