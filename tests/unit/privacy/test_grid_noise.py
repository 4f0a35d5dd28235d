"""Sums on a grid are whole steps, keep the stated sensitivity, and have the charged noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpfed.config import build
from dpfed.data.partition import shards_of
from dpfed.errors import DpfedError
from dpfed.privacy.clipping import Clipping, UnitRows, clip_and_sum, unit_means
from dpfed.privacy.grid_noise import (
    COUNT_STEP,
    LOSS,
    Grid,
    grid_of,
    noised,
    noised_counts,
    sensitivity,
)
from dpfed.privacy.noise import OsNoise, Streams
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import PrivateData, Records
from dpfed.registry import registry

CPU = torch.device("cpu")


def alone(grads: Tensor, clip: float, step: float, rule: Clipping | None = None) -> Tensor:
    """The rounded sum of these gradients, each its own unit of one client, in steps `[P]`."""
    client = torch.zeros(len(grads), dtype=torch.int64)
    steps = torch.tensor([step], dtype=torch.float64)
    units = UnitRows(client, torch.ones_like(client), 1)
    parts = [grads[:, :2], grads[:, 2:]]
    return clip_and_sum(parts, units, clip, rule or Clipping(), steps)[0][0]


def test_every_unit_is_rounded_before_the_sum() -> None:
    """Three units of 0.4 steps are nothing; were their sum rounded, it would be one step."""
    grads = torch.tensor([[0.4, 0.6, 0.0]] * 3)
    assert alone(grads, clip=100.0, step=1.0).tolist() == [0, 3, 0]


def test_one_unit_moves_the_sum_by_its_own_rounded_gradient_whatever_the_others_are() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = 5 * torch.randn(40, 3, generator=generator)
    whole = alone(grads, clip=100.0, step=1.0)
    for i in range(len(grads)):
        others = torch.cat([grads[:i], grads[i + 1 :]])
        moved = whole - alone(others, clip=100.0, step=1.0)
        assert moved.tolist() == grads[i].double().round().long().tolist()


@pytest.mark.parametrize("size", [1, 650, 10**6, 10**9])
@pytest.mark.parametrize(("std", "clip"), [(0.1, 0.1), (3.0, 0.5), (1e-9, 1e-7), (1e6, 1e5)])
def test_the_step_costs_less_than_is_allowed(std: float, clip: float, size: int) -> None:
    grid = grid_of(std, clip, size)
    assert math.log2(grid.step).is_integer()
    assert grid.step <= std * 2**-20
    assert std <= grid.std * grid.step <= std * (1 + LOSS)
    # The multiplier against the true sensitivity is the one that is charged.
    assert grid.std * grid.step / sensitivity(clip, grid.step, size) == pytest.approx(
        std / clip, rel=1e-12
    )
    assert (
        1e6 * clip / grid.step + 40 * grid.std < 2**62
    )  # a million units and any noise fit in 64 bits


@pytest.mark.parametrize("size", [1, 650, 10**9])
def test_noise_that_would_not_fit_in_64_bits_is_refused(size: int) -> None:
    """Noise that overflows 64 bits is one number, so a release would show the sign of the sum."""
    most = 2.0**51 * 2 * LOSS / math.sqrt(size)
    assert 9 * grid_of(most * 0.9, 1.0, size).std < 2**56
    for sigma in (most * 1.1, 1e13, 1e30, math.inf):
        with pytest.raises(DpfedError, match="too much for a grid"):
            grid_of(sigma, 1.0, size)


def test_the_sensitivity_by_hand() -> None:
    assert sensitivity(clip=3.0, step=0.5, size=16) == 3.0 + 0.5 * 4 / 2


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=6, max_size=6),
    st.sampled_from([0.01, 0.5, 100.0]),
    st.sampled_from([2.0**-3, 2.0**-10, 2.0**-24]),
    st.sampled_from([Clipping(), Clipping("automatic"), Clipping("quantile")]),
)
def test_one_unit_moves_the_sum_by_no_more_than_the_sensitivity(
    values: list[float], clip: float, step: float, rule: Clipping
) -> None:
    others = torch.linspace(-1, 1, 18).reshape(3, 6)
    one = torch.tensor([values])
    without, within = (
        alone(others, clip, step, rule),
        alone(torch.cat([others, one]), clip, step, rule),
    )
    moved = float((within - without).double().norm()) * step
    assert moved <= sensitivity(clip, step, 6) * (1 + 1e-12)


def test_the_bound_is_nearly_reached_by_gradients_that_all_round_up() -> None:
    step, size, clip = 0.25, 400, 1.0
    worst = torch.full((1, size), 0.1251)  # each coordinate is rounded away from zero, to one step
    moved = float(alone(worst, 10.0, step).double().norm()) * step
    assert moved == pytest.approx(0.25 * 20)
    assert moved > float(worst.norm()) + 0.9 * step * math.sqrt(size) / 2
    clipped = float(alone(100 * worst, clip, step / 64).double().norm()) * step / 64
    assert clip < clipped <= sensitivity(clip, step / 64, size)


def test_the_rounded_sum_is_the_plain_one_but_for_rounding() -> None:
    g = torch.Generator().manual_seed(1)
    grads = [torch.randn(7, 4, generator=g), torch.randn(7, 3, generator=g)]
    grads[0][1, 1] = float("nan")  # a unit with one such record gives exactly nothing
    unit, owner = torch.tensor([0, 0, 1, 2, 3, 4, 4]), torch.tensor([0, 1, 1, 0, 2])
    for rule in (Clipping(), Clipping("automatic"), Clipping("quantile")):
        means, finite = unit_means(grads, unit, len(owner))
        units = UnitRows(owner, finite, 3)
        plain, counts = clip_and_sum(means, units, 0.7, rule)
        steps = torch.tensor([2.0**-20, 2.0**-22, 2.0**-24], dtype=torch.float64)
        total, counted = clip_and_sum(means, units, 0.7, rule, steps)
        assert total.dtype == torch.int64
        torch.testing.assert_close((total * steps[:, None]).float(), plain, rtol=1e-5, atol=3e-6)
        assert counted.tolist() == counts.tolist()


def test_what_leaves_is_a_whole_number_of_steps_and_the_sums_residue_is_gone() -> None:
    grid = grid_of(std=0.3, clip=0.1, size=6)
    shifted = torch.tensor([[0.01, 0.02, 0.03, 0.04, 0.05, 0.06]])
    for grads in (shifted, shifted + 1e-9, shifted * math.pi):
        total = alone(grads, 0.1, grid.step)
        out = noised(total[None], [grid], [OsNoise(CPU)])
        assert torch.equal(torch.remainder(out, grid.step), torch.zeros_like(out))
    count = noised_counts(
        torch.tensor([[1.5], [-2.0]], dtype=torch.float64), [3.0, 5.0], [OsNoise(CPU)] * 2
    )
    assert torch.equal(torch.remainder(count, COUNT_STEP), torch.zeros_like(count))


def test_the_noise_has_the_variance_that_is_said() -> None:
    grid = grid_of(std=0.3, clip=0.1, size=100_000)
    out = noised(torch.zeros(1, 100_000, dtype=torch.int64), [grid], [OsNoise(CPU)])
    assert float(out.std()) == pytest.approx(0.3, rel=0.015)
    assert abs(float(out.mean())) < 5 * 0.3 / math.sqrt(100_000)
    coarse = noised(
        torch.zeros(1, 50_000, dtype=torch.int64), [Grid(step=0.5, std=4.0)], [OsNoise(CPU)]
    )
    assert set(torch.remainder(coarse, 1.0).unique().tolist()) == {0.0, 0.5}
    assert float(coarse.std()) == pytest.approx(2.0, rel=0.02)
    counts = noised_counts(
        torch.zeros(4000, 1, dtype=torch.float64), [3.0] * 4000, [OsNoise(CPU)] * 4000
    )
    assert float(counts.std()) == pytest.approx(3.0, rel=0.06)


def test_the_noise_is_fine_enough_to_reach_every_step() -> None:
    """Large float32 noise has 23 bits after the point, and would hit every 64th step only."""
    z = OsNoise(CPU).normal64(4000)
    large = z[z.abs() > 1]
    assert len(large) > 500
    assert float((torch.remainder(large * 2**30, 1.0) != 0).double().mean()) > 0.99


class Fixed:
    """Every record's gradient is its input."""

    space = SimpleNamespace(shapes=[torch.Size([6])])
    has_dropout = False

    def grads(
        self, theta: Tensor, client: Tensor, inputs: Mapping[str, Tensor], *_: Any
    ) -> list[Tensor]:
        return [inputs["g"]]


