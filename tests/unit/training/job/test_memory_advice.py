"""A device that is too small ends in one sentence that names what would fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_case import chat, chat_model

from dpfed.config import Config, build, load
from dpfed.data.sources.in_memory import source_of
from dpfed.errors import DpfedError
from dpfed.model.per_sample.gradients import PerSample
from dpfed.registry import registry
from dpfed.training.job.job import prepare
from dpfed.training.job.memory_advice import caused_by_memory, less_memory_advice

CHATS = [{"messages": chat("a b", "c")}] * 8


def config_of(folder: str, run: dict[str, Any] | None = None, **model: Any) -> Config:
    tables = {
        "data": {"clients": 2, "partition": "iid"},
        "model": {"name": "auto-text", "weights": folder, "max_length": 14, **model},
        "privacy": {"batch": 4.0, "sigma": 1.0},
        "run": {"rounds": 1, "local_steps": 1, "device": "cpu", **(run or {})},
    }
    return build(tables, registry())


def test_only_settings_that_are_left_are_named(tmp_path: Path) -> None:
    folder = chat_model(tmp_path)
    last = "or a smaller model or another run.device"
    assert less_memory_advice(config_of(folder)) == (
        'take a model.max_length below 14, run.precision = "bf16", '
        f'model.gradient_checkpointing = true, model.quantize = "4bit", {last}'
    )
    less = {"gradient_checkpointing": True, "quantize": "4bit"}
    assert less_memory_advice(config_of(folder, {"precision": "bf16"}, **less)) == (
        f"take a model.max_length below 14, {last}"
    )
    assert 'model.train = "lora"' in less_memory_advice(config_of(folder, train="full"))
    assert "4bit" not in less_memory_advice(config_of(folder, train="full"))
    digits = load(
        "digits",
        ("run.precision=bf16", "model.gradient_checkpointing=true", "privacy.sigma=1"),
        registry(),
    )
    assert less_memory_advice(digits) == "take a smaller model or another run.device"


@pytest.mark.parametrize("place", ["to", "raw_grads", "scores"])
def test_a_model_that_does_not_fit_is_refused_in_a_sentence(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends in a conversion, in the check of gradients or in an evaluation."""

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    config = config_of(chat_model(tmp_path))
    monkeypatch.setattr(PerSample, place, full)
    with pytest.raises(DpfedError) as caught:
        prepare(config, source_of(CHATS, CHATS[:2]))
    assert str(caught.value).startswith(
        "LlamaForCausalLM does not fit into the memory of cpu: take a model.max_length below 14, "
    )
    assert "\n" not in str(caught.value)


def test_other_errors_keep_their_own_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        raise ValueError("shapes differ")

    monkeypatch.setattr(PerSample, "raw_grads", wrong)
    with pytest.raises(DpfedError, match=r"cannot be computed .*shapes differ"):
        prepare(config_of(chat_model(tmp_path)), source_of(CHATS, CHATS[:2]))


def test_causes_are_followed() -> None:
    error = DpfedError("a layer fails")
    assert not caused_by_memory(error)
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert caused_by_memory(error)
