"""Model cards: results, privacy and code of each kind of export."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dpfed.config import Config, load
from dpfed.registry import registry
from dpfed.report.model_card import model_card

RESULT: dict[str, Any] = {
    "input": {"kind": "image"},
    "release": "no privacy",
    "algorithm": "dp-fedavg",
    "clients": 1,
    "rounds": 2,
    "parameters": 650,
    "start_accuracy": 0.1,
    "test_accuracy": 0.5,
}
FILES: Any = SimpleNamespace(has_code=False, model_class=None, notes=("A note.",))


def config(*keys: str) -> Config:
    return load("digits", ["model.name=auto-image", "model.weights=random", *keys], registry())


def card(found: Config, kind: str = "model", files: Any = FILES, **more: Any) -> str:
    return model_card(found, {**RESULT, **more}, None, kind, files)


def test_scores_are_listed() -> None:
    row = {"precision": 0.25, "recall": 0.5, "f1": 0.125, "support": 4}
    metrics = {"accuracy": 0.25, "f1": 0.75, "one_answer": "class 1", "per_class": {"<b>": row}}
    text = card(config(), metrics=metrics)
    assert "- accuracy 0.2500 (before training 0.1000)\n- F1 0.7500\n" in text
    assert "every record is taken for class 1" in text
    assert "| <b> | 0.250 | 0.500 | 0.125 | 4 |" in text
    assert "every record" not in card(config())
    many = {str(i): row for i in range(51)}
    assert "| class |" not in card(config(), metrics={"per_class": many})


def test_a_run_without_an_evaluation_has_no_accuracy() -> None:
    assert "- accuracy" not in card(config(), metrics=None, test_accuracy=None)


def test_a_card_says_that_nothing_is_protected() -> None:
    assert "> **No privacy.**" in card(config())
    assert "None: nothing in this model's training is protected." in card(config())
    assert "> **Not for release.**" in card(config(), release="simulation: not for release")


@pytest.mark.parametrize(("weights", "named"), [("google/vit", True), ("random", False)])
def test_only_hub_names_are_base_models(weights: str, named: bool) -> None:
    text = card(config(f"model.weights={weights}"), "adapter")
    assert (f"base_model: {weights}" in text) is named
    assert "library_name: peft" in text


def test_the_code_of_an_export_names_its_classes() -> None:
    whole = card(config())
    assert 'model = pipeline("image-classification", "this folder")' in whole
    assert whole.endswith("\nA note.\n")
    adapter = card(config("model.weights=google/vit"), "adapter")
    assert (
        "from transformers import AutoConfig, AutoModelForImageClassification, pipeline" in adapter
    )
    files = SimpleNamespace(has_code=True, model_class="own.Model", notes=())
    own = card(config("model.weights=google/vit"), "adapter", files)
    assert 'get_class_from_dynamic_module("own.Model", "this folder")' in own
    assert "base = Model.from_pretrained(base_model, config=config" in own
    assert "trust_remote_code=True" in own


def test_preparation_of_images_is_stated() -> None:
    text = card(config("model.resize=bicubic", "model.sharpen=2"))
    assert "Images are resized bicubically to the size of the model, then sharpened: x + 2" in text
    assert "resized" not in card(config())
