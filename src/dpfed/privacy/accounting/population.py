"""Epsilon of very many clients at once (server's figure, Poisson sampling).

Epsilon grows with the rate and the number of rounds and falls with the noise. So a client may be
moved to the next worse point of a grid, where one loss distribution serves many clients. The result
is an upper bound; the grid is refined where neighbouring points differ by more than the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.history import Floats, check_delta
from dpfed.privacy.accounting.loss_distribution import Term, compose, rounding
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.mechanism import Mechanism

Ints = npt.NDArray[np.int64]

# On a finer grid only an epsilon next to 0 can still differ between neighbours.
_FINEST_WIDTH = 1e-3


@dataclass(frozen=True, eq=False)
class Population:
    """The clients, one entry each: sampling rate, effective noise multiplier, rounds taken.

    `steps` is the number of batches that one client draws in one round.
    """

    rates: Floats
    multipliers: Floats
    rounds: Ints
    steps: int

    def __post_init__(self) -> None:
        if not np.all((self.rates > 0) & (self.rates <= 1)):
            raise DpfedError("every client's sampling rate must lie in (0, 1].")
        if not np.all(self.rounds >= 0):
            raise DpfedError("no client can have taken part in fewer than 0 rounds.")
        if not np.all((self.multipliers >= 0) & np.isfinite(self.multipliers)):
            raise DpfedError("every client's noise multiplier must be a number of 0 or more.")
        if self.steps < 0:
            raise DpfedError("population accounting needs a number of local steps >= 0.")

    @classmethod
    def of(cls, kinds: Sequence[Mechanism], rounds: npt.ArrayLike, local_steps: int) -> Self:
        """Clients with these mechanisms; all share the number of batches of the first."""
        return cls(
            np.array([kind.rate for kind in kinds]),
            np.array([kind.effective_multiplier for kind in kinds]),
            np.broadcast_to(np.asarray(rounds, dtype=np.int64), len(kinds)),
            local_steps * kinds[0].batches,
        )

    @property
    def active(self) -> Ints:
        """Clients that took at least one step."""
        return np.flatnonzero(self.rounds * self.steps > 0)

    def exact(self, client: int, delta: float) -> float:
        """The reported figure of a single client, with its RDP check."""
        step = Mechanism("poisson", float(self.rates[client]), float(self.multipliers[client]))
        return epsilon([(step, int(self.steps * self.rounds[client]))], delta).value

    def front(self, clients: Ints) -> list[int]:
        """The clients that may have the largest epsilon: no other is worse in all respects."""
        front: list[int] = []
        while len(clients):
            # The client with most rounds, then least noise, then highest rate is on the front.
            columns = (-self.rates[clients], self.multipliers[clients], -self.rounds[clients])
            first = int(clients[np.lexsort(columns)[0]])
            front.append(first)
            clients = clients[~self.dominated(clients, first)]
        return front

    def dominated(self, clients: Ints, other: int) -> npt.NDArray[np.bool_]:
        """True for clients with at most the rate and rounds of `other`, and at least its noise."""
        found: npt.NDArray[np.bool_] = (
            (self.rates[clients] <= self.rates[other])
            & (self.rounds[clients] <= self.rounds[other])
            & (self.multipliers[clients] >= self.multipliers[other])
        )
        return found


def largest_epsilon(population: Population, delta: float) -> float:
    """The largest epsilon over clients, exactly; only clients on the front are computed."""
    check_delta(delta)
    front = population.front(population.active)
    return max((population.exact(client, delta) for client in front), default=0.0)


def population_epsilon(population: Population, delta: float, tolerance: float = 0.03) -> Floats:
    """Epsilon of every client: an upper bound within the relative tolerance, exact for the largest.

    A client without rounds has 0, one without noise infinity.
    """
    check_delta(delta)
    if not tolerance > 0:
        raise DpfedError("population accounting needs a tolerance above 0.")
    bounds = np.zeros(population.rates.shape)
    bounds[population.active] = math.inf
    clients = population.active[population.multipliers[population.active] > 0]
    if not len(clients):
        return bounds
    grid = _Grid(population, clients, delta, tolerance)
    pending = clients
    width = 0.75 * math.log1p(tolerance)
    while len(pending):
        pending = grid.settle(pending, width, bounds)
        width /= 2
    # Exact figures replace the largest bounds until the maximum is exact.
    largest = -math.inf
    for client in sorted(population.front(clients), key=lambda i: -bounds[i]):
        if bounds[client] <= largest:
            break
        figure = population.exact(client, delta)
        below = clients[population.dominated(clients, client)]
        bounds[below] = np.minimum(bounds[below], figure)
        largest = max(largest, figure)
    return bounds


@dataclass
class _Point:
    """One grid point: the loss distribution of one round, composed once per number of rounds."""

    rate: float
    multiplier: float
    steps: int
    delta: float
    interval: float = 1e-2
    epsilon_after: dict[int, float] = field(default_factory=dict)
    one_round: Any = None

    def epsilon(self, rounds: int) -> float:
        if rounds not in self.epsilon_after:
            self.epsilon_after[rounds] = self._compose(rounds) if rounds else 0.0
        return self.epsilon_after[rounds]

    def _compose(self, rounds: int) -> float:
        """Compose at a quarter of the usual resolution, which raises epsilon by at most 0.3 %."""
        steps = self.steps * rounds
        while True:
            if self.one_round is None:
                term = Term(self.rate, self.multiplier, self.steps)
                # Noise beyond this tail counts as an infinite loss.
                log_tail = math.log(1e-6 * self.delta / steps)
                uncached = compose.__wrapped__
                self.one_round = uncached((term,), self.interval, "add/remove one", log_tail)
            total = self.one_round.self_compose(rounds) if rounds > 1 else self.one_round
            value = float(total.get_epsilon_for_delta(self.delta - rounding(steps)))
            wanted = min(1e-2, max(value, 2e-3) / 500)
            if self.interval <= wanted * 1.05:
                return value
            self.interval = wanted
            self.one_round = None


class _Grid:
    """Grid points by level: log rate below the highest, and log noise above the lowest.

    Halving the width keeps the old points.
    """

    def __init__(
        self, population: Population, clients: Ints, delta: float, tolerance: float
    ) -> None:
        self.highest_rate = population.rates[clients].max()
        self.least_noise = population.multipliers[clients].min()
        self.rounds = population.rounds
        self.steps = population.steps
        self.delta = delta
        self.tolerance = tolerance
        self.rate_levels = np.log(self.highest_rate / population.rates)
        noise = np.where(population.multipliers > 0, population.multipliers, self.least_noise)
        self.noise_levels = np.log(noise / self.least_noise)
        self.points: dict[tuple[float, float], _Point] = {}

    def epsilon(self, rate_level: float, noise_level: float, rounds: int) -> float:
        key = (rate_level, noise_level)
        if key not in self.points:
            rate = self.highest_rate * math.exp(-rate_level)
            multiplier = self.least_noise * math.exp(noise_level)
            self.points[key] = _Point(rate, multiplier, self.steps, self.delta)
        return self.points[key].epsilon(rounds)

    def settle(self, clients: Ints, width: float, bounds: Floats) -> Ints:
        """Bound `clients` by the worst corner of their cell; return those of cells still too large.

        The truth lies between the worst and the best corner. A cell is small enough if they differ
        by less than the tolerance, minus a margin for the discretisation of both.
        """
        # Rounding a level down is the worse way for both. The shift keeps exact hits exact.
        rate_cell = np.floor(self.rate_levels[clients] / width + 1e-12)
        noise_cell = np.floor(self.noise_levels[clients] / width + 1e-12)
        span = _rounds_span(self.rounds[clients], width)
        corners = np.stack([rate_cell, noise_cell, *span])
        cells, member = np.unique(corners, axis=1, return_inverse=True)
        member = member.reshape(-1)
        worst = np.zeros(cells.shape[1])
        settled = np.zeros(cells.shape[1], dtype=bool)
        # With one rate or one noise level all clients lie on the grid itself.
        rate_step = int(np.any(self.rate_levels[clients] != 0))
        noise_step = int(np.any(self.noise_levels[clients] != 0))
        for index, (r, s, low, high) in enumerate(cells.T):
            worst[index] = self.epsilon(r * width, s * width, int(high))
            best = self.epsilon((r + rate_step) * width, (s + noise_step) * width, int(low))
            close = worst[index] <= (1 + self.tolerance - 0.004) * best
            settled[index] = close or width < _FINEST_WIDTH
        bounds[clients] = worst[member]
        return clients[~settled[member]]


def _rounds_span(rounds: Ints, width: float) -> tuple[Floats, Floats]:
    """First and last number of rounds of each client's cell; small numbers have their own cell."""
    cell = np.floor(np.log(rounds) / width + 1e-12)
    low = np.ceil(np.exp(cell * width) - 1e-9)
    high = np.maximum(np.ceil(np.exp((cell + 1) * width) - 1e-9) - 1, rounds)
    return np.minimum(low, rounds).astype(np.float64), high.astype(np.float64)
