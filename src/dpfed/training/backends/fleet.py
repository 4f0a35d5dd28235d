"""The fleet: S clients of a cohort computed side by side, as rows of one tensor `[S, P]`.

A cohort larger than `run.fleet_size` is split into several fleets. Random streams belong to clients,
so the split changes only the order of additions. A fleet that does not fit into the device's memory
is halved, and its steps run again with the same random numbers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfed.algorithms.base import Context, Message
from dpfed.errors import StoppedError
from dpfed.privacy.fixed_shape_sum import FixedSum, Sums
from dpfed.privacy.noise import Noise
from dpfed.privacy.oracle import FleetOracle, free, out_of_memory
from dpfed.training.backends.base import WaitForCharge, no_charge
from dpfed.training.backends.batched_runs import UnbatchableError
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.backends.memory_fit import fleet_size, slots_of
from dpfed.training.callbacks.activity import Activity
from dpfed.training.finite_check import require_finite_messages
from dpfed.training.job.job import Job
from dpfed.training.local_steps import LocalResult, run_local_steps
from dpfed.training.round_context import context
from dpfed.training.server_state import State

LOG = logging.getLogger("dpfed")

LocalWatch = Callable[[Context, Sequence[int], Any], None]
"""A function that gets the clients' states after a round; for diagnostics of simulations only."""


