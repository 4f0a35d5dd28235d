"""The isolation check finds tensors that do not train and records that affect others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_case import CLASSES, MODELS, TRAIN, Case, adapted, spread, vit
from torch import Tensor, nn

from dpfed.errors import DpfedError
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.batched_layers import BatchedConv2d
from dpfed.model.per_sample.gradients import PerSample, trainable
from dpfed.model.per_sample.isolation_check import (
    RECORDS,
    check_gradients,
    check_isolation,
    records_mix,
)
from dpfed.model.task import CLASSIFY, InputSpec


def check(case: Case, inputs: dict[str, Tensor]) -> None:
    check_gradients(case.ready, case.theta, inputs, CLASSES, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", MODELS)
def test_tiny_models_are_alive(name: str, train: str) -> None:
    """Sound models pass. A trained key bias behind a softmax has a gradient of rounding alone."""
    build, make = MODELS[name]
    check(Case(adapted(build(), train)), make(RECORDS))


def test_dropout_does_not_disturb_it() -> None:
    spec = InputSpec("features", "pixel_values", (1, 8, 8), CLASSES)
    inputs = spec.synthetic(RECORDS, torch.Generator().manual_seed(0))
    check(Case(adapted(vit(hidden_dropout_prob=0.5), "full")), inputs)


class Base(nn.Module):
    """A model of two linear layers with a module between them."""

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
    check(
        Case(spread(Base())),
        {"x": torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))},
    )


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
    """Parts are folded into the leading axis in the wrong order, so copies meet other records."""

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
    """A slope that depends on other records for a number of calls, as rounding decides a ReLU's.

    `double`: the same in double precision, where rounding does nothing.
    """

    def __init__(self, by: float, times: int = 1, double: float = 0.0) -> None:
        super().__init__()
        self.by, self.left, self.double = by, times, double
        self.seen: set[tuple[int, torch.dtype]] = set()

    def between(self, y: Tensor) -> Tensor:
        self.seen.add((len(y), y.dtype))
        if len(y) > 1 and y.dtype == torch.float32 and self.left:
            self.left -= 1
            return y * (1 + self.by)
        return y * (1 + self.double) if len(y) > 1 and y.dtype == torch.float64 else y

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.first.weight.dtype))


def some() -> dict[str, Tensor]:
    return {"x": torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))}


def test_a_jump_by_rounding_is_told_from_an_error() -> None:
    """A small difference counts only if double precision or all other weights show it too.

    The model is unchanged afterwards.
    """
    model = Jumping(0.01)
    model.register_buffer("fine", torch.tensor([1 / 3], dtype=torch.float64))
    model.register_buffer("turned", torch.tensor([1 + 2j]))
    model.register_buffer("short", torch.tensor([0.5], dtype=torch.float16))
    case = Case(spread(model))
    before = {name: t.clone() for name, t in case.ready.model.state_dict().items()}
    check(case, some())
    after = case.ready.model.state_dict()
    assert case.ready.dtype == torch.float32
    assert all(
        torch.equal(before[n], after[n]) and after[n].dtype == before[n].dtype for n in before
    )
    assert {(1, torch.float64), (RECORDS, torch.float64)} <= model.seen, (
        "the judge works in double precision throughout"
    )


def test_a_difference_with_all_weights_is_an_error() -> None:
    """A mixture in float32 alone, as a wrong kernel would give."""
    refused(Jumping(0.01, times=1000), r"(first|classifier)\.(weight|bias) differ")


class Turning(Jumping):
    """One record's slope depends on the others in float32: a random record's or the first's."""

    def __init__(self, always: bool) -> None:
        super().__init__(0.01, times=0)
        self.always = always

    def between(self, y: Tensor) -> Tensor:
        if len(y) == 1 or y.dtype == torch.float64:
            return y
        self.left += not self.always
        scale = torch.ones(len(y), 1)
        scale[self.left % len(y)] += self.by
        return y * scale


def test_it_is_enough_that_every_record_agrees_with_some_weights() -> None:
    """In a deep network most weights put some record's ReLU near zero."""
    check(Case(spread(Turning(always=False))), some())
    refused(Turning(always=True), r"(first|classifier)\.(weight|bias) differ")


@pytest.mark.parametrize("double", [1e-2, 1e-5])
def test_a_small_error_in_double_precision_is_one(double: float) -> None:
    refused(Jumping(0.01, double=double), r"(first|classifier)\.(weight|bias) differ")


def test_a_large_difference_is_never_rounding() -> None:
    refused(Jumping(0.15), r"(first|classifier)\.(weight|bias) differ")


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_where_double_precision_is_not_to_be_had_a_difference_is_an_error(
    kind: type[Exception],
) -> None:
    class Single(Jumping):
        def between(self, y: Tensor) -> Tensor:
            if y.dtype == torch.float64:
                raise kind("no such type here")
            return super().between(y)

    refused(Single(0.01), r"(first|classifier)\.(weight|bias) differ")


