"""The name of the layer in which a computation fails."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpfed.model.per_sample.failing_layer import failing_layer


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


def test_the_innermost_layer_is_named() -> None:
    inner = nn.Sequential(nn.ReLU(), Broken())
    model = nn.Sequential(nn.Identity(), inner)
    assert failing_layer(model, lambda: model(torch.ones(1))) == " in 1.1 (Broken)"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_computation_that_succeeds_names_no_layer() -> None:
    model = nn.Sequential(nn.ReLU())
    assert failing_layer(model, lambda: model(torch.ones(1))) == ""
