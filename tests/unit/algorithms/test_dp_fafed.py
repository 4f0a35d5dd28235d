"""DP-FAFED against DP-FedAvg, with variance reduction, and examples by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from algorithm_case import (
    FakeOracle,
    curved,
    exact,
    keys_of,
    make_context,
    make_space,
    noise,
    noisy,
    relative,
    run_rounds,
    small_run,
    start_point,
    tables,
)
from torch import Tensor

from dpfed.algorithms.base import Facts, Releases
from dpfed.algorithms.dp_fafed import DPFAFED
from dpfed.algorithms.dp_fedavg import DPFedAvg
from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.registry import registry
from dpfed.training.job.plan import plan_of

FACTS = Facts(equal_phi=True, private=True, allow_nan=False)
F64 = torch.float64
GRADIENTS = [[[[2, 0, 1], [0, 4, -1]], [[2, 2, -1], [2, 0, 1]]]]
BY_HAND: dict[str, Any] = {"lr": 0.2, "weight_decay": 0.5, "alpha": 0.5, "beta2": 0.5, "rho": 1.0}
START = torch.tensor([1, -2, 0.5], dtype=F64)


def test_two_steps_of_two_clients_by_hand() -> None:
    """α=β2=½, ρ=1, Φ=1: v̄=1, H=√1+1=2 throughout the round;
        θ=(1,−2,.5), η=.2, λ=½: θ' = .9 θ − .1 m.

    A: g=(2,0,1)  m=½g=(1,0,.5)  v=½+½g²=(2.5,.5,1)  θ=(.8,−1.8,.4)
       g=(2,2,−1)  m=(1.5,1,−.25)  v=(3.25,2.25,1)  θ=(.57,−1.72,.385)
    B: g=(0,4,−1)  m=(0,2,−.5)  v=(.5,8.5,1)  θ=(.9,−2,.5)
       g=(2,0,1)  m=(1,1,.25)  v=(2.25,4.25,1)  θ=(.71,−1.9,.425)
    θ=(.64,−1.81,.405)  m̄=(1.25,1,0)  v̄=(2.75,3.25,1);  round 2 starts with H=√v̄+1
    """
    algorithm = DPFAFED(**BY_HAND)
    history = run_rounds(
        algorithm, make_space(2, 1), tables(GRADIENTS), 1, 2, 2, theta=START, phi=1.0
    )
    server = history.servers[-1]
    assert server.theta.tolist() == pytest.approx([0.64, -1.81, 0.405], abs=1e-12)
    assert server.m.tolist() == pytest.approx([1.25, 1, 0], abs=1e-12)
    assert server.v.tolist() == pytest.approx([2.75, 3.25, 1], abs=1e-12)
    ctx = make_context(algorithm, make_space(2, 1), 2, 5, 2, torch.ones(2, 1, dtype=F64))
    local = algorithm.start(ctx, server, {})
    assert local.h.tolist() == pytest.approx(
        [math.sqrt(2.75) + 1, math.sqrt(3.25) + 1, 2], abs=1e-12
    )
    assert local.m.tolist() == [server.m.tolist()] * 2
    assert local.v.tolist() == [server.v.tolist()] * 2


def test_two_steps_with_variance_reduction_by_hand() -> None:
    """As above with m ← g + ½(m − g'), where g' is the second release:

    A: g=(2,0,1)  g'=(2,2,0)  m=(1,−1,1)  θ=(.9,−1.8,.45)−.1m=(.8,−1.7,.35)
       g=(2,2,−1)  g'=(0,2,2)  m=(2.5,.5,−1.5)  θ=(.72,−1.53,.315)−.1m=(.47,−1.58,.465)
           x_prev=(.8,−1.7,.35)
    B: g=(0,4,−1)  g'=(0,2,2)  m=(0,3,−2)  θ=(.9,−2.1,.65)
       g=(2,0,1)  g'=(2,0,−2)  m=(1,1.5,1)  θ=(.81,−1.89,.585)−.1m=(.71,−2.04,.485)
           x_prev=(.9,−2.1,.65)
    θ=(.59,−1.81,.475)  m̄=(1.75,1,−.25)
        v̄=(2.75,3.25,1) as before: it has the first release only
    """
    second = [[[[2, 2, 0], [0, 2, 2]], [[0, 2, 2], [2, 0, -2]]]]
    algorithm = DPFAFED(**BY_HAND, fafed_vr=True)
    history = run_rounds(
        algorithm, make_space(2, 1), tables(GRADIENTS, second), 1, 2, 2, theta=START, phi=1.0
    )
    server = history.servers[-1]
    assert server.theta.tolist() == pytest.approx([0.59, -1.81, 0.475], abs=1e-12)
    assert server.m.tolist() == pytest.approx([1.75, 1, -0.25], abs=1e-12)
    assert server.v.tolist() == pytest.approx([2.75, 3.25, 1], abs=1e-12)
    kept = history.memories[1]["x_prev"]
    assert kept[0].tolist() == pytest.approx([0.8, -1.7, 0.35], abs=1e-12)
    assert kept[1].tolist() == pytest.approx([0.9, -2.1, 0.65], abs=1e-12)


# ------------------------------------------------------------------ B6


@pytest.mark.parametrize("vr", [False, True])
def test_b6_all_weight_on_the_new_gradient_and_a_denominator_of_one_is_fedavg(vr: bool) -> None:
    """α=1, v constant at 1 (Φ=1, β2=1), ρ=0: m = g, H = 1; the second release has no weight."""
    theta = start_point(6, F64)
    settings: dict[str, Any] = {
        "T": 4,
        "K": 3,
        "clients": 2,
        "theta": theta,
        "phi": 1.0,
        "schedule": "cosine",
    }
    algorithm = DPFAFED(lr=0.05, weight_decay=1e-3, alpha=1.0, beta2=1.0, rho=0.0, fafed_vr=vr)
    one = run_rounds(algorithm, make_space(6), exact(curved(6, F64)), **settings)
    two = run_rounds(DPFedAvg(lr=0.05), make_space(6), exact(curved(6, F64)), **settings)
    assert relative(one.path(), two.path()) < 1e-12


def test_b6_the_denominator_is_constant_inside_a_round_and_moves_between_rounds() -> None:
    seen: dict[int, list[Tensor]] = {}

    def watch(ctx: Any, k: int, before: Any, after: Any) -> None:
        seen.setdefault(int(ctx.t), []).append(after.h)
        assert not torch.equal(before.v, after.v)
        # and it is what divides: θ' = θ − η(m/H + λθ)
        want = before.theta - 0.05 * (after.m / after.h + 0.1 * before.theta)
        torch.testing.assert_close(after.theta, want, rtol=1e-12, atol=1e-14)

    algorithm = DPFAFED(lr=0.05, weight_decay=0.1, beta2=0.9)
    history = run_rounds(
        algorithm,
        make_space(6),
        noisy(curved(6, F64)),
        3,
        4,
        2,
        theta=start_point(6, F64),
        phi=0.25,
        watch=watch,
    )
    for t, hs in seen.items():
        want = history.servers[t - 1].v.sqrt() + 1e-3
        assert all(torch.equal(h.expand(6), want) for h in hs)
    assert not torch.equal(seen[1][0], seen[2][0])


def test_the_server_starts_from_the_public_noise_level_and_without_momentum() -> None:
    for phi in (0.04, 0.0):
        algorithm = DPFAFED()
        ctx = make_context(algorithm, make_space(3), 1, 5, 2, torch.full((4, 1), phi))
        server = algorithm.init(ctx, start_point(3))
        assert server.v.tolist() == pytest.approx([phi] * 3)
        assert not server.m.any()


def test_the_moments_go_on_over_rounds_where_one_client_walks_alone() -> None:
    """N=1: m and v are one recursion over T rounds; only H changes at the end of a round."""
    lr, alpha, beta2, rho, phi = 0.03, 0.3, 0.9, 0.1, 0.04
    gradient, x = curved(5, F64), start_point(5, F64)
    algorithm = DPFAFED(lr=lr, weight_decay=0.0, alpha=alpha, beta2=beta2, rho=rho)
    got = run_rounds(algorithm, make_space(5), exact(gradient), 3, 4, theta=x, phi=phi).theta
    m, v = torch.zeros(5, dtype=F64), torch.full((5,), phi, dtype=F64)
    for n in range(12):
        h = v.sqrt() + rho if n % 4 == 0 else h  # noqa: F821
        g = gradient(x)
        m, v = (1 - alpha) * m + alpha * g, beta2 * v + (1 - beta2) * g**2
        x = x - lr * m / h
    torch.testing.assert_close(got, x, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------ variance reduction


def test_the_second_gradient_is_asked_at_the_previous_iterate_over_rounds_and_absences() -> None:
    """Cohorts 0, 1 | 0, 2 | 1, 2. The first x_prev is θ, later the start of the last step."""
    cohorts = [[0, 1], [0, 2], [1, 2]]
    first: list[list[Tensor]] = []
    second: list[list[Tensor]] = []

    class Spy(FakeOracle):
        def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
            first[-1].append(theta.clone())
            return super().__call__(theta)

        def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
            second[-1].append(theta.clone())
            return super().again(theta)

    def factory(ctx: Any) -> Spy:
        first.append([])
        second.append([])
        return Spy(curved(4, F64), ctx.phi, torch.Generator().manual_seed(int(ctx.t)))

    history = run_rounds(
        DPFAFED(lr=0.05, fafed_vr=True),
        make_space(4),
        factory,
        3,
        3,
        3,
        theta=start_point(4, F64),
        phi=0.04,
        cohorts=cohorts,
    )
    # The start of each client's last step.
    last_start: dict[int, Tensor] = {}
    for t, cohort in enumerate(cohorts):
        for row, client in enumerate(cohort):
            want = last_start.get(client, history.servers[t].theta)
            assert torch.equal(second[t][0][row], want)
            for k in (1, 2):
                assert torch.equal(second[t][k][row], first[t][k - 1][row])
        last_start |= {client: first[t][2][row] for row, client in enumerate(cohort)}
    assert not torch.equal(history.memories[3]["x_prev"][0], history.memories[3]["x_prev"][1])


def test_without_noise_the_estimate_of_a_linear_gradient_is_exact_once_it_is_right() -> None:
    """If m is the gradient at x_prev, STORM gives the gradient at x; a plain average lags."""
    algorithm = DPFAFED(lr=0.1, weight_decay=0.0, alpha=0.1, rho=1.0, fafed_vr=True)
    theta = torch.tensor([4.0, -2.0], dtype=F64)
    errors = {}
    for vr in (True, False):
        lag: list[float] = []

        def watch(ctx: Any, k: int, before: Any, after: Any, lag: list[float] = lag) -> None:
            lag.append(float((after.m - before.theta).abs().max()))

        run_rounds(
            dataclasses.replace(algorithm, fafed_vr=vr),
            make_space(2),
            exact(lambda x: x),
            1,
            60,
            theta=theta,
            watch=watch,
        )
        errors[vr] = lag
    # The error of the estimate shrinks by 1−α, for any θ.
    for k in range(1, 60):
        assert errors[True][k] == pytest.approx(0.9 * errors[True][k - 1], rel=1e-9)
    assert errors[True][-1] < 0.05 * errors[False][-1]


@pytest.mark.parametrize(("vr", "factor"), [(False, 0.1 / 1.9), (True, 1.81 / 0.19)])
def test_under_pure_noise_the_variance_of_m_is_as_stated(vr: bool, factor: float) -> None:
    """After 40 steps (1−α)^80 = 2e-4 of the way is left."""
    algorithm = DPFAFED(lr=1e-6, fafed_vr=vr)
    m = run_rounds(algorithm, make_space(20_000), noise(1), 1, 40, 1, phi=0.04).servers[-1].m
    assert m.var().item() == pytest.approx(0.04 * factor, rel=0.04)


def test_variance_reduction_declares_a_second_release_and_a_memory_and_is_charged() -> None:
    plain, vr = DPFAFED(), DPFAFED(fafed_vr=True)
    assert (plain.releases, vr.releases) == (Releases(1, 1), Releases(1, 2))
    assert (plain.remembers, vr.remembers) == ((), ("x_prev",))
    keys = ["algorithm.name=dp-fafed", "privacy.sigma=1.0"]
    charged = [
        plan_of(load("digits", [*keys, *more], registry()))[0].mechanism(0).effective_multiplier
        for more in ([], ["algorithm.fafed_vr=true"])
    ]
    assert charged == pytest.approx([1.0, 1 / math.sqrt(2)])


# ------------------------------------------------------------------ refusals and switches


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(DpfedError, match="same noise level"):
        DPFAFED().check(dataclasses.replace(FACTS, equal_phi=False))
    with pytest.raises(DpfedError, match="rho > 0"):
        DPFAFED(rho=0.0).check(dataclasses.replace(FACTS, private=False))
    assert DPFAFED(rho=0.0).check(FACTS) == []


def test_more_weight_on_new_gradients_and_a_smaller_rho_move_further_at_first() -> None:
    theta = start_point(6, F64)

    def moved(**options: Any) -> Tensor:
        algorithm = DPFAFED(weight_decay=0.0, **options)
        return (
            run_rounds(
                algorithm, make_space(6), exact(curved(6, F64)), 1, 1, theta=theta, phi=0.01
            ).theta
            - theta
        ).abs()

    torch.testing.assert_close(moved(alpha=0.4), 4 * moved(alpha=0.1))
    # The ratio is (√.01+.4)/√.01.
    torch.testing.assert_close(moved(rho=0.4), moved(rho=0.0) / 5)


def test_the_defaults_are_those_of_the_specification() -> None:
    a = DPFAFED()
    assert (a.alpha, a.rho, a.beta2, a.weight_decay, a.fafed_vr) == (0.1, 1e-3, 0.999, 0.01, False)


SWITCHES: list[dict[str, Any]] = [
    {"lr": 0.06},
    {"weight_decay": 0.2},
    {"alpha": 0.2},
    {"beta2": 0.9},
    {"rho": 0.1},
    {"fafed_vr": True},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_changes_the_trajectory(switch: dict[str, Any]) -> None:
    base: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    assert relative(small_run(DPFAFED(**{**base, **switch})), small_run(DPFAFED(**base))) > 1e-4


def test_no_key_is_left_out_of_the_switch_test() -> None:
    assert {key for switch in SWITCHES for key in switch} == keys_of(DPFAFED)
