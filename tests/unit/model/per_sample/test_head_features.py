"""A model is split into frozen part and head if it can be, and the parts equal the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.per_sample.head_features import FEATURES, HeadSplit, heads_of, split
from dpfed.model.task import CLASSIFY


class Net(nn.Module):
    """Two layers, of which `body` is frozen; `how` names what surrounds the head."""

    def __init__(
        self, how: str = "plain", drop: float = 0.0, head: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.body, self.drop, self.how = nn.Linear(4, 3), nn.Dropout(drop), how
        self.head = head or nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.body(x)))
        if self.how == "twice":
            return self.head(x) + self.head(x)
        if self.how == "scaled":
            return 2 * self.head(x)
        if self.how == "by name":
            return self.head(input=x)
        if self.how == "around":
            return F.linear(x, self.head.weight, self.head.bias)
        if self.how == "one row":
            return self.head(x.mean(0, keepdim=True)).expand(len(x), -1)
        if self.how == "before":
            return self.head(x + self.head.bias.sum())
        return self.head(x)


class InPlace(nn.Sequential):
    """A head whose first operation changes its input in place."""

    def __init__(self) -> None:
        super().__init__(nn.Hardtanh(-0.2, 0.2, inplace=True), nn.Dropout(0.5), nn.Linear(3, 2))


def ready(model: nn.Module, train: str = "head") -> tuple[PerSample, Tensor]:
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(train))
    tensors = trainable(model)
    space = space_of({name: p.detach() for name, p in tensors.items()})
    theta = space.flatten(tensors)
    return PerSample(model, space, lambda m, w, i: call(m, w, i), CLASSIFY), theta


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(5, 4, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("head", [None, InPlace()], ids=["linear", "in place, with dropout"])
def test_both_parts_are_the_whole(head: nn.Module | None, batch: dict[str, Tensor]) -> None:
    """Scores and per-sample gradients agree, with the head's dropout by the same keys."""
    torch.manual_seed(0)
    model, theta = ready(Net(head=head))
    parts = split(model, theta, {"x": torch.zeros(2, 4)})
    assert isinstance(parts, HeadSplit)
    assert parts.size == 3 * 4
    body = model.model.body  # type: ignore[union-attr]
    features = parts.frozen.scores(theta, batch)
    torch.testing.assert_close(features, F.relu(body(batch["x"])))  # type: ignore[operator]
    torch.testing.assert_close(
        parts.head.scores(theta, {FEATURES: features.clone()}), model.scores(theta, batch)
    )
    rows, client = torch.stack([theta, 2 * theta]), torch.tensor([0, 1, 1, 0, 1])
    labels, keys = torch.tensor([0, 1, 0, 1, 1]), torch.arange(5) + 7
    whole = model.grads(rows, client, batch, labels, keys)
    for ours, theirs in zip(
        parts.head.grads(rows, client, {FEATURES: features.clone()}, labels, keys),
        whole,
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    assert parts.head.has_dropout is (head is not None)
    assert not parts.frozen.model._forward_hooks


@pytest.mark.parametrize("how", ["twice", "scaled", "by name", "around", "one row"])
def test_what_is_not_all_of_the_output_stays_whole(how: str) -> None:
    model, theta = ready(Net(how))
    found = split(model, theta, {"x": torch.zeros(2, 4)})
    assert found == "the output of Net is not that of head for one tensor of numbers"
    assert not model.model.head._forward_pre_hooks  # type: ignore[union-attr]


def test_what_follows_from_trained_weights_is_no_feature() -> None:
    """The features would change at the next step."""
    torch.manual_seed(0)
    model, theta = ready(Net("before"))
    assert (
        split(model, theta, {"x": torch.zeros(2, 4)})
        == "what enters head follows from its own weights too"
    )


def test_dropout_before_the_head_stays_whole() -> None:
    model, theta = ready(Net(drop=0.1))
    assert "stochastic depth before head" in str(split(model, theta, {"x": torch.zeros(2, 4)}))


def test_the_module_that_holds_what_is_trained() -> None:
    net: Any = nn.ModuleDict(
        {
            "body": nn.Linear(2, 2),
            "head": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}),
        }
    )
    assert heads_of(net, ("head.a.weight", "head.a.bias")) == ["head.a", "head"]
    assert heads_of(net, ("head.a.weight", "head.b.bias")) == ["head"]
    assert heads_of(net, ("body.weight", "head.b.bias")) == []
    # Nothing is frozen.
    assert heads_of(nn.ModuleDict({"head": nn.Linear(2, 2)}), ("head.weight", "head.bias")) == []
    # The weight is used before the head too.
    net["body"].weight = net["head"]["a"].weight
    assert heads_of(net, ("head.a.weight", "head.a.bias")) == []
