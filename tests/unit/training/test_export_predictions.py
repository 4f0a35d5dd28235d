"""Exports reproduce the run's test predictions with plain transformers and peft alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_case import SIZES, WORDS, images, own_logits, settings, texts
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
)

from dpfed.config import build, load
from dpfed.data.images import pixels as data_pixels
from dpfed.data.tables import Source, Table
from dpfed.model.export_files import Companions, ImageInput, Reading, image_companions
from dpfed.model.shipped.image_processor import RunImageProcessor
from dpfed.model.task import InputSpec
from dpfed.model.zoo.image_inputs import images as entering
from dpfed.registry import registry
from dpfed.report.model_card import write_export
from dpfed.training.run import run

KINDS = [False, True]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} so {% endfor %}"


def used(folder: Path, base: Path) -> Any:
    """Run the code of the model card and return its pipeline."""
    card = (folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    names: dict[str, Any] = {"base_model": str(base)}
    exec(code.replace("this folder", str(folder)), names)
    return names["model"]


def scores_of(answers: list[list[dict[str, Any]]], classes: tuple[str, ...]) -> Tensor:
    """Return the scores of a pipeline, `[records, classes]`, in the order of the class names."""
    return torch.tensor(
        [[{a["label"]: a["score"] for a in each}[name] for name in classes] for each in answers]
    )


def pictures(source: Source) -> list[Image.Image]:
    rows = source.test.inputs["pixel_values"]
    return [Image.fromarray(x[0] if len(x) == 1 else np.moveaxis(x, 0, -1)) for x in rows]


def exported(
    tmp: Path, model: dict[str, Any], source: Source, merge: bool, **changes: Any
) -> tuple[Any, Tensor]:
    """Return the card's pipeline and the run's own scores of the test records."""
    plain = {"privacy": {"enabled": False}, "algorithm": {"lr": 0.02}, **changes}
    head = {} if model["name"] == "auto-causal" else {"head": "kept"}
    run(settings({**model, **head}, **plain), tmp / "run", source=source)
    write_export(tmp / "run", tmp / "out", merge)
    _, scores = own_logits(tmp / "run", source)
    return used(tmp / "out", Path(model["weights"])), scores


# ---- images


def image_base(folder: Path, channels: int = 3) -> str:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_labels=3,
        num_channels=channels,
        initializer_range=0.3,
        **SIZES,
    )
    config.problem_type = "multi_label_classification"
    ViTForImageClassification(config).save_pretrained(folder)
    constants = {
        "image_mean": [0.4] * channels,
        "image_std": [0.3] * channels,
        "do_resize": False,
        "resample": 0,
    }
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**constants, "size": {"height": 4, "width": 4}})
    )
    return str(folder)


def image_source(side: int, channels: int = 3) -> Source:
    """Return images of random pixels with the labels of `images`."""
    source = images(side, channels)
    rng = np.random.default_rng(1)
    x = rng.integers(0, 256, source.train.inputs["pixel_values"].shape).astype(np.uint8)
    labels = source.train.labels
    train = Table({"pixel_values": x}, labels)
    return Source(train, Table({"pixel_values": x[:6]}, labels[:6]), source.classes, "image")


@pytest.mark.parametrize("merge", KINDS)
@pytest.mark.parametrize("side", [8, 5, 20])
def test_an_image_pipeline_reproduces_the_scores(tmp_path: Path, side: int, merge: bool) -> None:
    """The processor rounds resized pixels to integers, so scores differ slightly."""
    model = {"name": "auto-image", "weights": image_base(tmp_path / "base")}
    source = image_source(side)
    pipe, scores = exported(tmp_path, model, source, merge)
    wanted = scores.softmax(1)
    found = scores_of(pipe(pictures(source), top_k=3), source.classes)
    torch.testing.assert_close(found, wanted, atol=1e-6 if side == 8 else 0.01, rtol=0)
    assert float(wanted.std(0).min()) > 0.02
    assert not (tmp_path / "out" / "image_processor.py").exists()


@pytest.mark.parametrize("merge", KINDS)
@pytest.mark.parametrize(
    ("settings_of_model", "side", "channels", "said"),
    [
        ({"sharpen": 1.5}, 5, 3, "sharpening (model.sharpen = 1.5)"),
        ({"resize": "bicubic"}, 5, 3, "bicubic enlargement with the kernel of torch"),
        ({}, 8, 1, "images of 1 channel"),
    ],
)
def test_a_shipped_processor_prepares_images(
    tmp_path: Path,
    settings_of_model: dict[str, Any],
    side: int,
    channels: int,
    said: str,
    merge: bool,
) -> None:
    model = {
        "name": "auto-image",
        "weights": image_base(tmp_path / "base", channels),
        **settings_of_model,
    }
    source = image_source(side, channels)
    pipe, scores = exported(tmp_path, model, source, merge)
    assert said in (tmp_path / "out" / "README.md").read_text()
    found = scores_of(pipe(pictures(source), top_k=3), source.classes)
    torch.testing.assert_close(found, scores.softmax(1), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoImageProcessor.from_pretrained(tmp_path / "out", trust_remote_code=False)
    assert "dpfed" not in re.findall(
        r"^(?:from|import) (\w+)", (tmp_path / "out" / "image_processor.py").read_text(), re.M
    )


def test_the_export_of_the_demo_run_reproduces_its_scores(tmp_path: Path) -> None:
    """The images are grey and have 17 levels."""
    from dpfed.model.zoo.glyph_vit import WEIGHTS

    run(
        load("digits", ["run.rounds=1", "run.local_steps=1", "privacy.sigma=1.0"], registry()),
        tmp_path / "run",
    )
    write_export(tmp_path / "run", tmp_path / "out")
    inputs, scores = own_logits(tmp_path / "run")
    given = [Image.fromarray(x[0]) for x in inputs["pixel_values"][:20].numpy()]
    found = scores_of(used(tmp_path / "out", WEIGHTS)(given, top_k=10), tuple("0123456789"))
    torch.testing.assert_close(found, scores[:20].softmax(1), atol=1e-5, rtol=0)
    assert "pixel values from 0 to 16" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("resize", ["bilinear", "bicubic"])
@pytest.mark.parametrize("sharpen", [0.0, 1.5])
@pytest.mark.parametrize(("colour", "channels"), [("rgb", 3), ("grey", 3), ("grey", 1)])
@pytest.mark.parametrize(("crop", "size"), [(None, 9), (6, 9), (12, 9), (None, None)])
def test_the_shipped_processor_equals_reading_and_preparing(
    resize: str, sharpen: float, colour: Any, channels: int, crop: int | None, size: int | None
) -> None:
    """The processor computes bit for bit what `data` and the model compute from a file."""
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (10, 14, 3)).astype(np.uint8))
    record = data_pixels(picture, "picture", colour, crop)
    spec = InputSpec("image", "pixel_values", record.shape, 3)
    constants = ((0.4,) * channels, (0.3,) * channels)
    entry = ImageInput(spec, size, channels, *constants, resize, sharpen if size else 0.0)
    made = image_companions(entry)(Reading(crop, colour == "grey"))
    if "image_processor.py" not in made.files:
        return
    processor = RunImageProcessor(**json.loads(made.files["preprocessor_config.json"]))
    raw = {"pixel_values": torch.from_numpy(record.copy())[None]}
    if size is None:
        prepared = (raw["pixel_values"].float() / 255.0 - 0.4) / torch.tensor(0.3)
        wanted = prepared.expand(-1, channels, -1, -1)
    else:
        wanted = entering(entry)(raw)["pixel_values"]
    torch.testing.assert_close(processor(picture)["pixel_values"], wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        processor([np.asarray(picture)])["pixel_values"], wanted, atol=1e-6, rtol=0
    )


def test_the_export_includes_the_resizing_of_files(tmp_path: Path) -> None:
    """With data.size the images are resized and cropped before the model resizes again."""
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / "data" / part / name).mkdir(parents=True)
            for i in range(6):
                pixels = rng.integers(0, 256, (10, 14, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / part / name / f"{i}.png")
    folder = {"name": "image-folder", "path": str(tmp_path / "data")}
    model = {"name": "auto-image", "weights": image_base(tmp_path / "base")}
    config = build(
        {
            "data": {**folder, "size": 6, "clients": 2, "partition": "iid"},
            "model": {**model, "train": "head", "liveness": False},
            "algorithm": {"name": "dp-fedavg", "lr": 0.5},
            "privacy": {"enabled": False, "batch": 3.0},
            "run": {"rounds": 1, "local_steps": 1, "device": "cpu", "checkpoint_every": 0},
        },
        registry(),
    )  # fmt: skip
    run(config, tmp_path / "run")
    write_export(tmp_path / "run", tmp_path / "out")
    _, scores = own_logits(tmp_path / "run")
    files = [str(p) for p in sorted((tmp_path / "data" / "test").rglob("*.png"))]
    answers = used(tmp_path / "out", tmp_path / "base")(files, top_k=2)
    torch.testing.assert_close(
        scores_of(answers, ("cat", "dog")), scores.softmax(1), atol=1e-5, rtol=0
    )
    assert "data.size = 6" in (tmp_path / "out" / "README.md").read_text()


# ---- texts


def tokenizer(**more: Any) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return PreTrainedTokenizerFast(tokenizer_object=raw, **{**names, **more})


def text_base(folder: Path, **more: Any) -> str:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 6,
        "max_position_embeddings": 12,
        "pad_token_id": 0,
        "initializer_range": 0.5,
    }
    BertForSequenceClassification(BertConfig(num_labels=2, **sizes, **SIZES)).save_pretrained(
        folder
    )
    tokenizer(**more).save_pretrained(folder)
    return str(folder)


def pairs() -> Source:
    source = texts()

    def table(part: Table) -> Table:
        return Table({**part.inputs, "text_pair": part.inputs["text"][::-1].copy()}, part.labels)

    return Source(table(source.train), table(source.test), source.classes, "text")


@pytest.mark.parametrize("merge", KINDS)
@pytest.mark.parametrize("length", [3, 8])
def test_a_text_pipeline_reproduces_the_scores(tmp_path: Path, length: int, merge: bool) -> None:
    """With length 3 the run cuts texts on the right, although the base cuts on the left."""
    weights = text_base(tmp_path / "base", padding_side="left", truncation_side="left")
    model = {"name": "auto-text", "weights": weights, "max_length": length}
    pipe, scores = exported(tmp_path, model, texts(), merge)
    given = [str(t) for t in texts().test.inputs["text"]]
    wanted = scores.softmax(1)
    for rows in (1, 6):
        answers = pipe(given, truncation=True, top_k=None, batch_size=rows)
        torch.testing.assert_close(
            scores_of(answers, ("praise", "blame")), wanted, atol=1e-5, rtol=0
        )
    assert float(wanted.std(0).min()) > 0.02
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"cut texts after {length} tokens. Call the pipeline with `truncation=True`" in card


@pytest.mark.parametrize("merge", KINDS)
def test_a_pipeline_of_text_pairs_reproduces_the_scores(tmp_path: Path, merge: bool) -> None:
    more = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    model = {"name": "auto-text", "weights": text_base(tmp_path / "base", **more), "max_length": 6}
    source = pairs()
    pipe, scores = exported(tmp_path, model, source, merge)
    inputs = source.test.inputs
    given = [
        {"text": str(a), "text_pair": str(b)}
        for a, b in zip(inputs["text"], inputs["text_pair"], strict=True)
    ]
    found = scores_of(pipe(given, truncation=True, top_k=None), ("praise", "blame"))
    torch.testing.assert_close(found, scores.softmax(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("merge", KINDS)
def test_a_causal_model_reproduces_the_scores(tmp_path: Path, merge: bool) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=6, n_positions=12, n_embd=8, n_layer=1, n_head=2, initializer_range=0.5
    )
    config.bos_token_id = config.eos_token_id = 0
    base = GPT2LMHeadModel(config)
    base.generation_config = GenerationConfig(
        do_sample=True, top_k=3, max_new_tokens=4, eos_token_id=0, pad_token_id=0
    )
    base.save_pretrained(tmp_path / "base")
    tokenizer(padding_side="left", chat_template=TEMPLATE).save_pretrained(tmp_path / "base")
    model = {"name": "auto-causal", "weights": str(tmp_path / "base"), "max_length": 5}
    pipe, scores = exported(tmp_path, model, texts(), merge)
    coder = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text, (loss, *_) in zip(texts().test.inputs["text"], scores, strict=True):
        given = coder(str(text), return_tensors="pt", truncation=True, max_length=5)
        with torch.no_grad():
            found = pipe.model(**given, labels=given["input_ids"]).loss
        assert float(found) == pytest.approx(float(loss), abs=1e-5)
    kept = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (kept.do_sample, kept.top_k, kept.max_new_tokens) == (True, 3, 4)
    assert coder.padding_side == "left"
    assert (
        coder.apply_chat_template([{"role": "user", "content": "good"}], tokenize=False)
        == "good so "
    )
    assert "after 5 tokens" in (tmp_path / "out" / "README.md").read_text()
    assert pipe("good film")[0]["generated_text"].startswith("good film")
    if merge:
        assert json.loads((tmp_path / "out" / "config.json").read_text()).get("use_cache", True)


def test_a_text_model_without_a_tokenizer_can_be_exported(tmp_path: Path) -> None:
    """Data that already are tokens need no tokenizer."""
    base = text_base(tmp_path / "base")
    source = texts()
    coder = AutoTokenizer.from_pretrained(base)

    def coded(part: Table) -> Table:
        out = coder(
            [str(t) for t in part.inputs["text"]],
            padding="max_length",
            max_length=4,
            return_tensors="np",
        )
        tokens = {
            "input_ids": out["input_ids"].astype(np.int32),
            "attention_mask": out["attention_mask"].astype(np.uint8),
        }
        return Table(tokens, part.labels)

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "base" / name).unlink()
    given = Source(coded(source.train), coded(source.test), source.classes, "text")
    run(
        settings({"name": "auto-text", "weights": base, "max_length": 4}),
        tmp_path / "run",
        source=given,
    )
    write_export(tmp_path / "run", tmp_path / "out", merge=True)
    assert "This folder has no tokenizer" in (tmp_path / "out" / "README.md").read_text()


# ---- files of models


def test_a_model_can_add_files_and_entries_to_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpfed.model.zoo.built import Built
    from dpfed.model.zoo.vision import AutoImage

    plain = AutoImage.build
    extra = Companions(
        {"modeling_own.py": "x = 1\n"},
        {"auto_map": {"AutoModel": "modeling_own.Own"}},
        (),
        ("See it.",),
    )

    def built(self: AutoImage, spec: InputSpec) -> Built:
        from dataclasses import replace

        return replace(plain(self, spec), companions=lambda reading: extra)

    monkeypatch.setattr(AutoImage, "build", built)
    model = {"name": "auto-image", "weights": image_base(tmp_path / "base")}
    run(settings(model), tmp_path / "run", source=images())
    for merge, name in ((False, "model_config.json"), (True, "config.json")):
        out = tmp_path / name.split(".")[0]
        write_export(tmp_path / "run", out, merge)
        assert (out / "modeling_own.py").read_text() == "x = 1\n"
        assert json.loads((out / name).read_text())["auto_map"] == extra.config["auto_map"]
        card = (out / "README.md").read_text()
        assert "See it." in card
        assert "trust_remote_code=True" in card
