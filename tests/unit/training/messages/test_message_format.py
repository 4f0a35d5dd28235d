"""Formats of vectors: numbers by hand, unbiased rounding, and no rounding of second moments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpfed.algorithms import REGISTRY
from dpfed.privacy.noise import Streams
from dpfed.training.messages.message_format import (
    BLOCK,
    SCALE,
    Field,
    decode,
    draws,
    encode,
    from_int8,
    layout_of,
    to_int8,
)

# 1.0 is 127 steps of 1/127, so x = y / 127 lies y steps from zero.
STEP = 1 / 127


def test_integers_and_scales_by_hand() -> None:
    value = torch.tensor([127.0, -63.5, 0.25, 0.0, -2.75])
    uniform = torch.tensor([0.9, 0.4, 0.3, 0.0, 0.2])
    integers, scales = to_int8(value, uniform)
    # -63.5 = -64 + 0.5 and 0.4 < 0.5: up. 0.25 = 0 + 0.25 and 0.3 >= 0.25: down.
    # -2.75 = -3 + 0.25 and 0.2 < 0.25: up.
    assert integers.tolist() == [127, -63, 0, 0, -2]
    assert integers.dtype == torch.int8
    assert scales.tolist() == [1.0]
    assert from_int8(integers, scales).tolist() == [127.0, -63.0, 0.0, 0.0, -2.0]


def test_each_block_has_its_own_scale() -> None:
    value = torch.zeros(2 * BLOCK + 1)
    value[0], value[BLOCK], value[2 * BLOCK] = 127.0, -254.0, 12.7
    integers, scales = to_int8(value, torch.zeros(len(value)))
    assert scales.tolist() == pytest.approx([1.0, 2.0, 0.1])
    assert [int(integers[i]) for i in (0, BLOCK, 2 * BLOCK)] == [127, -127, 127]
    assert torch.allclose(from_int8(integers, scales), value)


def test_rounding_is_unbiased_and_moves_a_number_by_less_than_a_step() -> None:
    value = torch.cat([torch.tensor([1.0]), (torch.rand(400) * 2 - 1)])
    mean = torch.zeros(len(value), dtype=torch.float64)
    draw = draws(Streams(3), "upload", 1)
    count = 4000
    for _ in range(count):
        found = from_int8(*to_int8(value, draw(len(value))))
        assert float((found - value).abs().max()) < STEP * 1.0001
        mean += found / count
    # The deviation of one rounding is at most half a step.
    limit = 5 * 0.5 * STEP / math.sqrt(count)
    assert float((mean - value).abs().max()) < limit


def test_a_number_on_the_grid_stays_where_it_is() -> None:
    value = torch.arange(-127, 128, dtype=torch.float32)
    for uniform in (0.0, 0.5, 1 - 2**-24):
        integers, scales = to_int8(value, torch.full((255,), uniform))
        assert torch.equal(from_int8(integers, scales), value)


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1e10, 1e10, width=32), min_size=0, max_size=1200),
    st.floats(0, 1, exclude_max=True, width=32),
)
def test_any_vector_comes_back_within_a_step_of_its_block(numbers: list[float], u: float) -> None:
    value = torch.tensor(numbers, dtype=torch.float32)
    integers, scales = to_int8(value, torch.full((len(value),), u))
    found = from_int8(integers, scales)
    assert bool(found.isfinite().all())
    assert int(integers.abs().max()) <= 127 if numbers else len(scales) == 0
    for i in range(0, len(value), BLOCK):
        piece = value[i : i + BLOCK].double()
        step = float(piece.abs().max()) / 127
        error = float((found[i : i + BLOCK].double() - piece).abs().max())
        assert error <= step * (1 + 1e-5) + 1e-35


def test_zeros_and_numbers_below_float32s_normal_range_become_zero() -> None:
    value = torch.tensor([0.0, 1e-40, -1e-40])
    integers, scales = to_int8(value, torch.full((3,), 0.99))
    assert integers.tolist() == [0, 0, 0]
    assert scales.tolist() == [0.0]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_stays_so_and_spoils_no_other_block(wrong: float) -> None:
    value = torch.ones(2 * BLOCK)
    value[3] = wrong
    found = from_int8(*to_int8(value, torch.zeros(len(value))))
    assert bool(found[:BLOCK].isnan().all())
    assert torch.allclose(found[BLOCK:], torch.ones(BLOCK))


def values() -> dict[str, Tensor]:
    return {"theta": torch.linspace(-1, 1, 700), "dg": torch.ones(700), "v": torch.ones(700) / 3}


def test_a_message_comes_back_in_its_formats() -> None:
    fedadamw: Any = REGISTRY["dp-fedadamw"]()  # type: ignore[call-arg]
    sizes = {name: len(value) for name, value in values().items()}
    for format, error in (("float32", 0.0), ("bf16", 2**-8), ("int8", STEP)):
        layout = layout_of(sizes, fedadamw, 700, format)  # type: ignore[arg-type]
        sent = encode(values(), layout, draws(Streams(1), "download", 1))
        found = decode(sent, layout)
        assert found.keys() == values().keys()
        assert all(value.dtype == torch.float32 for value in found.values())
        moved = float((found["theta"] - values()["theta"]).abs().max())
        assert (moved == 0) == (error == 0)
        assert moved <= error
        assert torch.equal(found["v"], values()["v"]), "a second moment was rounded"
        assert sum(x.numel() * x.element_size() for x in sent.values()) == sum(
            field.bytes for field in layout.values()
        )


def test_sizes_by_hand() -> None:
    assert Field(1000).bytes == 4000
    assert Field(1000, "bf16").bytes == 2000
    assert Field(1000, "int8").bytes == 1000 + 4 * 2
    assert Field(1_000_000, "float32").bytes / Field(1_000_000, "int8").bytes > 3.96


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_no_algorithm_rounds_a_second_moment_or_a_block_vector(name: str) -> None:
    algorithm: Any = REGISTRY[name]()
    assert {"theta", "delta"} <= set(algorithm.rounded)
    assert not {"v", "w"} & set(algorithm.rounded)
    blocks = layout_of({"delta": 700, "theta": 9}, algorithm, 700, "int8")
    assert [blocks["delta"].format, blocks["theta"].format] == ["int8", "float32"]


def test_the_order_of_the_fields_does_not_change_the_random_numbers() -> None:
    layout = {name: Field(700, "int8") for name in values()}
    found = encode(values(), layout, draws(Streams(1), "upload", 2))
    turned = dict(reversed(values().items()))
    again = encode(turned, layout, draws(Streams(1), "upload", 2))
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert found["dg" + SCALE].tolist() == pytest.approx([STEP, STEP])


def test_streams_of_rounding_are_no_other_streams_and_secret_on_clients() -> None:
    seeded = Streams(1)
    keys = {seeded.key(purpose, 1, 2) for purpose in ("noise", "batch", "upload", "download")}
    assert len(keys) == 4
    first, second = Streams(1, secret=True), Streams(1, secret=True)
    assert first.key("upload", 1) != second.key("upload", 1)
    # A server that resumes must send the same bytes again.
    assert first.key("download", 1) == second.key("download", 1) == seeded.key("download", 1)
