"""DP-FedAdamW under a changing noise level: the correction follows its moving average."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_case import curved, make_context, make_space, relative, start_point
from torch import Tensor

from dpfed.algorithms.base import Facts
from dpfed.algorithms.dp_fedadamw import DPFedAdamW, Local, Server
from dpfed.errors import DpfedError
from dpfed.model.parameter_vector import Space

FACTS = Facts(equal_phi=True, private=True, allow_nan=False)
PHIS = [1.0, 4.0, 0.25, 9.0, 0.04, 1.0]

# ------------------------------------------------------------------ a loop in which Φ may change


class Noisy:
    """A gradient of θ plus noise of this round's Φ."""

    def __init__(
        self, gradient: Callable[[Tensor], Tensor], phi: Tensor, generator: torch.Generator
    ) -> None:
        self._gradient, self._phi, self._generator = gradient, phi, generator

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        noise = self._phi.sqrt() * torch.randn(
            theta.shape, generator=self._generator, dtype=theta.dtype
        )
        return self._gradient(theta) + noise, self._phi

    def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError("no second release is declared")


Seen = Callable[[int, int, Local, Any], None]


def run(
    algorithm: DPFedAdamW,
    space: Space,
    phis: list[float],
    K: int,
    clients: int = 2,
    gradient: Callable[[Tensor], Tensor] = torch.zeros_like,
    theta: Tensor | None = None,
    varying: bool = True,
    seen: Seen = lambda t, k, local, ctx: None,
) -> list[Server]:
    """The servers after rounds 0..T, T = len(phis)."""
    theta = torch.zeros(space.size, dtype=torch.float64) if theta is None else theta
    generator = torch.Generator().manual_seed(4)

    def context(t: int) -> Any:
        phi = torch.full((clients, 1), phis[t - 1], dtype=theta.dtype)
        return replace(make_context(algorithm, space, t, len(phis), K, phi), varying_phi=varying)

    servers = [algorithm.init(context(1), theta)]
    for t in range(1, len(phis) + 1):
        ctx = context(t)
        oracle = Noisy(gradient, ctx.phi, generator)
        local = algorithm.start(ctx, servers[-1], {})
        for k in range(1, K + 1):
            local = algorithm.step(ctx, local, oracle, torch.tensor(k, dtype=torch.float64))
            seen(t, k, local, ctx)
        message, _ = algorithm.finish(ctx, servers[-1], local)
        servers.append(
            algorithm.aggregate(ctx, servers[-1], {name: x.mean(0) for name, x in message.items()})
        )
    return servers


def excess(
    algorithm: DPFedAdamW, space: Space
) -> dict[tuple[int, int], tuple[Tensor, Tensor, float]]:
    """Return block means of v̂, of the subtracted noise, and Φ, at some (t, k) of pure noise."""
    found: dict[tuple[int, int], tuple[Tensor, Tensor, float]] = {}
    K = 4

    def seen(t: int, k: int, local: Local, ctx: Any) -> None:
        if k in (1, K):
            w = local.w / (1 - algorithm.beta2 ** ((t - 1) * K + k))
            means = [space.block_mean(x.expand(2, space.size)).mean(0) for x in (local.v_hat, w)]
            found[t, k] = (means[0], means[1], float(ctx.phi[0]))

    run(algorithm, space, PHIS, K, seen=seen)
    return found


# ------------------------------------------------------------------ Φ changes by round


@pytest.mark.parametrize("agg", ["mean", "full_v"])
def test_pure_noise_of_a_changing_level_leaves_nothing_and_this_rounds_level_would(
    agg: Any,
) -> None:
    for (t, k), (v, w, phi) in excess(DPFedAdamW(beta2=0.95, agg=agg), make_space(20_000)).items():
        assert float(v) == pytest.approx(float(w), rel=0.02), (t, k)
        if t > 1 and k == 1:
            # Subtracting Φ_t itself would be wrong.
            assert abs(float(v) - phi) > 0.1 * phi, (t, k)


