"""Decoders of transformers in tiny configurations, without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from text_case import gpt2, llama, mistral
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TEXT: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 12, "pad_token_id": 0,
}  # fmt: skip


GROUPED: dict[str, Any] = {
    **TEXT, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def neox() -> nn.Module:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**TEXT, attention_dropout=0.0, hidden_dropout=0.0))


def smollm() -> nn.Module:
    """Return a Llama with tied embeddings and one key head, as in SmolLM."""
    sizes = {**TEXT, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))


def qwen2() -> nn.Module:
    return Qwen2ForCausalLM(Qwen2Config(**TEXT, num_key_value_heads=1))


def qwen3() -> nn.Module:
    """The heads are wider than their share of the hidden size."""
    return Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=6))


def gemma2() -> nn.Module:
    """Return a Gemma 2 whose first layer sees two tokens, with caps on scores and logits."""
    sizes = {**GROUPED, "num_hidden_layers": 2, "head_dim": 6}
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **caps, sliding_window=2))


def gemma3() -> nn.Module:
    """Return a Gemma 3 with a layer that sees two tokens and a layer that sees all."""
    sizes = {**GROUPED, "num_hidden_layers": 2, "head_dim": 6}
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=layers, sliding_window=2))


def phi3() -> nn.Module:
    return Phi3ForCausalLM(Phi3Config(**GROUPED))


def mixtral() -> nn.Module:
    config = MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config)


def olmo2() -> nn.Module:
    return Olmo2ForCausalLM(Olmo2Config(**GROUPED))


def qwen3_moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**GROUPED, **experts, head_dim=4))


DECODERS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "smollm": smollm,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
    "gpt2": gpt2,
    "gpt_neox": neox,
    "olmo2": olmo2,
}
MIXTURES = ("mixtral", "qwen3_moe")
