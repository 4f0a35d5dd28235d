"""DP-FedAvg against plain SGD on one client, its keys, and an example by hand."""

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
    noise,
    noisy,
    relative,
    run_rounds,
    start_point,
)

from dpfed.algorithms.dp_fedavg import DPFedAvg


def test_b1_one_local_step_of_all_clients_without_noise_is_gradient_descent() -> None:
    """f(θ) = mean over all records of ½(x·θ − y)²; every client holds ten of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 10, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(4, 10, generator=generator, dtype=torch.float64)

    def local(theta: torch.Tensor) -> torch.Tensor:
        return torch.einsum("sn,snp->sp", torch.einsum("snp,sp->sn", x, theta) - y, x) / 10

    theta, T, lr, decay = start_point(6, torch.float64), 5, 0.1, 0.01
    algorithm = DPFedAvg(lr=lr, weight_decay=decay)
    got = run_rounds(
        algorithm, make_space(6), exact(local), T, 1, 4, theta=theta, schedule="cosine"
    ).path()
    want, flat_x, flat_y = [theta], x.reshape(40, 6), y.reshape(40)
    for t in range(1, T + 1):
        last = want[-1].clone().requires_grad_()
        (
            0.5 * (flat_x @ last - flat_y).square().mean() + 0.5 * decay * last.square().sum()
        ).backward()
        want.append(last.detach() - cosine(lr, t, T) * last.grad)  # type: ignore[operator]
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-12, atol=1e-14)


def test_one_client_is_torch_sgd() -> None:
    theta, gradient = start_point(12), curved(12)
    algorithm = DPFedAvg(lr=0.01, weight_decay=0.1)
    got = run_rounds(algorithm, make_space(12), exact(gradient), 3, 5, theta=theta).theta
    parameter = torch.nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([parameter], lr=0.01, weight_decay=0.1)
    for _ in range(15):
        parameter.grad = gradient(parameter.detach())
        sgd.step()
    assert relative(got, parameter.detach()) <= 1e-6


def test_the_server_learning_rate_scales_the_mean_update() -> None:
    theta = start_point(6, torch.float64)
    moves = []
    for server_lr in (1.0, 0.25):
        algorithm = DPFedAvg(lr=0.1, server_lr=server_lr)
        history = run_rounds(
            algorithm, make_space(6), exact(curved(6, torch.float64)), 1, 3, 2, theta=theta
        )
        moves.append(history.theta - theta)
    torch.testing.assert_close(moves[1], 0.25 * moves[0])


def test_pure_noise_walks_with_the_known_variance() -> None:
    """K steps of noise of variance Φ on each of S clients: the mean moves with variance η²KΦ/S."""
    algorithm = DPFedAvg(lr=0.5, weight_decay=0.0)
    theta = run_rounds(algorithm, make_space(40_000), noise(3), 1, 6, 3, phi=0.04).theta
    assert theta.var().item() == pytest.approx(0.25 * 6 * 0.04 / 3, rel=0.03)
    assert abs(theta.mean().item()) < 5 * (0.02 / 40_000) ** 0.5


SWITCHES: list[dict[str, Any]] = [{"lr": 0.06}, {"weight_decay": 0.2}, {"server_lr": 0.5}]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_changes_the_trajectory(switch: dict[str, Any]) -> None:
    theta, base = start_point(6, torch.float64), {"lr": 0.05, "weight_decay": 0.1}
    one, two = (
        run_rounds(
            DPFedAvg(**options),
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
    keys = {f.name for f in dataclasses.fields(DPFedAvg)}
    assert {key for switch in SWITCHES for key in switch} | {"agg_weights"} == keys


def test_two_steps_of_two_clients_by_hand() -> None:
    """θ=(1,−2,.5), η=.2, λ=½, η_g=½: θ' = θ − .2 (g + ½θ) = .9 θ − .2 g.

    client 1: .9(1,−2,.5) − .2(2,0,1)  = (.5,−1.8,.25);  .9(…) − .2(2,2,−1) = (.05,−2.02,.425)
        Δ=(−.95,−.02,−.075)
    client 2: .9(1,−2,.5) − .2(0,4,−1) = (.9,−2.6,.65);  .9(…) − .2(2,0,1)  = (.41,−2.34,.385)
        Δ=(−.59,−.34,−.115)
    Δ̄=(−.77,−.18,−.095);  θ + ½Δ̄ = (.615,−2.09,.4525)
    """
    gradients = [[[2, 0, 1], [0, 4, -1]], [[2, 2, -1], [2, 0, 1]]]
    history = run_rounds(
        DPFedAvg(lr=0.2, weight_decay=0.5, server_lr=0.5),
        make_space(2, 1),
        lambda ctx: Table([torch.tensor(g, dtype=torch.float64) for g in gradients], ctx.phi),
        T=1,
        K=2,
        clients=2,
        theta=torch.tensor([1, -2, 0.5], dtype=torch.float64),
        phi=1.0,
    )
    delta = history.messages[0]["delta"]
    assert delta[0].tolist() == pytest.approx([-0.95, -0.02, -0.075], abs=1e-12)
    assert delta[1].tolist() == pytest.approx([-0.59, -0.34, -0.115], abs=1e-12)
    assert history.theta.tolist() == pytest.approx([0.615, -2.09, 0.4525], abs=1e-12)
