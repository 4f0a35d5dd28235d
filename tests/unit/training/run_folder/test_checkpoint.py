"""A stopped run resumes with bitwise equal results, also after damage and on full disks."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from callback_case import Watcher
from resume_case import (
    KINDS,
    ROUNDS,
    SOURCE,
    CrashError,
    Server,
    config_of,
    crashed,
    metrics,
    resumed,
    same,
    stop_after,
)

from dpfed.algorithms.base import (
    Point,
)
from dpfed.errors import DpfedError
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.budget.recorded_spending import read_recorded_spending
from dpfed.training.job.job import Job
from dpfed.training.rounds import Progress
from dpfed.training.run import run
from dpfed.training.run_folder import checkpoint
from dpfed.training.run_folder.atomic_file import write_file
from dpfed.training.run_folder.checkpoint import Checkpoints
from dpfed.training.run_folder.folder import RunFolder
from dpfed.training.server_state import State


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Make runs that were not stopped."""
    done = {}
    for name, sections in KINDS.items():
        out = tmp_path_factory.mktemp("whole") / name
        done[name] = (out, run(config_of(name, **sections), out, source=SOURCE))
    return done


# --- bitwise ---


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("t", [0, 1, ROUNDS - 1, ROUNDS])
def test_a_stopped_run_resumes_bitwise(name: str, t: int, whole: Any, tmp_path: Path) -> None:
    config = config_of(name, **KINDS[name])
    out = crashed(config, tmp_path / "r", t)
    assert json.loads((out / "run.json").read_text())["state"] == "running"
    result = resumed(config, out)
    reference, wanted = whole[name]
    same(reference, out)
    for key in ("epsilon", "test_accuracy", "test_loss", "start_accuracy", "rounds", "guarantee"):
        assert result[key] == wanted[key], key
    rows = [read_recorded_spending(folder).rows for folder in (reference, out)]
    # Seeded noise is repeated, so its rows are the same.
    assert rows[0] == rows[1]
    assert json.loads((out / "run.json").read_text())["state"] == "finished"


def test_quantile_clipping_moves_the_clip_norm(whole: Any) -> None:
    """The test above needs a clip norm that changes."""
    clips = [row["clip"] for row in metrics(whole["dp-fedavg"][0])]
    assert len(set(clips[1:])) == ROUNDS


def test_a_run_with_rare_checkpoints_can_be_stopped_twice(tmp_path: Path, whole: Any) -> None:
    config = config_of("remembering", run={**KINDS["remembering"]["run"], "checkpoint_every": 2})
    out = crashed(config, tmp_path / "r", 4)
    # Rounds 3 and 4 run again.
    with pytest.raises(CrashError):
        resumed(config, out, callbacks=[Watcher(on_round=stop_after(3))])
    assert [row["round"] for row in metrics(out)] == [0, 1, 2, 3]
    resumed(config, out)
    same(whole["remembering"][0], out)


def test_without_checkpoints_a_run_starts_again(tmp_path: Path, whole: Any) -> None:
    config = config_of(run={"checkpoint_every": 0})
    out = crashed(config, tmp_path / "r", 3)
    assert not (out / "checkpoint").exists()
    assert resumed(config, out)["epsilon"] == whole["dp-fedadamw"][1]["epsilon"]
    assert metrics(out) == metrics(whole["dp-fedadamw"][0])


def test_client_memory_in_files_gives_equal_results(
    tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = ClientStates.__init__
    monkeypatch.setattr(
        ClientStates,
        "__init__",
        lambda self, names, size, folder, limit: init(self, names, size, folder, 1),
    )
    config = config_of("remembering", **KINDS["remembering"])
    out = crashed(config, tmp_path / "r", 3)
    resumed(config, out)
    same(whole["remembering"][0], out)


def test_the_last_two_checkpoints_are_kept(whole: Any) -> None:
    folder = whole["remembering"][0] / "checkpoint"
    assert {p.stem for p in folder.glob("round-*")} == {f"round-{ROUNDS - 1}", f"round-{ROUNDS}"}
    named = {
        file
        for path in folder.glob("round-*.json")
        for file, _ in json.loads(path.read_text())["memory"].values()
    }
    assert {p.name for p in (folder / "memory").iterdir()} == named


# --- damage ---


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "what", ["round-3.json", "round-3.safetensors", "memory", "cut", "not JSON", "list"]
)
def test_after_damage_the_previous_checkpoint_is_used(
    what: str, whole: Any, tmp_path: Path
) -> None:
    config = config_of("remembering", **KINDS["remembering"])
    out = crashed(config, tmp_path / "r", ROUNDS)
    folder = out / "checkpoint"
    if what == "memory":
        flip(next((folder / "memory").glob("*.round-3.npy")))
    elif what == "cut":
        (folder / "round-3.json").write_bytes((folder / "round-3.json").read_bytes()[:40])
    elif what in ("not JSON", "list"):
        (folder / "round-3.json").write_text("\x00" if what == "not JSON" else "[1]")
    else:
        flip(folder / what, 90)
    said: list[str] = []
    seen: list[int] = []
    resumed(
        config,
        out,
        callbacks=[Watcher(lambda job: said.extend(job.notes), lambda round: seen.append(round.t))],
    )
    assert seen == [3, 4]
    (note,) = [line for line in said if "the one before it is used" in line]
    assert "round-3" in note
    same(whole["remembering"][0], out)


