"""Hash of the frozen part of a model: it follows frozen values alone and never changes."""

from __future__ import annotations

import torch
from torch import nn

from dpfed.model.frozen.model_hash import model_hash
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import trainable


class Replaced(nn.Module):
    """Model with a trained copy of a module beside its original, as peft makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2).bfloat16()
        self.head = nn.ModuleDict({"original_module": nn.Linear(2, 1)})
        self.flag: torch.Tensor
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("empty", torch.zeros(0))
        for i, p in enumerate(self.parameters()):
            p.requires_grad_(i == 1)
            nn.init.constant_(p, i)


def hash_of(model: nn.Module, skip_replaced: bool = False) -> str:
    return model_hash(model, space_of(trainable(model)), skip_replaced)


def changed(name: str) -> Replaced:
    model = Replaced()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] += 1
    return model


def test_the_hash_follows_frozen_values_alone() -> None:
    before = hash_of(Replaced())
    assert hash_of(changed("linear.bias")) == before
    for name in ("linear.weight", "norm.weight"):
        assert hash_of(changed(name)) != before
    model = Replaced()
    model.flag = torch.tensor(False)
    assert hash_of(model) != before


def test_originals_that_peft_replaced_can_be_skipped() -> None:
    name = "head.original_module.weight"
    assert hash_of(changed(name)) != hash_of(Replaced())
    assert hash_of(changed(name), True) == hash_of(Replaced(), True)


def test_the_value_is_that_of_earlier_versions() -> None:
    """Servers and clients of different versions compare it."""
    assert hash_of(Replaced()) == "bb6c88b65e8fce26680330925d23a70369e7fd1efb8b2042d328039754073138"
