"""Small Llamas with quantised weights, wide enough for blocks of 64 numbers with one scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from zoo_case import spread_weights

LIBRARY = {"int8": "torchao", "4bit": "bitsandbytes"}


def need(how: str) -> str:
    """Skip the test if the library of this quantisation is not installed."""
    pytest.importorskip(LIBRARY[how], exc_type=ImportError)
    return how


def wide_llama(positions: int = 12) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=128, max_position_embeddings=positions,
            pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def saved_llama(folder: Path) -> str:
    model: nn.Module = spread_weights(wide_llama())
    model.save_pretrained(folder)  # type: ignore[operator]
    return str(folder)
