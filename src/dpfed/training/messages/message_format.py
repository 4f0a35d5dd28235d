"""Formats of the vectors in messages: float32, bf16, or int8 with stochastic rounding.

An int8 vector has blocks of BLOCK numbers. The scale s of a block is its largest absolute value
divided by 127. Each number x becomes one of the two integers next to x / s. The probabilities of
the two make the mean of the rounded number equal to x.

    `name`         int8 [P], the integers for a vector of P numbers
    `name.scale`   float32 [ceil(P / BLOCK)], the scales

Numbers are rounded after noise was added to them, so rounding is post-processing and costs no
privacy. An algorithm names the vectors that may be rounded (`Algorithm.rounded`). Everything else
is sent in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpfed.algorithms.base import Algorithm
from dpfed.config import MessageFormat
from dpfed.privacy.noise import Purpose, Streams

BLOCK = 512
LARGEST = 127
NUMBER_BYTES: dict[MessageFormat, int] = {"float32": 4, "bf16": 2, "int8": 1}
SCALE = ".scale"
# Scales of int8 blocks below this value are set to 0, because float32 arithmetic with such small
# numbers is not exact.
SMALLEST = torch.finfo(torch.float32).tiny

Draw = Callable[[int], Tensor]
"""Function of a number n that returns n independent uniform numbers in [0, 1), float32 `[n]`."""


@dataclass(frozen=True)
class Field:
    """One vector of a message: its length, and the format in which its numbers are sent."""

    size: int
    format: MessageFormat = "float32"

    @property
    def scales(self) -> int:
        """Number of scales that are sent with the vector: one per int8 block, else 0."""
        return math.ceil(self.size / BLOCK) if self.format == "int8" else 0

    @property
    def bytes(self) -> int:
        return self.size * NUMBER_BYTES[self.format] + 4 * self.scales


Layout = Mapping[str, Field]


def layout_of(
    sizes: Mapping[str, int], algorithm: Algorithm, size: int, format: MessageFormat
) -> dict[str, Field]:
    """Return the layout of a message: the length and the format of each tensor, by name.

    sizes      length of each tensor of the message
    algorithm  its `rounded` names the vectors that may be rounded
    size       number of trainable numbers; only vectors of this length are rounded
    format     format of the rounded vectors
    """
    return {
        name: Field(n, format if name in algorithm.rounded and n == size else "float32")
        for name, n in sizes.items()
    }


def draws(streams: Streams, purpose: Purpose, round: int, client: int = 0) -> Draw:
    """Return the source of the random numbers that decide the rounding of one message."""
    generator = streams.generator(purpose, round, client)
    return lambda size: torch.from_numpy(generator.random(size, dtype="float32"))


def encode(values: Mapping[str, Tensor], layout: Layout, draw: Draw) -> dict[str, Tensor]:
    """Return the tensors that are sent for the vectors of a message, by name.

    layout  format of each vector
    draw    source of random numbers for rounding
    """
    sent: dict[str, Tensor] = {}
    # Draw the random numbers in alphabetical order of names. The order of `values` then has no
    # effect.
    for name in sorted(values):
        value = values[name]
        match layout[name].format:
            case "int8":
                uniform = draw(len(value)).to(value.device)
                sent[name], sent[name + SCALE] = to_int8(value, uniform)
            case "bf16":
                sent[name] = value.to(torch.bfloat16)
            case _:
                sent[name] = value.to(torch.float32)
    return sent


def decode(sent: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Return the float32 vectors of a received message, from the tensors that `encode` returned."""
    return {
        name: from_int8(sent[name], sent[name + SCALE])
        if field.format == "int8"
        else sent[name].to(torch.float32)
        for name, field in layout.items()
    }


def to_int8(value: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Round a float32 vector `[P]` at random; return int8 integers `[P]` and one scale per block.

    A block that contains NaN or infinity becomes NaN when it is decoded.

    uniform  random numbers in [0, 1), float32 `[P]`
    """
    blocks = pad(value.abs(), (0, -len(value) % BLOCK)).view(-1, BLOCK)
    scales = blocks.amax(1) / LARGEST
    scales = scales.where(~(scales < SMALLEST), 0.0)
    # If the scale of a block is 0, divide by infinity, which gives zeros. A division by 0 would
    # give NaN.
    steps = value / _each(scales.where(scales != 0, math.inf), len(value))
    # Compare `uniform` with `steps - low`, a difference that is exact in float32. A sum of
    # `uniform` and large `steps` would be rounded.
    low = steps.floor()
    rounded = low + (uniform < steps - low)
    return rounded.nan_to_num(0.0).clamp(-LARGEST, LARGEST).to(torch.int8), scales


def from_int8(integers: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 vector `[P]` that `to_int8` has rounded to these integers and scales."""
    return _each(scales, len(integers)).mul_(integers)


def _each(scales: Tensor, size: int) -> Tensor:
    """Repeat the scale of each block for each of its numbers: `[blocks]` -> `[size]`."""
    return scales.repeat_interleave(BLOCK)[:size]
