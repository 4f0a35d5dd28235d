"""Epsilon of very many clients at once (server view, Poisson sampling).

Epsilon grows with the rate and the number of rounds and falls with the noise: a lower rate is the higher one mixed
with no release, fewer rounds are a part of more, and more noise is post-processing of less. So a client may be moved
to the next worse point of a grid, where one loss distribution serves many clients. The result is never below the
truth, and the grid is refined wherever neighbouring points differ by more than the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dpfed.errors import DpfedError
from dpfed.privacy.accounting.pld import Term, check_delta, compose, epsilon, rounding
from dpfed.privacy.mechanism import Mechanism

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FINEST_WIDTH = (
    1e-3  # a grid so fine that only an epsilon next to 0 can still differ between neighbours
)


@dataclass
class _Point:
    """One grid point (rate, sigma): a loss distribution of one round, composed once for each number of rounds."""

    rate: float
    multiplier: float
    steps: int
    delta: float
    interval: float = 0.0
    known: dict[int, float] = field(default_factory=dict)
    one_round: Any = None

    def epsilon(self, rounds: int) -> float:
        if rounds not in self.known:
            self.known[rounds] = self._compose(rounds)
        return self.known[rounds]

    def _compose(self, rounds: int) -> float:
        """A quarter of SPEC 6.1's resolution: it costs at most 0.3 % of epsilon, upwards, and is shared by rounds."""
        if rounds == 0:
            return 0.0
        while True:
            if self.one_round is None:
                self.interval = self.interval or 1e-2
                term = Term(self.rate, self.multiplier, self.steps)
                log_tail = math.log(
                    1e-6 * self.delta / (self.steps * rounds)
                )  # the rest counts as infinite loss
                self.one_round = compose.__wrapped__(
                    (term,), self.interval, "add/remove one", log_tail
                )
            total = self.one_round.self_compose(rounds) if rounds > 1 else self.one_round
            value = float(
                total.get_epsilon_for_delta(
                    self.delta - rounding((Term(0, 0, self.steps * rounds),))
                )
            )
            wanted = min(1e-2, max(value, 2e-3) / 500)
            if self.interval <= wanted * 1.05:
                return value
            self.interval, self.one_round = wanted, None


class _Grid:
    """Grid points by their level (rate index, sigma index) at the current width; halving the width keeps old ones."""

    def __init__(self, rate: float, sigma: float, steps: int, releases: int, delta: float) -> None:
        self.rate, self.sigma, self.steps, self.releases, self.delta = (
            rate,
            sigma,
            steps,
            releases,
            delta,
        )
        self.points: dict[tuple[float, float], _Point] = {}

    def epsilon(self, rate_level: float, sigma_level: float, rounds: int) -> float:
        """Levels count natural-log units from the highest rate downwards, and from the lowest sigma upwards."""
        key = (rate_level, sigma_level)
        if key not in self.points:
            rate, sigma = self.rate * math.exp(-rate_level), self.sigma * math.exp(sigma_level)
            multiplier = Mechanism(
                "poisson", rate, sigma, releases=self.releases
            ).effective_multiplier
            self.points[key] = _Point(rate, multiplier, self.steps, self.delta)
        return self.points[key].epsilon(rounds)


def population_epsilon(
    rates: npt.ArrayLike,
    rounds: npt.ArrayLike,
    local_steps: int,
    sigma: npt.ArrayLike,
    delta: float,
    *,
    batches: int = 1,
    releases: int = 1,
    tolerance: float = 0.03,
) -> Floats:
    """Epsilon of every client: never below the truth, at most `tolerance` above it, exact PLD for the largest.

    `rates` and `rounds` hold one entry per client (its sampling rate, and the rounds it took part in); `sigma` is one
    number or one per client. A client that took part in no round has 0, one without noise infinity.
    """
    check_delta(delta)
    rate, taken, noise = _clients(rates, rounds, sigma)
    if local_steps < 0 or not tolerance > 0:
        raise DpfedError(
            "population accounting needs a number of local steps >= 0 and a tolerance above 0."
        )
    epsilons = np.zeros(rate.shape)
    epsilons[(taken > 0) & (noise == 0)] = math.inf
    pending = (
        np.flatnonzero((taken > 0) & (noise > 0))
        if local_steps > 0
        else np.zeros(0, dtype=np.int64)
    )
    if len(pending):
        grid = _Grid(
            rate[pending].max(), noise[pending].min(), local_steps * batches, releases, delta
        )
        levels = (
            np.log(grid.rate / rate),
            np.log(np.where(noise > 0, noise, grid.sigma) / grid.sigma),
        )
        everyone, width = pending, 0.75 * math.log1p(tolerance)
        while len(pending):
            pending = _settle(grid, pending, levels, taken, width, tolerance, epsilons)
            width /= 2

        def exact(i: int) -> float:
            return _exact(rate[i], local_steps * taken[i], noise[i], batches, releases, delta)

        _exact_worst(everyone, rate, taken, noise, epsilons, exact)
    return epsilons


