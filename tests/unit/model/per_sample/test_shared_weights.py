"""Batched layers whose input or weights are shared agree with a loop of single records."""

from __future__ import annotations

import torch
from gradient_case import CLASSES, Case, spread
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

RECORDS = st.sampled_from([0, 1, 2, 5])
CLIENTS = st.sampled_from([1, 2, 3])
SEEDS = st.integers(0, 2**16)
often = settings(max_examples=60)


class Positions(nn.Module):
    """All records share position ids `[1, L]`, or an activation through norm and linear."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(3)
        self.linear = nn.Linear(3, 3)
        self.classifier = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        position = self.linear(self.norm(self.table(torch.arange(4).unsqueeze(0))))
        return self.classifier(torch.tanh(x + position).mean(1))


@often
@given(RECORDS, CLIENTS, SEEDS)
def test_shared_leading_axis(n: int, s: int, seed: int) -> None:
    x = torch.randn(n, 4, 3, generator=torch.Generator().manual_seed(seed))
    case = Case(spread(Positions(), seed))
    case.check({"x": x}, torch.arange(n) % CLASSES, s)
    if n > 1:
        x[0, 0, 0] = float("nan")
        case.check({"x": x}, torch.arange(n) % CLASSES, s, nan=0)


class Tied(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=bias)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.words(ids)).mean(1))


@often
@given(RECORDS, CLIENTS, SEEDS, st.booleans())
def test_tied_weights_get_the_summed_gradient(n: int, s: int, seed: int, bias: bool) -> None:
    ids = torch.randint(0, 6, (n, 3), generator=torch.Generator().manual_seed(seed))
    case = Case(spread(Tied(bias), seed))
    # One tensor, once in the vector.
    assert case.space.names == (
        "words.weight",
        *(["out.bias"] if bias else []),
    )
    got = case.check({"ids": ids}, torch.arange(n) % 6, s)
    # Both uses count: rows of absent words get the output's gradient.
    if n:
        assert (got[0].view(-1)[: 6 * 4].view(6, 4) != 0).all()


def test_a_leaf_used_twice_gets_the_summed_gradient() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(CLASSES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(torch.tanh(self.one(x)))

    x = torch.randn(5, CLASSES, generator=torch.Generator().manual_seed(0))
    Case(spread(Twice())).check({"x": x}, torch.arange(5) % CLASSES, clients=2)
