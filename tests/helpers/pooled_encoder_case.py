"""A small sentence encoder with its tokenizer and pooling."""

from __future__ import annotations

from pathlib import Path

from export_case import SIZES, TEXT, base
from pooling_case import state_pooling
from transformers import BertConfig, BertModel


def encoder(folder: Path, layers: int = 1) -> str:
    """Save a tiny BERT with dropout, a tokenizer and pooling files."""
    base("bert", folder)
    shape = {**TEXT, **SIZES, "num_hidden_layers": layers}
    BertModel(BertConfig(**shape)).save_pretrained(folder)
    return state_pooling(folder, None, "Normalize")
