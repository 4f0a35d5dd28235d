"""Llama models with random weights to measure, from tiny (for a CPU) to 8 billion parameters."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpfed.model.task import NEXT_TOKEN, InputSpec
from dpfed.model.zoo.built import Built
from dpfed.model.zoo.pretrained import on_meta
from dpfed.model.zoo.text import AutoCausal
from dpfed.model.zoo.text_inputs import tokens

# Layer sizes of the models to measure: TinyLlama 1.1B, Llama 3 8B, and a small model with the same
# kinds of layers as these.
LLAMAS: dict[str, dict[str, Any]] = {
    "llama-tiny": {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 512,
    },
    "llama-1b": {
        "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 5632,
        "max_position_embeddings": 2048,
    },
    "llama-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "rope_theta": 500000.0,
    },
}  # fmt: skip


def text_of(case: str, length: int) -> InputSpec:
    """Return the input format of the Llama `case` of `LLAMAS`, with `length` tokens per record."""
    return InputSpec("text", "input_ids", (length,), 0, vocabulary=LLAMAS[case]["vocab_size"])


@dataclass(frozen=True)
class RandomLlama(AutoCausal):
    """The `[model]` section of a Llama with random weights.

    case    name of the Llama in `LLAMAS`
    dtype   dtype of the weights before they are quantised
    device  device on which the weights are made; quantised weights are made on the CPU
    """

    weights: str | None = "random"
    case: str = ""
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None

    def build(self, spec: InputSpec) -> Built:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(**LLAMAS[self.case], use_cache=False, pad_token_id=0)
        plain = self.quantize == "none" or on_meta()
        with _default_dtype(self.dtype), self.device if plain and self.device else nullcontext():
            model: nn.Module = LlamaForCausalLM(config)
        if not plain:
            # Save the random weights to files first, because the quantising libraries read weights
            # only from files.
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)  # type: ignore[operator]
                del model
                stored = AutoCausal(weights=folder, quantize=self.quantize)
                return stored.build(spec)
        forms = tokens(model, True, spec.shape[0])
        return Built(model.eval(), (), forms[0], task=NEXT_TOKEN, spec=spec, rows=16, forms=forms)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
