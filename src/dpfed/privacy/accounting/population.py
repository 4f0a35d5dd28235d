"""Compute the epsilon against the server of very many clients at once, for Poisson sampling.

Epsilon grows with the sampling rate and the number of rounds, and falls with the noise. A grid of
(rate, noise) pairs covers all clients. The epsilon of a grid point with at least a client's rate
and at most its noise, after at least as many rounds, bounds the client's epsilon. Many clients use
the same grid point, so few loss distributions are computed. Where the epsilons of neighbouring
points differ by more than TOLERANCE, the grid is refined.
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

# The upper bound on a client's epsilon may be larger than this epsilon by at most this relative
# amount.
TOLERANCE = 0.03
# Smallest width of a cell of the grid. At this width, neighbouring grid points differ by more than
# TOLERANCE only if their epsilons are almost 0.
_FINEST_WIDTH = 1e-3


@dataclass(frozen=True, eq=False)
class Population:
    """All clients whose epsilons are computed together. Arrays have one entry per client.

    rates        sampling rate
    multipliers  effective noise multiplier
    rounds       number of rounds in which the client took part
    steps        batches that a client draws in one round, equal for all clients
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
        """Build a population of clients with these mechanisms.

        kinds   mechanism of each client; all have the same number of batches
        rounds  number of rounds of each client, or one number for all
        """
        return cls(
            np.array([kind.rate for kind in kinds]),
            np.array([kind.effective_multiplier for kind in kinds]),
            np.broadcast_to(np.asarray(rounds, dtype=np.int64), len(kinds)),
            local_steps * kinds[0].batches,
        )

    @property
    def active(self) -> Ints:
        """Indices of the clients that took at least one step."""
        return np.flatnonzero(self.rounds * self.steps > 0)

    def exact(self, client: int, delta: float) -> float:
        """Return the epsilon of one client, computed from its own rate, noise and rounds."""
        step = Mechanism("poisson", float(self.rates[client]), float(self.multipliers[client]))
        return epsilon([(step, int(self.steps * self.rounds[client]))], delta)

    def front(self, clients: Ints) -> list[int]:
        """Return those of the given clients that can have the largest epsilon (the Pareto front).

        A client is left out if another one has at least its rate and rounds, and at most its noise.
        """
        front: list[int] = []
        while len(clients):
            # Of the remaining clients, one with the most rounds is on the front: of several, the
            # one with the least noise, and then the one with the highest rate.
            columns = (-self.rates[clients], self.multipliers[clients], -self.rounds[clients])
            first = int(clients[np.lexsort(columns)[0]])
            front.append(first)
            clients = clients[~self.dominated(clients, first)]
        return front

    def dominated(self, clients: Ints, other: int) -> npt.NDArray[np.bool_]:
        """Return True for each client whose epsilon cannot exceed that of `other`.

        The rate and the rounds of such a client are at most those of `other`. The noise multiplier
        is at least that of `other`.
        """
        found: npt.NDArray[np.bool_] = (
            (self.rates[clients] <= self.rates[other])
            & (self.rounds[clients] <= self.rounds[other])
            & (self.multipliers[clients] >= self.multipliers[other])
        )
        return found


def largest_epsilon(population: Population, delta: float) -> float:
    """Return the exact largest epsilon over all clients; 0 if no client took a step."""
    check_delta(delta)
    front = population.front(population.active)
    return max((population.exact(client, delta) for client in front), default=0.0)


