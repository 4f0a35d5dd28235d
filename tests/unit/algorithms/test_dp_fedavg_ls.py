"""DP-FedAvg-LS: properties of the smoothing, the place of it, and an example by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithm_case import (
    curved,
    exact,
    keys_of,
    make_context,
    make_space,
    noisy,
    relative,
    run_rounds,
    small_run,
    start_point,
    tables,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpfed.algorithms.base import Facts
from dpfed.algorithms.dp_fedavg import DPFedAvg
from dpfed.algorithms.dp_fedavg_ls import DPFedAvgLS, smooth

FACTS = Facts(equal_phi=True, private=True, allow_nan=False)
F64 = torch.float64
CLIENT: dict[str, Any] = {"ls_where": "client_grad"}


@pytest.mark.parametrize(
    ("options", "K", "want"),
    [
        ({}, 2, [0.54625, -2.30625, 0.215]),
        (CLIENT, 2, [0.38, -2.045, 0.12]),
    ],
    ids=["server", "client_grad"],
)
def test_two_steps_of_two_clients_by_hand(
    options: dict[str, Any], K: int, want: list[float]
) -> None:
    """One tensor of three, σ_ls=1: I−L has 3 on the diagonal and −1 beside it,
        so x = ¾ mean(g) + ¼ g.
    θ=(1,−2,.5), η=.2, λ=½: θ' = .9 θ − .2 g.

    server: Δ_A=(−.95,−.02,−.075), Δ_B=(−.59,−.34,−.115) as in DP-FedAvg;
        Δ̄=(−.77,−.18,−.095), its mean −.348333
            x=−.26125+¼Δ̄=(−.45375,−.30625,−.285)  θ=(.54625,−2.30625,.215)
    client_grad (all four gradients have mean 1, x=¾+¼g):
      A: g=(2,0,1)  x=(1.25,.75,1)  θ=(.65,−1.95,.25);  g=(2,2,−1) x=(1.25,1.25,.5)
          θ=(.335,−2.005,.125)
      B: g=(0,4,−1) x=(.75,1.75,.5)  θ=(.75,−2.15,.35);  g=(2,0,1)  x=(1.25,.75,1)
          θ=(.425,−2.085,.115)
      mean (.38,−2.045,.12)
    """
    gradients = [[[[2, 0, 1], [0, 4, -1]], [[2, 2, -1], [2, 0, 1]]]]
    algorithm = DPFedAvgLS(lr=0.2, weight_decay=0.5, **options)
    theta = torch.tensor([1, -2, 0.5], dtype=F64)
    got = run_rounds(
        algorithm, make_space(3), tables(gradients), 1, K, 2, theta=theta, phi=1.0
    ).theta
    assert got.tolist() == pytest.approx(want, abs=1e-12)


# ------------------------------------------------------------------ B3: the operator


def dense(m: int, sigma: float) -> Tensor:
    """I − σ_ls L, entry by entry."""
    matrix = torch.zeros(m, m, dtype=F64)
    for i in range(m):
        matrix[i, i] += 1 + 2 * sigma
        matrix[i, (i + 1) % m] -= sigma
        matrix[i, (i - 1) % m] -= sigma
    return matrix


@given(m=st.integers(3, 40), sigma=st.floats(0, 10), seed=st.integers(0, 99))
def test_b3_the_fft_is_the_dense_solve_keeps_the_mean_and_never_lengthens(
    m: int, sigma: float, seed: int
) -> None:
    g = torch.randn(2, m, generator=torch.Generator().manual_seed(seed), dtype=F64)
    x = smooth(make_space(m), g, sigma)
    want = torch.linalg.solve(dense(m, sigma), g.T).T
    torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(x.mean(1), g.mean(1), rtol=1e-6, atol=1e-9)
    assert (x.norm(dim=1) <= g.norm(dim=1) * (1 + 1e-9)).all()
    single = smooth(make_space(m), g.float(), sigma)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("m", [1, 2])
def test_b3_tensors_of_one_and_two_numbers_are_left_alone(m: int) -> None:
    g = start_point(m)
    assert torch.equal(smooth(make_space(m), g, 1.0), g)


def test_b3_without_strength_nothing_is_smoothed() -> None:
    g = start_point(9, F64)
    torch.testing.assert_close(smooth(make_space(9), g, 0.0), g, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_b3_the_variance_of_white_noise_falls_as_stated(sigma: float) -> None:
    g = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    factor = (1 + 2 * sigma) / (1 + 4 * sigma) ** 1.5
    assert smooth(make_space(200_000), g, sigma).var().item() == pytest.approx(factor, rel=0.015)
    if sigma == 1:
        assert factor == pytest.approx(0.268, abs=5e-4)


def test_tensors_are_smoothed_one_by_one() -> None:
    """A spike in one tensor does not leak over its border, nor around the whole vector."""
    space, g = make_space(4, 2, 5), torch.zeros(11, dtype=F64)
    g[0], g[4] = 1, 1
    x = smooth(space, g, 1.0)
    assert (x[:4] > 0).all()
    assert torch.equal(x[4:], g[4:])
    torch.testing.assert_close(x[:4], torch.linalg.solve(dense(4, 1.0), g[:4]))


# ------------------------------------------------------------------ B3: in the algorithm


def test_b3_smoothing_at_the_server_commutes_with_averaging() -> None:
    algorithm, space = DPFedAvgLS(), make_space(4, 6)
    ctx = make_context(algorithm, space, 1, 3, 2, torch.zeros(5, 1))
    delta = torch.randn(5, 10, generator=torch.Generator().manual_seed(0), dtype=F64)
    server = algorithm.init(ctx, start_point(10, F64))
    once = algorithm.aggregate(ctx, server, {"delta": delta.mean(0)}).theta
    each = torch.stack([algorithm.aggregate(ctx, server, {"delta": row}).theta for row in delta])
    torch.testing.assert_close(once, each.mean(0), rtol=1e-12, atol=1e-14)


def test_b3_at_the_server_each_round_is_a_smoothed_round_of_fedavg() -> None:
    """The clients are DP-FedAvg's: same messages in round 1, and θ + smooth(Δ̄) instead of θ + Δ̄."""
    space, theta = make_space(4, 6), start_point(10, F64)
    settings: dict[str, Any] = {"T": 1, "K": 3, "clients": 3, "theta": theta, "phi": 0.04}
    ls = run_rounds(DPFedAvgLS(lr=0.05, ls_sigma=2.0), space, noisy(curved(10, F64)), **settings)
    avg = run_rounds(DPFedAvg(lr=0.05), space, noisy(curved(10, F64)), **settings)
    assert torch.equal(ls.messages[0]["delta"], avg.messages[0]["delta"])
    assert torch.equal(ls.theta, theta + smooth(space, avg.means[0]["delta"], 2.0))


