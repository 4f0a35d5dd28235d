"""At a fixed place, gradients and scores are bitwise independent of the other places' contents."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_case import DECODERS, MIXTURES
from gradient_case import CLASSES, TRAIN, Case, adapted, spread, swin, vit
from torch import Tensor, nn
from zoo_case import ZooCase, save, text_spec, with_train

from dpfed.model.per_sample.gradients import PerSample, has_experts
from dpfed.model.per_sample.places import (
    CHOICES,
    expected_passes,
    failing_part,
    operations,
    places_for,
    same_bits,
    settle_places,
)
from dpfed.model.task import InputSpec
from dpfed.model.zoo.text import AutoCausal

FEATURES = InputSpec("features", "x", (4,), CLASSES)
IMAGES = InputSpec("image", "pixel_values", (1, 8, 8), CLASSES)


# Here the window is shorter than a record, so transformers gets a 2-D mask. It then chooses another
# kernel if no record of the pass has padding.
CHOOSE_BY_PADDING = ("gemma3",)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def fails(
    model: PerSample, theta: Tensor, spec: InputSpec, places: int = 4, augmentations: int = 1
) -> str | None:
    return failing_part(model, theta, spec, (places, augmentations), generator())


class Pixels(nn.Module):
    """A model that takes the bytes of an image as numbers, as `Built.prepare` does in a run."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.inner(pixel_values.to(self.dtype) / 255)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def image_case(inner: nn.Module) -> Case:
    return Case(spread(Pixels(inner)))


class Flat(nn.Module):
    """An image as rows of 8 numbers, or as 64 token ids below 16."""

    def __init__(self, as_ids: bool, *layers: nn.Module) -> None:
        super().__init__()
        self.as_ids = as_ids
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = (x * 255).long().flatten(1) % 16 if self.as_ids else x.flatten(0, 1).flatten(1)
        if not self.as_ids:
            x = x.view(-1, 8, 8)
        return self.head(self.layers(x).mean(1))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True)


LAYERS: dict[str, Any] = {
    "linear and norm": lambda: Flat(False, nn.Linear(8, 9), nn.LayerNorm(9), nn.Linear(9, 8)),
    "embedding": lambda: Flat(True, nn.Embedding(16, 8, padding_idx=0)),
    "attention and dropout, by vmap": lambda: Flat(False, attention()),
    "convolutions with groups": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Conv2d(4, 4, 3, groups=2, dilation=2),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    ),
    "convolution as a product": lambda: nn.Sequential(
        nn.Conv2d(1, 128, 2, stride=2),
        nn.Conv2d(128, 128, 1),
        nn.Conv2d(128, 128, 2, stride=2),
        nn.Flatten(),
        nn.Linear(512, CLASSES),
    ),
    "padding by reflection": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(256, CLASSES),
    ),
    "dropout": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 9), nn.Dropout(0.3), nn.Tanh(), nn.Linear(9, CLASSES)
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_batched_layer_isolates_its_places(name: str, dtype: torch.dtype) -> None:
    case = image_case(LAYERS[name]())
    case.ready.to(dtype)
    for places in (2, 8):
        assert fails(case.ready, case.theta, IMAGES, places) is None
    assert fails(case.ready, case.theta, IMAGES, 4, augmentations=3) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", ["swin", "vit"])
def test_attention_of_images_and_lora_isolate_places(
    name: str, train: str, dtype: torch.dtype
) -> None:
    side = {"swin": 16, "vit": 8}[name]
    inner = {"swin": swin, "vit": vit}[name]()
    case = Case(spread(Wrapped(adapted(inner, train))))
    case.ready.to(dtype)
    assert (
        fails(case.ready, case.theta, InputSpec("image", "pixel_values", (1, side, side), 3))
        is None
    )


class Wrapped(Pixels):
    def forward(self, pixel_values: Tensor) -> Tensor:
        logits: Tensor = self.inner(pixel_values=pixel_values.to(self.dtype) / 255).logits
        return logits


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_isolate_places_and_mixtures_of_experts_are_computed_alone(
    name: str, tmp_path: Path
) -> None:
    section = AutoCausal(weights=save(DECODERS[name](), tmp_path), max_length=8)
    case = ZooCase(with_train(section, "lora"), text_spec(classes=1))
    settle_places(case.ready, case.theta, case.spec, 1, 512, generator())
    assert has_experts(case.ready.model) == (name in MIXTURES)
    if name in MIXTURES:
        assert case.ready.places == 1
        assert "mixes the records of a pass" in str(case.ready.alone)
    elif name in CHOOSE_BY_PADDING:
        assert case.ready.places == 1
        assert "with the records at other" in str(case.ready.alone)
    else:
        assert case.ready.places > 1
        assert case.ready.alone is None


