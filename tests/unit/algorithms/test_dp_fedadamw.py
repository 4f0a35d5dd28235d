"""Properties of DP-FedAdamW, and one example worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from algorithm_case import (
    FakeOracle,
    Table,
    cosine,
    curved,
    exact,
    make_context,
    make_space,
    noise,
    noisy,
    relative,
    run_rounds,
    start_point,
)
from torch import Tensor

from dpfed.algorithms.base import Algorithm
from dpfed.algorithms.dp_fedadamw import DPFedAdamW, Server
from dpfed.algorithms.dp_fedadamw_printed import DPFedAdamWPrinted
from dpfed.algorithms.dp_local_adamw import DPLocalAdamW

# σ=1, C=0.1, B=16
PHI = (0.1 / 16) ** 2


def adamw_steps(theta: Tensor, gradient: Any, steps: int, lr: float, decay: float) -> Tensor:
    parameter = torch.nn.Parameter(theta.clone())
    torch_adamw = torch.optim.AdamW([parameter], lr=lr, weight_decay=decay)
    for _ in range(steps):
        parameter.grad = gradient(parameter.detach())
        torch_adamw.step()
    return parameter.detach()


# ------------------------------------------------------------------ identities with AdamW


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"bc": False}, {"bc_floor": 0.01}])
def test_one_client_one_round_without_noise_is_torch_adamw(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    P, K = 12, 12
    algorithm = DPFedAdamW(lr=0.03, weight_decay=0.1, gamma=0.0, agg="off", **options)
    theta, gradient = start_point(P, dtype), curved(P, dtype)
    got = run_rounds(algorithm, make_space(5, 7), exact(gradient), T=1, K=K, theta=theta).theta
    want = adamw_steps(theta, gradient, K, 0.03, 0.1)
    assert relative(got, want) <= 1e-6
    # In single precision, θ's rounding hides the displacement.
    if dtype == torch.float64:
        assert relative(got - theta, want - theta) <= 1e-6


@pytest.mark.parametrize("granularity", ["full_v", "mean with one coordinate per block"])
def test_second_moment_and_its_counter_go_on_over_rounds(granularity: str) -> None:
    P, K, T, lr, decay, eps = 6, 5, 4, 0.02, 0.1, 1e-8
    agg: Any = "full_v" if granularity == "full_v" else "mean"
    space = make_space(6) if agg == "full_v" else make_space(*[1] * 6)
    algorithm = DPFedAdamW(lr=lr, weight_decay=decay, gamma=0.0, agg=agg)
    theta, gradient = start_point(P, torch.float64), curved(P, torch.float64)
    got = run_rounds(algorithm, space, exact(gradient), T=T, K=K, theta=theta).path()

    x, v, n, want = theta, torch.zeros(P, dtype=torch.float64), 0, [theta]
    for _ in range(T):
        m, k = torch.zeros(P, dtype=torch.float64), 0
        for _ in range(K):
            n, k, g = n + 1, k + 1, gradient(x)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            x = x * (1 - lr * decay) - lr * (m / (1 - 0.9**k)) / ((v / (1 - 0.999**n)).sqrt() + eps)
        want.append(x)
    assert relative(got, torch.stack(want)) <= 1e-6
    assert relative(got[1:] - got[:-1], torch.stack(want).diff(dim=0)) <= 1e-6


def test_all_switches_off_is_dp_local_adamw_bit_for_bit() -> None:
    space, theta = make_space(4, 6), start_point(10)
    common = {"lr": 0.05, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6}
    off = DPFedAdamW(agg="off", bc=False, gamma=0.0, **common)
    settings: dict[str, Any] = {
        "T": 5,
        "K": 4,
        "clients": 3,
        "theta": theta,
        "phi": 0.04,
        "schedule": "cosine",
    }
    one = run_rounds(off, space, noisy(curved(10), seed=5), **settings)
    two = run_rounds(DPLocalAdamW(**common), space, noisy(curved(10), seed=5), **settings)
    assert torch.equal(one.path(), two.path())
    assert all(
        torch.equal(a["delta"], b["delta"]) for a, b in zip(one.messages, two.messages, strict=True)
    )


@pytest.mark.parametrize("agg", ["off", "mean", "full_v"])
def test_without_noise_the_correction_changes_nothing(agg: Any) -> None:
    space, theta = make_space(4, 6), start_point(10)
    paths = [
        run_rounds(
            DPFedAdamW(lr=0.05, agg=agg, bc=bc), space, exact(curved(10)), 4, 5, 2, theta=theta
        ).path()
        for bc in (True, False)
    ]
    assert torch.equal(*paths)


# ------------------------------------------------------------------ pure noise


def v_hat_over_phi(
    algorithm: Algorithm, at: set[tuple[int, int]], T: int, P: int = 40_000
) -> dict[Any, Tensor]:
    """Return v̂/Φ at these (t, k) under pure noise, from the algorithm's own v̂."""
    seen: dict[Any, Tensor] = {}

    def watch(ctx: Any, k: int, before: Any, after: Any) -> None:
        if (int(ctx.t), k) in at:
            seen[int(ctx.t), k] = after.v_hat / ctx.phi

    run_rounds(
        algorithm,
        make_space(P // 4, P - P // 4),
        noise(1),
        T=T,
        K=20,
        clients=2,
        phi=PHI,
        watch=watch,
    )
    return seen


@pytest.mark.parametrize("options", [{}, {"agg": "full_v"}, {"agg": "off"}], ids=str)
def test_the_corrected_second_moment_of_pure_noise_is_phi(options: dict[str, Any]) -> None:
    at = {(t, k) for t in (1, 2, 10) for k in (1, 20)}
    seen = v_hat_over_phi(DPFedAdamW(**options), at, T=10)
    assert set(seen) == at
    assert {where: v.mean().item() for where, v in seen.items()} == {
        where: pytest.approx(1, abs=0.02) for where in at
    }


def test_fails_under_the_printed_exponent() -> None:
    """E v̂/Φ is (β2(1−β2^20) + 1−β2)/(1−β2) = 20.8 at (2,1).

    At (2,20) it is (1−β2^40)/(1−β2^20) = 1.98.
    """
    seen = v_hat_over_phi(DPFedAdamWPrinted(), {(1, 20), (2, 1), (2, 20)}, T=2)
    assert seen[1, 20].mean().item() == pytest.approx(1, abs=0.02)
    assert seen[2, 1].mean().item() == pytest.approx(20.8, rel=0.02)
    assert seen[2, 20].mean().item() == pytest.approx(1.98, rel=0.02)


@pytest.mark.parametrize("level", ["coordinate", "block"])
def test_fifty_rounds_of_pure_noise_stay_finite_and_steps_are_bounded(level: Any) -> None:
    algorithm = DPFedAdamW(lr=3e-3, bc_level=level)
    worst = 0.0

    def watch(ctx: Any, k: int, before: Any, after: Any) -> None:
        nonlocal worst
        m_hat = after.m / (1 - 0.9**k)
        bound = (
            m_hat.abs() / (0.5 * ctx.phi).sqrt() + 0.5 * before.dg.abs() + 0.01 * before.theta.abs()
        )
        rounding = 1e-6 * (1 + before.theta.abs())
        moved = (after.theta - before.theta).abs() - rounding
        worst = max(worst, float((moved / (ctx.lr * bound)).max()))

    theta = start_point(300)
    history = run_rounds(
        algorithm, make_space(100, 200), noise(2), 50, 20, 2, theta=theta, phi=PHI, watch=watch
    )
    for server in history.servers:
        assert all(
            torch.isfinite(getattr(server, f.name)).all() for f in dataclasses.fields(server)
        )
    # A bound that is far away would show nothing.
    assert 0.5 < worst <= 1.0


# ------------------------------------------------------------------ decay, alignment, server


@pytest.mark.parametrize(
    ("cls", "base"), [(DPFedAdamW, 1 - 0.1 * 0.2), (DPFedAdamWPrinted, 1 + 0.1 * 0.2)]
)
def test_weights_decay_by_exactly_one_minus_eta_lambda(cls: Any, base: float) -> None:
    """The printed sign lets weights grow instead."""
    algorithm = cls(lr=0.1, weight_decay=0.2, gamma=0.0)
    theta = start_point(8, torch.float64)
    got = run_rounds(
        algorithm, make_space(8), exact(torch.zeros_like), T=3, K=7, clients=2, theta=theta
    )
    for t, server in enumerate(got.servers):
        torch.testing.assert_close(server.theta, theta * base ** (7 * t), rtol=1e-12, atol=0)


def sign_descent(**options: Any) -> DPFedAdamW:
    """With ϵ=0, no warm start and a constant gradient c, a round moves θ by −Kη sign(c)."""
    return DPFedAdamW(agg="off", bc=False, eps=0.0, weight_decay=0.0, **options)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.6])
