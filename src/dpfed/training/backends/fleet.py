"""The fleet: S clients of a cohort computed side by side, as rows of one tensor `[S, P]`.

A cohort that does not fit is split into fleets of `fleet_size`. Random streams belong to clients, not to fleets, so the
split changes nothing but the order of additions. The same holds where a fleet finds no room on the device: it is halved,
and its steps are run again with the same random numbers.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfed.algorithms.base import ClientState, Context, Message
from dpfed.errors import DivergedError, StoppedError
from dpfed.privacy.fixed_shape_sum import FixedSum, Sums
from dpfed.privacy.noise import Noise
from dpfed.privacy.oracle import FleetOracle, free, out_of_memory
from dpfed.training.backends.batched_runs import UnbatchableError
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.backends.memory_fit import fleet_size, slots_of
from dpfed.training.callbacks.activity import Activity
from dpfed.training.job.job import Job
from dpfed.training.local_steps import RoundFigures, round_context
from dpfed.training.server_state import State

LOG = logging.getLogger("dpfed")


def learning_rate(base: float, schedule: str, t: int, rounds: int) -> float:
    """η_t, constant within a round; the cosine never reaches zero, so that dividing by it is safe (SPEC 1.2)."""
    return (
        base if schedule == "constant" else 0.5 * base * (1 + math.cos(math.pi * (t - 1) / rounds))
    )


def context(
    job: Job, t: int, clients: Sequence[int], clip: float | None = None, answered: int = 0
) -> Context:
    """Return the context of round t with this clip norm for these clients."""
    run, base = job.config.run, job.algorithm.lr
    figures = RoundFigures(
        t,
        run.rounds,
        run.local_steps,
        job.schedule.clients,
        learning_rate(base, run.lr_schedule, t, run.rounds),
        base,
        job.plan.equal_phi,
        answered,
    )
    plan = job.plan if clip is None else job.plan.at(clip)
    return round_context(job.space, plan, clients, figures, job.device)


LocalWatch = Callable[[Context, Sequence[int], Any], None]
"""Is shown the clients' states at the end of a round; for diagnostics of simulated clients only."""