@pytest.mark.parametrize("options", [{}, CLIENT], ids=str)
def test_b3_without_strength_it_is_fedavg(options: dict[str, Any]) -> None:
    assert (
        relative(
            small_run(DPFedAvgLS(lr=0.05, ls_sigma=0.0, **options)), small_run(DPFedAvg(lr=0.05))
        )
        < 1e-12
    )


def test_in_the_client_the_smoothed_gradient_takes_the_place_of_the_gradient() -> None:
    """K=1, λ=0: Δ = −η smooth(g), as at the server (both are linear)."""
    space, theta, gradient = make_space(4, 6), start_point(10, F64), curved(10, F64)
    moves = [
        run_rounds(
            DPFedAvgLS(lr=0.1, weight_decay=0.0, **o), space, exact(gradient), 1, 1, theta=theta
        ).theta
        - theta
        for o in ({}, CLIENT)
    ]
    x = smooth(space, gradient(theta), 1.0)
    torch.testing.assert_close(moves[0], -0.1 * x)
    torch.testing.assert_close(moves[1], -0.1 * x)


def test_in_a_round_stronger_smoothing_moves_less() -> None:
    theta, space = start_point(6, F64), make_space(6)
    lengths = [
        (
            run_rounds(
                DPFedAvgLS(ls_sigma=s), space, exact(curved(6, F64)), 1, 3, theta=theta
            ).theta
            - theta
        )
        .norm()
        .item()
        for s in (0.0, 0.5, 2.0)
    ]
    assert lengths[0] > 1.2 * lengths[1] > 1.2 * lengths[2]


def test_smoothing_without_strength_is_warned_about() -> None:
    (said,) = DPFedAvgLS(ls_sigma=0.0).check(FACTS)
    assert "dp-fedavg" in said


SWITCHES: list[dict[str, Any]] = [
    {"lr": 0.06},
    {"weight_decay": 0.2},
    {"ls_sigma": 0.5},
    CLIENT,
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_changes_the_trajectory(switch: dict[str, Any]) -> None:
    base: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    assert (
        relative(small_run(DPFedAvgLS(**{**base, **switch})), small_run(DPFedAvgLS(**base))) > 1e-4
    )


def test_no_key_is_left_out_of_the_switch_test() -> None:
    assert {key for switch in SWITCHES for key in switch} == keys_of(DPFedAvgLS)
