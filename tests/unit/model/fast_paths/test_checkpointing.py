"""Checkpointed layers give bitwise the same gradients and need less memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_case import DECODERS, GROUPED
from gradient_case import MODELS, TRAIN, Case, adapted, labels_of
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from zoo_case import ZooCase, alone_causal, save, text_spec, tokens_of, with_train

from dpfed.bench.peak_memory import peak_bytes
from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.model.fast_paths.checkpointing import checkpoint_layers
from dpfed.model.zoo.text import AutoCausal
from dpfed.privacy.clipping import Clipping
from dpfed.privacy.fixed_shape_sum import FixedSum, Pass, PassShape
from dpfed.privacy.record_batch import Records
from dpfed.registry import registry
from dpfed.training.job.job import prepare

CLIENT = torch.tensor([0, 1, 1, 0])
KEYS = torch.tensor([5, 6, 7, 8])
DEEP: dict[str, Any] = {**GROUPED, "num_hidden_layers": 4}


def deep_llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**DEEP))


def with_and_without(case: Case | ZooCase, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of all records `[M, P]` before and after `checkpoint`."""
    theta = case.rows(2)
    want = torch.cat(case.ready.grads(theta, CLIENT, *arguments), 1)
    case.ready.checkpoint()
    return torch.cat(case.ready.grads(theta, CLIENT, *arguments), 1), want


@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bitwise_equal(name: str, train: str) -> None:
    make, inputs = MODELS[name]
    case = Case(adapted(make(), train))
    got, want = with_and_without(case, inputs(4), labels_of(4))
    assert torch.equal(got, want)


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize("name", ["smollm", "gemma3", "gpt2", "qwen3_moe"])
def test_decoders_are_bitwise_equal_and_equal_the_loop(
    name: str, train: str, tmp_path: Path
) -> None:
    make = {**DECODERS, "qwen3_moe": qwen3_moe}[name]
    section = AutoCausal(weights=save(make(), tmp_path), max_length=8)
    case = ZooCase(with_train(section, train), text_spec(classes=1))
    inputs, labels = tokens_of(4, 8, 20, 0), torch.zeros(4, dtype=torch.int64)
    got, want = with_and_without(case, inputs, labels)
    assert torch.equal(got, want)
    case.check(inputs, labels, alone_causal)
    case.alive()


def qwen3_moe() -> nn.Module:
    """The helper's model has a single layer."""
    model: Any = DECODERS["qwen3_moe"]()
    model.config.num_hidden_layers = 2
    return type(model)(model.config)


@pytest.mark.parametrize("train", TRAIN)
def test_the_second_computation_draws_the_same_dropout(train: str) -> None:
    make, inputs = MODELS["bert"]
    case = Case(adapted(make(hidden_dropout_prob=0.4), train, dropout=0.3))
    assert case.ready.has_dropout
    got, want = with_and_without(case, inputs(4), labels_of(4), KEYS)
    without_dropout = case.ready.grads(case.rows(2), CLIENT, inputs(4), labels_of(4))
    assert torch.equal(got, want)
    assert not torch.allclose(got, torch.cat(without_dropout, 1))


def test_passes_of_a_fixed_shape_are_bitwise_equal() -> None:
    make, inputs = MODELS["bert"]
    case = Case(adapted(make(hidden_dropout_prob=0.4), "lora"))
    theta, zeros = case.rows(2), torch.zeros(4, dtype=torch.int64)
    filling = Pass.of(torch.arange(4), CLIENT, torch.tensor([1, 1, 0, 1]), KEYS, zeros)
    shape = PassShape(2, 4, case.space.size)
    records = Records(inputs(4), labels_of(4))
    before = FixedSum(case.ready, records, Clipping(), None, shape)(theta, filling, 0.1)
    case.ready.checkpoint()
    after = FixedSum(case.ready, records, Clipping(), None, shape)(theta, filling, 0.1)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("train", ["full", "lora"])
def test_memory_falls(train: str, tmp_path: Path) -> None:
    section = AutoCausal(weights=save(deep_llama(), tmp_path), max_length=12)
    case = ZooCase(with_train(section, train, r=1), text_spec(12, classes=1))
    inputs, labels = tokens_of(12, 12, 20, 0), torch.zeros(12, dtype=torch.int64)
    theta, client = case.rows(1), torch.zeros(12, dtype=torch.int64)

    def activations() -> int:
        """Return the peak without the records' weights and gradients, in bytes."""
        fixed = 2 * 12 * case.space.size * 4
        return peak_bytes(lambda: case.ready.grads(theta, client, inputs, labels)) - fixed

    before = activations()
    case.ready.checkpoint()
    assert activations() < 0.5 * before


def test_evaluation_does_not_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    make, inputs = MODELS["bert"]
    case = Case(adapted(make(), "lora"))
    want = case.ready.scores(case.theta, inputs(4))
    case.ready.checkpoint()
    monkeypatch.setattr("dpfed.model.fast_paths.checkpointing.checkpoint", None)
    assert torch.equal(case.ready.scores(case.theta, inputs(4)), want)


def test_a_model_without_repeated_layers_is_refused() -> None:
    with pytest.raises(DpfedError, match="needs repeated layers, and Sequential has none"):
        checkpoint_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_the_key_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("digits", ("run.device=cpu", "privacy.sigma=1"), registry())
    on = replace(config, model=replace(config.model, gradient_checkpointing=True))
    kinds = [{type(m).__name__ for m in prepare(c).model.model.modules()} for c in (config, on)]
    assert not any(name.startswith("Checkpointed") for name in kinds[0])
    assert any(name.startswith("Checkpointed") for name in kinds[1])


def test_the_compiler_checkpoints_compiled_layers() -> None:
    """Compiled layers save fewer bytes for the backward pass, and give equal gradients."""
    make, inputs = MODELS["bert"]
    saved = []
    for checkpoints in (False, True):
        case = Case(adapted(make(hidden_dropout_prob=0.4), "lora"))
        arguments = case.rows(2), CLIENT, inputs(4), labels_of(4), KEYS
        want = torch.cat(case.ready.grads(*arguments), 1)
        if checkpoints:
            case.ready.checkpoint()
        case.ready.compile(backend="aot_eager_decomp_partition")
        saved.append(0)

        def count(x: Tensor) -> Tensor:
            saved[-1] += x.numel() * x.element_size()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            got = torch.cat(case.ready.grads(*arguments), 1)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert saved[1] < 0.6 * saved[0]
