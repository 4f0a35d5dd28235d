"""The memory that follows from shapes is the memory that a step on the CPU has."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dpfed.bench.cases import Case
from dpfed.bench.llama import text_of

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, BENCHMARKS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def growth() -> ModuleType:
    return script("memory_growth.py")


def tiny(**keys: Any) -> Case:
    return Case("llama-tiny", text_of("llama-tiny", 32), clients=2, batch=2, rank=2, **keys)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_shapes_give_the_memory_of_real_tensors(
    checkpoint: bool, growth: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = tiny(checkpoint=checkpoint)
    with growth.fused_attention():
        by_shapes = growth.private_bytes(case), growth.union_bytes(case)
        monkeypatch.setattr(growth, "META", torch.device("cpu"))
        real = growth.private_bytes(case), growth.union_bytes(case)
    assert by_shapes == pytest.approx(real, rel=0.02)


def test_memory_grows_with_records_and_falls_with_checkpoints(growth: ModuleType) -> None:
    one = growth.row_of(tiny())
    more = growth.row_of(Case("llama-tiny", text_of("llama-tiny", 64), clients=4, batch=2, rank=2))
    again = growth.row_of(tiny(checkpoint=True))
    assert more.private > 3 * one.private
    assert again.private < 0.8 * one.private
    assert again.union < 0.6 * one.union


def test_the_table_and_the_file(
    growth: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(growth, "growth", lambda base: [tiny()])
    out = tmp_path / "memory.json"
    monkeypatch.setattr(sys, "argv", ["x", "--case", "llama-tiny", "--out", str(out)])
    growth.main()
    assert "2 x 2,   32,  2: " in capsys.readouterr().out
    stored = json.loads(out.read_text())
    # Four layers of 36,864 and two tables of 16,384 numbers, norms apart.
    linear = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
    other = 2 * 256 * 64 + 9 * 64
    assert stored["weights"]["bf16"] * 2**30 == 2 * (linear + other)
    assert stored["weights"]["int8"] * 2**30 == linear + 2 * other


def test_a_missing_opake_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("opake") is not None:
        pytest.skip("Opake changes transformers for the whole process")
    script("peers/opake_step.py").main(["--case", "llama-tiny", "--device", "cpu"])
    failed = json.loads(capsys.readouterr().out)["failed"]
    assert failed == "not installed: pip install 'opake[transformers]>=0.16,<0.17'"
