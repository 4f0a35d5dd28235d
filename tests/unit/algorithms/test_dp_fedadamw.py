"""Properties of DP-FedAdamW, and one example worked out by hand."""

from __future__ import annotations

import dataclasses
import math
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

PHI = (0.1 / 16) ** 2  # σ=1, C=0.1, B=16


def adamw_steps(theta: Tensor, gradient: Any, steps: int, lr: float, decay: float) -> Tensor:
    parameter = torch.nn.Parameter(theta.clone())
    torch_adamw = torch.optim.AdamW([parameter], lr=lr, weight_decay=decay)
    for _ in range(steps):
        parameter.grad = gradient(parameter.detach())
        torch_adamw.step()
    return parameter.detach()


# ------------------------------------------------------------------ F1-F4: identities with AdamW


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"bc": False}, {"bc_floor": 0.01}])
def test_f1_one_client_one_round_without_noise_is_torch_adamw(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    P, K = 12, 12
    algorithm = DPFedAdamW(lr=0.03, weight_decay=0.1, gamma=0.0, agg="off", **options)
    theta, gradient = start_point(P, dtype), curved(P, dtype)
    got = run_rounds(algorithm, make_space(5, 7), exact(gradient), T=1, K=K, theta=theta).theta
    want = adamw_steps(theta, gradient, K, 0.03, 0.1)
    assert relative(got, want) <= 1e-6
    if (
        dtype == torch.float64
    ):  # the displacement too, which in single precision drowns in θ's rounding
        assert relative(got - theta, want - theta) <= 1e-6


@pytest.mark.parametrize("granularity", ["full_v", "mean with one coordinate per block"])
def test_f2_second_moment_and_its_counter_go_on_over_rounds(granularity: str) -> None:
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


def test_f3_all_switches_off_is_dp_local_adamw_bit_for_bit() -> None:
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
def test_f4_without_noise_the_correction_changes_nothing(agg: Any) -> None:
    space, theta = make_space(4, 6), start_point(10)
    paths = [
        run_rounds(
            DPFedAdamW(lr=0.05, agg=agg, bc=bc), space, exact(curved(10)), 4, 5, 2, theta=theta
        ).path()
        for bc in (True, False)
    ]
    assert torch.equal(*paths)


# ------------------------------------------------------------------ F5, F6: pure noise


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
def test_f5_the_corrected_second_moment_of_pure_noise_is_phi(options: dict[str, Any]) -> None:
    at = {(t, k) for t in (1, 2, 10) for k in (1, 20)}
    seen = v_hat_over_phi(DPFedAdamW(**options), at, T=10)
    assert set(seen) == at
    assert {where: v.mean().item() for where, v in seen.items()} == {
        where: pytest.approx(1, abs=0.02) for where in at
    }


def test_f5_fails_under_the_printed_exponent() -> None:
    """E v̂/Φ is (β2(1−β2^20) + 1−β2)/(1−β2) = 20.8 at (2,1).

    At (2,20) it is (1−β2^40)/(1−β2^20) = 1.98.
    """
    seen = v_hat_over_phi(DPFedAdamWPrinted(), {(1, 20), (2, 1), (2, 20)}, T=2)
    assert seen[1, 20].mean().item() == pytest.approx(1, abs=0.02)
    assert seen[2, 1].mean().item() == pytest.approx(20.8, rel=0.02)
    assert seen[2, 20].mean().item() == pytest.approx(1.98, rel=0.02)


@pytest.mark.parametrize("level", ["coordinate", "block"])
def test_f6_fifty_rounds_of_pure_noise_stay_finite_and_steps_are_bounded(level: Any) -> None:
    algorithm = DPFedAdamW(lr=3e-3, bc_level=level)
    worst = 0.0

    def watch(ctx: Any, k: int, before: Any, after: Any) -> None:
        nonlocal worst
        m_hat = after.m / (1 - 0.9**k)
        bound = (
            m_hat.abs() / (0.5 * ctx.phi).sqrt() + 0.5 * before.dg.abs() + 0.01 * before.theta.abs()
        )
        moved = (after.theta - before.theta).abs() - 1e-6 * (
            1 + before.theta.abs()
        )  # less θ's own rounding
        worst = max(worst, float((moved / (ctx.lr * bound)).max()))

    theta = start_point(300)
    history = run_rounds(
        algorithm, make_space(100, 200), noise(2), 50, 20, 2, theta=theta, phi=PHI, watch=watch
    )
    for server in history.servers:
        assert all(
            torch.isfinite(getattr(server, f.name)).all() for f in dataclasses.fields(server)
        )
    assert 0.5 < worst <= 1.0  # a bound that is never approached would show nothing


# ------------------------------------------------------------------ decay, alignment, server


@pytest.mark.parametrize(
    ("cls", "base"), [(DPFedAdamW, 1 - 0.1 * 0.2), (DPFedAdamWPrinted, 1 + 0.1 * 0.2)]
)
def test_f7_weights_decay_by_exactly_one_minus_eta_lambda(cls: Any, base: float) -> None:
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
def test_f8_alignment_amplifies_a_constant_displacement_by_one_over_one_minus_gamma(
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


def test_f8_under_cosine_the_pull_is_gamma_times_the_last_step_scaled_by_the_learning_rates() -> (
    None
):
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
    for t in range(1, T):  # the move of round t+1 from that of round t
        ratio = cosine(lr, t + 1, T) / cosine(lr, t, T)
        want = gamma * ratio * history.means[t - 1]["delta"]
        torch.testing.assert_close(history.means[t]["delta"], want, rtol=1e-9, atol=0)


def test_f9_the_server_starts_without_direction_and_without_second_moments() -> None:
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


def test_f10_the_server_is_linear_in_the_mean_message() -> None:
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
def test_f10_permuting_or_duplicating_all_clients_changes_nothing(order: list[int]) -> None:
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


def test_f10_a_single_clients_model_becomes_the_servers() -> None:
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


# ------------------------------------------------------------------ uplink, unequal noise, floor


@pytest.mark.parametrize(("agg", "numbers"), [("mean", 10 + 3), ("off", 10), ("full_v", 20)])
def test_f13_uplink_is_the_parameters_and_one_number_per_block(agg: Any, numbers: int) -> None:
    history = run_rounds(DPFedAdamW(agg=agg), make_space(2, 3, 5), noise(), 2, 3, 4, phi=PHI)
    for message in history.messages:
        assert sum(value[0].numel() for value in message.values()) == numbers
        assert all(value.shape[0] == 4 for value in message.values())


def test_what_is_sent_is_the_block_mean_of_the_raw_second_moment() -> None:
    """After one round of constant gradient g, v is (1−β2^K) g² and v̂ would be g²."""
    g = torch.tensor([[1.0, 3.0, 2.0, 2.0, 5.0]], dtype=torch.float64)
    theta = torch.zeros(5, dtype=torch.float64)
    squares = torch.tensor([5.0, 11.0], dtype=torch.float64)  # (1+9)/2 and (4+4+25)/3
    history = run_rounds(
        DPFedAdamW(), make_space(2, 3), exact(lambda x: g.expand_as(x)), 1, 20, theta=theta
    )
    torch.testing.assert_close(
        history.messages[0]["v"][0], (1 - 0.999**20) * squares, rtol=1e-12, atol=0
    )


class Centred(DPFedAdamW):
    """Always subtracts the noise's share from v, also where all clients have the same noise."""

    def finish(self, ctx: Any, server: Any, local: Any) -> Any:
        return super().finish(dataclasses.replace(ctx, equal_phi=False), server, local)

    def start(self, ctx: Any, server: Any, memory: Any) -> Any:
        return super().start(dataclasses.replace(ctx, equal_phi=False), server, memory)


class PlainMean(DPFedAdamW):
    """A broken build: averages raw second moments although the noise of the clients differs."""

    def finish(self, ctx: Any, server: Any, local: Any) -> Any:
        return super().finish(dataclasses.replace(ctx, equal_phi=True), server, local)

    def start(self, ctx: Any, server: Any, memory: Any) -> Any:
        return super().start(dataclasses.replace(ctx, equal_phi=True), server, memory)


@pytest.mark.parametrize("agg", ["mean", "full_v"])
def test_f14_the_corrected_form_is_the_plain_one_when_noise_is_equal(agg: Any) -> None:
    theta = start_point(6, torch.float64)
    settings: dict[str, Any] = {"T": 4, "K": 5, "clients": 3, "theta": theta, "phi": 0.01}
    plain, corrected = (
        run_rounds(
            cls(lr=0.05, agg=agg), make_space(2, 4), noisy(curved(6, torch.float64)), **settings
        )
        for cls in (DPFedAdamW, Centred)
    )
    assert relative(corrected.path(), plain.path()) <= 1e-12
    share = (1 - 0.999**5) * 0.01  # the noise's share in v after one round
    torch.testing.assert_close(
        corrected.messages[0]["v"], plain.messages[0]["v"] - share, rtol=1e-12, atol=1e-14
    )


def unequal_v_hat(algorithm: DPFedAdamW, ratios: list[float]) -> dict[Any, Tensor]:
    """Mean of v̂_j/Φ_j under pure noise, for clients whose Φ_j are in these ratios."""
    phi, seen = torch.tensor([[r] for r in ratios]) * PHI, {}

    def watch(ctx: Any, k: int, before: Any, after: Any) -> None:
        seen[int(ctx.t), k] = (after.v_hat / ctx.phi).mean(1)

    run_rounds(
        algorithm,
        make_space(15_000, 25_000),
        noise(8),
        3,
        20,
        len(ratios),
        phi=phi,
        watch=watch,
        checked=False,
    )
    return seen


@pytest.mark.parametrize(
    ("agg", "ratios"), [("mean", [1.0, 4.0, 16.0]), ("full_v", [1.0, 1.3, 1.6])]
)
def test_f14_with_unequal_noise_every_client_starts_unbiased(agg: Any, ratios: list[float]) -> None:
    """E v̂_j = Φ_j, for ratios at which full_v is rarely clamped."""
    seen = unequal_v_hat(DPFedAdamW(agg=agg), ratios)
    for where in ((1, 1), (1, 20), (2, 1), (2, 20), (3, 1), (3, 20)):
        assert seen[where].tolist() == [pytest.approx(1, abs=0.02)] * 3, where


def test_f14_the_plain_form_would_give_every_client_the_others_noise() -> None:
    """The test above has power: the mean of Φ is 7 times the smallest, 7/16 of the largest."""
    plain = unequal_v_hat(PlainMean(), [1.0, 4.0, 16.0])[2, 1]
    assert plain[0].item() == pytest.approx(7, rel=0.1)
    assert plain[2].item() == pytest.approx(7 / 16, rel=0.2)
    plain = unequal_v_hat(PlainMean(agg="full_v"), [1.0, 1.3, 1.6])[2, 1]
    assert plain[0].item() == pytest.approx(1.3, rel=0.05)


@pytest.mark.parametrize("agg", ["mean", "full_v"])
def test_f14_the_start_value_is_the_mean_plus_ones_own_noise_clamped_at_zero(agg: Any) -> None:
    algorithm, space = DPFedAdamW(agg=agg, beta2=0.5), make_space(1, 2)
    phi = torch.tensor([[1.0], [4.0]])
    ctx = make_context(algorithm, space, 2, 5, 2, phi)  # (1−β2^2) = 0.75
    v = torch.tensor([-2.0, 1.0]) if agg == "mean" else torch.tensor([-2.0, 1.0, 1.0])
    local = algorithm.start(ctx, Server(torch.zeros(3), v, torch.zeros(3), torch.zeros(0)), {})
    assert local.v.tolist() == [[0.0, 1.75, 1.75], [1.0, 4.0, 4.0]]


def test_f15_at_floor_one_a_second_moment_below_twice_phi_means_a_constant_denominator() -> None:
    P, K, T, lr, phi = 6, 5, 3, 0.05, 0.04
    generator = torch.Generator().manual_seed(0)
    bound = 0.999 * math.sqrt(2 * phi)
    gradients = bound * (2 * torch.rand(T, K, 1, P, generator=generator, dtype=torch.float64) - 1)
    algorithm = DPFedAdamW(lr=lr, bc_floor=1.0, gamma=0.0, weight_decay=0.1)
    theta = start_point(P, torch.float64)
    got = run_rounds(
        algorithm,
        make_space(2, 4),
        lambda ctx: Table(list(gradients[int(ctx.t) - 1]), ctx.phi),
        T,
        K,
        theta=theta,
        phi=phi,
    ).theta
    x = theta
    for t in range(T):
        m = torch.zeros(P, dtype=torch.float64)
        for k in range(1, K + 1):
            m = 0.9 * m + 0.1 * gradients[t, k - 1, 0]
            x = x - lr * (m / (1 - 0.9**k) / (math.sqrt(phi) + 1e-8) + 0.1 * x)
    torch.testing.assert_close(got, x, rtol=1e-12, atol=0)


# ------------------------------------------------------------------ by hand


def test_two_rounds_of_two_steps_of_two_clients_by_hand() -> None:
    """Blocks {1,2} and {3}; θ=(1,−2,.5); β1=½, β2=¾, ϵ=1, κ=½, Φ=1, γ=λ=½;
        cosine: η_1=.2, η_2=.1.

    Round 1 (v̄=0, Δ_G=0), θ' = .9 θ − .2 step:
      client 1, k=1: g=(2,0,1)  m=g/2  v=g²/4  m̂=g  v̂=(4,0,1)  u=(3,.5,.5)
                     step=(2/(√3+1), 0, 1/(√.5+1))=(.7320508,0,.5857864)
                         θ=(.7535898,−1.8,.3328427)
                k=2: g=(2,2,−1)  m=(1.5,1,−.25) v=(1.75,1,.4375)  m̂=(2,4/3,−1/3)
                    v̂=(4,16/7,1)  u=(3,9/7,.5)
                     step=(.7320508,.6248360,−.1952621)  θ=(.5318207,−1.7449672,.3386109)
      client 2, k=1: g=(0,4,−1)  m=(0,2,−.5)  v=(0,4,.25)  m̂=(0,4,−1)  v̂=(0,16,1)  u=(.5,15,.5)
                     step=(0,.8208524,−.5857864)  θ=(.9,−1.9641705,.5671573)
                k=2: g=(2,0,1)  m=(1,1,.25)  v=(1,3,.4375)  m̂=(4/3,4/3,1/3)
                    v̂=(16/7,48/7,1) u=(9/7,41/7,.5)
                     step=(.6248360,.3898461,.1952621)  θ=(.6850328,−1.8457226,.4713891)
      v̄_1=((1.75+1)/2,.4375)=(1.375,.4375)  v̄_2=((1+3)/2,.4375)=(2,.4375)  v̄=(1.6875,.4375)
      Δ̄=(−.3915732,.2046551,−.095)  Δ_G=−Δ̄/(2·.2)=(.9789331,−.5116377,.2375)
    Round 2 (v starts at (1.6875,1.6875,.4375)), θ' = .95 θ − .1 step − .05 Δ_G;
        1−β2^3=37/64, 1−β2^4=175/256:
      client 1, k=1: g=(1,−1,2)  v=(1.515625,1.515625,1.328125)  v̂=(97/37,97/37,85/37)  u=v̂−1
          m̂=g
                     step=(.4398642,−.4398642,.9350209)  θ=(.4850723,−1.6360094,.2793729)
                k=2: g=(0,2,1)  v=(1.13671875,2.13671875,1.24609375)
                    u=(.6628571,2.1257143,.8228571)  m̂=(1/3,1,4/3)
                     step=(.1837397,.4068376,.6991364)  θ=(.3934981,−1.5693108,.1836156)
      client 2, k=1: g=(−3,1,0)  v=(3.515625,1.515625,.328125)  u=(5.0810811,1.6216216,.5)
          (v̂_3=21/37: the floor)
                     step=(−.9219067,.4398642,0)  θ=(.6212494,−1.7239822,.372875)
                k=2: g=(1,1,−2)  v=(2.88671875,1.38671875,1.24609375)
                    u=(3.2228571,1.0285714,.8228571)
                     m̂=(−1/3,1,−4/3)  step=(−.1192507,.4964787,−.6991364)
                         θ=(.5531654,−1.6618491,.4122699)
      v̄=((1.63671875+2.13671875)/2, 1.24609375)  Δ_G=−Δ̄/(2·.1)
    """
    f64 = torch.float64
    gradients = {
        1: [[[2, 0, 1], [0, 4, -1]], [[2, 2, -1], [2, 0, 1]]],
        2: [[[1, -1, 2], [-3, 1, 0]], [[0, 2, 1], [1, 1, -2]]],
    }
    algorithm = DPFedAdamW(
        lr=0.2,
        weight_decay=0.5,
        beta1=0.5,
        beta2=0.75,
        eps=1.0,
        gamma=0.5,
        agg="mean",
        bc=True,
        bc_floor=0.5,
    )
    history = run_rounds(
        algorithm,
        make_space(2, 1),
        lambda ctx: Table([torch.tensor(g, dtype=f64) for g in gradients[int(ctx.t)]], ctx.phi),
        T=2,
        K=2,
        clients=2,
        theta=torch.tensor([1, -2, 0.5], dtype=f64),
        phi=1.0,
        schedule="cosine",
    )
    first, second = history.servers[1:]
    sent = history.messages[0]
    assert sent["delta"][0].tolist() == pytest.approx(
        [-0.468179306876, 0.255032808907, -0.161389129598], abs=1e-11
    )
    assert sent["delta"][1].tolist() == pytest.approx(
        [-0.314967191093, 0.154277360209, -0.028610870402], abs=1e-11
    )
    assert sent["v"].tolist() == [[1.375, 0.4375], [2.0, 0.4375]]
    assert first.theta.tolist() == pytest.approx(
        [0.608426751016, -1.795344915442, 0.405], abs=1e-11
    )
    assert first.v.tolist() == [1.6875, 0.4375]
    assert first.dg.tolist() == pytest.approx([0.978933122461, -0.511637711395, 0.2375], abs=1e-11)
    assert second.theta.tolist() == pytest.approx(
        [0.473331732472, -1.615579926601, 0.297942756720], abs=1e-11
    )
    assert second.v.tolist() == [1.88671875, 1.24609375]
    assert second.dg.tolist() == pytest.approx(
        [0.675475092718, -0.898824944203, 0.535286216402], abs=1e-11
    )
