"""Audit a job: test with canaries if it reveals more than its claimed epsilon allows.

A canary is a unit for which a fair coin decides if it is in the data. The less noise protects the
data, the better this coin can be guessed from what the job releases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpfed.errors import DpfedError
from dpfed.privacy.auditing.guesses import epsilon_bound, ladder_bound
from dpfed.privacy.auditing.laws import Law
from dpfed.privacy.auditing.report import Assumed, Report, Seen
from dpfed.privacy.auditing.shifts import ratio_bound
from dpfed.privacy.published import show_setting
from dpfed.training.auditing.canaries import most_canaries
from dpfed.training.auditing.canary_run import observe
from dpfed.training.auditing.measurement import Measurement
from dpfed.training.auditing.records import MOST_PER_CLIENT, measured_records
from dpfed.training.auditing.setting import (
    MAX_CLIENT_STEPS,
    AuditSetting,
    chosen_clients,
    fair_coins,
    setting_of,
    size_for,
)
from dpfed.training.job.job import Job

# `audit` computes this many lower bounds on epsilon, counted without and with `own_model`. Each
# bound may be wrong with an equal part of the probability 1 - confidence.
BOUNDS = 5
BOUNDS_WITH_MODEL = 8


@dataclass(frozen=True)
class Audit:
    reports: list[Report]
    laws: list[Law]


@dataclass(frozen=True)
class Bounds:
    """Computes lower bounds on epsilon from the observations of an audit.

    setting     the audited clients; each is listed once for each training run
    confidence  probability that a single bound does not exceed the true epsilon
    runs        number of training runs
    """

    setting: AuditSetting
    confidence: float
    runs: int = 1

    def of_guesses(self, seen: Seen, scores: np.ndarray, coins: np.ndarray) -> list[Report]:
        """Return two lower bounds from guesses which canaries are in the data.

        The first assumes nothing. The second assumes a trade-off curve as the accountant computes
        it, but with another noise level.

        scores  one number per canary; a high score suggests that the canary is in the data
        coins   the truth: True for each canary that is in the data
        """
        least = epsilon_bound(scores, coins, self.setting.delta, self.confidence)
        ratio = ladder_bound(scores, coins, self.setting.curve_at, self.confidence)
        return [
            self._report(seen, "nothing", least, coins),
            self._report(seen, "the accounted curve", self._epsilon_at(ratio), coins),
        ]

    def of_measurement(self, seen: Seen, found: Measurement, coins: np.ndarray) -> list[Report]:
        """Return three lower bounds on epsilon: two from guesses, and one from measured shifts.

        A canary that is in the data shifts the released gradient sums along its direction.
        """
        ratio = ratio_bound(found.shifts, self.confidence)
        # `ratio_bound` is about the noise multiplier of the sum, `_epsilon_at` about that of the
        # plan. With quantile clipping the latter is smaller, because it covers sum and count.
        ratio /= self.setting.plan.clipping.sum_multiplier(1.0)
        shifts = self._report(seen, "Gaussian noise", self._epsilon_at(ratio), coins)
        return [*self.of_guesses(seen, found.scores, coins), shifts]

    def _epsilon_at(self, ratio: float) -> float:
        return self.setting.epsilon_at(ratio) if ratio > 0 else 0.0

    def _report(self, seen: Seen, assumes: Assumed, lower: float, coins: np.ndarray) -> Report:
        return Report(
            seen=seen,
            assumes=assumes,
            lower=lower,
            claimed=float(self.setting.epsilons().max()),
            delta=self.setting.delta,
            confidence=self.confidence,
            canaries=coins.size,
            clients=self.setting.plan.clients // self.runs,
            runs=self.runs,
            steps=self.setting.steps,
        )


def audit_model(job: Job, clients: np.ndarray, canaries: int, confidence: float) -> list[Report]:
    """Audit the gradients of the job's own model, with records of these clients as canaries.

    canaries    about this many canaries in all
    confidence  probability that a single bound does not exceed the true epsilon
    """
    setting = setting_of(job).only(clients)
    wanted = max(1, round(canaries / len(clients)))
    count = min(MOST_PER_CLIENT, wanted, int(setting.plan.sizes.min()))
    coins = fair_coins(setting, count, 4)
    found = measured_records(job, setting, clients, coins)
    return Bounds(setting, confidence).of_measurement("model", found, coins)


def audit(
    job: Job, canaries: int = 4000, confidence: float = 0.95, own_model: bool = False
) -> Audit:
    """Train a job with canaries; return lower bounds on epsilon, and tests of batches and noise.

    If training all clients would take too many steps, only some clients are audited.

    canaries    about this many canaries in all
    confidence  probability that no lower bound exceeds the true epsilon
    own_model   True to use a second kind of canaries too, which keep their own gradients; the
                auditor chooses the gradients of all others
    """
    _require(job, canaries, confidence)
    whole = setting_of(job)
    clients = chosen_clients(whole.epsilons(), max(1, MAX_CLIENT_STEPS // whole.steps))
    each = 1 - (1 - confidence) / (BOUNDS_WITH_MODEL if own_model else BOUNDS)
    setting = whole.only(clients)
    size = size_for(setting, canaries, most_canaries(job.space.size))
    found = observe(job, clients, setting, size)
    bounds = Bounds(found.setting, each, size.runs)
    reports = [
        *bounds.of_measurement("oracle", found.gradients, found.coins),
        *bounds.of_guesses("server", found.messages, found.coins),
    ]
    if own_model:
        reports += audit_model(job, clients, canaries, each)
    return Audit(reports, list(found.draws.laws()))


def _require(job: Job, canaries: int, confidence: float) -> None:
    """Require that the job claims privacy and the options are in range; else raise DpfedError."""
    if not job.plan.private:
        raise DpfedError(
            "no privacy is claimed here (privacy.enabled is false or sigma is 0): nothing to audit"
        )
    if canaries < 8:
        raise DpfedError(f"--canaries {canaries} is too few to show anything: give at least 8")
    if not 0.5 <= confidence < 1:
        raise DpfedError(
            f"--confidence {show_setting(confidence)} is not allowed: it lies from 0.5 to below 1, "
            "such as 0.95"
        )
