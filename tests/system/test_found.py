"""Regression tests for the inputs that fuzzing found, each as its smallest file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_cases import CASES, KNOWN, SPEC, adapter_files, read_resealed, stopped_files, vision
from fuzz_mutants import write_folder

from dpfed.config import load
from dpfed.config.parsing import overrides_layer
from dpfed.errors import DpfedError
from dpfed.model.build import assemble
from dpfed.model.zoo.pretrained import public_constants
from dpfed.studies.outcomes import read_outcome
from dpfed.training.budget.recorded_spending import read_recorded_spending
from dpfed.training.callbacks.diagnostics import read_diagnostics
from dpfed.training.run_folder.files import METRICS, RESULT, read_rows
from dpfed.training.run_folder.folder import versions

DEEP = b"[" * 20_000


@pytest.mark.parametrize(
    "content", [b"a = " + DEEP, b"a = " + b"9" * 5000, b'extends = "\\u0000"', b"\xff"]
)
def test_configurations(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(DpfedError) as caught:
        load(tmp_path / "c.toml", [], KNOWN)
    assert "\n" not in str(caught.value)
    with pytest.raises(DpfedError):
        load("\x00", [], KNOWN)


def test_an_override_that_is_no_toml_is_a_text() -> None:
    for text in (DEEP.decode(), "9" * 5000):
        assert overrides_layer([f"data.path={text}"]) == {"data": {"path": text}}


def change(folder: Path, **values: Any) -> None:
    for path in (folder / "checkpoint").glob("round-*.json"):
        index = json.loads(path.read_text())
        for key, value in values.items():
            index.pop(key) if value is None else index.update({key: value})
        path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "values",
    [
        {"job": None},
        {"clip": None},
        {"round": 1e999},
        {"seconds": "x"},
        {"taken": {"-9": 1}},
        {"clients": 10**15},
    ],
)
def test_checkpoints_whose_hashes_fit(values: dict[str, Any], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, stopped_files())
    change(folder, **values)
    with pytest.raises(DpfedError, match="checkpoint"):
        read_resealed(folder)


def test_a_memory_that_is_no_array_or_of_another_shape(tmp_path: Path) -> None:
    for bad in (np.zeros((1, 2), np.float32), np.array([{}], dtype=object), np.zeros(3)):
        folder = write_folder(tmp_path, stopped_files())
        for file in (folder / "checkpoint" / "memory").iterdir():
            np.save(file, bad)
        with pytest.raises(DpfedError, match="memory of client"):
            read_resealed(folder)


def test_a_checkpoint_cannot_name_a_memory_outside_its_folder(tmp_path: Path) -> None:
    """The name was checked inside the folder, and then another file was opened."""
    folder = write_folder(tmp_path / "run", stopped_files())
    for path in (folder / "checkpoint").glob("round-*.json"):
        index = json.loads(path.read_text())
        index["memory"] = {
            i: [f"../../../{file}", sha] for i, (file, sha) in index["memory"].items()
        }
        path.write_text(json.dumps(index))
    for file in (folder / "checkpoint" / "memory").iterdir():
        np.save(tmp_path / file.name, np.full_like(np.load(file), 7.0))
    from fuzz_cases import stopped_run

    from dpfed.training.backends.client_state import ClientStates
    from dpfed.training.round_context import first_state
    from dpfed.training.run_folder.checkpoint import Checkpoints, index_hash, job_hash
    from dpfed.training.run_folder.run_identity import run_identity

    job = stopped_run()[0]
    for path in (folder / "checkpoint").glob("round-*.json"):
        index = json.loads(path.read_text())
        index.pop("sha256")
        path.write_text(json.dumps({**index, "sha256": index_hash(index)}))
    memory = ClientStates(
        job.algorithm.remembers, job.space.size, folder / "checkpoint" / "memory", 1 << 20
    )
    Checkpoints(folder / "checkpoint", job_hash(run_identity(job), job.theta), memory).load(
        first_state(job)
    )
    assert not bool((memory.gather(range(3), job.device)[job.algorithm.remembers[0]] == 7.0).any())


def test_lines_of_metrics_and_diagnostics(tmp_path: Path) -> None:
    lines = ['{"round": 1e999}', '{"round": NaN}', DEEP.decode(), '{"round": 4}']
    (tmp_path / METRICS).write_text("\n".join(lines))
    assert read_rows(tmp_path / METRICS) == [{"round": 4}]
    good = b'{"round": 1, "x": 2}\n'
    (tmp_path / "diagnostics.jsonl").write_bytes(b'\x8f\n{"round": 1e999}\n' + DEEP + b"\n" + good)
    assert read_diagnostics(tmp_path) == [{"round": 1, "x": 2}]


def test_results(tmp_path: Path) -> None:
    (tmp_path / RESULT).write_bytes(DEEP)
    with pytest.raises(DpfedError):
        read_recorded_spending(tmp_path)


@pytest.mark.parametrize(
    ("result", "row"),
    [
        ({}, {"accuracy": 5.0}),
        ({}, {"accuracy": float("nan")}),
        ({}, {"loss": float("nan")}),
        ({"test_records": 0}, {}),
        ({"test_records": 1e999}, {}),
        ({"epsilon": []}, {}),
        ({"epsilon": {"server_worst": "1"}}, {}),
        ({"guarantee": 3}, {}),
        ({"guarantee": "\ud800"}, {}),
        ({"traffic": {"up": "x"}}, {}),
        ({"traffic": [1]}, {}),
        ({"metrics": {"per_class": {"a": {"support": -1}, "b": {"support": -3}}}}, {}),
        ({"metrics": [1]}, {}),
    ],
)
def test_outcomes_that_no_run_can_have_left_are_done_again(
    result: dict[str, Any], row: dict[str, Any], tmp_path: Path
) -> None:
    whole = {
        "state": "finished",
        "rounds": 1,
        "test_records": 9,
        "epsilon": {},
        "guarantee": "sworn",
        "versions": versions(),
    }
    rows = {"round": 1, "accuracy": 0.5, "loss": 1.0}
    for changes, line, good in (({}, {}, True), (result, row, False)):
        (tmp_path / RESULT).write_text(json.dumps({**whole, **changes}))
        (tmp_path / METRICS).write_text(json.dumps({**rows, **line}) + "\n")
        assert (read_outcome(tmp_path) is not None) is good


def test_a_study_that_is_no_text(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"study.json": b"\xa4"})
    with pytest.raises(DpfedError, match="another study"):
        CASES["study"].read(folder)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("base/config.json", {"hidden_dropout_prob": "0"}),
        ("base/config.json", {"initializer_range": {}}),
        ("base/config.json", {"patch_size": 0}),
        ("base/config.json", {"dtype": ""}),
        ("adapter/adapter_config.json", {"modules_to_save": [[]]}),
        ("adapter/adapter_config.json", {"target_modules": ["patch_embeddings"]}),
        ("base/preprocessor_config.json", {"image_std": []}),
        ("base/preprocessor_config.json", {"image_std": [0, 0, 0]}),
        ("base/preprocessor_config.json", {"image_mean": [float("nan")] * 3}),
    ],
)
def test_models_and_adapters(file: str, values: dict[str, Any], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, adapter_files())
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **values}))
    with pytest.raises(DpfedError) as caught:
        assemble(vision(folder), SPEC)
    assert "\n" not in str(caught.value)


def test_constants_nested_too_deeply(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, adapter_files())
    (folder / "base" / "preprocessor_config.json").write_bytes(DEEP)
    with pytest.raises(DpfedError, match="cannot be read"):
        public_constants(str(folder / "base"))
    (folder / "adapter" / "adapter_config.json").write_bytes(DEEP)
    with pytest.raises(DpfedError, match="cannot be read"):
        assemble(vision(folder), SPEC)
