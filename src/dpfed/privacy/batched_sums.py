"""Clipped sums of several runs in one pass, so that small runs keep a GPU busy.

Each run works in a thread of its own, with its own plan, streams, noise and ledger. Runs share the
pass in which gradients are computed, clipped by the C of each run and summed for its clients. A run
receives only its own rows; they have no noise, so only its oracle may request them.

Requests meet at a barrier: a pass is computed when every member has requested sums. A run that ends
or fails leaves, and nobody waits for it. When half of the members have left, the pass is made anew
for the others, so that no work is done for absent runs.
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
class _Request:
    """One run's request for sums, and its result or error."""

    theta: Tensor
    arrays: Mapping[str, np.ndarray]
    clip: float
    result: tuple[Tensor, Tensor] | None = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None


class BatchedSums:
    """The shared passes of `runs` runs with up to `clients` clients each.

    make  runs -> the fixed-shape sum over runs x clients rows of theta. It is called while no run
          uses the device, and called again for fewer runs if memory runs out.
    """

    def __init__(self, runs: int, clients: int, make: Callable[[int], FixedSum]) -> None:
        self.clients = clients
        self._make = make
        self._members = set(range(runs))
        self._requests: dict[int, _Request] = {}
        self._barrier = threading.Condition()
        self._shared_sum: FixedSum | None = None
        self._max_runs_per_pass = runs

    def batched_sum(self, number: int) -> BatchedSum:
        return BatchedSum(self, number)

    def sums_of(self, number: int, request: _Request) -> tuple[Tensor, Tensor]:
        """Wait until every member has a request; the last one computes the sums of all."""
        if len(request.theta) > self.clients:
            raise ValueError(f"a run has {self.clients} rows, not {len(request.theta)}")
        with self._barrier:
            if number not in self._members:
                raise RuntimeError(f"run {number} has left: it cannot request sums")
            self._requests[number] = request
            self._compute_if_complete()
            try:
                while not request.done:
                    self._barrier.wait()
            finally:
                # An exception such as KeyboardInterrupt may end the wait early.
                if self._requests.get(number) is request:
                    del self._requests[number]
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def leave(self, number: int) -> None:
        """Remove a member, and compute the requests that waited for it alone."""
        with self._barrier:
            self._members.discard(number)
            self._requests.pop(number, None)
            self._compute_if_complete()
            if not self._members:
                self._delete_shared_sum()

    def _compute_if_complete(self) -> None:
        if not self._requests or set(self._requests) != self._members:
            return
        requests = [self._requests[number] for number in sorted(self._requests)]
        self._requests.clear()
        try:
            while waiting := [request for request in requests if not request.done]:
                self._compute_some(waiting, len(requests))
        except BaseException as error:
            for request in requests:
                if not request.done:
                    request.error = _without_traceback(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._barrier.notify_all()

    def _compute_some(self, waiting: Sequence[_Request], members: int) -> None:
        """Compute one pass; after an error the next pass takes half as many runs.

        Memory is the usual reason, and kernels have limits on their size. A run alone gets its
        error. No batch is drawn again, and the size of a pass does not depend on what was drawn.
        """
        size = min(members, self._max_runs_per_pass)
        try:
            size = self._runs_per_pass(members)
            together = waiting[:size]
            for request, result in zip(together, self._one_pass(together), strict=True):
                request.result = result
            return
        except Exception as error:
            if size == 1:
                waiting[0].error = _without_traceback(error)
        # Outside the handler, which holds the memory of the failed pass.
        self._max_runs_per_pass = (size + 1) // 2
        self._delete_shared_sum()
        free(waiting[0].theta.device)

    def _runs_per_pass(self, members: int) -> int:
        """Return the runs in a pass, after making it or making it smaller."""
        wanted = min(members, self._max_runs_per_pass)
        if self._shared_sum is None or 2 * wanted <= self._shared_sum.clients // self.clients:
            # Deleted first, so that memory holds only one.
            self._delete_shared_sum()
            self._shared_sum = self._make(wanted)
        return self._shared_sum.clients // self.clients

    def _delete_shared_sum(self) -> None:
        if self._shared_sum is not None:
            self._shared_sum.wait()
        self._shared_sum = None

    def _one_pass(self, requests: Sequence[_Request]) -> list[tuple[Tensor, Tensor]]:
        """Compute the sums of these runs; rows of theta without a run have no records."""
        assert self._shared_sum is not None
        columns: dict[str, list[np.ndarray]] = {name: [] for name in requests[0].arrays}
        rows: list[slice] = []
        for place, request in enumerate(requests):
            first = place * self.clients
            rows.append(slice(first, first + len(request.theta)))
            self._shared_sum.load(request.theta, request.clip, first)
            for name, column in request.arrays.items():
                columns[name].append(column + first if name == "client" else column)
        joined = {name: np.concatenate(parts) for name, parts in columns.items()}
        total, count = self._shared_sum.loaded_sums(joined)
        return [(total[own], count[own]) for own in rows]


class BatchedSum:
    """One run's part of the shared passes; its oracle uses it like a `FixedSum`."""

    def __init__(self, shared: BatchedSums, number: int) -> None:
        self._shared = shared
        self._number = number

    def sums(
        self, theta: Tensor, arrays: Mapping[str, np.ndarray], clip: float
    ) -> tuple[Tensor, Tensor]:
        return self._shared.sums_of(self._number, _Request(theta, arrays, clip))

    def leave(self) -> None:
        self._shared.leave(self._number)


def _without_traceback(error: BaseException) -> BaseException:
    """Return an out-of-memory error without its traceback, which holds the memory of the pass."""
    return torch.OutOfMemoryError(str(error)) if out_of_memory(error) else error