class Fleet:
    """The backend that computes a cohort in this process. `stop` is called after each local step, and may raise."""

    def __init__(
        self,
        job: Job,
        memory: ClientStates | None = None,
        watch: LocalWatch | None = None,
        stop: Callable[[], None] = lambda: None,
        late: bool = False,
    ) -> None:
        """`late`: whether messages are finite is found out by what the server's state becomes, not here and at once."""
        self._job, self._stop, self._late = job, stop, late
        if memory is None:  # an empty one is false, and must not be replaced
            memory = ClientStates(job.algorithm.remembers, job.space.size, Path(), sys.maxsize)
        self.memory = memory
        self._watch = watch
        self._size = fleet_size(job)
        self._fixed: dict[int, FixedSum] = {}
        self._no_fixed = False
        self._max_slots = job.config.run.max_slots
        self._said = False
        self._paid: Callable[[], None] = lambda: None
        # Local steps of this round, summed over its clients.
        self._steps_done = 0
        self._steps_wanted = 0

    def run_cohort(
        self,
        t: int,
        state: State,
        clients: Sequence[int],
        wait_for_charge: Callable[[], None] = lambda: None,
    ) -> tuple[Message, int]:
        """The mean of the clients' messages, and how many answered."""
        self._paid = wait_for_charge
        return self.weighted_sum(t, state, clients, self.weights(clients)), len(clients)

    def weighted_sum(
        self, t: int, state: State, clients: Sequence[int], weights: Tensor
    ) -> Message:
        """The clients' messages times their weights, summed: what these clients add to the mean of a cohort."""
        total: Message = {}
        self._steps_done = 0
        self._steps_wanted = len(clients) * self._job.config.run.local_steps
        size = self._size  # a fleet that does not fit lowers it, for the rounds after this one
        for first in range(0, len(clients), size):
            message = self._fleet(t, state, clients[first : first + size])
            weight = weights[first : first + size]
            for name, value in message.items():
                summed = torch.tensordot(weight, value, dims=1)
                total[name] = total[name] + summed if name in total else summed
        return total

    def _fleet(self, t: int, state: State, clients: Sequence[int]) -> Message:
        """The clients' messages `[S, ...]`."""
        return self._attempt(t, state, clients, None)

    def _attempt(
        self, t: int, state: State, clients: Sequence[int], noise: Sequence[Noise] | None
    ) -> Message:
        """The clients' messages, and their memory kept; of an attempt that found no room nothing is."""
        job = self._job
        ctx = context(job, t, clients, state.clip)
        oracle = self._oracle(t, state, clients, noise)
        fixed = oracle.fixed
        done = self._steps(t, ctx, state, clients, oracle)
        if done is None:
            return self._halves(t, state, clients, oracle.noise)
        if oracle.max_slots < self._max_slots or (fixed is not None and oracle.fixed is None):
            self._max_slots = oracle.max_slots
            self._no_fixed = self._no_fixed or (fixed is not None and oracle.fixed is None)
            self._say_once()
        local, message, memory = done
        if not job.config.run.allow_nan:
            refuse_nonfinite(t, clients, memory if self._late else {**message, **memory})
        self.memory.put(t, clients, memory)
        if self._watch is not None:
            self._watch(ctx, clients, local)
        return message | {"below": oracle.below} if job.plan.clipping.counts else message

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
            wait_for_charge=self._paid,
            isolation=job.config.privacy.isolation,
        )

    def _steps(
        self, t: int, ctx: Context, state: State, clients: Sequence[int], oracle: FleetOracle
    ) -> tuple[Any, Message, ClientState] | None:
        """The clients' states, messages and memory after K local steps; None where there is no room for so many."""
        job = self._job
        steps_before = self._steps_done
        try:
            local = job.algorithm.start(ctx, state.server, self.memory.gather(clients, job.device))
            for k in torch.arange(1, ctx.K + 1, dtype=torch.float64, device=job.device):
                job.on_activity(Activity("local steps", self._steps_done, self._steps_wanted, t))
                local = job.algorithm.step(ctx, local, oracle, k)
                self._steps_done += len(clients)
                self._stop()
            return local, *job.algorithm.finish(ctx, state.server, local)
        except Exception as error:
            if not out_of_memory(error):
                raise
        self._steps_done = steps_before
        return None

    def _halves(
        self, t: int, state: State, clients: Sequence[int], noise: Sequence[Noise]
    ) -> Message:
        """The same steps by two fleets of half the size."""
        if len(clients) == 1 and self._job.batched_sum is not None:
            raise UnbatchableError  # others take room too
        if len(clients) == 1:
            raise StoppedError(
                f"round {t} does not fit into the memory of {self._job.device}, not even one record of one client at a "
                "time: choose a smaller model or another run.device; what was computed before is kept"
            )
        free(self._job.device)
        half = (len(clients) + 1) // 2
        self._size = min(self._size, half)
        self._max_slots = (
            self._job.config.run.max_slots
        )  # with fewer rows there may be room for whole passes
        self._say_once()
        parts = [
            self._attempt(t, state, clients[p], noise[p])
            for p in (slice(0, half), slice(half, None))
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _say_once(self) -> None:
        if self._said:
            return
        self._said = True
        sentence = (
            f"{self._job.device} ran out of memory: from here on less is computed at once, with the same random numbers; "
            "a lower run.max_slots or run.fleet_size saves the failed attempts"
        )
        self._job.notes.append(sentence)
        LOG.warning(sentence)

    def _fixed_sum(self, clients: Sequence[int]) -> Sums | None:
        """Passes of a fixed size for a fleet of so many clients, made once; None where passes may have any size."""
        job, run = self._job, self._job.config.run
        if self._no_fixed:
            self._fixed.clear()
        if job.batched_sum is not None:
            if not self._no_fixed:
                return job.batched_sum
            job.batched_sum.leave()  # it will not ask again, and nobody is to wait for it
        if self._no_fixed or (run.slots == "auto" and job.device.type != "cuda"):
            return None
        if job.config.privacy.isolation == "exact":
            return None
        if len(clients) not in self._fixed:
            slots = slots_of(job, len(clients))
            self._fixed[len(clients)] = FixedSum(
                job.model,
                job.records,
                job.plan.clipping,
                job.view,
                len(clients),
                slots,
                job.space.size,
                capture=run.graphs is not False,
            )
        return self._fixed[len(clients)]

    def weights(self, clients: Sequence[int]) -> Tensor:
        """Weights of the mean, public constants that sum to one."""
        if self._job.algorithm.agg_weights == "size":
            weights = torch.tensor([float(self._job.plan.sizes[i]) for i in clients])
        else:
            weights = torch.ones(len(clients))
        return (weights / weights.sum()).to(self._job.device, non_blocking=True)


def refuse_nonfinite(t: int, clients: Sequence[int], values: Message) -> None:
    """Values have noise in them, so that naming their client tells nothing about a record."""
    for name, value in values.items():
        finite = value.reshape(len(clients), -1).isfinite().all(1)
        if not bool(finite.all()):
            client = clients[int(finite.int().argmin())]
            raise DivergedError(
                f"in round {t} the {name} of client {client} is no longer finite: lower algorithm.lr; "
                "what was computed before is kept"
            )