def test_damage_of_all_checkpoints_is_reported_and_changes_no_file(
    tmp_path: Path,
) -> None:
    config = config_of()
    out = crashed(config, tmp_path / "r", 3)
    for path in (out / "checkpoint").glob("*.safetensors"):
        flip(path)
    before = (out / "metrics.jsonl").read_bytes()
    with pytest.raises(DpfedError, match=r"cannot go on.*damaged") as caught:
        resumed(config, out)
    assert "\n" not in str(caught.value)
    assert (out / "metrics.jsonl").read_bytes() == before


def test_an_incomplete_line_of_metrics_is_dropped(tmp_path: Path, whole: Any) -> None:
    config = config_of()
    out = crashed(config, tmp_path / "r", 2)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "accu')
    resumed(config, out)
    assert metrics(out) == metrics(whole["dp-fedadamw"][0])


def test_missing_metrics_are_refused(tmp_path: Path) -> None:
    """Only the first line has the start_accuracy."""
    config = config_of()
    out = crashed(config, tmp_path / "r", 3)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    for kept in ([], lines[1:], lines[:2]):
        (out / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))
        with pytest.raises(DpfedError, match="rounds 0 to 2"):
            resumed(config, out)


def test_a_state_with_other_fields_is_refused(tmp_path: Path) -> None:
    """A program version with a new field refuses an older state."""
    memory = ClientStates((), 3, tmp_path / "memory", 1)
    checkpoints = Checkpoints(tmp_path, "job", memory)
    checkpoints.save(Progress(1, State(Point(torch.ones(3)), 1.0)), np.array([1, 0]), wait=True)
    for form in (
        Server(torch.ones(3), torch.ones(3)),
        Point(torch.ones(4)),
        Point(torch.ones(3, dtype=torch.float64)),
    ):
        saved, said = checkpoints.load(State(form, 1.0))
        assert saved is None
        assert len(said) == 1
        assert "another version" in said[0]
    saved, said = Checkpoints(tmp_path, "other", memory).load(State(Point(torch.ones(3)), 1.0))
    assert (saved, len(said)) == (None, 1)
    assert "another configuration" in said[0]


def test_a_checkpoint_is_read_back_unchanged(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "job", ClientStates((), 3, tmp_path / "memory", 1))
    shared = torch.tensor([1e-30, -0.0, 3.0])
    # One tensor in two fields.
    state = State(Server(shared, shared), 0.1 + 0.2)
    checkpoints.save(Progress(7, state, 1.25), np.array([0, 3, 0]), wait=True)
    saved, said = checkpoints.load(State(Server(torch.zeros(3), torch.zeros(3)), 1.0))
    assert saved is not None
    assert said == []
    assert (saved.progress.t, saved.progress.seconds, saved.progress.state.clip) == (
        7,
        1.25,
        0.1 + 0.2,
    )
    assert saved.rounds_taken.tolist() == [0, 3, 0]
    for value in saved.progress.state.tensors().values():
        assert value.numpy().tobytes() == shared.numpy().tobytes()
    progress = Progress(8, State(state.server, float("inf")))
    checkpoints.save(progress, np.zeros(3, dtype=np.int64), wait=True)
    again, _ = checkpoints.load(state)
    assert again is not None
    assert again.progress.state.clip == float("inf")


# --- full disks ---


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_file(path, lambda file: file.write(b"old"))

    def full(file: IO[bytes]) -> None:
        file.write(b"new, but on")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DpfedError, match="No space left"):
        write_file(path, full)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_is_synced_before_it_replaces_another(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_file(path, lambda file: file.write(b"old"))

    def broken(*_: object) -> None:
        assert path.read_bytes() == b"old"
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(DpfedError, match="cannot be written"):
            write_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"old"
    digest = write_file(path, lambda file: file.write(b"new"))
    assert (path.read_bytes(), len(digest)) == (b"new", 64)


@pytest.mark.parametrize("nth", [1, 3, 4])
def test_a_full_disk_during_a_checkpoint_ends_the_run(
    nth: int, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails at the first state, the second state, or the second index."""
    out, written = tmp_path / "r", 0

    def failing(path: Path, write: Callable[[IO[bytes]], object]) -> str:
        nonlocal written
        written += 1

        def full(file: IO[bytes]) -> None:
            write(file)
            if written == nth:
                raise OSError(errno.ENOSPC, "No space left on device")

        return write_file(path, full)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_file", failing)
        with pytest.raises(DpfedError, match="No space left"):
            run(config_of(), out, source=SOURCE)
    assert len(list((out / "checkpoint").glob("*.json"))) == (nth > 2)
    resumed(config_of(), out)
    same(whole["dp-fedadamw"][0], out)


@pytest.mark.parametrize("call", ["flush", "fileno"])
def test_a_full_disk_for_metrics_gives_a_one_sentence_error(tmp_path: Path, call: str) -> None:
    def fill(job: Job) -> None:
        handle = io.StringIO()

        def full() -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        setattr(handle, call, full)
        folders[0]._metrics = handle

    folders: list[RunFolder] = []
    init = RunFolder.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RunFolder, "__init__", lambda self, *args: (folders.append(self), init(self, *args))[1]
        )
        with pytest.raises(DpfedError, match=r"metrics\.jsonl cannot be written: No space left"):
            run(config_of(), tmp_path / "r", source=SOURCE, callbacks=[Watcher(on_start=fill)])