def test_alignment_amplifies_a_constant_displacement_by_one_over_one_minus_gamma(
    gamma: float,
) -> None:
    c = torch.tensor([[0.3, -2.0, 5.0]], dtype=torch.float64)
    history = run_rounds(
        sign_descent(lr=0.01, gamma=gamma),
        make_space(3),
        exact(lambda x: c.expand_as(x)),
        60,
        4,
        2,
        theta=torch.zeros(3, dtype=torch.float64),
    )
    u = -4 * 0.01 * c[0].sign()
    torch.testing.assert_close(history.means[-1]["delta"], u / (1 - gamma), rtol=1e-9, atol=0)


def test_under_cosine_the_pull_is_gamma_times_the_last_step_scaled_by_the_learning_rates() -> None:
    """From round 2 on the gradient is zero, so all that moves θ is the alignment."""
    T, gamma, lr = 5, 0.7, 0.1
    c = torch.tensor([[0.3, -2.0, 5.0]], dtype=torch.float64)
    algorithm = dataclasses.replace(sign_descent(lr=lr, gamma=gamma), eps=1e-8)
    history = run_rounds(
        algorithm,
        make_space(3),
        lambda ctx: FakeOracle(lambda x: c * (ctx.t == 1) + 0 * x, ctx.phi),
        T,
        4,
        2,
        theta=torch.zeros(3, dtype=torch.float64),
        schedule="cosine",
    )
    assert float(history.means[0]["delta"].abs().min()) > 0.39
    # Compute the move of round t+1 from that of round t.
    for t in range(1, T):
        ratio = cosine(lr, t + 1, T) / cosine(lr, t, T)
        want = gamma * ratio * history.means[t - 1]["delta"]
        torch.testing.assert_close(history.means[t]["delta"], want, rtol=1e-9, atol=0)


