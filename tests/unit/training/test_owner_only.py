"""Run files are readable by their owner alone; files for release follow the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from callback_case import Watcher

from dpfed.config import build
from dpfed.registry import registry
from dpfed.report.model_card import write_export
from dpfed.report.page import write_page
from dpfed.training.run import run

RAW: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "clients": 3},
    "model": {"name": "linear"},
    "algorithm": {"name": "dp-scaffold", "lr": 0.01},
    "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 10},
    "run": {
        "local_steps": 2,
        "participation": 1.0,
        "device": "cpu",
        "checkpoint_every": 1,
        "lr_schedule": "constant",
    },
}


@pytest.fixture(params=[0o000, 0o022], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def trained(out: Path, rounds: int = 2, **keys: Any) -> None:
    """Train a run that leaves checkpoints and clients' memory."""
    section = {**RAW["run"], "rounds": rounds, **keys.pop("section", {})}
    config = build({**RAW, "run": section}, registry())
    run(config, out, **keys)


def open_to_others(folder: Path) -> dict[str, str]:
    """Return the modes of files and folders of a tree that others can read, write or enter."""
    modes = {}
    for path in (folder, *folder.rglob("*")):
        # A checkpoint is written in the background, so a file may be renamed in the meantime.
        with suppress(FileNotFoundError):
            modes[str(path.relative_to(folder))] = path.lstat().st_mode & 0o777
    return {name: oct(mode) for name, mode in modes.items() if mode & 0o077}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("noise", ["os", "seeded"])
def test_a_run_folder_is_never_readable_by_others(noise: str, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "first"
    during: list[dict[str, str]] = []
    diagnostics = noise == "seeded"
    section = {"noise": noise, "diagnostics": diagnostics}
    trained(
        out,
        section=section,
        callbacks=[Watcher(on_round=lambda round: during.append(open_to_others(out)))],
    )
    assert [*during, open_to_others(out)] == [{}] * 4
    files = {path.name for path in out.rglob("*")}
    assert {
        "config.toml",
        "metrics.jsonl",
        "ledger.sqlite",
        "model.safetensors",
        "run.json",
        ".lock",
    } <= files
    assert any(name.startswith("client-") for name in files)
    assert ("diagnostics.jsonl" in files) == ("holdings.json" in files) == diagnostics


def test_resuming_restricts_the_folder_of_an_older_version(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained(out, section={"noise": "os"})
    for path in (out, *out.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    trained(out, rounds=3, section={"noise": "os"}, mode="resume")
    assert open_to_others(out) == {}


def test_files_for_release_follow_the_umask(umask: int, tmp_path: Path) -> None:
    trained(tmp_path / "run", section={"noise": "os"})
    write_export(tmp_path / "run", tmp_path / "export")
    write_page([tmp_path / "run"], tmp_path / "public.html", public=True)
    for path in (*(tmp_path / "export").iterdir(), tmp_path / "public.html"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask, path.name
    assert (tmp_path / "export").stat().st_mode & 0o777 == 0o777 & ~umask


@pytest.mark.usefixtures("umask")
def test_the_operators_page_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    write_page([tmp_path / "run"], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_mode & 0o777 == 0o600
