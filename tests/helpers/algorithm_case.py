"""A fake oracle and a small round loop, to test algorithms without data or a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from dpfed.algorithms.base import Algorithm, ClientState, Context, Facts
from dpfed.model.parameter_vector import Space

torch.set_num_threads(1)

Gradient = Callable[[Tensor], Tensor]


def make_space(*sizes: int) -> Space:
    """Return a space with one tensor and one block for each size."""
    names = tuple(f"block{i}" for i in range(len(sizes)))
    blocks = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return Space(names, tuple(torch.Size([n]) for n in sizes), names, blocks)


class FakeOracle:
    """An oracle of a plain function of θ `[S, P]`, with Gaussian noise of variance `phi`."""

    def __init__(
        self, gradient: Gradient, phi: Tensor, generator: torch.Generator | None = None
    ) -> None:
        self.gradient, self.phi, self.generator = gradient, phi, generator
        self.calls, self.again_calls = 0, 0
        # The last gradients and copies of them, so that a test can find changes in place.
        self.given: list[tuple[Tensor, Tensor]] = []

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self._release(theta)

    def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        self.again_calls += 1
        return self._release(theta)

    def _release(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        g = self.gradient(theta)
        if self.generator is not None:
            g = g + self.phi.sqrt() * torch.randn(
                theta.shape, generator=self.generator, dtype=theta.dtype
            )
        self.given.append((g, g.clone()))
        self.given = self.given[-4:]
        return g, self.phi


class Table:
    """An oracle that returns listed gradients `[S, P]`, one per call, for examples by hand."""

    def __init__(
        self, gradients: Sequence[Tensor], phi: Tensor, second: Sequence[Tensor] | None = None
    ) -> None:
        self._gradients, self._phi = iter(gradients), phi
        self._second = None if second is None else iter(second)

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        return next(self._gradients), self._phi

    def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        assert self._second is not None, "no second release is declared"
        return next(self._second), self._phi


@dataclass
class History:
    """The server and the clients' memory after rounds 0 to T, with the messages and oracles."""

    servers: list[Any]
    means: list[dict[str, Tensor]] = field(default_factory=list)
    messages: list[dict[str, Tensor]] = field(default_factory=list)
    oracles: list[Any] = field(default_factory=list)
    # Entries are {name: [N, P], "seen": [N]}, or {} for algorithms without memory.
    memories: list[ClientState] = field(default_factory=list)

    @property
    def theta(self) -> Tensor:
        theta: Tensor = self.servers[-1].theta
        return theta

    def path(self) -> Tensor:
        return torch.stack([server.theta for server in self.servers])


OracleFactory = Callable[[Context], Any]
Watch = Callable[[Context, int, Any, Any], None]


def cosine(base: float, t: int, T: int) -> float:
    return 0.5 * base * (1 + math.cos(math.pi * (t - 1) / T))


def make_context(
    algorithm: Algorithm,
    space: Space,
    t: int,
    T: int,
    K: int,
    phi: Tensor,
    *,
    schedule: str = "constant",
) -> Context:
    base = 3e-4 if algorithm.lr == "auto" else algorithm.base_lr
    lr = base if schedule == "constant" else cosine(base, t, T)

    def scalar(x: float) -> Tensor:
        return torch.tensor(x, dtype=torch.float64)

    equal = bool((phi == phi[:1]).all())
    return Context(
        space,
        len(phi),
        len(phi),
        T,
        K,
        scalar(t),
        scalar(lr),
        scalar(base),
        phi,
        equal_phi=equal,
    )