def apart(case: Case, inputs: dict[str, Tensor], precision: torch.dtype) -> None:
    case.ready.to(precision)
    check_isolation(case.ready, case.theta, inputs, CLASSES, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", MODELS)
def test_in_tiny_models_no_number_stays_alone(
    name: str, train: str, precision: torch.dtype
) -> None:
    build, make = MODELS[name]
    inputs = {k: x.to(precision) if x.is_floating_point() else x for k, x in make(RECORDS).items()}
    apart(Case(adapted(build(), train)), inputs, precision)


def test_what_carries_no_number_to_others_is_refused() -> None:
    """Zero times any finite number is zero, but zero times NaN is NaN."""

    class Touching(Base):
        def between(self, y: Tensor) -> Tensor:
            return y + 0 * y.sum(0)

    case = Case(spread(Touching()))
    check(case, some())
    with pytest.raises(
        DpfedError, match=r"run.precision = 'float32' a record .* changes that of another"
    ):
        apart(case, some(), torch.float32)


def test_what_no_number_stops_is_refused_in_a_sentence() -> None:
    class Stopping(Base):
        def between(self, y: Tensor) -> Tensor:
            if not bool(y.isfinite().all()):
                raise ArithmeticError("no number")
            return y

    with pytest.raises(
        DpfedError, match=r"a record that is not finite stops the pass of all: no number"
    ):
        apart(Case(spread(Stopping())), some(), torch.float32)


def test_a_precision_without_finite_gradients_is_refused() -> None:
    class Steep(Base):
        def between(self, y: Tensor) -> Tensor:
            return y * 1e30 * 1e30

    with pytest.raises(DpfedError, match="gradients near the initial weights are not finite"):
        apart(Case(spread(Steep())), some(), torch.float32)


def test_rounding_of_half_precision_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is only rounding may differ each time: a GPU adds in no fixed order."""
    build, make = MODELS["vit"]
    inputs = {
        k: x.to(torch.bfloat16) if x.is_floating_point() else x for k, x in make(RECORDS).items()
    }
    case = Case(adapted(build(), "full"))
    grads, generator = case.ready.grads, torch.Generator().manual_seed(3)

    def jittered(*given: Any) -> list[Tensor]:
        found = grads(*given)
        size = torch.cat([g.float() for g in found], 1).norm(dim=1, keepdim=True)
        return [
            g + 1e-3 * size * torch.randn(g.shape, generator=generator) / g.shape[1] ** 0.5
            for g in found
        ]

    monkeypatch.setattr(case.ready, "grads", jittered)
    apart(case, inputs, torch.bfloat16)


class Strided(nn.Module):
    """For odd numbers of channels the CPU's grouped bfloat16 convolution reads beyond a group."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        sizes = ((3, 1), (7, 2), (7, 2), (7, 2))
        self.convs = nn.Sequential(
            *[nn.Conv2d(c, 7, 3, stride=s, padding=1, padding_mode=mode) for c, s in sizes]
        )
        self.classifier = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.convs(x).mean((2, 3)))


@pytest.mark.parametrize("product", [True, False])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_strided_convolutions_in_half_precision_keep_no_number_apart(
    mode: str, product: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchedConv2d, "_product_is_faster", lambda self, x: product)
    model = Strided(mode)
    x = torch.randn(RECORDS, 3, 31, 31, generator=torch.Generator().manual_seed(0)).bfloat16()
    apart(Case(spread(model)), {"x": x}, torch.bfloat16)


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
    """A straight-through layer: it has a gradient, but its output never changes."""

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
    """A forward pass that does not pass on its weights."""
    model = nn.Linear(4, CLASSES)
    space = space_of(trainable(model))
    ready = PerSample(model, space, lambda m, w, x: m(x["x"]).requires_grad_(), CLASSIFY)
    with pytest.raises(DpfedError, match="weight has no gradient"):
        check_gradients(
            ready,
            torch.zeros(space.size),
            {"x": torch.randn(RECORDS, 4)},
            CLASSES,
            torch.Generator(),
        )


# ---- bitwise isolation in passes of one shape


def mixes(case: Case, inputs: dict[str, Tensor]) -> bool:
    return records_mix(case.ready, case.theta, inputs, CLASSES, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", MODELS)
def test_plain_models_do_not_mix_records(name: str, train: str) -> None:
    build, make = MODELS[name]
    assert not mixes(Case(adapted(build(), train)), make(RECORDS))


def stop_at_outliers(y: Tensor) -> Tensor:
    if y.detach().abs().max() > 0.999:
        raise ValueError("an outlier")
    return y


@pytest.mark.parametrize(
    "mix",
    [
        lambda y: y + ((y * 1e6 / y.abs().max()).round() * y.abs().max() / 1e6 - y).detach(),
        lambda y: torch.where(y.detach().abs().amax(0) > 0.9, y * (1 + 1e-6), y),
        stop_at_outliers,
    ],
    ids=["scale-of-the-pass", "outlier-columns", "an-error"],
)
def test_quantised_activations_mix_records(mix: Callable[[Tensor], Tensor]) -> None:
    """The differences are below the tolerance of the other checks."""

    class Quantised(Base):
        def between(self, y: Tensor) -> Tensor:
            return mix(y)

    x = 0.1 * torch.randn(RECORDS, 4, generator=torch.Generator().manual_seed(0))
    case = Case(spread(Quantised()))
    check(case, {"x": x})
    assert mixes(case, {"x": x})
