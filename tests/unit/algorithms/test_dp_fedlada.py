"""DP-FedLADA against limits, the maximum, the global direction, and an example by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from algorithm_case import (
    cosine,
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

from dpfed.algorithms.base import Facts
from dpfed.algorithms.dp_fedlada import DPFedLADA, Server
from dpfed.errors import DpfedError

FACTS = Facts(equal_phi=True, private=True, allow_nan=False)
F64 = torch.float64


def test_two_rounds_of_two_steps_of_two_clients_by_hand() -> None:
    """β1=β2=a=½, ϵ=1, Φ=1 (so v̄=1);
        θ=(1,−2,.5), λ=½, η=.2: θ' = .9 θ − .1 m/(√v_max+1) − .1 g_a.

    Round 1 (g_a=0):
      A: g=(2,0,1)  m=(1,0,.5)  v=½+½g²=(2.5,.5,1)  v_max=(2.5,1,1)  step=(1/(√2.5+1),0,.25)
         θ=(.8612574,−1.8,.425)
         g=(2,2,−1)  m=(1.5,1,−.25) v=(3.25,2.25,1)  v_max=(3.25,2.25,1)
             step=(1.5/(√3.25+1),.4,−.125)
         θ=(.7216133,−1.66,.395)
      B: g=(0,4,−1)  m=(0,2,−.5)  v=(.5,8.5,1)  v_max=(1,8.5,1)  step=(0,2/(√8.5+1),−.25)
         θ=(.9,−1.8510794,.475)
         g=(2,0,1)  m=(1,1,.25)  v=(2.25,4.25,1)  v_max=(2.25,8.5,1)  step=(.4,1/(√8.5+1),.125)
         θ=(.77,−1.6915111,.415)
      θ=(.7458066,−1.6757555,.405)  v̄=(2.75,5.375,1)  g_a=−Δ̄/(2·.2)=(.6354834,−.8106111,.2375)
    Round 2, all gradients 0: m=0 and v falls, v_max stays;
        θ' = .9θ − .1g_a twice, θ = .81θ − .19g_a
    """
    zero = [[0, 0, 0], [0, 0, 0]]
    gradients = [[[[2, 0, 1], [0, 4, -1]], [[2, 2, -1], [2, 0, 1]]], [zero, zero]]
    algorithm = DPFedLADA(lr=0.2, weight_decay=0.5, beta1=0.5, beta2=0.5, eps=1.0, a=0.5)
    theta = torch.tensor([1, -2, 0.5], dtype=F64)
    history = run_rounds(
        algorithm, make_space(2, 1), tables(gradients), 2, 2, 2, theta=theta, phi=1.0
    )
    first, second = history.servers[1:]
    root = math.sqrt(8.5) + 1
    ends = [
        [0.9 * (0.9 - 0.1 / (math.sqrt(2.5) + 1)) - 0.15 / (math.sqrt(3.25) + 1), -1.66, 0.395],
        [0.77, 0.9 * (-1.8 - 0.2 / root) - 0.1 / root, 0.415],
    ]
    for delta, end in zip(history.messages[0]["delta"], ends, strict=True):
        assert (theta + delta).tolist() == pytest.approx(end, abs=1e-12)
    assert first.theta.tolist() == pytest.approx([0.7458066, -1.6757555, 0.405], abs=1e-7)
    assert first.v.tolist() == [2.75, 5.375, 1]
    assert first.ga.tolist() == pytest.approx([0.6354834, -0.8106111, 0.2375], abs=1e-6)
    torch.testing.assert_close(
        second.theta, 0.81 * first.theta - 0.19 * first.ga, rtol=1e-12, atol=1e-14
    )
    assert second.v.tolist() == [2.75, 5.375, 1]


# ------------------------------------------------------------------ B7


def test_b7_with_all_weight_on_itself_and_a_constant_maximum_it_is_momentum_sgd() -> None:
    """With a=1 and g² < v̄=Φ, v_max stays: θ ← θ − η/(√Φ+ϵ) m; m restarts in each round."""
    phi, lr, beta1, decay, gradient = 400.0, 2.0, 0.8, 0.01, curved(6, F64)
    theta = start_point(6, F64)
    algorithm = DPFedLADA(lr=lr, weight_decay=decay, beta1=beta1, a=1.0)
    got = run_rounds(algorithm, make_space(6), exact(gradient), 3, 4, theta=theta, phi=phi)
    assert torch.equal(got.servers[-1].v, torch.full((6,), phi, dtype=F64))
    parameter = torch.nn.Parameter(theta.clone())
    # torch's momentum adds the whole gradient, so it gets (1−β1)g.
    for _ in range(3):
        sgd = torch.optim.SGD([parameter], lr=lr / (20 + 1e-8), momentum=beta1)
        for _ in range(4):
            before = parameter.detach().clone()
            parameter.grad = (1 - beta1) * gradient(before)
            sgd.step()
            # Decoupled weight decay; torch's would enter the buffer.
            parameter.data.sub_(lr * decay * before)
    assert relative(got.theta - theta, parameter.detach() - theta) < 1e-12


@pytest.mark.parametrize("amsgrad", [True, False])
def test_b7_the_maximum_never_falls_in_a_round_nor_over_rounds(amsgrad: bool) -> None:
    falls = 0

    def watch(ctx: Any, k: int, before: Any, after: Any) -> None:
        nonlocal falls
        falls += int((after.v_max < before.v_max).sum())
        want = torch.maximum(before.v_max, after.v) if amsgrad else after.v
        assert torch.equal(after.v_max, want)

    algorithm = DPFedLADA(lr=0.01, beta2=0.9, lada_amsgrad=amsgrad)
    history = run_rounds(
        algorithm, make_space(6), noise(1), 5, 6, 2, phi=torch.full((2, 1), 0.04), watch=watch
    )
    assert (falls == 0) == amsgrad
    rises = [
        (two.v >= one.v - 1e-9).all()
        for one, two in zip(history.servers[:-1], history.servers[1:], strict=True)
    ]
    assert all(rises) == amsgrad


def test_the_ratchet_is_biased_upwards_under_pure_noise_and_plain_adam_is_not() -> None:
    means = {}
    for amsgrad in (True, False):
        algorithm = DPFedLADA(beta2=0.99, lada_amsgrad=amsgrad)
        means[amsgrad] = (
            run_rounds(algorithm, make_space(20_000), noise(1), 4, 20, 2, phi=0.04)
            .servers[-1]
            .v.mean()
            .item()
        )
    assert means[False] == pytest.approx(0.04, rel=0.02)
    assert means[True] > 1.1 * 0.04


def test_no_bias_correction_and_a_warm_start() -> None:
    """One step, β1=.9, β2=.75, a=1, ϵ=0, v̄=Φ=1, g=2: m=.2, v=.75+.25·4=1.75, θ=−η·.2/√1.75."""
    algorithm = DPFedLADA(lr=1.0, weight_decay=0.0, beta2=0.75, a=1.0, eps=0.0)
    theta = torch.zeros(2, dtype=F64)
    got = run_rounds(
        algorithm,
        make_space(2),
        exact(lambda x: torch.full_like(x, 2.0)),
        1,
        1,
        theta=theta,
        phi=1.0,
    ).theta
    assert got.tolist() == pytest.approx([-0.2 / math.sqrt(1.75)] * 2, rel=1e-12)


def test_the_server_starts_from_phi_or_from_eps_squared_without_noise() -> None:
    for phi, want in ((0.04, 0.04), (0.0, 1e-6)):
        algorithm = DPFedLADA(eps=1e-3)
        ctx = make_context(algorithm, make_space(3), 1, 5, 2, torch.full((4, 1), phi))
        server = algorithm.init(ctx, start_point(3))
        assert server.v.tolist() == pytest.approx([want] * 3)
        assert not server.ga.any()


def test_the_global_direction_is_the_mean_update_per_step_of_the_round_that_made_it() -> None:
    algorithm = DPFedLADA(lr=0.1)
    history = run_rounds(
        algorithm,
        make_space(6),
        noisy(curved(6, F64)),
        3,
        4,
        2,
        theta=start_point(6, F64),
        phi=0.04,
        schedule="cosine",
    )
    for t in (1, 2, 3):
        want = -history.means[t - 1]["delta"] / (4 * cosine(0.1, t, 3))
        torch.testing.assert_close(history.servers[t].ga, want)


def test_the_two_directions_share_the_step() -> None:
    """At a=1, g_a has no weight; in round 1 the step is proportional to a."""
    ga = torch.tensor([1.0, -3.0, 2.0], dtype=F64)

    def moved(a: float, ga: Tensor) -> Tensor:
        algorithm = DPFedLADA(lr=0.5, weight_decay=0.0, a=a)
        ctx = make_context(algorithm, make_space(3), 2, 5, 4, torch.ones(1, 1, dtype=F64))
        server = Server(torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64), ga)
        oracle = exact(torch.ones_like)(ctx)
        return algorithm.step(
            ctx, algorithm.start(ctx, server, {}), oracle, torch.tensor(1.0, dtype=F64)
        ).theta[0]

    assert torch.equal(moved(1.0, ga), moved(1.0, 0 * ga))
    torch.testing.assert_close(moved(0.3, 0 * ga), 0.3 * moved(1.0, ga))
    torch.testing.assert_close(moved(0.3, ga) - moved(0.3, 0 * ga), -0.5 * 0.7 * ga)


# ------------------------------------------------------------------ refusals and switches


def test_what_cannot_work_is_refused_and_what_is_odd_is_said() -> None:
    with pytest.raises(DpfedError, match="same noise level"):
        DPFedLADA().check(dataclasses.replace(FACTS, equal_phi=False))
    with pytest.raises(DpfedError, match="eps > 0"):
        DPFedLADA(eps=0.0).check(dataclasses.replace(FACTS, private=False))
    assert DPFedLADA(eps=0.0).check(FACTS) == []
    (said,) = DPFedLADA().check(dataclasses.replace(FACTS, varying_phi=True))
    assert "never falls" in said
    assert DPFedLADA(lada_amsgrad=False).check(dataclasses.replace(FACTS, varying_phi=True)) == []


def test_the_defaults_are_those_of_the_specification() -> None:
    a = DPFedLADA()
    assert (a.a, a.beta1, a.beta2, a.eps, a.weight_decay, a.lada_amsgrad) == (
        0.1,
        0.9,
        0.999,
        1e-8,
        0.01,
        True,
    )


SWITCHES: list[dict[str, Any]] = [
    {"lr": 0.06},
    {"weight_decay": 0.2},
    {"beta1": 0.5},
    {"beta2": 0.95},
    {"eps": 1e-2},
    {"a": 0.5},
    {"lada_amsgrad": False},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_changes_the_trajectory(switch: dict[str, Any]) -> None:
    base: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "beta2": 0.8}
    assert relative(small_run(DPFedLADA(**{**base, **switch})), small_run(DPFedLADA(**base))) > 1e-4


def test_no_key_is_left_out_of_the_switch_test() -> None:
    assert {key for switch in SWITCHES for key in switch} == keys_of(DPFedLADA)
