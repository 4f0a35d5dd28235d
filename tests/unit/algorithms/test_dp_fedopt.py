"""DP-FedOpt: the three server steps, the preset, and an example by hand."""

from __future__ import annotations

import dataclasses
import math
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

from dpfed.algorithms.base import Facts, Moments
from dpfed.algorithms.dp_fedavg import DPFedAvg
from dpfed.algorithms.dp_fedopt import DPFedOpt
from dpfed.errors import DpfedError

FACTS = Facts(equal_phi=True, private=True, allow_nan=False)
F64 = torch.float64


@pytest.mark.parametrize(
    ("opt", "v"),
    [
        ("adam", [0.75, 0.4375, 0.4375]),
        ("yogi", [0.8125, 0.5, 0.5]),
        ("adagrad", [2.5, 1.25, 1.25]),
    ],
)
def test_two_steps_of_two_clients_by_hand(opt: Any, v: list[float]) -> None:
    """η=½, λ=0: Δ_A = −½((2,0,1)+(2,2,−1)) = (−2,−1,0);
        Δ_B = −½((0,2,−1)+(2,0,5)) = (−1,−1,−2);  Δ̄=(−1.5,−1,−1).

    Server: β1=½, β2=¾, τ=½, η_s=.1, so m=½Δ̄=(−.75,−.5,−.5) and v starts at ¼. Δ̄²=(2.25,1,1),
        above v:
      adam  v=¾·¼+¼Δ̄²=(.75,.4375,.4375)  θ = .1·m/(√v+½) = (−.075/1.3660254, −.05/1.1614378, …)
      yogi  v=¼+¼Δ̄²=(.8125,.5,.5)  θ = (−.075/1.4013878, −.05/1.2071068, …)
      adagrad v=¼+Δ̄²=(2.5,1.25,1.25)  θ = (−.075/2.0811388, −.05/1.6180340, …)
    """
    gradients = [[[[2, 0, 1], [0, 2, -1]], [[2, 2, -1], [2, 0, 5]]]]
    beta2 = None if opt == "adagrad" else 0.75
    algorithm = DPFedOpt(
        lr=0.5, weight_decay=0.0, server_opt=opt, server_lr=0.1, beta1=0.5, beta2=beta2, tau=0.5
    )
    history = run_rounds(
        algorithm,
        make_space(2, 1),
        tables(gradients),
        1,
        2,
        2,
        theta=torch.zeros(3, dtype=F64),
        phi=1.0,
    )
    server = history.servers[-1]
    assert history.messages[0]["delta"].tolist() == [[-2, -1, 0], [-1, -1, -2]]
    assert server.m.tolist() == [-0.75, -0.5, -0.5]
    assert server.v.tolist() == pytest.approx(v, abs=1e-12)
    moves = [
        -0.075 / (math.sqrt(v[0]) + 0.5),
        -0.05 / (math.sqrt(v[1]) + 0.5),
        -0.05 / (math.sqrt(v[2]) + 0.5),
    ]
    assert server.theta.tolist() == pytest.approx(moves, abs=1e-12)


def test_the_second_round_goes_on_with_both_moments_by_hand() -> None:
    """After the example's first round under adam, Δ̄=0: m=(−.375,−.25,−.25),
        v=¾v=(.5625,.328125,.328125).
    θ moves by .1·m/(√v+½) = (−.0375/1.25, −.025/1.0728220, …); bias correction would change it.
    """
    algorithm = DPFedOpt(server_lr=0.1, beta1=0.5, beta2=0.75, tau=0.5)
    ctx = make_context(algorithm, make_space(3), 2, 5, 2, torch.zeros(2, 1))
    m, v = (
        torch.tensor([-0.75, -0.5, -0.5], dtype=F64),
        torch.tensor([0.75, 0.4375, 0.4375], dtype=F64),
    )
    zero = torch.zeros(3, dtype=F64)
    got = algorithm.aggregate(ctx, Moments(zero, m, v), {"delta": zero})
    assert got.m.tolist() == [-0.375, -0.25, -0.25]
    assert got.v.tolist() == [0.5625, 0.328125, 0.328125]
    last = -0.025 / (math.sqrt(0.328125) + 0.5)
    assert got.theta.tolist() == pytest.approx([-0.0375 / 1.25, last, last], abs=1e-12)


def test_yogi_falls_by_the_square_where_adam_would_fall_by_its_share_of_v() -> None:
    """v=4 and Δ̄²=1: yogi 4 − ¼·1 = 3.75, adam ¾·4 + ¼ = 3.25; where v = Δ̄² yogi stays."""
    v, delta = torch.tensor([4.0, 1.0], dtype=F64), torch.tensor([-1.0, 1.0], dtype=F64)
    got = {}
    for opt in ("adam", "yogi"):
        algorithm = DPFedOpt(server_opt=opt, beta2=0.75)  # type: ignore[arg-type]
        ctx = make_context(algorithm, make_space(2), 2, 5, 2, torch.zeros(2, 1))
        got[opt] = algorithm.aggregate(ctx, Moments(v, v, v), {"delta": delta}).v.tolist()
    assert got == {"adam": [3.25, 1.0], "yogi": [3.75, 1.0]}


# ------------------------------------------------------------------ B5: limits


def huge_tau(**options: Any) -> DPFedOpt:
    tau = 1e9
    return DPFedOpt(lr=0.05, beta1=0.0, tau=tau, server_lr=tau, **options)


