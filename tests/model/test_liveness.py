"""The check before any private record is read: everything trains, and no record sees another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_per_sample import CLASSES, MODELS, TRAIN, Case, adapted, spread, vit
from torch import Tensor, nn

from dpfed.errors import DpfedError
from dpfed.model.liveness import RECORDS, check_alive
from dpfed.model.per_sample import PerSample, trainable
from dpfed.model.space import space_of
from dpfed.model.task import InputSpec, per_record_loss


def check(case: Case, inputs: dict[str, Tensor]) -> None:
    check_alive(case.ready, case.theta, inputs, CLASSES, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", MODELS)
def test_tiny_models_are_alive(name: str, train: str) -> None:
    """Also with a key's bias among the trained tensors, whose gradient behind the softmax is zero but for rounding."""
    build, make = MODELS[name]
    check(Case(adapted(build(), train)), make(RECORDS))


def test_dropout_does_not_disturb_it() -> None:
    spec = InputSpec("features", "pixel_values", (1, 8, 8), CLASSES)
    inputs = spec.synthetic(RECORDS, torch.Generator().manual_seed(0))
    check(Case(adapted(vit(hidden_dropout_prob=0.5), "full")), inputs)


class Base(nn.Module):
    """Linear, something in between, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.classifier = nn.Linear(5, CLASSES)

    def between(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.between(torch.tanh(self.first(x))))


def refused(model: nn.Module, match: str) -> None:
    x = torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(DpfedError, match=match) as error:
        check(Case(spread(model)), {"x": x})
    assert "\n" not in str(error.value)


def test_the_base_of_these_models_is_alive() -> None:
    check(Case(spread(Base())), {"x": torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))})


def test_a_dead_adapter_is_named() -> None:
    class Dead(Base):
        def __init__(self) -> None:
            super().__init__()
            self.adapter = nn.Linear(5, 5)

    refused(Dead(), r"adapter\.weight has no gradient")


def test_an_adapter_behind_a_zero_is_named() -> None:
    class Silent(Base):
        def __init__(self) -> None:
            super().__init__()
            self.adapter = nn.Linear(5, 5)

        def between(self, y: Tensor) -> Tensor:
            return y + 0 * self.adapter(y)

    refused(Silent(), r"adapter\.weight has no gradient")


@pytest.mark.parametrize(
    "mix",
    [
        lambda y: y - y.mean(0),
        lambda y: y + y.mean(0),
        lambda y: y - y.mean(0, keepdim=True).detach(),
        lambda y: y + 0.1 * y.roll(1, 0),
        lambda y: nn.functional.normalize(y, dim=0),
    ],
    ids=["centred", "mean", "detached-mean", "neighbour", "norm"],
)
def test_a_module_that_mixes_records_is_refused(mix: Callable[[Tensor], Tensor]) -> None:
    class Mixing(Base):
        def between(self, y: Tensor) -> Tensor:
            return mix(y)

    refused(Mixing(), r"(first|classifier)\.(weight|bias) (differ|has no gradient)")


def test_a_wrong_fold_is_refused() -> None:
    """Stretches folded into the leading axis, but not batch-major: each copy meets another record's rows."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 5)
            self.classifier = nn.Linear(10, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            halves = torch.cat([x[:, :2], x[:, 2:]], 0)  # [2*M, 2], halves first
            return self.classifier(torch.cat(self.first(halves).tanh().chunk(2), 1))

    refused(Folded(), r"first\.weight differ")


class Jumping(Base):
    """A slope that depends on more than the record: as a ReLU's does at zero, by rounding, where `exact` types are spared."""

    def __init__(self, by: float, exact: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.by, self.exact = by, exact

    def between(self, y: Tensor) -> Tensor:
        return y * (1 + self.by) if len(y) > 1 and y.dtype not in self.exact else y

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.first.weight.dtype))


def test_a_jump_by_rounding_is_told_from_an_error() -> None:
    """A small difference that double precision has not is none; the model is as it was afterwards."""
    x = {"x": torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))}
    case = Case(spread(Jumping(0.01, (torch.float64,))))
    before = {name: t.clone() for name, t in case.ready.model.state_dict().items()}
    check(case, x)
    after = case.ready.model.state_dict()
    assert case.ready.dtype == torch.float32
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.float32 for name in before)


def test_a_small_error_in_double_precision_is_one() -> None:
    refused(Jumping(0.01, ()), r"(first|classifier)\.(weight|bias) differ")


def test_a_large_difference_is_never_rounding() -> None:
    refused(Jumping(0.5, (torch.float64,)), r"(first|classifier)\.(weight|bias) differ")


def test_where_double_precision_is_not_to_be_had_a_difference_is_an_error() -> None:
    class Single(Jumping):
        def between(self, y: Tensor) -> Tensor:
            if y.dtype == torch.float64:
                raise RuntimeError("no such type here")
            return super().between(y)

    refused(Single(0.01, ()), r"(first|classifier)\.(weight|bias) differ")


class Counting(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))

    def between(self, y: Tensor) -> Tensor:
        self.seen.add_(y.detach().sum(0))
        return y


class Replacing(Counting):
    def between(self, y: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return y


@pytest.mark.parametrize("cls", [Counting, Replacing])
def test_a_buffer_that_changes_is_named(cls: type[nn.Module]) -> None:
    refused(cls(), "the buffer seen changes")


def test_an_update_without_effect_is_refused() -> None:
    """Straight-through: a gradient comes back, and yet the output never moves."""

    class Straight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            y = self.classifier(x)
            return x[:, :CLASSES] + (y - y.detach())

    refused(Straight(), "does not change the model's output")


def test_what_cannot_be_computed_is_refused() -> None:
    class Branching(Base):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (self.scale if self.scale.item() > 0 else 1)

    refused(Branching(), r"per-sample gradients of .*Branching cannot be computed")


def test_weights_that_never_reach_the_model_are_named() -> None:
    """A forward that forgets to hand them over."""
    model = nn.Linear(4, CLASSES)
    space = space_of(trainable(model))
    ready = PerSample(model, space, lambda m, w, x: m(x["x"]).requires_grad_(), per_record_loss)
    with pytest.raises(DpfedError, match="weight has no gradient"):
        check_alive(ready, torch.zeros(space.size), {"x": torch.randn(RECORDS, 4)}, CLASSES, torch.Generator())
