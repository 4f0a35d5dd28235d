"""Scripts that measure on a GPU, tried on a CPU with small models: that they run, and that they can tell a difference."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.vit.configuration_vit import ViTConfig
from transformers.models.vit.modeling_vit import ViTForImageClassification

from dpfed.bench.cases import CPU

ROOT = Path(__file__).parents[1]
SMALL = replace(CPU[1], clients=2, batch=3)  # glyph-vit
HERE = torch.device("cpu")


def script(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"tried_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_pass_is_every_record_by_hand() -> None:
    equality = script("scripts/gpu_equality.py")
    expected = equality.Setting(SMALL, HERE).by_hand(torch.float32)
    found = equality.Setting(SMALL, HERE).by_pass(torch.float32, captured=False, compiled=False)
    assert equality.difference(found, expected) < equality.FLOAT32
    assert equality.difference(1.001 * found, expected) > equality.FLOAT32
    assert (expected.norm(dim=1) <= SMALL.batch * equality.CLIP * (1 + 1e-6)).all()


def test_a_row_of_growth() -> None:
    growth = script("benchmarks/fleet_growth.py")
    row = growth.row_of(SMALL, HERE, repeats=1)
    assert (row["clients"], row["fleets"], row["failed"]) == (2, 1, None)
    assert row["ms_per_client"] == pytest.approx(row["ms"] / 2, abs=0.011)  # both are rounded
    full = growth.row_of(replace(SMALL, train="full"), HERE, repeats=1)
    assert full["P"] > 10 * row["P"]


def test_sharpening_is_chosen_by_answers_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=7, **shape)).save_pretrained(
        tmp_path / "model"
    )
    rng = np.random.default_rng(0)
    for i in range(6):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    choose = script("scripts/choose_sharpen.py")
    x = choose.read(tmp_path, 4)
    assert x.shape == (4, 3, 16, 16)
    given = ["--weights", str(tmp_path / "model"), "--images", str(tmp_path), "--size", "8"]
    monkeypatch.setattr(sys, "argv", ["choose_sharpen.py", *given])
    choose.main()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("6 images of 16 pixels, shrunk to 8")
    assert len(said) == 1 + len(choose.WAYS)
