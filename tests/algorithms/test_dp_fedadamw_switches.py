"""DP-FedAdamW's switches (SPEC 4, 8, 13): each changes something, and what cannot work is refused or warned about."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dpfed.algorithms.base import Facts
from dpfed.algorithms.dp_fedadamw import DPFedAdamW
from dpfed.errors import DpfedError

from .helpers import curved, exact, make_space, noise, noisy, relative, run_rounds, start_point

FACTS = Facts(equal_phi=True, private=True, allow_nan=False)
PHI = (0.1 / 16) ** 2  # σ=1, C=0.1, B=16

# ------------------------------------------------------------------ every switch does something


BASE: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "beta2": 0.9}
SWITCHES: list[dict[str, Any]] = [
    {"lr": 0.06}, {"weight_decay": 0.2}, {"beta1": 0.8}, {"beta2": 0.95}, {"eps": 1e-3}, {"gamma": 0.3},
    {"agg": "off"}, {"agg": "full_v"}, {"bc": False}, {"bc_floor": 0.1}, {"bc_floor_abs": 1e-3}, {"bc_level": "block"},
    {"align": "off"}, {"align": "convex"}, {"v_exponent": "local"}, {"v_exponent": "round"}, {"m_exponent": "total"},
    {"v_send": "hat"}, {"wd_sign": "literal"}, {"dg_lr": "base"}, {"agg_center": "plain"},
]  # fmt: skip
# The model's blocks and the backend's mean read the first four; `scale` has test_dp_fedadamw_noise.py.
ELSEWHERE = {"granularity", "lora_merge_ab", "cnn_blocks", "agg_weights", "scale"}


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
    unequal = "agg_center" in switch
    phi = torch.tensor([[0.25], [2.25 if unequal else 0.25]], dtype=torch.float64)
    theta = start_point(6, torch.float64)
    base, changed = small_noisy_run({}, phi), small_noisy_run(switch, phi)
    assert changed.isfinite().all()
    assert relative(changed - theta, base - theta) > 1e-4


def test_no_key_is_left_out_of_the_switch_test() -> None:
    assert {key for switch in SWITCHES for key in switch} | ELSEWHERE == {
        f.name for f in dataclasses.fields(DPFedAdamW)
    }


def test_align_off_is_gamma_zero() -> None:
    phi = torch.full((2, 1), 0.25, dtype=torch.float64)
    assert torch.equal(small_noisy_run({"align": "off"}, phi), small_noisy_run({"gamma": 0.0}, phi))


def test_the_absolute_floor_is_without_eps_and_the_block_level_shares_one_denominator() -> None:
    """K=1, β1=0, so the step is −η g/√u: u read back from it."""
    phi, g = torch.full((1, 1), 1.0, dtype=torch.float64), torch.tensor([[1.1, 2.0, 3.0]], dtype=torch.float64)

    def u(**options: Any) -> list[float]:
        algorithm = DPFedAdamW(lr=1.0, weight_decay=0.0, beta1=0.0, eps=0.5, **options)
        theta = torch.zeros(3, dtype=torch.float64)
        history = run_rounds(algorithm, make_space(1, 2), exact(lambda x: g), 1, 1, theta=theta, phi=phi)
        root = -g[0] / history.theta - (0.0 if "bc_floor_abs" in options else 0.5)
        return root.square().tolist()

    assert u(bc=False) == pytest.approx([1.21, 4, 9])
    assert u() == pytest.approx([0.5, 3, 8])  # 1.21 − 1 is below κΦ = 0.5
    assert u(bc_floor=0.1) == pytest.approx([0.21, 3, 8])
    assert u(bc_floor_abs=4.0) == pytest.approx([4, 4, 8])
    assert u(bc_level="block") == pytest.approx([0.5, 5.5, 5.5])  # (4+9)/2 − 1


# ------------------------------------------------------------------ literal variants: refused or warned about


def test_the_printed_root_of_a_negative_number_is_refused_unless_nan_is_allowed() -> None:
    literal = DPFedAdamW(bc_floor="none")
    with pytest.raises(DpfedError, match="allow_nan"):
        literal.check(FACTS)
    literal.check(dataclasses.replace(FACTS, allow_nan=True))
    DPFedAdamW(bc_floor="none", bc=False).check(FACTS)  # nothing is subtracted: nothing to refuse
    history = run_rounds(literal, make_space(500, 500), noise(), 1, 1, phi=PHI, checked=False)
    share = history.theta.isnan().double().mean().item()
    assert share == pytest.approx(0.682, abs=0.05)  # P(χ²₁ < 1): SPEC 0, finding 3


@pytest.mark.parametrize(
    "options",
    [
        {"bc_floor": -0.1}, {"bc_floor": math.nan}, {"bc_floor_abs": 0.0}, {"bc_floor_abs": -1e-9},
        {"agg": "off", "v_exponent": "round"}, {"agg": "off", "v_send": "hat"}, {"agg": "off", "agg_center": "plain"},
        {"v_send": "hat", "v_exponent": "local"},
    ],
    ids=str,
)  # fmt: skip
def test_values_and_combinations_without_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DpfedError, match="dp-fedadamw: "):
        DPFedAdamW(**options).check(FACTS)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"v_exponent": "local"}, "v_exponent"), ({"v_exponent": "round"}, "v_exponent"),
        ({"wd_sign": "literal"}, "wd_sign"), ({"gamma": 1.0}, "gamma"),
    ],
)  # fmt: skip
def test_literal_variants_that_run_are_warned_about(options: dict[str, Any], word: str) -> None:
    (said,) = DPFedAdamW(**options).check(FACTS)
    assert word in said


def test_the_defaults_are_those_of_the_specification_and_say_nothing() -> None:
    a = DPFedAdamW()
    assert (a.lr, a.weight_decay, a.gamma, a.beta1, a.beta2, a.eps) == (3e-4, 0.01, 0.5, 0.9, 0.999, 1e-8)
    assert (a.agg, a.bc, a.bc_floor, a.bc_floor_abs, a.bc_level, a.align) == (
        "mean",
        True,
        0.5,
        None,
        "coordinate",
        "on",
    )
    assert (a.v_exponent, a.m_exponent, a.v_send, a.wd_sign, a.dg_lr) == ("total", "local", "raw", "decay", "round")
    assert a.check(FACTS) == []