class Mixing(nn.Module):
    """Two linear layers with a function between them that sees all records."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.classifier = nn.Linear(5, CLASSES)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(self.between(torch.tanh(self.first(x))))
        return y


def in_two_ways(y: Tensor) -> Tensor:
    """Equal numbers for every record, but other rounding if any number of the pass is large."""
    return y * 3.3 if bool(y.abs().max() > 0.9) else y * 1.1 * 3


BROKEN = {
    "the records' mean": lambda y: y - 1e-7 * y.mean(0),
    "a scale of the whole pass": lambda y: (y / y.abs().max()) * y.abs().max(),
    "a choice for the whole pass": in_two_ways,
    "a sum with zero times the others": lambda y: y + 0 * y.sum(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_mixes_places_is_computed_one_record_at_a_time(name: str) -> None:
    case = Case(spread(Mixing(BROKEN[name])))
    settle_places(case.ready, case.theta, FEATURES, 1, 512, generator())
    assert case.ready.places == 1
    assert "at one place with the records at other" in str(case.ready.alone)


def test_a_model_that_stops_at_huge_numbers_is_computed_one_record_at_a_time() -> None:
    def refuse(y: Tensor) -> Tensor:
        if not bool(y.isfinite().all()):
            raise ValueError
        return y

    case = Case(spread(Mixing(refuse)))
    settle_places(case.ready, case.theta, FEATURES, 1, 512, generator())
    assert (case.ready.places, "ValueError" in str(case.ready.alone)) == (1, True)


def test_a_pass_of_one_client_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of one theta share their memory, so other kernels may compute them."""
    plain = PerSample.grads

    def mixed_for_one(self: PerSample, theta: Tensor, *rest: Any) -> list[Tensor]:
        grads = plain(self, theta, *rest)
        return [g + g.mean(0) for g in grads] if len(theta) == 1 else grads

    monkeypatch.setattr(PerSample, "grads", mixed_for_one)
    case = Case(spread(Mixing(lambda y: y)))
    settle_places(case.ready, case.theta, FEATURES, 1, 512, generator())
    assert case.ready.places == 1


class AnyPadding(nn.Module):
    """Without padding another formula runs, as in transformers with a 2-D mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, real = self.table(input_ids.long()), attention_mask.unsqueeze(-1)
        mean = x.mean(1) if bool(real.all()) else (x * real / real.sum(1, keepdim=True)).sum(1)
        scores: Tensor = self.classifier(mean)
        return scores


def test_the_padding_of_other_records_is_tested() -> None:
    case = Case(spread(AnyPadding()))
    settle_places(case.ready, case.theta, text_spec(12, CLASSES), 1, 512, generator())
    assert case.ready.places == 1


def test_the_number_of_places_follows_from_the_cost_of_a_record() -> None:
    case = Case(spread(Mixing(lambda y: y)))
    assert operations(case.ready, case.theta, FEATURES, generator()) == 2 * (4 * 5 + 5 * CLASSES)
    small, vit_small, large = (places_for(cost, "cpu") for cost in (5e6, 3.6e8, 2e10))
    assert small > vit_small >= large > 1
    assert {small, vit_small, large} <= set(CHOICES)
    assert places_for(2e10, "cuda") > large
    settle_places(case.ready, case.theta, FEATURES, 3, 13, generator())
    assert case.ready.places == 4, "4 places of 3 rows are 12"
    settle_places(case.ready, case.theta, FEATURES, 3, 2, generator())
    assert (case.ready.places, case.ready.alone) == (1, None)


def test_expected_passes_are_the_mean_load_of_the_fullest_place() -> None:
    draws = torch.poisson(torch.full((20_000, 4), 16 / 4), generator=generator())
    assert expected_passes(16, 4) == pytest.approx(float(draws.amax(1).mean()), rel=0.02)
    assert expected_passes(16, 1) == pytest.approx(16, rel=1e-9)


def test_numbers_that_are_not_finite_equal_one_another_only() -> None:
    one = torch.tensor([1.0, math.nan, math.inf])
    assert same_bits(one, torch.tensor([1.0, math.inf, math.nan]))
    assert not same_bits(one, torch.tensor([1.0, 2.0, math.nan]))
    assert not same_bits(one, torch.tensor([1.0 + 2**-23, math.nan, math.nan]))
