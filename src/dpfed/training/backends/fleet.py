"""The fleet: S clients computed side by side, as rows of one tensor `[S, P]` of P parameters each.

A cohort (the clients of one round) larger than `run.fleet_size` is split into several fleets. Each
client has its own random streams, so the split changes only the order of additions. If a fleet does
not fit into the memory of the device, it is halved. The two halves repeat the local steps with the
same random numbers.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dpfed.algorithms.base import Context, Message
from dpfed.errors import StoppedError
from dpfed.privacy.fixed_shape_sum import FixedSum, PassShape, Sums
from dpfed.privacy.noise import Noise
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms, free, out_of_memory
from dpfed.privacy.record_batch import PrivateData
from dpfed.training.backends.base import WaitForCharge, no_charge
from dpfed.training.backends.batched_runs import UnbatchableError
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.backends.finite_check import require_finite_messages
from dpfed.training.backends.memory_fit import fleet_size, slots_of
from dpfed.training.callbacks.activity import Activity
from dpfed.training.job.job import Job
from dpfed.training.job.memory_advice import less_memory_advice
from dpfed.training.local_steps import LocalResult, run_local_steps
from dpfed.training.messages.message_rounding import message_rounding
from dpfed.training.round_context import context
from dpfed.training.server_state import State

LOG = logging.getLogger("dpfed")

LocalWatch = Callable[[Context, Sequence[int], LocalResult], None]
"""Function that gets the results of a fleet after its local steps; for simulations only."""


@dataclass(frozen=True)
class Part:
    """The part of a cohort that is computed as one fleet.

    clients  numbers of the S clients
    weights  weights of their messages in the cohort's mean, `[S]`
    noise    noise sources of local steps that failed and are repeated; None to draw new noise
    """

    clients: Sequence[int]
    weights: Tensor
    noise: Sequence[Noise] | None = None


class Fleet:
    """The backend that computes the clients of a round in this process, as one fleet or several.

    memory          store of the vectors that clients keep between rounds; None for a new store
    watch           called with the results of each fleet after its local steps
    stop            called after each local step; may raise an error to end the run
    check_messages  True: check each client's message for NaN and infinity. False: leave this to the
                    round loop, which checks the server's state; the CPU then waits less for a GPU
    """

    def __init__(
        self,
        job: Job,
        memory: ClientStates | None = None,
        watch: LocalWatch | None = None,
        stop: Callable[[], None] = lambda: None,
        check_messages: bool = True,
    ) -> None:
        # Test for None, because an empty ClientStates is falsy and `or` would replace it.
        if memory is None:
            memory = ClientStates(job.algorithm.remembers, job.space.size, Path(), sys.maxsize)
        self.memory = memory
        self._job = job
        self._watch = watch
        self._stop = stop
        self._check_messages = check_messages
        self._size = fleet_size(job)
        self._rounding = message_rounding(job, job.config.federation)
        self._max_slots = job.config.run.max_slots
        self._places = job.model.places
        self._fixed: dict[int, FixedSum] = {}
        self._fixed_fits = True
        self._warned = False
        self._wait_for_charge: WaitForCharge = no_charge
        # Makes the oracle, which releases noised gradients, of each fleet. An audit replaces it by
        # a function whose oracles report their releases.
        self.new_oracle: Callable[..., FleetOracle] = FleetOracle
        # Completed and planned local steps of this round, summed over its clients.
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
        """Compute round `t`; return (weighted sum of the clients' messages, number of clients).

        weights  weight of each client's message; None for weights with which the sum is their mean
        """
        job = self._job
        self._wait_for_charge = wait_for_charge
        self._steps_done = 0
        self._steps_planned = len(clients) * job.config.run.local_steps
        weights = self.weights(clients) if weights is None else weights
        total: Message = {}
        server = self._rounding.received(t, state.server)
        parts = self._parts(clients, weights)
        while parts:
            part = parts.popleft()
            ctx = context(job, t, part.clients, state.clip)
            oracle = self._oracle(t, state, part)
            uses_fixed = oracle.fixed is not None
            memory = self.memory.gather(part.clients, job.device)
            after_step = self._step_counter(t, len(part.clients))
            steps_before = self._steps_done
            result: LocalResult | None = None
            try:
                result = run_local_steps(job.algorithm, ctx, server, memory, oracle, after_step)
            except Exception as error:
                if not out_of_memory(error):
                    raise
            if result is None:
                # Retry after the `except` block, where the exception no longer keeps tensors alive.
                self._steps_done = steps_before
                parts.extendleft(reversed(self._halves(t, part, oracle.noise)))
                continue
            self._lower_limits(oracle, uses_fixed)
            self._store(t, ctx, part, result)
            answers = self._rounding.answers(t, part.clients, result.message)
            for name, value in answers.items():
                summed = torch.tensordot(part.weights, value, dims=1)
                total[name] = total[name] + summed if name in total else summed
        return total, len(clients)

    def _parts(self, clients: Sequence[int], weights: Tensor) -> deque[Part]:
        """Split a cohort into fleets of at most `self._size` clients."""
        size = self._size
        starts = range(0, len(clients), size)
        return deque(Part(clients[i : i + size], weights[i : i + size]) for i in starts)

    def _step_counter(self, t: int, clients: int) -> Callable[[int], None]:
        """Return a function to call after each local step of a fleet of `clients` clients.

        The function counts the step, reports progress and calls `stop`, which may end the run.
        """
        if self._steps_done == 0:
            self._report_steps(t)

        def after_step(k: int) -> None:
            self._steps_done += clients
            self._report_steps(t)
            self._stop()

        return after_step

    def _store(self, t: int, ctx: Context, part: Part, result: LocalResult) -> None:
        """Store the vectors that a fleet's clients keep, after a check for NaN and infinity."""
        if not self._job.config.run.allow_nan:
            sent = result.message if self._check_messages else {}
            require_finite_messages(t, part.clients, {**sent, **result.memory})
        self.memory.put(t, part.clients, result.memory)
        if self._watch is not None:
            self._watch(ctx, part.clients, result)

    def weights(self, clients: Sequence[int]) -> Tensor:
        """Return the weights of the clients in the mean of their messages, which sum to one.

        Weights are equal or proportional to the clients' declared sizes, which are public.
        """
        if self._job.algorithm.agg_weights == "size":
            weights = torch.tensor([float(self._job.plan.sizes[i]) for i in clients])
        else:
            weights = torch.ones(len(clients))
        return (weights / weights.sum()).to(self._job.device, non_blocking=True)

    def _report_steps(self, t: int) -> None:
        if self._steps_done < self._steps_planned:
            self._job.on_activity(Activity("local steps", self._steps_done, self._steps_planned, t))

    def _oracle(self, t: int, state: State, part: Part) -> FleetOracle:
        job = self._job
        private = job.private
        return self.new_oracle(
            PrivateData(job.model, private.records, private.shards, private.augmentations),
            RoundTerms(
                job.plan.at(state.clip),
                job.streams,
                t,
                part.clients,
                steps=job.config.run.local_steps,
                grid=job.config.privacy.grid is True,
                isolation=job.config.privacy.isolation,
            ),
            PassLimits(self._max_slots, self._fixed_sum(part.clients), self._places),
            noise=part.noise,
            wait_for_charge=self._wait_for_charge,
        )

    def _halves(self, t: int, part: Part, noise: Sequence[Noise]) -> list[Part]:
        """Split a fleet that ran out of memory into two halves, which repeat its local steps.

        noise  noise sources of the fleet's clients, which repeat the noise of the failed steps
        """
        job = self._job
        count = len(part.clients)
        if count == 1 and job.batched_sum is not None:
            # After this error, the run is no longer trained together with other runs. It starts
            # again alone, which needs less memory.
            raise UnbatchableError
        if count == 1:
            raise StoppedError(
                f"round {t} does not fit into the memory of {job.device}, not even one record of "
                f"one client at a time: {less_memory_advice(job.config)}; "
                "what was computed before is kept"
            )
        free(job.device)
        half = (count + 1) // 2
        self._size = min(self._size, half)
        # Reset the limits of a pass, because fewer clients may leave room for larger passes.
        self._max_slots = job.config.run.max_slots
        self._places = job.model.places
        self._warn_of_memory()
        return [
            Part(part.clients[rows], part.weights[rows], noise[rows])
            for rows in (slice(0, half), slice(half, None))
        ]

    def _lower_limits(self, oracle: FleetOracle, used_fixed: bool) -> None:
        """Use smaller passes from now on if the oracle had to use them for lack of memory.

        used_fixed  True if the oracle began with passes of a fixed shape
        """
        lost_fixed = used_fixed and oracle.fixed is None
        fewer = oracle.max_slots < self._max_slots or oracle.places < self._places
        if fewer or lost_fixed:
            self._max_slots = oracle.max_slots
            self._places = oracle.places
            self._fixed_fits = self._fixed_fits and not lost_fixed
            self._warn_of_memory()

    def _fixed_sum(self, clients: Sequence[int]) -> Sums | None:
        """Return the object that computes clipped sums in passes of a fixed shape, or None.

        None means that passes vary in size, or that isolation is exact. Passes vary in size by
        default on a CPU, and after the device ran out of memory.
        """
        job = self._job
        run = job.config.run
        if not self._fixed_fits:
            self._fixed.clear()
            if job.batched_sum is not None:
                # Runs that are trained together wait for each other in every pass, so leave them.
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
                job.private.records,
                job.plan.clipping,
                job.private.augmentations,
                PassShape(len(clients), slots_of(job, len(clients)), job.space.size),
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
