"""A head on all layers of an encoder: its features, a run, the export, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from export_case import images, own_logits, settings, texts
from pooled_encoder_case import encoder
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    ViTConfig,
    ViTModel,
)

from dpfed.config import Config
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError
from dpfed.model.shipped.modeling_layers import EARLIER, layers_of
from dpfed.report.model_card import write_export
from dpfed.training.job.frozen_features import NOTE
from dpfed.training.job.job import prepare
from dpfed.training.layers_model import NORM, LayersModel, write_layers_model
from dpfed.training.run import run

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def text_config(weights: Path, **changes: Any) -> Config:
    model = {"name": "auto-text", "weights": str(weights), "max_length": 5, "train": "head"}
    return settings(model, **changes)


def image_config(weights: Path, **changes: Any) -> Config:
    return settings({"name": "auto-image", "weights": str(weights), "train": "head"}, **changes)


def vit(folder: Path) -> None:
    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 4, "intermediate_size": 8, "initializer_range": 0.5}
    ViTModel(ViTConfig(**SIZES, **shape), add_pooling_layer=False).save_pretrained(folder)


def by_hand(outputs: list[Tensor]) -> Tensor:
    """Return the joined vectors of one record; `outputs` are the layers' tokens, `[1, L, D]`."""
    earlier = (EARLIER / (len(outputs) - 1)) ** 0.5
    parts = []
    for i, tokens in enumerate(outputs):
        x = tokens[0].mean(0)
        x = (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() / len(x) ** 0.5
        parts.append(x if i == len(outputs) - 1 else earlier * x)
    return torch.cat(parts)


def check_features(config: Config, source: Source, wanted: Tensor) -> None:
    """The features of the test records are centred and scaled, and equal `wanted` up to that."""
    job = prepare(config, source)
    assert NOTE in job.notes
    assert any("features of public records" in note for note in job.notes)
    found = job.public.test.inputs["features"]
    torch.testing.assert_close(found.mean(0), torch.zeros(found.shape[1]), atol=1e-4, rtol=0)
    assert float(found.square().sum(1).mean().sqrt()) == pytest.approx(NORM, rel=1e-4)
    centred = wanted - wanted.mean(0)
    scale = NORM / centred.square().sum(1).mean().sqrt()
    torch.testing.assert_close(found, centred * scale, atol=1e-3, rtol=1e-3)


def test_features_of_texts_are_those_of_each_record_alone(tmp_path: Path) -> None:
    encoder(tmp_path / "base", layers=2)
    made = write_layers_model(text_config(tmp_path / "base"), tmp_path / "out", texts())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    body = AutoModel.from_pretrained(tmp_path / "base").eval()
    rows = []
    for text in texts().test.inputs["text"]:
        one = tokenizer(str(text), return_tensors="pt", truncation=True, max_length=5)
        with torch.no_grad():
            states = body(**one, output_hidden_states=True).hidden_states
        rows.append(by_hand(list(states[1:])))
    assert made == LayersModel((8, 8), 6)
    check_features(text_config(tmp_path / "out"), texts(), torch.stack(rows))


def test_features_of_images_are_those_of_each_record_alone(tmp_path: Path) -> None:
    vit(tmp_path / "base")
    config = image_config(tmp_path / "base")
    assert write_layers_model(config, tmp_path / "out", images()).widths == (8, 8)
    body = AutoModel.from_pretrained(tmp_path / "base", add_pooling_layer=False).eval()
    mean = torch.tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)
    rows = []
    for x in images().test.inputs["pixel_values"]:
        with torch.no_grad():
            found = body((torch.from_numpy(x)[None] / 255 - mean) / std, output_hidden_states=True)
        rows.append(by_hand([found.hidden_states[1], found.last_hidden_state]))
    check_features(image_config(tmp_path / "out"), images(), torch.stack(rows))


def test_labels_and_training_records_have_no_influence(tmp_path: Path) -> None:
    vit(tmp_path / "base")
    source = images()
    other = Source(
        Table({"pixel_values": source.train.inputs["pixel_values"] // 2}, source.train.labels),
        Table(source.test.inputs, (source.test.labels + 1) % 3),
        source.classes,
        "image",
    )
    for name, records in (("one", source), ("two", other)):
        write_layers_model(image_config(tmp_path / "base"), tmp_path / name, records)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


@pytest.mark.parametrize("kind", ["text", "image"])
def test_an_export_repeats_the_predictions_without_dpfed(kind: str, tmp_path: Path) -> None:
    source: Source = texts() if kind == "text" else images()
    make: Any = text_config if kind == "text" else image_config
    if kind == "text":
        encoder(tmp_path / "base", layers=2)
    else:
        vit(tmp_path / "base")
    write_layers_model(make(tmp_path / "base"), tmp_path / "layers", source)
    plain = {"privacy": {"enabled": False}, "algorithm": {"lr": 0.05}}
    run(make(tmp_path / "layers", **plain), tmp_path / "run", source=source)
    write_export(tmp_path / "run", tmp_path / "out", False)
    assert "the server's public records" in (tmp_path / "out" / "README.md").read_text()
    _, wanted = own_logits(tmp_path / "run", source)
    if kind == "text":
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        words = [str(text) for text in source.test.inputs["text"]]
        inputs = tokenizer(words, return_tensors="pt", padding=True, truncation=True)
        auto: Any = AutoModelForSequenceClassification
    else:
        processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
        pictures = list(np.moveaxis(source.test.inputs["pixel_values"], 1, -1))
        inputs = processor(pictures, return_tensors="pt")
        auto = AutoModelForImageClassification
    model = auto.from_pretrained(tmp_path / "out", trust_remote_code=True).eval()
    labels = torch.from_numpy(source.test.labels)
    with torch.no_grad():
        output = model(**inputs, labels=labels)
    found = output.logits
    torch.testing.assert_close(output.loss, F.cross_entropy(found, labels))
    assert wanted.std() > 0.01
    torch.testing.assert_close(F.softmax(found, 1), F.softmax(wanted, 1), atol=1e-3, rtol=0)


def test_layers_are_those_of_the_innermost_lists() -> None:
    body = BertModel(BertConfig(vocab_size=6, intermediate_size=8, **SIZES))
    assert layers_of(body) == list(body.encoder.layer)


def test_models_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="has no pretrained weights"):
        write_layers_model(settings({"name": "linear"}), tmp_path / "out", images())
    vit(tmp_path / "base")
    config = image_config(tmp_path / "base")
    write_layers_model(config, tmp_path / "out", images())
    with pytest.raises(DpfedError, match="is not empty"):
        write_layers_model(config, tmp_path / "out", images())
    with pytest.raises(DpfedError, match="is no plain encoder"):
        write_layers_model(image_config(tmp_path / "out"), tmp_path / "again", images())
    run(image_config(tmp_path / "base"), tmp_path / "run", source=images())
    write_export(tmp_path / "run", tmp_path / "trained", False)
    with pytest.raises(DpfedError, match="was trained on private records"):
        write_layers_model(image_config(tmp_path / "trained"), tmp_path / "again", images())