def oracle_of(grid: bool, clipping: Clipping, secret: bool = False) -> FleetOracle:
    plan = Plan(
        sampling="poisson",
        clip=0.5,
        sizes=np.array([4, 8]),
        rates=np.array([0.5, 0.5]),
        expected=np.array([2.0, 4.0]),
        multipliers=np.array([1.0, 2.0]),
        clipping=clipping,
    )
    records = Records(
        {"g": torch.randn(12, 6, generator=torch.Generator().manual_seed(2))}, torch.arange(12)
    )
    shards = shards_of(np.repeat([0, 1], [4, 8]), 2)
    return FleetOracle(
        PrivateData(Fixed(), records, shards),
        RoundTerms(plan, Streams(3, secret), 1, [0, 1], steps=3, grid=grid),
        PassLimits(max_slots=3),
    )


@pytest.mark.parametrize("clipping", [Clipping(), Clipping("quantile")])
def test_a_seeded_oracle_on_the_grid_is_the_plain_one_but_for_rounding(clipping: Clipping) -> None:
    plain, grid = oracle_of(False, clipping), oracle_of(True, clipping)
    for _ in range(3):
        (a, phi), (b, phi_grid) = plain(torch.zeros(2, 6)), grid(torch.zeros(2, 6))
        assert b.dtype == torch.float32
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
        assert torch.equal(phi, phi_grid)
    torch.testing.assert_close(grid.below, plain.below, rtol=1e-5, atol=1e-5)


def test_an_oracle_on_the_grid_releases_whole_steps_for_clients_with_their_own() -> None:
    oracle = oracle_of(True, Clipping(), secret=True)
    assert oracle._grid is not None
    total, _ = oracle._clipped_sum(torch.zeros(2, 6), oracle._draw())
    assert total.dtype == torch.int64
    out = noised(total, oracle._grid, oracle._noise)
    for row, grid in zip(out, oracle._grid, strict=True):
        assert torch.equal(torch.remainder(row, grid.step), torch.zeros_like(row))


def test_a_grid_needs_noise() -> None:
    raw = {
        "data": {"name": "digits"},
        "model": {"name": "linear"},
        "privacy": {"batch": 10, "grid": True, "sigma": 0.0},
    }
    with pytest.raises(DpfedError, match=r"privacy\.grid = true is for sums with noise"):
        build(raw, registry())
    records = Records({"g": torch.zeros(2, 6)}, torch.arange(2))
    data = PrivateData(Fixed(), records, shards_of(np.zeros(2, np.int64), 1))
    silent = Plan("poisson", 1.0, np.array([2]), np.array([0.5]), np.array([1.0]), np.zeros(1))
    with pytest.raises(ValueError, match="a grid is for sums"):
        FleetOracle(data, RoundTerms(silent, Streams(0), 1, [0], steps=1, grid=True))
