"""Common decoders against a plain loop over single unpadded records: gradients, targets, blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_case import DECODERS, MIXTURES
from zoo_case import ZooCase, alone_causal, save, text_spec, tokens_of, with_train

from dpfed.model.build import describe_space
from dpfed.model.per_sample.isolation_check import RECORDS, records_mix
from dpfed.model.zoo.text import AutoCausal

LABELS = torch.zeros(4, dtype=torch.int64)
# The layers that get an adapter by default.
SEPARATE = {"q_proj", "k_proj", "v_proj", "o_proj"}
GATED = {"gate_proj", "up_proj", "down_proj"}
TARGETS = {
    **dict.fromkeys(DECODERS, SEPARATE | GATED),
    **dict.fromkeys(MIXTURES, SEPARATE),
    "phi3": {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "gpt_neox": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
}


def case_of(name: str, train: str, folder: Path, **keys: Any) -> ZooCase:
    section = AutoCausal(weights=save(DECODERS[name](), folder), max_length=8)
    return ZooCase(with_train(section, train, **keys), text_spec(classes=1))


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("name", DECODERS)
def test_gradients_equal_the_unpadded_loop(name: str, train: str, tmp_path: Path) -> None:
    """Also where experts compute the tokens of all records at once."""
    case = case_of(name, train, tmp_path)
    for count in (1, 4):
        case.check(tokens_of(count, 8, 20, 0), LABELS[:count], alone_causal)
    case.alive()
    assert case.ready.shares_passes == (name not in MIXTURES)
    if case.ready.shares_passes:
        generator = torch.Generator().manual_seed(0)
        records = case.spec.synthetic(RECORDS, generator)
        assert not records_mix(case.ready, case.theta, records, case.spec.classes, generator)


@pytest.mark.parametrize("name", DECODERS)
def test_default_targets(name: str, tmp_path: Path) -> None:
    section = AutoCausal(weights=save(DECODERS[name](), tmp_path), max_length=8)
    names = describe_space(with_train(section, "lora"), text_spec(classes=1)).space.names
    assert {n.split(".lora_")[0].rpartition(".")[2] for n in names} == TARGETS[name]
    assert all(".lora_" in n for n in names), "a decoder has no head of its own"


def test_heads_of_an_adapter_of_conv1d(tmp_path: Path) -> None:
    """GPT-2 stores weights as columns, but the rows of LoRA's B are the heads."""
    section = AutoCausal(weights=save(DECODERS["gpt2"](), tmp_path), max_length=8)
    space = describe_space(with_train(section, "lora"), text_spec(classes=1)).space
    at = space.names.index("transformer.h.0.attn.c_attn.lora_B.default.weight")
    blocks = space.blocks[space.slices()[at]].view(24, 2)
    labels = [space.block_names[b] for b in blocks[:, 0].tolist()]
    stem = "transformer.h.0.attn.c_attn.lora_B"
    assert labels == [f"{stem}.{p}.head{h}" for p in "qkv" for h in (0, 1) for _ in range(4)]
    assert (blocks[:, 0] == blocks[:, 1]).all()


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3"])
@pytest.mark.parametrize("length", [2, 3])
def test_a_window_that_holds_a_whole_record_needs_no_mask_of_its_own(
    name: str, length: int, tmp_path: Path
) -> None:
    """The windows hold two tokens."""
    section = AutoCausal(weights=save(DECODERS[name](), tmp_path), max_length=length)
    case = ZooCase(with_train(section, "lora"), text_spec(length, 1))
    mask = case.form(tokens_of(1, length, 20, 0))["attention_mask"]
    assert mask.dim() == (4 if length == 2 else 2)


def test_half_precision_agrees_with_single_precision(tmp_path: Path) -> None:
    """Frozen weights in bfloat16 change a gradient by rounding only."""
    for name in ("llama", "gemma2", "gpt_neox"):
        case = case_of(name, "lora", tmp_path / name)
        inputs, client = tokens_of(4, 8, 20, 0), torch.tensor([0, 1, 1, 0])
        rows = case.rows(2)
        want = torch.cat(case.ready.grads(rows, client, inputs, LABELS), 1)
        case.ready.to(torch.bfloat16)
        got = torch.cat(case.ready.grads(rows, client, inputs, LABELS), 1).float()
        cosine = torch.nn.functional.cosine_similarity(got, want, dim=1)
        assert (cosine > 0.98).all(), name