def test_the_server_starts_without_direction_and_without_second_moments() -> None:
    space = make_space(4, 6)
    for agg, size in (("mean", 2), ("full_v", 10), ("off", 0)):
        algorithm = DPFedAdamW(agg=agg)  # type: ignore[arg-type]
        ctx = make_context(algorithm, space, 1, 5, 3, torch.full((2, 1), PHI))
        server = algorithm.init(ctx, start_point(10))
        assert torch.equal(server.theta, start_point(10))
        assert server.v.shape == (size,)
        assert server.dg.shape == (10,)
        assert not server.v.any()
        assert not server.dg.any()
        local = algorithm.start(ctx, server, {})
        assert not local.v.any()
        assert not local.m.any()


def test_the_server_is_linear_in_the_mean_message() -> None:
    space, algorithm = make_space(1, 2), DPFedAdamW(lr=0.1)
    ctx = make_context(
        algorithm, space, 2, 4, 5, torch.zeros(2, 1, dtype=torch.float64), schedule="cosine"
    )
    generator = torch.Generator().manual_seed(1)

    def mean() -> dict[str, Tensor]:
        return {
            k: torch.randn(n, generator=generator, dtype=torch.float64)
            for k, n in (("delta", 3), ("v", 2))
        }

    server = Server(
        start_point(3, torch.float64),
        torch.rand(2).double(),
        torch.randn(3).double(),
        torch.zeros(0).double(),
    )
    a, b = mean(), mean()
    mixed = algorithm.aggregate(ctx, server, {k: 0.25 * a[k] + 2 * b[k] for k in a})
    one, two = algorithm.aggregate(ctx, server, a), algorithm.aggregate(ctx, server, b)
    torch.testing.assert_close(
        mixed.theta - server.theta,
        0.25 * (one.theta - server.theta) + 2 * (two.theta - server.theta),
    )
    torch.testing.assert_close(mixed.dg, 0.25 * one.dg + 2 * two.dg)
    torch.testing.assert_close(mixed.v, 0.25 * one.v + 2 * two.v)
    torch.testing.assert_close(one.theta, server.theta + a["delta"])
    torch.testing.assert_close(one.dg, -a["delta"] / (5 * cosine(0.1, 2, 4)))
    assert torch.equal(one.v, a["v"])


def rows(order: list[int], T: int, K: int, P: int, seed: int = 4) -> Any:
    """Clients with their own gradients and noise; row r of the fleet is client order[r]."""
    clients = max(order) + 1
    noises = torch.randn(
        T, K, clients, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    target = torch.randn(
        clients, P, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
    )

    def factory(ctx: Any) -> Table:
        at = noises[int(ctx.t) - 1]
        return Table([(target + 0.3 * at[k])[order] for k in range(K)], ctx.phi)

    return factory


@pytest.mark.parametrize("order", [[2, 0, 1], [0, 1, 2, 0, 1, 2]], ids=["permuted", "duplicated"])
def test_permuting_or_duplicating_all_clients_changes_nothing(order: list[int]) -> None:
    theta, algorithm = start_point(5, torch.float64), DPFedAdamW(lr=0.05)
    settings: dict[str, Any] = {"T": 3, "K": 4, "theta": theta, "phi": 0.09, "schedule": "cosine"}
    one = run_rounds(algorithm, make_space(2, 3), rows([0, 1, 2], 3, 4, 5), clients=3, **settings)
    two = run_rounds(
        algorithm, make_space(2, 3), rows(order, 3, 4, 5), clients=len(order), **settings
    )
    for name in ("theta", "v", "dg"):
        torch.testing.assert_close(
            getattr(two.servers[-1], name), getattr(one.servers[-1], name), rtol=1e-12, atol=1e-14
        )


def test_a_single_clients_model_becomes_the_servers() -> None:
    last: list[Tensor] = []
    theta = start_point(5, torch.float64)
    history = run_rounds(
        DPFedAdamW(lr=0.05),
        make_space(2, 3),
        rows([0], 3, 4, 5),
        3,
        4,
        1,
        theta=theta,
        phi=0.09,
        watch=lambda ctx, k, before, after: last.append(after.theta[0]),
    )
    for t in (1, 2, 3):
        torch.testing.assert_close(
            history.servers[t].theta, last[4 * t - 1], rtol=1e-14, atol=1e-15
        )