def run_rounds(
    algorithm: Algorithm,
    space: Space,
    oracle_factory: OracleFactory,
    T: int,
    K: int,
    clients: int = 1,
    *,
    theta: Tensor | None = None,
    phi: Tensor | float = 0.0,
    schedule: str = "constant",
    watch: Watch | None = None,
    checked: bool = True,
    cohorts: Sequence[Sequence[int]] | None = None,
) -> History:
    """Run T rounds of an algorithm's five methods with a plain mean of the messages.

    `watch(ctx, k, before, after)` is called for each step. The clients of round t are
    `cohorts[t-1]`, by default all. Clients keep their memory over rounds without them.
    """
    theta = torch.zeros(space.size) if theta is None else theta
    phi = phi if isinstance(phi, Tensor) else torch.full((clients, 1), phi, dtype=theta.dtype)
    ctx = make_context(algorithm, space, 1, T, K, phi, schedule=schedule)
    if checked:
        algorithm.check(Facts(equal_phi=ctx.equal_phi, private=True, allow_nan=False))
    history = History(
        [algorithm.init(ctx, theta)], memories=[blank_memory(algorithm, clients, theta)]
    )
    for t in range(1, T + 1):
        chosen = torch.tensor(range(clients) if cohorts is None else cohorts[t - 1])
        ctx = make_context(algorithm, space, t, T, K, phi[chosen], schedule=schedule)
        ctx = replace(ctx, N=clients)
        server, oracle = history.servers[-1], oracle_factory(ctx)
        local = algorithm.start(
            ctx, server, {name: kept[chosen] for name, kept in history.memories[-1].items()}
        )
        for k in range(1, K + 1):
            after = algorithm.step(ctx, local, oracle, torch.tensor(k, dtype=torch.float64))
            if watch is not None:
                watch(ctx, k, local, after)
            local = after
        message, memory = algorithm.finish(ctx, server, local)
        mean = {name: value.mean(0) for name, value in message.items()}
        history.servers.append(
            algorithm.aggregate(replace(ctx, answered=len(chosen)), server, mean)
        )
        history.memories.append(remember(history.memories[-1], chosen, memory))
        history.means.append(mean)
        history.messages.append(message)
        history.oracles.append(oracle)
    return history


def blank_memory(algorithm: Algorithm, clients: int, theta: Tensor) -> ClientState:
    """Return zeros and `seen` = False for each client, or {} for an algorithm without memory."""
    if not algorithm.remembers:
        return {}
    blank: ClientState = {
        name: theta.new_zeros(clients, len(theta)) for name in algorithm.remembers
    }
    return {**blank, "seen": torch.zeros(clients, dtype=torch.bool)}


def remember(old: ClientState, chosen: Tensor, new: ClientState) -> ClientState:
    """Return the memory of all clients after a round of the chosen ones."""
    assert set(new) | {"seen"} == set(old) | {"seen"}, (
        "finish gives back the vectors that the algorithm names"
    )
    out = {name: kept.clone() for name, kept in old.items()}
    for name, value in new.items():
        out[name][chosen] = value
    if out:
        out["seen"][chosen] = True
    return out


def noise(seed: int = 0) -> OracleFactory:
    """Make oracles of noise alone, with one random stream for all rounds."""
    return noisy(torch.zeros_like, seed)


def noisy(gradient: Gradient, seed: int = 0) -> OracleFactory:
    generator = torch.Generator().manual_seed(seed)
    return lambda ctx: FakeOracle(gradient, ctx.phi, generator)


def exact(gradient: Gradient) -> OracleFactory:
    """Make oracles without noise."""
    return lambda ctx: FakeOracle(gradient, ctx.phi)


def curved(size: int, dtype: torch.dtype = torch.float32) -> Gradient:
    """Return a non-quadratic function's gradient, with very different sizes per coordinate."""
    generator = torch.Generator().manual_seed(7)
    matrix = torch.randn(size, size, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-2, 1, size, dtype=torch.float64)
    matrix, scale = (matrix @ matrix.T / size).to(dtype), scale.to(dtype)
    return lambda theta: scale * (theta @ matrix + torch.sin(3 * theta) - 0.5)


def start_point(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(
        dtype
    )


def relative(a: Tensor, b: Tensor) -> float:
    """Return ‖a − b‖ / ‖b‖."""
    return float((a - b).double().norm() / b.double().norm())


def tables(gradients: Sequence[Any], second: Sequence[Any] | None = None) -> OracleFactory:
    """Make oracles of listed gradients; `second` holds the answers of `again`.

    `gradients[t-1][k-1]` is a list of rows, one per client of round t.
    """

    def rows(steps: Any) -> list[Tensor]:
        return [torch.tensor(step, dtype=torch.float64) for step in steps]

    def factory(ctx: Context) -> Table:
        t = int(ctx.t) - 1
        return Table(rows(gradients[t]), ctx.phi, None if second is None else rows(second[t]))

    return factory


def small_run(algorithm: Algorithm, schedule: str = "constant") -> Tensor:
    """Return the change of θ in four noisy rounds, which depends on every key of an algorithm."""
    theta = start_point(6, torch.float64)
    oracle = noisy(curved(6, torch.float64), seed=11)
    return run_rounds(
        algorithm, make_space(2, 4), oracle, 4, 3, 2, theta=theta, phi=0.25, schedule=schedule
    ).theta - theta  # fmt: skip


def keys_of(algorithm: type[Algorithm]) -> set[str]:
    """Return the keys that a test must change, without `agg_weights`, which the backend reads."""
    return {f.name for f in fields(algorithm)} - {"agg_weights"}
