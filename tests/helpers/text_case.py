"""Small text models without dropout."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

SMALL: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12,
}  # fmt: skip


QUIET: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**SMALL, **QUIET, max_position_embeddings=10))


def roberta() -> nn.Module:
    return RobertaForSequenceClassification(
        RobertaConfig(**SMALL, **QUIET, max_position_embeddings=10)
    )


def distilbert() -> nn.Module:
    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=20, dim=8, n_layers=2, n_heads=2, hidden_dim=12, max_position_embeddings=10,
            dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
        )
    )  # fmt: skip


def gpt2(cls: type[nn.Module] = GPT2LMHeadModel) -> nn.Module:
    return cls(
        GPT2Config(
            vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=10, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, eos_token_id=0, bos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


def llama() -> nn.Module:
    """Return a Llama whose four query heads share two key and value heads."""
    sizes = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=10, pad_token_id=0))


def mistral() -> nn.Module:
    """Return a Mistral whose sliding window is shorter than a record, so it needs its own mask."""
    sizes = {**SMALL, "num_key_value_heads": 1}
    return MistralForCausalLM(
        MistralConfig(**sizes, max_position_embeddings=10, sliding_window=2, pad_token_id=0)
    )
