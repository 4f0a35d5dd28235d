"""Small runs of text models: tokenizer, loss and scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from dpfed.config import build
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError
from dpfed.registry import registry
from dpfed.training.evaluation import evaluate
from dpfed.training.job.data import spec_of, tokenised
from dpfed.training.job.job import prepare
from dpfed.training.run import run

WORDS = ["[PAD]", "[UNK]", "good", "bad", "film", "so"]


def folder_of(folder: Path, model: Any) -> str:
    model.save_pretrained(folder)
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    return str(folder)


def bert(folder: Path) -> str:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    return folder_of(
        folder,
        BertForSequenceClassification(BertConfig(vocab_size=6, max_position_embeddings=8, **sizes)),
    )


def gpt2(folder: Path) -> str:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=6, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return folder_of(folder, GPT2LMHeadModel(config))


def texts(labelled: bool) -> Source:
    train = np.array(
        ["good film", "bad film", "so good", "so bad", "good good so film", "bad bad"] * 4,
        dtype=object,
    )
    labels = (
        np.array(["bad" in t for t in train], dtype=np.int64)
        if labelled
        else np.zeros(len(train), dtype=np.int64)
    )
    classes = ("good", "bad") if labelled else ("text",)
    table = Table({"text": train}, labels)
    return Source(table, Table({"text": train[:6]}, labels[:6]), classes, kind="text")


def config_of(name: str, weights: str, **privacy: Any) -> Any:
    tables = {
        "data": {"clients": 2, "partition": "iid"},
        "model": {"name": name, "weights": weights, "max_length": 5, "lora": {"r": 2}},
        "algorithm": {"name": "dp-fedadamw", "lr": 0.02},
        "privacy": {"batch": 6.0, "sigma": 1.0, **privacy},
        "run": {"rounds": 2, "local_steps": 2, "participation": 1.0, "device": "cpu"},
    }
    return build(tables, registry())


def test_a_text_classifier_runs(tmp_path: Path) -> None:
    config = config_of("auto-text", bert(tmp_path / "model"))
    result = run(config, tmp_path / "out", source=texts(labelled=True))
    # A head of zeros answers class 0.
    assert result["start_accuracy"] == pytest.approx(0.5)
    assert 0 <= result["test_accuracy"] <= 1
    assert result["epsilon"]["server_worst"] > 0


def test_a_text_classifier_learns_without_noise(tmp_path: Path) -> None:
    """The classes differ in one word, and training starts from random weights."""
    config = config_of("auto-text", bert(tmp_path / "model"), enabled=False, batch=12.0)
    run_keys = replace(config.run, rounds=6, local_steps=10, lr_schedule="constant")
    config = replace(
        config,
        model=replace(config.model, train="full"),
        algorithm=replace(config.algorithm, lr=0.01, gamma=0.0),
        run=run_keys,
    )
    assert run(config, tmp_path / "out", source=texts(labelled=True))["test_accuracy"] > 0.9


def test_a_language_model_runs_and_is_scored_by_its_tokens(tmp_path: Path) -> None:
    config = config_of("auto-causal", gpt2(tmp_path / "model"))
    job = prepare(config, texts(labelled=False))
    accuracy, loss = evaluate(job, job.theta)
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "model").eval()
    losses, right, targets = [], [], []
    for text in texts(labelled=False).test.inputs["text"]:
        ids = torch.tensor([[WORDS.index(w) for w in text.split()]])
        with torch.no_grad():
            out = model(input_ids=ids, labels=ids)
        losses.append(float(out.loss))
        right.append(float((out.logits[0, :-1].argmax(-1) == ids[0, 1:]).float().mean()))
        targets.append(ids.shape[1] - 1)
    # Scores are means over target tokens, not over records.
    assert loss == pytest.approx(np.average(losses, weights=targets), rel=1e-5)
    assert accuracy == pytest.approx(np.average(right, weights=targets), abs=1e-6)
    result = run(config, tmp_path / "out", source=texts(labelled=False))
    # The weights have changed.
    assert result["test_loss"] != pytest.approx(loss, rel=1e-4)


def test_text_is_tokenised_once_with_a_known_shape(tmp_path: Path) -> None:
    section = config_of("auto-text", bert(tmp_path)).model
    source = texts(labelled=True)
    coded = tokenised(section, source)
    assert coded.train.inputs["input_ids"].shape == (24, 5)
    assert coded.test.inputs["attention_mask"][0].tolist() == [1, 1, 0, 0, 0]
    assert tokenised(section, coded) is coded
    assert spec_of(source, section) == spec_of(coded, section)


def test_tokens_are_cached_by_data_and_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFED_CACHE", str(tmp_path / "cache"))
    section = config_of("auto-text", bert(tmp_path / "model")).model
    source = replace(texts(labelled=True), fingerprint="these texts")
    calls: list[int] = []
    encode = type(section).encode
    monkeypatch.setattr(type(section), "encode", lambda *given: calls.append(1) or encode(*given))
    first, again = tokenised(section, source), tokenised(section, source)
    # Each of the two tables once.
    assert len(calls) == 2
    assert np.array_equal(first.train.inputs["input_ids"], again.train.inputs["input_ids"])
    assert first.test.inputs["input_ids"].shape == (6, 5)
    tokenised(replace(section, max_length=6), source)
    tokenised(section, replace(source, fingerprint="others"))
    assert len(calls) == 6


def test_text_with_an_image_model_is_refused(tmp_path: Path) -> None:
    config = build({"privacy": {"batch": 4.0, "sigma": 1.0}}, registry())
    with pytest.raises(DpfedError, match="'glyph-vit' does not read text: choose a language model"):
        prepare(config, texts(labelled=True))
