"""DP-LocalAdamW against a new AdamW of torch in each round, and an example by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from algorithm_case import (
    Table,
    cosine,
    curved,
    exact,
    make_space,
    noisy,
    relative,
    run_rounds,
    start_point,
)

from dpfed.algorithms.dp_local_adamw import DPLocalAdamW


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_torch_adamw_made_afresh_each_round(dtype: torch.dtype) -> None:
    P, K, T = 12, 6, 4
    theta, gradient = start_point(P, dtype), curved(P, dtype)
    algorithm = DPLocalAdamW(lr=0.03, weight_decay=0.1, beta1=0.8, beta2=0.98, eps=1e-6)
    got = run_rounds(
        algorithm, make_space(12), exact(gradient), T, K, theta=theta, schedule="cosine"
    ).theta
    parameter = torch.nn.Parameter(theta.clone())
    for t in range(1, T + 1):
        fresh = torch.optim.AdamW(
            [parameter], lr=cosine(0.03, t, T), betas=(0.8, 0.98), eps=1e-6, weight_decay=0.1
        )
        for _ in range(K):
            parameter.grad = gradient(parameter.detach())
            fresh.step()
    assert relative(got, parameter.detach()) <= 1e-6
    if dtype == torch.float64:
        assert relative(got - theta, parameter.detach() - theta) <= 1e-6


def test_the_server_takes_the_mean_of_clients_that_each_ran_their_own_adamw() -> None:
    P, K = 4, 5
    targets = torch.tensor([[1.0, -1, 2, 0], [3, 3, -3, 1], [0, 0, 5, -2]], dtype=torch.float64)
    theta = start_point(P, torch.float64)
    algorithm = DPLocalAdamW(lr=0.1, weight_decay=0.05)
    got = run_rounds(
        algorithm, make_space(4), exact(lambda x: x - targets), 1, K, 3, theta=theta
    ).theta
    ends = []
    for target in targets:
        parameter = torch.nn.Parameter(theta.clone())
        adamw = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.05)
        for _ in range(K):
            parameter.grad = parameter.detach() - target
            adamw.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(got, torch.stack(ends).mean(0), rtol=1e-10, atol=1e-12)


SWITCHES: list[dict[str, Any]] = [
    {"lr": 0.06},
    {"weight_decay": 0.2},
    {"beta1": 0.8},
    {"beta2": 0.9},
    {"eps": 1e-3},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_changes_the_trajectory(switch: dict[str, Any]) -> None:
    theta, base = start_point(6, torch.float64), {"lr": 0.05, "weight_decay": 0.1}
    one, two = (
        run_rounds(
            DPLocalAdamW(**options),
            make_space(6),
            noisy(curved(6, torch.float64), seed=11),
            4,
            3,
            2,
            theta=theta,
            phi=0.25,
        ).theta
        for options in (base, {**base, **switch})
    )
    assert relative(two - theta, one - theta) > 1e-4


def test_no_key_is_left_out_of_the_switch_test() -> None:
    keys = {f.name for f in dataclasses.fields(DPLocalAdamW)}
    assert {key for switch in SWITCHES for key in switch} | {"agg_weights"} == keys


def test_two_steps_of_two_clients_by_hand() -> None:
    """θ=(1,−2,.5); β1=½, β2=¾, ϵ=1, λ=½, η=.2, so θ' = .9 θ − .2 m̂/(√v̂+1).

    client 1, k=1: g=(2,0,1)  m=g/2  v=g²/4  m̂=g  v̂=g²=(4,0,1)
                   step=(2/3,0,1/2)  θ=(.7666667,−1.8,.35)
              k=2: g=(2,2,−1)  m=(1.5,1,−.25)  v=(1.75,1,.4375)  m̂=m/.75=(2,4/3,−1/3)
                  v̂=v/.4375=(4,16/7,1)
                   step=(2/3, (4/3)/(√(16/7)+1)=.5308156, −1/6)  θ=(.5566667,−1.7261631,.3483333)
    client 2, k=1: g=(0,4,−1)  m=(0,2,−.5)  v=(0,4,.25)  m̂=g  v̂=(0,16,1)
                   step=(0,4/5,−1/2)  θ=(.9,−1.96,.55)
              k=2: g=(2,0,1)  m=(1,1,.25)  v=(1,3,.4375)  m̂=(4/3,4/3,1/3)  v̂=(16/7,48/7,1)
                   step=(.5308156,.3684651,1/6)  θ=(.7038369,−1.8376930,.4616667)
    """
    gradients = [[[2, 0, 1], [0, 4, -1]], [[2, 2, -1], [2, 0, 1]]]
    algorithm = DPLocalAdamW(lr=0.2, weight_decay=0.5, beta1=0.5, beta2=0.75, eps=1.0)
    history = run_rounds(
        algorithm,
        make_space(2, 1),
        lambda ctx: Table([torch.tensor(g, dtype=torch.float64) for g in gradients], ctx.phi),
        T=1,
        K=2,
        clients=2,
        theta=torch.tensor([1, -2, 0.5], dtype=torch.float64),
        phi=1.0,
    )
    delta = history.messages[0]["delta"]
    assert delta[0].tolist() == pytest.approx(
        [-0.443333333333, 0.273836881652, -0.151666666667], abs=1e-11
    )
    assert delta[1].tolist() == pytest.approx(
        [-0.296163118348, 0.162306973790, -0.038333333333], abs=1e-11
    )
    assert history.theta.tolist() == pytest.approx(
        [0.630251774159, -1.781928072279, 0.405], abs=1e-11
    )
