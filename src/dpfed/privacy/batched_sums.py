"""Compute the clipped gradient sums of several training runs together, so that a GPU stays busy.

Each run works in its own thread, with its own plan, random streams, noise and ledger. All runs
share their passes. A pass computes the gradients of several runs, clips each gradient to the clip
norm C of its run and adds the clipped gradients per client. A run receives only the sums of its own
clients. These sums have no noise yet, so only the code that adds the noise (the run's oracle) may
request them.

The runs that share passes are called members. A pass starts when every member has requested sums.
A run that ends or fails leaves, and the remaining members no longer wait for this run. When half of
the members have left, a smaller pass is built, so that absent runs cost no work.
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
    """One run's request for clipped gradient sums.

    theta   `[S, P]` vectors of P parameters of the run's S clients
    arrays  the batch, as columns of `RecordGradients.columns`
    clip    clip norm C of the run
    result  sums and counts, as `FixedSum` returns them; None until they are computed
    error   the reason why there is no result; None without an error
    """

    theta: Tensor
    arrays: Mapping[str, np.ndarray]
    clip: float
    result: tuple[Tensor, Tensor] | None = None
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None


class BatchedSums:
    """Computes the clipped sums of several runs together, in passes that the runs share.

    A pass is one forward and backward computation of many records.

    runs     number of runs that share the passes
    clients  largest number of clients of a run
    make     function from a number of runs to a new `FixedSum`, which computes the passes for
             runs * clients clients. It is called while no run uses the device. If memory runs out,
             it is called again with fewer runs.
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
        """Return the sums and counts that run `number` requests, or raise the error that occurred.

        Each run's thread waits here until all runs that have not left have requested sums. The
        thread of the last request computes the sums for all of them.
        """
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
                # The wait may end by an exception, such as KeyboardInterrupt, before the sums are
                # computed. Remove the request then, so that no other thread computes it later.
                if self._requests.get(number) is request:
                    del self._requests[number]
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def leave(self, number: int) -> None:
        """Remove run `number`, so that the other runs no longer wait for it.

        If all other runs are waiting already, compute their sums now.
        """
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
        """Compute the sums of the first waiting runs together (one pass), and store their results.

        After an error, later passes take half as many runs. The usual errors are lack of memory
        and size limits of kernels. If a pass of one run fails, that run gets the error. No batch is
        drawn again, and the number of runs in a pass does not depend on the drawn batches.
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
        # Free memory only after the except block. Inside this block the exception still refers to
        # the tensors of the failed pass (forward and backward computation).
        self._max_runs_per_pass = (size + 1) // 2
        self._delete_shared_sum()
        free(waiting[0].theta.device)

    def _runs_per_pass(self, members: int) -> int:
        """Return how many runs are computed together in one pass.

        Build a new `FixedSum`, which computes the passes, if none exists or if the old one is at
        least twice as large as needed.
        """
        wanted = min(members, self._max_runs_per_pass)
        if self._shared_sum is None or 2 * wanted <= self._shared_sum.clients // self.clients:
            # Delete the old `FixedSum` before a new one is built, because the memory may be too
            # small for both.
            self._delete_shared_sum()
            self._shared_sum = self._make(wanted)
        return self._shared_sum.clients // self.clients

    def _delete_shared_sum(self) -> None:
        if self._shared_sum is not None:
            self._shared_sum.wait()
        self._shared_sum = None

    def _one_pass(self, requests: Sequence[_Request]) -> list[tuple[Tensor, Tensor]]:
        """Compute the requests of several runs together; return each run's sums and counts.

        The results have the order of `requests`. Clients that belong to no request get no records,
        so their sums are zero.
        """
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
    """One run's access to `BatchedSums`, which computes the clipped sums of several runs together.

    The run's oracle uses it in place of a `FixedSum`, which computes the sums of one run.
    """

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
    """Return a new error without traceback for an out-of-memory error; return others unchanged.

    The traceback refers to the tensors of the failed computation, so they would stay in memory.
    """
    return torch.OutOfMemoryError(str(error)) if out_of_memory(error) else error
