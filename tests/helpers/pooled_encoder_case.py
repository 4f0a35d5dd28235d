"""Cases that several tests share: pooled encoder."""

from __future__ import annotations

from pathlib import Path

from export_case import SIZES, TEXT, base
from pooling_case import state_pooling
from transformers import BertConfig, BertModel


def encoder(folder: Path) -> str:
    """A tiny BERT with dropout, its tokenizer, and the pooling that its folder states."""
    base("bert", folder)
    BertModel(BertConfig(**TEXT, **SIZES)).save_pretrained(folder)
    return state_pooling(folder, None, "Normalize")
