"""The one round loop: cohort -> charge -> train -> aggregate -> evaluate. Backends compute cohorts, nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Message
from dpfed.errors import DivergedError, DpfedError, InterruptedRunError, StoppedError
from dpfed.training.backends.fleet import context
from dpfed.training.budget.spending import Spending
from dpfed.training.evaluation import scored_batches
from dpfed.training.job.job import Job
from dpfed.training.server_state import State


class Backend(Protocol):
    """Computes a cohort: the fleet in this process, several processes, or clients on a network.

    `paid` returns when the round's charge is on the disk, and raises if it cannot be written; it is called before the
    first noised value leaves an oracle.
    """

    def run_cohort(
        self,
        t: int,
        state: State,
        clients: Sequence[int],
        wait_for_charge: Callable[[], None] = ...,
    ) -> tuple[Message, int]: ...


class RemoteBackend(Backend, Protocol):
    """A backend with knowledge of its own, which a checkpoint has to hold; JSON can."""

    def restore(self, remembered: Mapping[str, Any]) -> None: ...

    def after(self, t: int, state: State) -> dict[str, Any]:
        """Round t is over and came to this state. What its checkpoint has to hold besides, for `restore`."""

    def report(self) -> dict[str, Any]:
        """What of the backend's knowledge belongs into the run's result."""


class LostRoundError(DpfedError):
    """Nothing came of a round, and the run can do without it: the state stays, and the next round comes."""


@dataclass(frozen=True)
class Round:
    """What is known after a round. Accuracy and loss are those of the server's public test set.

    clip              the clip norm that was used, which moves under quantile clipping (from noised counts, so public)
    cohort, eligible  how many clients took part, and among how many they were drawn: for the server's eyes only
    theta             what was evaluated: the last iterate, or with `run.average` the average of all
    last_accuracy     with `run.average`: that of the last iterate
    """

    t: int
    accuracy: float | None
    loss: float | None
    epsilon: float | None
    cohort: int
    eligible: int
    clip: float
    seconds: float
    theta: Tensor = field(repr=False)
    last_accuracy: float | None = None


Observer = Callable[[Round], None]


@dataclass(frozen=True)
class Progress:
    """How far a run is: the rounds that are over, the state after them, and the seconds they took."""

    t: int
    state: State
    seconds: float = 0.0


def first_state(job: Job) -> State:
    """The server before round 1."""
    state = State(
        job.algorithm.init(context(job, 1, range(job.schedule.clients)), job.theta), job.plan.clip
    )
    return state.averaging() if job.config.run.average else state


def train(
    job: Job,
    backend: Backend,
    spending: Spending,
    observe: Observer,
    progress: Progress | None = None,
    keep: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], None] = lambda: None,
    due: Callable[[int], bool] = lambda t: True,
    late: bool = False,
) -> Tensor:
    """Runs all rounds that are left and returns the trained vector.

    `observe` is told of round 0, before training, and of each round; `keep` may then store how far the run is, after rounds
    that are `due`; `stop` is called before a round is charged, and may raise. With `late` a round that is neither scored nor
    due is told of when the next is on its way: a GPU that is asked at once whether all is finite waits for the host.
    """
    if progress is None:
        progress = Progress(0, first_state(job))
        theta = progress.state.theta
        observe(
            Round(0, *evaluate(job, theta), spending.server_max(), 0, 0, job.plan.clip, 0.0, theta)
        )
    state, started = progress.state, time.perf_counter() - progress.seconds
    untold: Callable[[], None] | None = None
    try:
        for t in range(progress.t + 1, job.config.run.rounds + 1):
            stop()
            able = spending.enough(t)
            cohort = choose(job, t, able)
            scored = t % job.config.run.eval_every == 0 or t == job.config.run.rounds
            wait_for_charge = spending.begin_charge(
                t, cohort
            )  # waited for before anything of this round is released
            spent = spending.begin_server_max() if scored else None
            clip, state = state.clip, _next_state(job, backend, t, state, cohort, wait_for_charge)
            finite = begin_finite(state, t) if not job.config.run.allow_nan else lambda: None
            before, untold = untold, None
            if before is not None:
                before()
            seconds = time.perf_counter() - started
            round = Round(t, None, None, None, len(cohort), len(able), clip, seconds, state.result)
            saves = due(t)
            if late and not scored and not saves:
                untold = partial(_tell, finite, observe, round)
                continue
            finite()
            if scored:
                round = _scored(job, state, round, started, spent)
            observe(round)
            if saves:
                keep(Progress(t, state, round.seconds))
    except (InterruptedRunError, StoppedError):
        if untold is not None:
            untold()
        raise
    return state.result


def _next_state(
    job: Job,
    backend: Backend,
    t: int,
    state: State,
    cohort: Sequence[int],
    wait_for_charge: Callable[[], None],
) -> State:
    try:
        mean, answered = backend.run_cohort(t, state, cohort, wait_for_charge)
        return aggregate(job, t, state, cohort, mean, answered)
    except LostRoundError:
        return state  # the backend has said why; what was charged stays charged
    finally:
        wait_for_charge()


def _tell(finite: Callable[[], None], observe: Observer, round: Round) -> None:
    finite()
    observe(round)


def _scored(
    job: Job, state: State, round: Round, started: float, spent: Callable[[], float | None] | None
) -> Round:
    accuracy, loss = evaluate(job, state.result)
    last = evaluate(job, state.theta)[0] if state.average is not None else None
    seconds, epsilon = time.perf_counter() - started, spent() if spent else None
    return replace(
        round, accuracy=accuracy, loss=loss, epsilon=epsilon, seconds=seconds, last_accuracy=last
    )


def aggregate(
    job: Job, t: int, state: State, cohort: Sequence[int], mean: Message, answered: int
) -> State:
    """The server's step: the algorithm's own, the clip norm's where it follows a quantile, and the average's."""
    mean = dict(mean)
    below = mean.pop("below", None)
    ctx = context(job, t, cohort, state.clip, answered)
    clip = state.clip if below is None else job.plan.clipping.next_clip(state.clip, float(below))
    return state.after(
        job.algorithm.aggregate(ctx, state.server, mean), clip, job.config.run.average
    )


def choose(job: Job, t: int, able: np.ndarray) -> list[int]:
    """S distinct clients, uniformly among those that may take part, from the cohort's own stream."""
    rng = job.streams.generator("cohort", t)
    chosen = rng.choice(able, size=min(job.schedule.cohort, len(able)), replace=False)
    return sorted(int(i) for i in chosen)


