"""Small saved models, small data and short runs for the tests of export and prior spending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

from dpfed.config import Config, build, load
from dpfed.data.tables import Source, Table
from dpfed.registry import registry
from dpfed.training.job.job import prepare
from dpfed.training.run import run

WORDS = ["<pad>", "<unk>", "good", "bad", "film", "so"]
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
TEXT = {"vocab_size": 6, "max_position_embeddings": 12, "pad_token_id": 0}


def base(kind: str, folder: Path) -> str:
    """Save a pretrained model of one layer with a head for other classes."""
    torch.manual_seed(0)
    made: Any = {
        "vit": lambda: ViTForImageClassification(
            ViTConfig(image_size=8, patch_size=4, num_labels=5, **SIZES)
        ),
        "bert": lambda: BertForSequenceClassification(BertConfig(num_labels=5, **TEXT, **SIZES)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=6, n_positions=12, n_embd=8, n_layer=1, n_head=2)
        ),
        "roberta": lambda: RobertaForSequenceClassification(
            RobertaConfig(num_labels=5, **TEXT, **SIZES)
        ),
    }[kind]()
    made.save_pretrained(folder)
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind != "vit":
        PreTrainedTokenizerFast(
            tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>"
        ).save_pretrained(folder)
    return str(folder)


def images(side: int = 8, channels: int = 3) -> Source:
    rng = np.random.default_rng(0)
    labels = np.arange(24) % 3
    x = (rng.integers(0, 80, (24, channels, side, side)) + 80 * labels[:, None, None, None]).astype(
        np.uint8
    )
    train = Table({"pixel_values": x}, labels)
    return Source(
        train, Table({"pixel_values": x[:6]}, labels[:6]), ("red", "green", "blue"), "image"
    )


def texts() -> Source:
    words = np.array(
        ["good film", "bad film", "so good", "so bad", "good good so film", "bad bad"] * 4,
        dtype=object,
    )
    labels = np.array(["bad" in t for t in words], dtype=np.int64)
    test = Table({"text": words[:6]}, labels[:6])
    return Source(Table({"text": words}, labels), test, ("praise", "blame"), "text")


def settings(model: dict[str, Any], **changes: dict[str, Any]) -> Config:
    """Return settings of two clients, with one of them in each of two rounds."""
    tables: dict[str, Any] = {
        "data": {"clients": 2, "partition": "iid"},
        "model": {"lora": {"r": 2}, "liveness": False, **model},
        "algorithm": {"name": "dp-fedadamw", "lr": 0.05},
        "privacy": {"batch": 6.0, "sigma": 1.0},
        "run": {
            "rounds": 2,
            "local_steps": 2,
            "participation": 0.5,
            "device": "cpu",
            "checkpoint_every": 0,
        },
    }
    if changes.get("run", {}).get("noise") == "os":
        # Real noise needs the check.
        tables["model"]["liveness"] = True
    for section, keys in changes.items():
        tables[section] = {k: v for k, v in {**tables[section], **keys}.items() if v is not None}
    return build(tables, registry())


def vit_run(
    tmp: Path, name: str = "run", model: dict[str, Any] | None = None, **changes: dict[str, Any]
) -> Path:
    """Run the small ViT for two rounds."""
    if not (tmp / "base").exists():
        base("vit", tmp / "base")
    weights = {"name": "auto-image", "weights": str(tmp / "base"), **(model or {})}
    run(settings(weights, **changes), tmp / name, source=images())
    return tmp / name


def own_logits(folder: Path, source: Any = None) -> tuple[dict[str, Tensor], Tensor]:
    """Compute the run's own test scores with its trained vector, without the exporter."""
    job = prepare(load(folder / "config.toml", ["run.features=false"], registry()), source)
    stored = load_file(folder / "model.safetensors")
    assert set(stored) == set(job.space.names)
    theta = job.space.flatten(stored)
    inputs, _ = job.public.test.take(torch.arange(len(job.public.test.labels)))
    scores = job.model.scores(theta, inputs)
    # The weights have changed.
    assert not torch.equal(scores, job.model.scores(job.theta, inputs))
    return inputs, scores