def test_with_a_constant_level_following_it_changes_nothing() -> None:
    space, theta = make_space(3, 5), start_point(8, torch.float64)
    for agg in ("mean", "full_v"):
        algorithm = DPFedAdamW(lr=0.05, agg=agg)  # type: ignore[arg-type]
        ends = [
            run(
                algorithm,
                space,
                [0.3] * 4,
                3,
                gradient=curved(8, torch.float64),
                theta=theta,
                varying=varying,
            )[-1]
            for varying in (True, False)
        ]
        assert relative(ends[0].theta - theta, ends[1].theta - theta) <= 1e-6
        torch.testing.assert_close(ends[0].v, ends[1].v, rtol=1e-9, atol=0)
        assert (ends[0].w.numel(), ends[1].w.numel()) == (1, 0)


def test_the_server_knows_the_clients_average_without_being_told() -> None:
    last: dict[int, Tensor] = {}

    def seen(t: int, k: int, local: Local, ctx: Any) -> None:
        last[t] = local.w

    space = make_space(3, 5)
    servers = run(DPFedAdamW(beta2=0.9), space, PHIS, 3, seen=seen)
    for t, w in last.items():
        torch.testing.assert_close(w, servers[t].w.expand(w.shape), rtol=1e-9, atol=0)
    assert len({round(float(server.w[0]), 9) for server in servers}) == len(servers)


def test_changing_levels_by_a_loop_over_everything() -> None:
    """Two clients, three coordinates in two blocks, written out in plain double precision."""
    beta1, beta2, kappa, lr, decay, gamma, K, T, C = 0.8, 0.9, 0.5, 0.1, 0.2, 0.5, 2, 3, 2
    space, phis = make_space(1, 2), [0.5, 2.0, 0.1]
    algorithm = DPFedAdamW(lr, decay, beta1=beta1, beta2=beta2, gamma=gamma, eps=0.0)
    theta0, gradient = start_point(3, torch.float64), curved(3, torch.float64)
    got = run(algorithm, space, phis, K, gradient=gradient, theta=theta0)

    generator = torch.Generator().manual_seed(4)
    theta, vbar, dg, w = (
        theta0.clone(),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, dtype=torch.float64),
        0.0,
    )
    for t in range(1, T + 1):
        x = theta.expand(C, 3).clone()
        m, v, own = torch.zeros_like(x), vbar.expand(C, 3).clone(), w
        for k in range(1, K + 1):
            noise = torch.randn(C, 3, generator=generator, dtype=torch.float64)
            g = gradient(x) + math.sqrt(phis[t - 1]) * noise
            m, v, own = (
                beta1 * m + (1 - beta1) * g,
                beta2 * v + (1 - beta2) * g * g,
                beta2 * own + (1 - beta2) * phis[t - 1],
            )
            n = (t - 1) * K + k
            level = own / (1 - beta2**n)
            u = torch.maximum(
                v / (1 - beta2**n) - level, torch.tensor(kappa * level, dtype=torch.float64)
            )
            x = x - lr * (m / (1 - beta1**k) / u.sqrt() + gamma * dg + decay * x)
        move = (x - theta).mean(0)
        theta, dg, w = theta + move, -move / (K * lr), own
        vbar = torch.tensor([v[:, 0].mean(), *[v[:, 1:].mean()] * 2], dtype=torch.float64)
        torch.testing.assert_close(got[t].theta, theta, rtol=1e-9, atol=1e-12)
        assert float(got[t].w) == pytest.approx(w)


def test_a_changing_level_needs_equal_clients() -> None:
    changing = replace(FACTS, varying_phi=True)
    with pytest.raises(DpfedError, match="same noise level"):
        DPFedAdamW().check(replace(changing, equal_phi=False))
    for agg in ("mean", "full_v", "off"):
        DPFedAdamW(agg=agg).check(changing)  # type: ignore[arg-type]
    # v starts at zero in every round.
    DPFedAdamW(agg="off").check(replace(changing, equal_phi=False))
