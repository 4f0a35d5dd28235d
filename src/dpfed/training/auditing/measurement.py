"""Measure canaries in released gradient sums: a score of each canary, and the shift by all.

A canary is a unit for which a fair coin decides if it is in the data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpfed.privacy.auditing.guesses import log_ratio
from dpfed.privacy.auditing.shifts import Shifts
from dpfed.training.auditing.setting import AuditSetting


@dataclass(frozen=True)
class Step:
    """One step of some clients: components of their released sums along canaries' directions.

    All components are in units of the clip norm C. Each direction has length 1.

    clients  numbers of the clients
    along    component along each canary's direction, `[clients, canaries]`
    sizes    largest component that each canary can cause along its direction, at most 1
    summed   sum of the components along the directions of all canaries in the data, `[clients]`;
             a canary with the opposite gradient counts with the opposite sign
    spread   squared length of the sum of these directions, `[clients]`
    noise    components along directions that no canary has, `[clients, any number]`
    """

    clients: np.ndarray
    along: np.ndarray
    sizes: np.ndarray | float
    summed: np.ndarray
    spread: np.ndarray
    noise: np.ndarray


class Measurement:
    """Adds up what an audit measures in each step: the scores and the shifts of its canaries.

    coins   `[clients, canaries]`, True for a canary that is in the data
    scores  `[clients, canaries]`, high for a canary that is probably in the data
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
    """Return the sign of each canary's gradient in the data: 1, or 0 if the canary is absent.

    With replace-one adjacency, the sign of an absent canary is -1, because a record with the
    opposite gradient replaces it.

    coins  `[clients, canaries]`, True for a canary that is in the data
    """
    absent = 0.0 if setting.plan.mechanism(0).adjacency == "add/remove one" else -1.0
    return np.where(coins, 1.0, absent)