def test_b5_with_v_from_zero_and_a_huge_tau_it_is_fedavg() -> None:
    """v starts at 0 in the authors' preset; then √v ≪ τ and θ ← θ + Δ̄."""
    theta = start_point(6, F64)
    settings: dict[str, Any] = {
        "T": 4,
        "K": 3,
        "clients": 2,
        "theta": theta,
        "phi": 0.25,
        "schedule": "cosine",
    }
    one = run_rounds(
        huge_tau(fedopt_preset="authors"), make_space(6), noisy(curved(6, F64)), **settings
    )
    two = run_rounds(DPFedAvg(lr=0.05), make_space(6), noisy(curved(6, F64)), **settings)
    assert relative(one.path(), two.path()) < 1e-6


def test_b5_with_v_from_tau_squared_the_limit_is_smaller_and_grows_with_the_round() -> None:
    """√v → β2^{t/2} τ, so each round moves by Δ̄/(1+β2^{t/2})."""
    beta2, theta = 0.7, start_point(6, F64)
    algorithm = huge_tau(beta2=beta2)
    history = run_rounds(
        algorithm, make_space(6), noisy(curved(6, F64)), 5, 3, 2, theta=theta, phi=0.25
    )
    for t in range(1, 6):
        moved = history.servers[t].theta - history.servers[t - 1].theta
        torch.testing.assert_close(
            moved, history.means[t - 1]["delta"] / (1 + beta2 ** (t / 2)), rtol=1e-6, atol=1e-9
        )


def test_the_clients_are_those_of_fedavg() -> None:
    settings: dict[str, Any] = {"T": 1, "K": 3, "clients": 2, "theta": start_point(6), "phi": 0.25}
    one = run_rounds(
        DPFedOpt(lr=0.05, weight_decay=0.1), make_space(6), noisy(curved(6)), **settings
    )
    two = run_rounds(
        DPFedAvg(lr=0.05, weight_decay=0.1), make_space(6), noisy(curved(6)), **settings
    )
    assert torch.equal(one.messages[0]["delta"], two.messages[0]["delta"])


def test_the_moments_stay_at_the_server() -> None:
    assert DPFedOpt().broadcast == ("theta",)
    history = run_rounds(DPFedOpt(), make_space(6), exact(curved(6)), 1, 2, 2, theta=start_point(6))
    assert set(history.messages[0]) == {"delta"}


# ------------------------------------------------------------------ keys and the preset


def start_of_v(algorithm: DPFedOpt) -> float:
    ctx = make_context(algorithm, make_space(2), 1, 5, 2, torch.zeros(2, 1))
    server = algorithm.init(ctx, torch.zeros(2, dtype=F64))
    assert not server.m.any()
    return float(server.v[0])


def test_v_starts_at_tau_squared_and_in_the_authors_preset_at_zero() -> None:
    assert start_of_v(DPFedOpt()) == pytest.approx(1e-6)
    assert start_of_v(DPFedOpt(tau=0.5)) == 0.25
    assert start_of_v(DPFedOpt(fedopt_preset="authors")) == 0
    assert start_of_v(DPFedOpt(fedopt_preset="authors", tau=0.5)) == 0


def test_a_preset_is_its_numbers_and_an_explicit_key_comes_before_it() -> None:
    assert DPFedOpt().server_lr == 0.01
    assert torch.equal(small_run(DPFedOpt()), small_run(DPFedOpt(beta2=0.99, tau=1e-3)))
    authors = DPFedOpt(fedopt_preset="authors")
    assert torch.equal(
        small_run(authors), small_run(dataclasses.replace(authors, beta2=0.98, tau=0.01))
    )
    for key in ({"beta2": 0.5}, {"tau": 0.5}):
        assert relative(small_run(dataclasses.replace(authors, **key)), small_run(authors)) > 1e-4  # type: ignore[arg-type]


def test_what_would_be_silently_ignored_is_refused() -> None:
    with pytest.raises(DpfedError, match="no beta2"):
        DPFedOpt(server_opt="adagrad", beta2=0.9).check(FACTS)
    for opt in ("yogi", "adagrad"):
        with pytest.raises(DpfedError, match='server_opt = "adam"'):
            DPFedOpt(server_opt=opt, fedopt_preset="authors").check(FACTS)  # type: ignore[arg-type]
    DPFedOpt(server_opt="yogi", beta2=0.9, tau=0.1).check(FACTS)


def test_a_round_moves_in_proportion_to_the_server_learning_rate_and_less_with_a_larger_tau() -> (
    None
):
    theta = start_point(6, F64)

    def moved(**options: Any) -> torch.Tensor:
        return (
            run_rounds(
                DPFedOpt(**options), make_space(6), exact(curved(6, F64)), 1, 3, theta=theta
            ).theta
            - theta
        )

    torch.testing.assert_close(moved(server_lr=0.03), 3 * moved(server_lr=0.01))
    assert (moved(tau=0.1).abs() < moved(tau=0.01).abs()).all()


def test_the_grids_are_those_of_the_specification() -> None:
    assert DPFedOpt.server_lr_grid == (1e-3, 1e-2, 1e-1)
    assert (DPFedOpt().lr, DPFedOpt().weight_decay, DPFedOpt().beta1) == (0.1, 1e-3, 0.9)


SWITCHES: list[dict[str, Any]] = [
    {"lr": 0.06},
    {"weight_decay": 0.2},
    {"server_opt": "yogi"},
    {"server_opt": "adagrad"},
    {"server_lr": 0.05},
    {"beta1": 0.5},
    {"beta2": 0.8},
    {"tau": 0.1},
    {"fedopt_preset": "authors"},
]


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_changes_the_trajectory(switch: dict[str, Any]) -> None:
    base: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    assert relative(small_run(DPFedOpt(**{**base, **switch})), small_run(DPFedOpt(**base))) > 1e-4


def test_no_key_is_left_out_of_the_switch_test() -> None:
    assert {key for switch in SWITCHES for key in switch} == keys_of(DPFedOpt)