class Fleet:
    """The backend that computes a cohort in this process.

    watch           is called with the clients' states after each round
    stop            is called after each local step; it may raise to end the run
    check_messages  False: the round loop's check of the server's state replaces the check here,
                    so that the host does not wait for the device
    """

    def __init__(
        self,
        job: Job,
        memory: ClientStates | None = None,
        watch: LocalWatch | None = None,
        stop: Callable[[], None] = lambda: None,
        check_messages: bool = True,
    ) -> None:
        # An empty ClientStates is falsy, so `or` would replace it.
        if memory is None:
            memory = ClientStates(job.algorithm.remembers, job.space.size, Path(), sys.maxsize)
        self.memory = memory
        self._job = job
        self._watch = watch
        self._stop = stop
        self._check_messages = check_messages
        self._size = fleet_size(job)
        self._max_slots = job.config.run.max_slots
        self._fixed: dict[int, FixedSum] = {}
        self._fixed_fits = True
        self._warned = False
        self._wait_for_charge: WaitForCharge = no_charge
        # Local steps of this round, summed over its clients.
        self._steps_done = 0
        self._steps_planned = 0

    def run_cohort(
        self,
        t: int,
        state: State,
        clients: Sequence[int],
        wait_for_charge: WaitForCharge = no_charge,
        weights: Tensor | None = None,
    ) -> tuple[Message, int]:
        """Return the weighted sum of the clients' messages, and the number of clients.

        Without `weights` the sum is the mean of the cohort.
        """
        self._wait_for_charge = wait_for_charge
        weights = self.weights(clients) if weights is None else weights
        self._steps_done = 0
        self._steps_planned = len(clients) * self._job.config.run.local_steps
        total: Message = {}
        # A fleet that does not fit lowers the size for later rounds only.
        size = self._size
        for first in range(0, len(clients), size):
            part = slice(first, first + size)
            for name, value in self.messages(t, state, clients[part]).items():
                summed = torch.tensordot(weights[part], value, dims=1)
                total[name] = total[name] + summed if name in total else summed
        return total, len(clients)

    def messages(
        self, t: int, state: State, clients: Sequence[int], noise: Sequence[Noise] | None = None
    ) -> Message:
        """Return the messages `[S, ...]` of one fleet and store what its clients remember.

        `noise` repeats the random numbers of an attempt that ran out of memory.
        """
        job = self._job
        ctx = context(job, t, clients, state.clip)
        oracle = self._oracle(t, state, clients, noise)
        uses_fixed = oracle.fixed is not None
        steps_before = self._steps_done

        def after_step(k: int) -> None:
            self._steps_done += len(clients)
            self._report_steps(t)
            self._stop()

        result: LocalResult | None = None
        if steps_before == 0:
            self._report_steps(t)
        try:
            memory = self.memory.gather(clients, job.device)
            result = run_local_steps(job.algorithm, ctx, state.server, memory, oracle, after_step)
        except Exception as error:
            if not out_of_memory(error):
                raise
        if result is None:
            # Outside of the handler, where the failed attempt's tensors are released.
            self._steps_done = steps_before
            return self._halves(t, state, clients, oracle.noise)
        self._lower_limits(oracle, uses_fixed)
        if not job.config.run.allow_nan:
            sent = result.message if self._check_messages else {}
            require_finite_messages(t, clients, {**sent, **result.memory})
        self.memory.put(t, clients, result.memory)
        if self._watch is not None:
            self._watch(ctx, clients, result.states)
        return result.message

    def weights(self, clients: Sequence[int]) -> Tensor:
        """Return the weights of the mean: public constants that sum to one."""
        if self._job.algorithm.agg_weights == "size":
            weights = torch.tensor([float(self._job.plan.sizes[i]) for i in clients])
        else:
            weights = torch.ones(len(clients))
        return (weights / weights.sum()).to(self._job.device, non_blocking=True)

    def _report_steps(self, t: int) -> None:
        if self._steps_done < self._steps_planned:
            self._job.on_activity(Activity("local steps", self._steps_done, self._steps_planned, t))

    def _oracle(
        self, t: int, state: State, clients: Sequence[int], noise: Sequence[Noise] | None
    ) -> FleetOracle:
        job = self._job
        return FleetOracle(
            job.model,
            job.records,
            job.shards,
            job.plan.at(state.clip),
            job.streams,
            t,
            clients,
            steps=job.config.run.local_steps,
            max_slots=self._max_slots,
            view=job.view,
            fixed=self._fixed_sum(clients),
            noise=noise,
            grid=job.config.privacy.grid is True,
            wait_for_charge=self._wait_for_charge,
            isolation=job.config.privacy.isolation,
        )

    def _halves(
        self, t: int, state: State, clients: Sequence[int], noise: Sequence[Noise]
    ) -> Message:
        """Return the messages of the same steps, computed by two fleets of half the size."""
        job = self._job
        if len(clients) == 1 and job.batched_sum is not None:
            # Alone, without the other runs, it may fit.
            raise UnbatchableError
        if len(clients) == 1:
            raise StoppedError(
                f"round {t} does not fit into the memory of {job.device}, not even one record of "
                "one client at a time: choose a smaller model or another run.device; "
                "what was computed before is kept"
            )
        free(job.device)
        half = (len(clients) + 1) // 2
        self._size = min(self._size, half)
        # Fewer clients may leave room for larger passes.
        self._max_slots = job.config.run.max_slots
        self._warn_of_memory()
        first = self.messages(t, state, clients[:half], noise[:half])
        second = self.messages(t, state, clients[half:], noise[half:])
        return {name: torch.cat([first[name], second[name]]) for name in first}

    def _lower_limits(self, oracle: FleetOracle, used_fixed: bool) -> None:
        """Use in later rounds the smaller passes that the oracle had to take."""
        lost_fixed = used_fixed and oracle.fixed is None
        if oracle.max_slots < self._max_slots or lost_fixed:
            self._max_slots = oracle.max_slots
            self._fixed_fits = self._fixed_fits and not lost_fixed
            self._warn_of_memory()

    def _fixed_sum(self, clients: Sequence[int]) -> Sums | None:
        """Return passes of a fixed size for this many clients, or None if passes vary in size."""
        job = self._job
        run = job.config.run
        if not self._fixed_fits:
            self._fixed.clear()
            if job.batched_sum is not None:
                # The other runs must not wait for this one.
                job.batched_sum.leave()
            return None
        if job.batched_sum is not None:
            return job.batched_sum
        varies = run.slots == "auto" and job.device.type != "cuda"
        if varies or job.config.privacy.isolation == "exact":
            return None
        if len(clients) not in self._fixed:
            self._fixed[len(clients)] = FixedSum(
                job.model,
                job.records,
                job.plan.clipping,
                job.view,
                len(clients),
                slots_of(job, len(clients)),
                job.space.size,
                capture=run.graphs is not False,
            )
        return self._fixed[len(clients)]

    def _warn_of_memory(self) -> None:
        if self._warned:
            return
        self._warned = True
        sentence = (
            f"{self._job.device} ran out of memory: from here on less is computed at once, "
            "with the same random numbers; a lower run.max_slots or run.fleet_size saves the "
            "failed attempts"
        )
        self._job.notes.append(sentence)
        LOG.warning(sentence)
