"""Collect what the released sums show of the canaries: a score of each, and the shift of all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpfed.privacy.auditing.guesses import log_ratio
from dpfed.privacy.auditing.shifts import Shifts
from dpfed.training.auditing.setting import AuditSetting


@dataclass(frozen=True)
class Step:
    """One step of some clients, measured along directions of unit length, in units of C.

    clients  numbers of the clients
    along    released sums along each canary's direction, `[clients, canaries]`
    sizes    shift along its direction that each canary may cause, at most 1
    summed   released sums along the sum of the counted canaries' directions, `[clients]`
    spread   squared length of that sum of directions, `[clients]`
    noise    released sums along directions that no canary has, `[clients, any number]`
    """

    clients: np.ndarray
    along: np.ndarray
    sizes: np.ndarray | float
    summed: np.ndarray
    spread: np.ndarray
    noise: np.ndarray


class Measurement:
    """Accumulates the steps of an audit.

    coins   `[clients, canaries]`, True for a canary that is in the data
    scores  score of each canary, `[clients, canaries]`; a present canary has a high score
    """

    def __init__(self, setting: AuditSetting, coins: np.ndarray) -> None:
        self.scores = np.zeros(coins.shape)
        self._signs = signs_of(setting, coins)
        self._rates = setting.plan.rates
        self._multipliers = setting.sum_multipliers
        self._kinds, self._which = setting.plan.kinds()
        self._total = 0.0
        self._noise_variance = 0.0
        self._chances = 0
        self._drawn = 0.0
        self._noise_values = 0
        self._noise_squares = 0.0

    def add(self, step: Step) -> None:
        clients = step.clients
        sizes = np.broadcast_to(step.sizes, step.along.shape)
        for kind in np.unique(self._which[clients]):
            rows = self._which[clients] == kind
            ratios = log_ratio(step.along[rows], self._kinds[kind], sizes[rows])
            self.scores[clients[rows]] += ratios
        variance = self._multipliers[clients] ** 2
        counted = np.abs(self._signs[clients]).sum(1)
        self._total += float(step.summed.sum())
        self._noise_variance += float((variance * step.spread).sum())
        self._chances += int(counted.sum())
        self._drawn += float((counted * self._rates[clients]).sum())
        self._noise_values += step.noise.size
        self._noise_squares += float((step.noise**2 / variance[:, None]).sum())

    @property
    def shifts(self) -> Shifts:
        rate = self._drawn / max(1, self._chances)
        return Shifts(
            self._total,
            self._noise_variance,
            self._chances,
            rate,
            self._noise_values,
            self._noise_squares,
        )


def signs_of(setting: AuditSetting, coins: np.ndarray) -> np.ndarray:
    """Return 1 for a present canary, and 0 for an absent one.

    With replace-one adjacency, an absent canary is replaced by its opposite, and has -1.
    """
    absent = 0.0 if setting.plan.mechanism(0).adjacency == "add/remove one" else -1.0
    return np.where(coins, 1.0, absent)