def _clients(
    rates: npt.ArrayLike, rounds: npt.ArrayLike, sigma: npt.ArrayLike
) -> tuple[Floats, Ints, Floats]:
    rate = np.atleast_1d(np.asarray(rates, dtype=np.float64))
    taken = np.broadcast_to(np.asarray(rounds, dtype=np.int64), rate.shape)
    noise = np.broadcast_to(np.asarray(sigma, dtype=np.float64), rate.shape)
    if not np.all((rate > 0) & (rate <= 1)):
        raise DpfedError("every client's sampling rate must lie in (0, 1].")
    if not np.all(taken >= 0):
        raise DpfedError("no client can have taken part in fewer than 0 rounds.")
    if not np.all((noise >= 0) & np.isfinite(noise)):
        raise DpfedError("every client's noise multiplier must be a number of 0 or more.")
    return rate, taken, noise


def _settle(
    grid: _Grid,
    clients: Ints,
    levels: tuple[Floats, Floats],
    taken: Ints,
    width: float,
    tolerance: float,
    out: Floats,
) -> Ints:
    """Round `clients` to the worse corner of their cell; return those whose cell is not yet small enough.

    A cell is small enough when its worst corner exceeds its best one by less than the tolerance, since the truth lies
    between them. The small margin is for the discretisation of both.
    """
    # Rounding a level down is the worse way for both: a higher rate, a lower sigma. The shift keeps exact hits exact.
    rate_cell = np.floor(levels[0][clients] / width + 1e-12)
    sigma_cell = np.floor(levels[1][clients] / width + 1e-12)
    span = _rounds_span(taken[clients], width)
    cells, member = np.unique(np.stack([rate_cell, sigma_cell, *span]), axis=1, return_inverse=True)
    member = member.reshape(-1)
    worst, done = np.zeros(cells.shape[1]), np.zeros(cells.shape[1], dtype=bool)
    one_rate = bool(np.all(levels[0][clients] == 0))
    one_sigma = bool(np.all(levels[1][clients] == 0))
    for index, (r, s, low, high) in enumerate(cells.T):
        worst[index] = grid.epsilon(r * width, s * width, int(high))
        best = grid.epsilon((r + (not one_rate)) * width, (s + (not one_sigma)) * width, int(low))
        done[index] = worst[index] <= (1 + tolerance - 0.004) * best or width < _FINEST_WIDTH
    out[clients] = worst[member]
    return clients[~done[member]]


def _rounds_span(taken: Ints, width: float) -> tuple[Floats, Floats]:
    """First and last number of rounds of each client's cell; small numbers have a cell of their own."""
    cell = np.floor(np.log(taken) / width + 1e-12)
    low = np.ceil(np.exp(cell * width) - 1e-9)
    high = np.maximum(np.ceil(np.exp((cell + 1) * width) - 1e-9) - 1, taken)
    return np.minimum(low, taken).astype(np.float64), high.astype(np.float64)


def largest_epsilon(
    rates: npt.ArrayLike,
    rounds: npt.ArrayLike,
    local_steps: int,
    sigma: npt.ArrayLike,
    delta: float,
    *,
    batches: int = 1,
    releases: int = 1,
) -> float:
    """The largest epsilon over clients, exactly: only clients that no other one exceeds in every respect are computed."""
    check_delta(delta)
    rate, taken, noise = _clients(rates, rounds, sigma)
    clients = np.flatnonzero(taken > 0) if local_steps > 0 else np.zeros(0, dtype=np.int64)
    steps = local_steps * taken
    figures = [
        _exact(rate[i], steps[i], noise[i], batches, releases, delta)
        for i in _front(clients, rate, taken, noise)
    ]
    return max(figures, default=0.0)


def _exact(
    rate: float, steps: int, sigma: float, batches: int, releases: int, delta: float
) -> float:
    """The figure one would report for a single client, RDP check included."""
    step = Mechanism("poisson", float(rate), float(sigma), batches, releases)
    return epsilon([(step, int(steps))], delta).value


def _front(clients: Ints, rate: Floats, taken: Ints, noise: Floats) -> list[int]:
    """Clients that may have the largest epsilon: no other has at least their rate and rounds and at most their sigma."""
    front: list[int] = []
    while len(clients):
        # Among the rest, one with the most rounds, of those the least noise, of those the highest rate, is on the front.
        first = clients[np.lexsort((-rate[clients], noise[clients], -taken[clients]))[0]]
        front.append(int(first))
        worse = (
            (rate[clients] > rate[first])
            | (taken[clients] > taken[first])
            | (noise[clients] < noise[first])
        )
        clients = clients[worse]
    return front


def _exact_worst(
    clients: Ints,
    rate: Floats,
    taken: Ints,
    noise: Floats,
    out: Floats,
    exact: Callable[[int], float],
) -> None:
    """Replace the largest bounds by exact figures until the largest entry is exact, so that the maximum is."""
    largest = -math.inf
    for client in sorted(_front(clients, rate, taken, noise), key=lambda i: -out[i]):
        if out[client] <= largest:
            return
        figure = exact(client)
        # No client that this one exceeds in every respect can truly have more.
        below = (
            (rate[clients] <= rate[client])
            & (taken[clients] <= taken[client])
            & (noise[clients] >= noise[client])
        )
        out[clients[below]] = np.minimum(out[clients[below]], figure)
        largest = max(largest, figure)
