"""Notes and warnings about data are equal for every source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dpfed.config import build
from dpfed.data.sources.in_memory import source_of
from dpfed.privacy.noise import Streams
from dpfed.registry import registry
from dpfed.training.job.data import shards_for
from dpfed.training.job.notes import data_warnings

LABELS = [0, 7, 7, 0]
GAPS = "6 of 8 classes have no training record (1, 2, 3, 4, 5, ...)"


def npz(folder: Path) -> dict[str, Any]:
    x = np.zeros((4, 3), dtype=np.float32)
    np.savez(folder / "a.npz", x_train=x, y_train=LABELS, x_test=x, y_test=LABELS)
    return {"name": "npz", "path": str(folder / "a.npz")}


def text_table(folder: Path) -> dict[str, Any]:
    for part in ("train", "test"):
        rows = [{"text": f"{part} {i}", "label": label} for i, label in enumerate(LABELS)]
        (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {
        "name": "text-table",
        "path": str(folder / "train.jsonl"),
        "test_path": str(folder / "test.jsonl"),
    }


def image_folder(folder: Path) -> dict[str, Any]:
    for part in ("train", "test"):
        for name in ("ant", "bee", "emu"):
            (folder / part / name).mkdir(parents=True)
            if name != "emu":
                Image.new("RGB", (2, 2)).save(folder / part / name / "0.png")
    return {"name": "image-folder", "path": str(folder)}


def warned(data: dict[str, Any]) -> list[str]:
    tables = {
        "data": {"clients": 2, "partition": "iid", **data},
        "privacy": {"sigma": 1.0, "batch": 1.0},
    }
    config = build(tables, registry())
    source = config.data.load()  # type: ignore[attr-defined]
    return data_warnings(config, source, shards_for(config, source, Streams(0)))


@pytest.mark.parametrize("source", [npz, text_table])
def test_gaps_between_labels_are_reported_unless_declared(source: Any, tmp_path: Path) -> None:
    section = source(tmp_path)
    assert [said.split(":")[0] for said in warned(section)] == [GAPS]
    assert warned({**section, "classes": 8}) == []


def test_an_empty_class_folder_is_reported_unless_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPFED_CACHE", str(tmp_path / "cache"))
    section = image_folder(tmp_path / "images")
    (said,) = warned(section)
    assert said.startswith("1 of 3 classes have no training record (emu): ")
    assert "remove empty class folders, or declare data.classes" in said
    assert warned({**section, "classes": ["ant", "bee", "emu"]}) == []


def test_notes_on_labels_in_memory_and_on_one_class() -> None:
    tables = {"data": {"name": "given", "clients": 2}, "privacy": {"sigma": 1.0, "batch": 1.0}}
    config = build(tables, registry())
    for labels, classes, expected in (
        (LABELS, None, [GAPS]),
        (LABELS, 8, []),
        ([1, 2, 1, 2], None, ["1 of 3 classes have no training record (0)"]),
        (["x"] * 4, None, ["every record has the label 'x'"]),
        (["x", "y", "x", "y"], None, []),
    ):
        data = {"text": list("abcd"), "label": labels}
        source = source_of(data, dict(data), classes)
        shards = shards_for(config, source, Streams(0))
        assert [said.split(":")[0] for said in data_warnings(config, source, shards)] == expected
