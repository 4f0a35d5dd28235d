"""The keys of DP-FedAdamW: each has an effect; combinations that cannot work are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from algorithm_case import (
    curved,
    exact,
    make_space,
    noise,
    noisy,
    relative,
    run_rounds,
    start_point,
)
from torch import Tensor

from dpfed.algorithms.base import Facts
from dpfed.algorithms.dp_fedadamw import DPFedAdamW
from dpfed.algorithms.dp_fedadamw_printed import DPFedAdamWPrinted
from dpfed.errors import DpfedError

FACTS = Facts(equal_phi=True, private=True, allow_nan=False)
# σ=1, C=0.1, B=16
PHI = (0.1 / 16) ** 2

# ------------------------------------------------------------------ every switch does something


BASE: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "beta2": 0.9}
SWITCHES: list[dict[str, Any]] = [
    {"lr": 0.06},
    {"weight_decay": 0.2},
    {"beta1": 0.8},
    {"beta2": 0.95},
    {"eps": 1e-3},
    {"gamma": 0.3},
    {"agg": "off"},
    {"agg": "full_v"},
    {"bc": False},
    {"bc_floor": 0.1},
    {"bc_level": "block"},
]
# The model's blocks and the backend's mean read these two.
ELSEWHERE = {"granularity", "agg_weights"}


def small_noisy_run(options: dict[str, Any], phi: Tensor) -> Tensor:
    theta = start_point(6, torch.float64)
    algorithm = DPFedAdamW(**{**BASE, **options})
    gradient = curved(6, torch.float64)
    return run_rounds(
        algorithm,
        make_space(2, 4),
        noisy(gradient, seed=11),
        4,
        3,
        len(phi),
        theta=theta,
        phi=phi,
        schedule="cosine",
        checked=False,
    ).theta


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_every_switch_changes_the_trajectory(switch: dict[str, Any]) -> None:
    phi = torch.full((2, 1), 0.25, dtype=torch.float64)
    theta = start_point(6, torch.float64)
    base, changed = small_noisy_run({}, phi), small_noisy_run(switch, phi)
    assert changed.isfinite().all()
    assert relative(changed - theta, base - theta) > 1e-4


def test_no_key_is_left_out_of_the_switch_test() -> None:
    assert {key for switch in SWITCHES for key in switch} | ELSEWHERE == {
        f.name for f in dataclasses.fields(DPFedAdamW)
    }


def test_the_floor_is_relative_and_the_block_level_shares_one_denominator() -> None:
    """K=1, β1=0, so the step is −η g/√u: u read back from it."""
    phi, g = (
        torch.full((1, 1), 1.0, dtype=torch.float64),
        torch.tensor([[1.1, 2.0, 3.0]], dtype=torch.float64),
    )

    def u(**options: Any) -> list[float]:
        algorithm = DPFedAdamW(lr=1.0, weight_decay=0.0, beta1=0.0, eps=0.5, **options)
        theta = torch.zeros(3, dtype=torch.float64)
        history = run_rounds(
            algorithm, make_space(1, 2), exact(lambda x: g), 1, 1, theta=theta, phi=phi
        )
        return (-g[0] / history.theta - 0.5).square().tolist()

    assert u(bc=False) == pytest.approx([1.21, 4, 9])
    # 1.21 − 1 is below κΦ = 0.5.
    assert u() == pytest.approx([0.5, 3, 8])
    assert u(bc_floor=0.1) == pytest.approx([0.21, 3, 8])
    # The block's mean is (4+9)/2 − 1.
    assert u(bc_level="block") == pytest.approx([0.5, 5.5, 5.5])


# ------------------------------------------------------------------ the printed form, warnings


def test_the_printed_form_takes_the_root_of_negative_numbers() -> None:
    printed = DPFedAdamWPrinted()
    (said,) = printed.check(FACTS)
    assert "negative" in said
    history = run_rounds(printed, make_space(500, 500), noise(), 1, 1, phi=PHI)
    share = history.theta.isnan().double().mean().item()
    # 0.682 is P(χ²₁ < 1).
    assert share == pytest.approx(0.682, abs=0.05)
    for facts in ({"equal_phi": False}, {"varying_phi": True}):
        with pytest.raises(DpfedError, match="same noise level"):
            printed.check(dataclasses.replace(FACTS, **facts))


def test_the_printed_form_without_noise_and_decay_is_one_round_of_the_default() -> None:
    theta = start_point(6, torch.float64)
    one, two = (
        run_rounds(
            cls(weight_decay=0.0),
            make_space(2, 4),
            exact(curved(6, torch.float64)),
            1,
            5,
            theta=theta,
        ).theta
        for cls in (DPFedAdamW, DPFedAdamWPrinted)
    )
    torch.testing.assert_close(one, two, rtol=1e-12, atol=0)


def test_full_alignment_is_warned_about() -> None:
    (said,) = DPFedAdamW(gamma=1.0).check(FACTS)
    assert "gamma" in said


def test_without_alignment_no_direction_is_sent() -> None:
    assert "dg" in DPFedAdamW().broadcast
    assert "dg" not in DPFedAdamW(gamma=0.0).broadcast


def test_the_defaults_are_those_of_the_specification_and_say_nothing() -> None:
    a = DPFedAdamW()
    assert (a.lr, a.weight_decay, a.gamma, a.beta1, a.beta2, a.eps) == (
        "auto",
        0.01,
        0.5,
        0.9,
        0.999,
        1e-8,
    )
    assert (a.agg, a.bc, a.bc_floor, a.bc_level, a.granularity) == (
        "mean",
        True,
        0.5,
        "coordinate",
        "block",
    )
    assert a.check(FACTS) == []