def population_epsilon(population: Population, delta: float) -> Floats:
    """Return an upper bound on the epsilon of every client.

    Each bound exceeds the client's epsilon by at most 3 % (TOLERANCE). The largest of all bounds is
    exact: it equals that client's epsilon. The bound is 0 for a client without rounds, and infinite
    for a client without noise.
    """
    check_delta(delta)
    bounds = np.zeros(population.rates.shape)
    bounds[population.active] = math.inf
    clients = population.active[population.multipliers[population.active] > 0]
    if not len(clients):
        return bounds
    grid = _Grid(population, clients, delta)
    pending = clients
    width = 0.75 * math.log1p(TOLERANCE)
    while len(pending):
        pending = grid.settle(pending, width, bounds)
        width /= 2
    # Compute exact epsilons of clients in the order of their bounds, largest first. Stop when one
    # of the exact epsilons is at least as large as all remaining bounds: it is the largest.
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
    """One grid point: a pair of sampling rate and noise multiplier, and its epsilons.

    The epsilons after different numbers of rounds are computed on request and stored.

    rate           sampling rate
    multiplier     effective noise multiplier
    steps          batches in one round
    delta          delta at which epsilons are computed
    interval       grid width of the loss distribution
    epsilon_after  epsilon by number of rounds
    one_round      loss distribution of one round; None before it is computed
    """

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
        """Return the epsilon after this number of rounds.

        The grid of privacy losses is four times wider than usual, which raises epsilon by at most
        0.3 %.
        """
        steps = self.steps * rounds
        while True:
            if self.one_round is None:
                term = Term(self.rate, self.multiplier, self.steps)
                # Noise with a smaller probability than e^log_tail counts as an infinite loss.
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
    """All grid points (sampling rate, noise multiplier) at which epsilons are computed.

    The rate level of a point is log(highest rate / rate), and its noise level is log(noise / least
    noise). A cell is a square of levels with a given width. If the width is halved, the corners of
    old cells remain grid points, so their epsilons are used again.
    """

    def __init__(self, population: Population, clients: Ints, delta: float) -> None:
        self.highest_rate = population.rates[clients].max()
        self.least_noise = population.multipliers[clients].min()
        self.rounds = population.rounds
        self.steps = population.steps
        self.delta = delta

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
        """Bound the epsilons of these clients; return the clients that need a finer grid.

        Clients with similar rates, noise and rounds are in one cell. Its worst corner has the
        highest rate, the least noise and the most rounds, and its best corner the opposite. The
        epsilon at the worst corner bounds all clients of the cell. A cell is small enough if the
        epsilons at both corners differ by less than TOLERANCE, minus a margin for rounding.

        width   side of a cell
        bounds  bounds of all clients, which this changes in place
        """
        # Round both levels down, to a higher rate and less noise. The added 1e-12 prevents that a
        # level on the grid is rounded to the grid point below.
        rate_cell = np.floor(self.rate_levels[clients] / width + 1e-12)
        noise_cell = np.floor(self.noise_levels[clients] / width + 1e-12)
        span = _rounds_span(self.rounds[clients], width)
        corners = np.stack([rate_cell, noise_cell, *span])
        cells, member = np.unique(corners, axis=1, return_inverse=True)
        member = member.reshape(-1)
        worst = np.zeros(cells.shape[1])
        settled = np.zeros(cells.shape[1], dtype=bool)
        # If all clients have the same rate, there is no other rate at the best corner of a cell,
        # and the step is 0. The same holds for the noise.
        rate_step = int(np.any(self.rate_levels[clients] != 0))
        noise_step = int(np.any(self.noise_levels[clients] != 0))
        for index, (rate_index, noise_index, fewest, most) in enumerate(cells.T):
            worst[index] = self.epsilon(rate_index * width, noise_index * width, int(most))
            best_rate = (rate_index + rate_step) * width
            best_noise = (noise_index + noise_step) * width
            best = self.epsilon(best_rate, best_noise, int(fewest))
            close = worst[index] <= (1 + TOLERANCE - 0.004) * best
            settled[index] = close or width < _FINEST_WIDTH
        bounds[clients] = worst[member]
        return clients[~settled[member]]


def _rounds_span(rounds: Ints, width: float) -> tuple[Floats, Floats]:
    """Return the smallest and the largest number of rounds in the cell of each client.

    A cell covers several numbers of rounds, with equal width in log(rounds). A small number of
    rounds therefore has its own cell.
    """
    cell = np.floor(np.log(rounds) / width + 1e-12)
    low = np.ceil(np.exp(cell * width) - 1e-9)
    high = np.maximum(np.ceil(np.exp((cell + 1) * width) - 1e-9) - 1, rounds)
    return np.minimum(low, rounds).astype(np.float64), high.astype(np.float64)