def evaluate(job: Job, theta: Tensor) -> tuple[float | None, float | None]:
    """Accuracy and mean loss on the server's test set; none of both where there is no such set."""
    test = job.test
    if len(test.labels) == 0:
        return None, None
    sums = torch.zeros(
        2, dtype=torch.float64, device=job.device
    )  # read once: each reading waits for the device
    for scores, labels in scored_batches(job, theta):
        right, loss = job.model.correct(scores, labels), job.model.loss(scores, labels)
        sums += torch.stack([right.double().sum(), loss.double().sum()])
    accuracy, mean_loss = (sums / len(test.labels)).tolist()
    return accuracy, mean_loss


def begin_finite(state: State, t: int) -> Callable[[], None]:
    """Asks the device whether the state is finite. What it returns waits for the answer, and raises if it is not."""
    names, values = zip(*state.tensors().items(), strict=True)
    flags = torch.stack(
        [value.isfinite().all().to(state.theta.device, non_blocking=True) for value in values]
    )
    answered: torch.cuda.Event | None = None
    if flags.is_cuda:
        here = torch.empty(len(flags), dtype=torch.bool, pin_memory=True)
        here.copy_(flags, non_blocking=True)
        flags, answered = here, torch.cuda.current_stream(flags.device).record_event()

    def finite() -> None:
        if answered is not None:
            answered.synchronize()
        for name, good in zip(names, flags.tolist(), strict=True):
            if not good:
                raise DivergedError(
                    f"after round {t} the server's {name} is no longer finite: lower algorithm.lr; "
                    "what was computed before is kept"
                )

    return finite
