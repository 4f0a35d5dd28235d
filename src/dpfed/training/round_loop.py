"""The round loop of every run: cohort -> charge -> train -> aggregate -> evaluate -> callbacks.

"Charge" means: record the privacy cost of the round in the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dpfed.algorithms.base import Message
from dpfed.errors import InterruptedRunError, StoppedError
from dpfed.training.backends.base import Backend, LostRoundError
from dpfed.training.backends.finite_check import begin_finite_check
from dpfed.training.budget.participation import choose_cohort
from dpfed.training.budget.spending import Spending
from dpfed.training.callbacks.base import Callback
from dpfed.training.evaluation import evaluate
from dpfed.training.job.job import Job
from dpfed.training.job.public_score import chosen_score, with_scores
from dpfed.training.round_context import context, first_state
from dpfed.training.rounds import Progress, Round
from dpfed.training.server_state import State

# Accuracy, loss and epsilon of a round that is not evaluated.
UNSCORED = (None, None, None)


@dataclass
class RoundLoop:
    """Run the rounds of a job.

    backend         computes the mean of each cohort's messages
    spending        selects the clients that may take part, and records their privacy cost
    callbacks       gets the events of the run
    stop            called before each round; may raise an error to end the run
    checkpoint_due  called once for each round; returns True if a checkpoint follows the round
    overlap         True: begin the next round before the check of a round for NaN and infinity, so
                    that the host does not wait for the GPU. False: check each round at once.
                    Rounds that are evaluated or saved are always checked at once.
    """

    job: Job
    backend: Backend
    spending: Spending
    callbacks: Callback
    stop: Callable[[], None] = lambda: None
    checkpoint_due: Callable[[int], bool] = lambda t: True
    overlap: bool = False

    def run(self, progress: Progress | None = None) -> Tensor:
        """Run the remaining rounds and return the trained vector, `[P]` for P trainable parameters.

        progress  completed rounds of a resumed run; None to begin with the evaluation of round 0
        """
        progress = progress or self._round_zero()
        state = progress.state
        started = time.perf_counter() - progress.seconds
        unreported: Callable[[], None] | None = None
        try:
            for t in range(progress.t + 1, self.job.config.run.rounds + 1):
                if is_over(self.job, state):
                    break
                self.stop()
                eligible = self.spending.require_eligible(t)
                cohort = choose(self.job, t, eligible, self.spending.rounds_taken)
                wait_for_charge = self.spending.begin_charge(t, cohort)
                scored = self._is_scored(t)
                epsilon = self.spending.begin_server_max() if scored else None
                clip = state.clip
                try:
                    mean, answered = self.backend.run_cohort(t, state, cohort, wait_for_charge)
                    state = aggregate(self.job, t, state, cohort, mean, answered)
                except LostRoundError:
                    # A lost round leaves the state unchanged, but its privacy cost remains.
                    pass
                finally:
                    wait_for_charge()
                require_finite = self._begin_finite_check(state, t)
                if unreported is not None:
                    unreported()
                    unreported = None
                seconds = time.perf_counter() - started
                counts = (len(cohort), len(eligible))
                round = Round(t, *UNSCORED, *counts, clip, seconds, state.result, best=state.best)
                due = self.checkpoint_due(t)
                if self.overlap and not scored and not due:
                    unreported = self._reporter(require_finite, round)
                    continue
                require_finite()
                if scored:
                    round, state = self._scored(round, state, epsilon, started)
                self.callbacks.on_round(round)
                if due:
                    self.callbacks.on_checkpoint(Progress(t, state, round.seconds))
        except (InterruptedRunError, StoppedError):
            if unreported is not None:
                unreported()
            raise
        return state.result

    def _round_zero(self) -> Progress:
        """Evaluate the initial vector, report it as round 0, and return the progress after it."""
        state = first_state(self.job)
        epsilon = self.spending.server_max()
        round = Round(0, None, None, epsilon, 0, 0, self.job.plan.clip, 0.0, state.theta)
        round = with_scores(self.job, round, state.theta)
        state = state.judged(chosen_score(self.job, round), 0)
        self.callbacks.on_round(replace(round, best=state.best))
        return Progress(0, state)

    def _is_scored(self, t: int) -> bool:
        run = self.job.config.run
        return t % run.eval_every == 0 or t == run.rounds

    def _begin_finite_check(self, state: State, t: int) -> Callable[[], None]:
        if self.job.config.run.allow_nan:
            return lambda: None
        return begin_finite_check(state, t)

    def _reporter(self, require_finite: Callable[[], None], round: Round) -> Callable[[], None]:
        def report() -> None:
            require_finite()
            self.callbacks.on_round(round)

        return report

    def _scored(
        self,
        round: Round,
        state: State,
        epsilon: Callable[[], float | None] | None,
        started: float,
    ) -> tuple[Round, State]:
        """Return the round with its scores and epsilon, and the state with the best round so far.

        The time of the returned round includes the evaluation.

        epsilon  function that waits for the epsilon from another thread; None for no epsilon
        started  start of training, in seconds of `time.perf_counter`
        """
        scored = with_scores(self.job, round, state.result)
        last = evaluate(self.job, state.theta)[0] if state.average is not None else None
        seconds = time.perf_counter() - started
        waited = epsilon() if epsilon else None
        scored = replace(scored, last_accuracy=last, epsilon=waited, seconds=seconds)
        state = state.judged(chosen_score(self.job, scored), round.t)
        return replace(scored, best=state.best), state


def is_over(job: Job, state: State) -> bool:
    """Return True if the last `run.early_stopping` evaluations have not found a better score."""
    patience = job.config.run.early_stopping
    return patience is not None and state.best is not None and int(state.best.waited) >= patience


def aggregate(
    job: Job, t: int, state: State, cohort: Sequence[int], mean: Message, answered: int
) -> State:
    """Return the server's state after round t: the algorithm applies the mean message to the state.

    With quantile clipping, the clip norm of the state changes too. With `run.average`, the average
    of the iterates changes.

    mean      mean of the clients' messages
    answered  number of clients whose messages are in the mean
    """
    mean = dict(mean)
    below = mean.pop("below", None)
    ctx = context(job, t, cohort, state.clip, answered)
    clip = state.clip
    if below is not None:
        clip = job.plan.clipping.next_clip(clip, float(below))
    server = job.algorithm.aggregate(ctx, state.server, mean)
    return state.after(server, clip, job.config.run.average)


def choose(job: Job, t: int, eligible: np.ndarray, requests: np.ndarray) -> list[int]:
    """Choose the cohort of round t: return the sorted numbers of S distinct clients.

    If there are fewer than S eligible clients, all of them are in the cohort.

    eligible  numbers of the clients that may take part
    requests  number of rounds that each of the N clients was asked for so far, `[N]`
    """
    schedule = job.schedule
    rng = job.streams.generator("cohort", t)
    return choose_cohort(eligible, requests, schedule.cohort, schedule.choice, rng)
