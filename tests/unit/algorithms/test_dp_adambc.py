"""DP-AdamBC against a plain loop, DP-FedAdamW with other keys, and an example by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithm_case import (
    curved,
    exact,
    keys_of,
    make_space,
    noise,
    noisy,
    relative,
    run_rounds,
    small_run,
    start_point,
    tables,
)

from dpfed.algorithms.dp_adambc import DPAdamBC
from dpfed.algorithms.dp_fedadamw import DPFedAdamW

F64 = torch.float64


def test_two_steps_of_two_clients_by_hand() -> None:
    """θ=(1,−2,.5); β1=½, β2=¾, Φ=1, γ′=¼, λ=½, η=.2, so θ' = .9 θ − .2 m̂/√u.

    A: g=(2,0,1)  m̂=g  v̂=g²=(4,0,1)  u=(3,¼,¼)  step=(2/√3,0,2)
       θ=(.6690599,−1.8,.05)
       g=(2,2,−1)  m̂=(2,4/3,−1/3)  v̂=(4,16/7,1)  u=(3,9/7,¼)  step=(2/√3,(4/3)/√(9/7),−2/3)
       θ=(.3712138,−1.8551779,.1783333)
    B: g=(0,4,−1)  m̂=g  v̂=(0,16,1)  u=(¼,15,¼)  step=(0,4/√15,−2)
       θ=(.9,−2.0065591,.85)
       g=(2,0,1)  m̂=(4/3,4/3,1/3)  v̂=(16/7,48/7,1)  u=(9/7,41/7,¼)
           step=((4/3)/√(9/7),(4/3)/√(41/7),2/3)
       θ=(.5748221,−1.9160891,.6316667)
    mean (.4730179,−1.8856335,.405)
    """
    gradients = [[[[2, 0, 1], [0, 4, -1]], [[2, 2, -1], [2, 0, 1]]]]
    algorithm = DPAdamBC(lr=0.2, weight_decay=0.5, beta1=0.5, beta2=0.75, bc_floor_abs=0.25)
    theta = torch.tensor([1, -2, 0.5], dtype=F64)
    history = run_rounds(
        algorithm, make_space(2, 1), tables(gradients), 1, 2, 2, theta=theta, phi=1.0
    )
    one, two = (theta + history.messages[0]["delta"]).tolist()
    r = (4 / 3) / math.sqrt(9 / 7)
    assert one == pytest.approx(
        [
            0.9 * (0.9 - 0.4 / math.sqrt(3)) - 0.4 / math.sqrt(3),
            -1.62 - 0.2 * r,
            0.045 + 0.2 * 2 / 3,
        ],
        abs=1e-12,
    )
    assert two == pytest.approx(
        [
            0.81 - 0.2 * r,
            0.9 * (-1.8 - 0.8 / math.sqrt(15)) - 0.2 * (4 / 3) / math.sqrt(41 / 7),
            0.765 - 0.2 * 2 / 3,
        ],
        abs=1e-12,
    )
    assert history.theta.tolist() == pytest.approx([0.4730179, -1.8856335, 0.405], abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_with_a_floor_that_is_phi_it_is_dp_fedadamw_without_eps(dtype: torch.dtype) -> None:
    common: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.99}
    settings: dict[str, Any] = {
        "T": 4,
        "K": 3,
        "clients": 3,
        "theta": start_point(10, dtype),
        "phi": 0.25,
        "schedule": "cosine",
    }
    paths = [
        run_rounds(algorithm, make_space(4, 6), noisy(curved(10, dtype), seed=5), **settings).path()
        for algorithm in (
            DPAdamBC(bc_floor_abs=0.25, **common),
            DPFedAdamW(agg="off", gamma=0.0, eps=0.0, bc_floor=1.0, **common),
        )
    ]
    assert torch.equal(*paths)


def test_without_noise_and_floor_it_is_torch_adamw_without_eps() -> None:
    theta, gradient = start_point(8, F64), curved(8, F64)
    got = run_rounds(
        DPAdamBC(lr=0.03, bc_floor_abs=1e-30), make_space(8), exact(gradient), 1, 7, theta=theta
    ).theta
    parameter = torch.nn.Parameter(theta.clone())
    adamw = torch.optim.AdamW([parameter], lr=0.03, weight_decay=0.01, eps=0.0)
    for _ in range(7):
        parameter.grad = gradient(parameter.detach())
        adamw.step()
    assert relative(got - theta, parameter.detach() - theta) < 1e-9


def test_each_clients_own_noise_level_is_subtracted() -> None:
    """Φ may differ: K=1, β1=0, λ=0: the step is −η g/√max(g²−Φ_i, γ′)."""
    phi = torch.tensor([[1.0], [3.0], [5.0]], dtype=F64)
    algorithm = DPAdamBC(lr=1.0, weight_decay=0.0, beta1=0.0, bc_floor_abs=0.25)
    history = run_rounds(
        algorithm,
        make_space(1),
        exact(lambda x: torch.full_like(x, 2.0)),
        1,
        1,
        3,
        theta=torch.zeros(1, dtype=F64),
        phi=phi,
    )
    assert history.messages[0]["delta"][:, 0].tolist() == pytest.approx([-2 / math.sqrt(3), -2, -4])


def test_the_floor_decides_the_step_where_the_noise_is_all_there_is() -> None:
    """At 68 % of the first steps of noise v̂ < Φ and the step is m̂/√γ′; a larger floor helps."""
    sizes = []
    for floor in (1e-8, 1e-6, 1e-4):
        algorithm = DPAdamBC(lr=1.0, weight_decay=0.0, bc_floor_abs=floor)
        history = run_rounds(algorithm, make_space(5000), noise(1), 1, 1, phi=4e-5)
        g = history.oracles[0].given[-1][0][0]
        below = g.square() < 4e-5
        assert below.double().mean().item() == pytest.approx(0.682, abs=0.02)
        torch.testing.assert_close(
            history.theta[below], -g[below] / math.sqrt(floor), rtol=1e-4, atol=1e-7
        )
        sizes.append(history.theta.square().mean().sqrt().item())
    assert sizes[0] > 5 * sizes[1] > 25 * sizes[2]


SWITCHES: list[dict[str, Any]] = [
    {"lr": 0.06},
    {"weight_decay": 0.2},
    {"beta1": 0.8},
    {"beta2": 0.9},
    {"bc_floor_abs": 0.1},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_changes_the_trajectory(switch: dict[str, Any]) -> None:
    base: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "bc_floor_abs": 0.01}
    assert relative(small_run(DPAdamBC(**{**base, **switch})), small_run(DPAdamBC(**base))) > 1e-4


def test_no_key_is_left_out_of_the_switch_test() -> None:
    assert {key for switch in SWITCHES for key in switch} == keys_of(DPAdamBC)
    assert DPAdamBC().bc_floor_abs == 1e-8
