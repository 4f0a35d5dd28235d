"""Runs of a sentence encoder: features, older run folders, and the defaults of `fine_tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from export_case import base, settings, texts
from pooled_encoder_case import encoder
from safetensors.torch import load_file

import dpfed
from dpfed.config import Config, load
from dpfed.registry import registry
from dpfed.training.export import read_run
from dpfed.training.job.frozen_features import NOTE
from dpfed.training.job.job import prepare
from dpfed.training.run import run


def config_of(folder: Path, model: dict[str, Any] | None = None, **changes: Any) -> Config:
    section = {"name": "auto-text", "weights": str(folder), "max_length": 5, "train": "head"}
    return settings({**section, **(model or {})}, **changes)


def test_features_do_not_change_the_trained_head(tmp_path: Path) -> None:
    encoder(tmp_path / "base")
    found = []
    for features in (True, False):
        config = config_of(tmp_path / "base", run={"features": features})
        assert (NOTE in prepare(config, texts()).notes) is features
        run(config, tmp_path / str(features), source=texts())
        found.append(load_file(tmp_path / str(features) / "model.safetensors"))
    assert found[0].keys() == {"classifier.weight", "classifier.bias"}
    for name, value in found[0].items():
        assert value.abs().max() > 0.01
        torch.testing.assert_close(value, found[1][name], rtol=0, atol=1e-6)


def test_features_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    folder = encoder(tmp_path)
    job = prepare(config_of(tmp_path, run={"features": True}), texts())
    words = [str(text) for text in texts().train.inputs["text"]]
    want = torch.tensor(library.SentenceTransformer(folder, device="cpu").encode(words))
    torch.testing.assert_close(
        job.private.records.inputs["features"], want * 8**0.5, rtol=1e-5, atol=1e-5
    )


def test_an_older_run_folder_keeps_the_models_own_head(tmp_path: Path) -> None:
    """The old head has the shape of the new one, so a mix-up would raise no error."""
    encoder(tmp_path / "base")
    config = config_of(tmp_path / "base", {"pooling": "none"})
    run(config, tmp_path / "run", source=texts())
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace('pooling = "none"\n', ""))
    assert type(read_run(tmp_path / "run").parts.adapted.model).__name__.startswith("BertFor")
    assert pooling_in(path) is None
    path.rename(tmp_path / "config.toml")
    assert pooling_in(tmp_path / "config.toml") == "auto"


def pooling_in(path: Path) -> Any:
    section: Any = load(path, [], registry()).model
    return section.pooling


def test_an_older_run_resumes(tmp_path: Path) -> None:
    encoder(tmp_path / "base")
    limits = {"lr_schedule": "constant", "checkpoint_every": 1}
    config = config_of(tmp_path / "base", {"pooling": None}, run=limits)
    run(config, tmp_path / "run", source=texts())
    path = tmp_path / "run" / "config.toml"
    assert "pooling" not in path.read_text()
    longer = load(path, ["run.rounds=3"], registry())
    assert run(longer, tmp_path / "run", source=texts(), mode="resume")["rounds"] == 3


# ---- the defaults of fine_tune


def tuned(folder: Path, out: Path, epsilon: float | None = 8.0, **given: Any) -> Config:
    """Return the configuration of a short run."""
    data = texts()
    tables = (data.train, data.test)
    train, test = ({"text": list(t.inputs["text"]), "label": t.labels} for t in tables)
    short = {"run.rounds": 1, "run.local_steps": 1, "model.max_length": 5, "privacy.batch": 4}
    dpfed.fine_tune(
        str(folder), train, test, clients=2, epsilon=epsilon, classes=["good", "bad"],
        settings={**short, **given}, out=out, progress=False,
    )  # fmt: skip
    return load(out / "config.toml", [], registry())


def test_fine_tune_trains_the_head_of_a_sentence_encoder(tmp_path: Path) -> None:
    encoder(tmp_path / "base")
    config = tuned(tmp_path / "base", tmp_path / "one")
    assert (config.model.train, config.algorithm.lr) == ("head", 0.112)
    config = tuned(tmp_path / "base", tmp_path / "two", **{"algorithm.lr": 0.5})
    assert (config.model.train, config.algorithm.lr) == ("head", 0.5)
    config = tuned(tmp_path / "base", tmp_path / "three", **{"model.train": "lora"})
    assert (config.model.train, config.algorithm.lr) == ("lora", 0.0448)
    plain = {"privacy.enabled": False}
    config = tuned(tmp_path / "base", tmp_path / "four", None, **plain)
    assert (config.model.train, config.algorithm.lr) == ("head", 1e-3)
    other = {"algorithm.name": "dp-fedavg"}
    config = tuned(tmp_path / "base", tmp_path / "five", **other)
    assert config.algorithm.lr == registry().algorithm["dp-fedavg"]().lr


def test_fine_tune_trains_adapters_of_other_models(tmp_path: Path) -> None:
    base("bert", tmp_path / "base")
    config = tuned(tmp_path / "base", tmp_path / "out")
    assert (config.model.train, config.algorithm.lr) == ("lora", 0.0448)
