"""Resuming is refused for other settings, data, devices and ledgers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_case import Watcher
from command import dpfed
from resume_case import (
    SOURCE,
    CrashError,
    config_of,
    crashed,
    metrics,
    resumed,
    stop_after,
    taken_in,
)
from safetensors.torch import load_file

from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.training.budget.recorded_spending import read_recorded_spending
from dpfed.training.callbacks.progress import ProgressDisplay
from dpfed.training.job.job import Job
from dpfed.training.run import run
from dpfed.training.run_folder.run_identity import run_identity


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run that was not stopped."""
    out = tmp_path_factory.mktemp("whole") / "r"
    run(config_of(), out, source=SOURCE)
    return out


# --- what must not change ---


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crashed(config_of(), tmp_path_factory.mktemp("half") / "r", 3)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("privacy", "sigma", 2.0),
        ("privacy", "quantile", 0.3),
        ("run", "rounds", 9),
        ("run", "seed", 1),
        ("run", "fleet_size", 1),
        ("data", "clients", 6),
        ("algorithm", "gamma", 0.1),
    ],
)
def test_another_configuration_is_refused_by_name(
    half: Path, section: str, key: str, value: Any
) -> None:
    more = {"clip_mode": "quantile"} if key == "quantile" else {}
    with pytest.raises(
        DpfedError,
        match=rf"{section}\.{'clip_mode' if more else key} was .* {value if not more else ''}",
    ):
        resumed(config_of(**{section: {key: value, **more}}), half)


def test_some_keys_may_change(half: Path, tmp_path: Path, whole: Path) -> None:
    out = Path(shutil.copytree(half, tmp_path / "r"))
    config = config_of(
        run={"eval_every": 4, "checkpoint_every": 3, "memory_limit": 1, "threads": 1}
    )
    resumed(config, out)
    a, b = (load_file(folder / "model.safetensors") for folder in (whole, out))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [row["accuracy"] is None for row in metrics(out)] == [False, False, False, True, False]


def test_changed_data_are_refused(half: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(half, tmp_path / "r"))
    fewer = Source(
        Table({"features": SOURCE.train.inputs["features"][:95]}, SOURCE.train.labels[:95]),
        SOURCE.test, SOURCE.classes, "features",
    )  # fmt: skip
    with pytest.raises(DpfedError):
        run(config_of(), out, source=fewer, mode="resume")
    plain = crashed(config_of(privacy={"enabled": False}), tmp_path / "plain", 2)
    with pytest.raises(DpfedError, match="another configuration"):
        run(config_of(privacy={"enabled": False}), plain, source=fewer, mode="resume")


def test_a_finished_run_and_other_folders_are_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="finished"):
        resumed(config_of(), whole)
    with pytest.raises(DpfedError, match="not the folder of a run"):
        resumed(config_of(), tmp_path)
    (tmp_path / "config.toml").write_text("not = [toml")
    with pytest.raises(DpfedError, match="not the folder of a run"):
        resumed(config_of(), tmp_path)


def test_a_run_without_a_name_is_refused(half: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(half, tmp_path / "r"))
    (out / "run.json").write_text("{}")
    with pytest.raises(DpfedError, match="does not name the run"):
        resumed(config_of(), out)


def test_another_kind_of_device_is_refused(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed gives other noise on another device, so a repeated round would differ."""
    out = shutil.copytree(half, tmp_path / "r")
    original = run_identity
    monkeypatch.setattr(
        "dpfed.training.open_run.run_identity", lambda job: {**original(job), "device": "cuda"}
    )
    with pytest.raises(DpfedError, match="another configuration"):
        resumed(config_of(), out)
    monkeypatch.undo()
    jobs: list[Job] = []
    resumed(config_of(), out, callbacks=[Watcher(on_start=jobs.append)])
    assert (
        run_identity(dataclasses.replace(jobs[0], device=torch.device("meta")))["device"] == "meta"
    )


# --- the ledger ---


def test_every_attempt_with_real_noise_is_charged(tmp_path: Path) -> None:
    config = config_of(run={"noise": "os"})
    # Round 3 was charged, and will be charged again.
    out = crashed(config, tmp_path / "r", 3)
    before = read_recorded_spending(out)
    assert (before.rows, before.void) == (6, None)
    result = resumed(config, out)
    after = read_recorded_spending(out)
    assert after.rows == 10
    assert sum(taken_in(out).values()) == 10
    assert result["epsilon"]["server_max"] == pytest.approx(after.server_max, rel=1e-6)
    assert (
        result["epsilon"]["third_party"]
        == result["epsilon"]["server_worst"]
        == pytest.approx(after.server_worst)
    )
    assert after.third_party == after.server_worst
    assert after.void is not None


def test_a_repeated_round_with_other_clients_counts_twice(tmp_path: Path) -> None:
    """Round 1 has two disjoint cohorts, so every client could have been drawn twice."""
    config = config_of(run={"noise": "os", "rounds": 1})
    out = tmp_path / "r"
    jobs: list[Job] = []
    run(config, out, source=SOURCE, callbacks=[Watcher(on_start=jobs.append)])
    name = json.loads((out / "run.json").read_text())["run"]
    with Ledger.open(out / "ledger.sqlite", run=name) as ledger:
        drawn = {int(row.charge.client) for row in ledger.rows()}
        others = sorted(set(range(5)) - drawn)[:2]
        ledger.charge([Charge(i, 1, 2, jobs[0].plan.mechanism(i), "os") for i in others])
    assert read_recorded_spending(out).void is not None
    assert read_recorded_spending(out).third_party == read_recorded_spending(out).server_worst


def test_a_round_that_was_not_charged_is_not_counted_twice(tmp_path: Path) -> None:
    """A stop between a checkpoint and the next charge repeats no release."""
    config = config_of(run={"noise": "os"})
    out = tmp_path / "r"
    charge = Ledger.charge

    def killed(self: Ledger, charges: Any, run: str | None = None) -> Any:
        if charges[0].round == 3:
            raise CrashError
        return charge(self, charges, run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "charge", killed)
        with pytest.raises(CrashError):
            run(config, out, source=SOURCE)
    result = resumed(config, out)
    assert read_recorded_spending(out).rows == 8
    assert result["epsilon"]["third_party"] < result["epsilon"]["server_worst"]
    assert result["epsilon"]["third_party"] == pytest.approx(
        read_recorded_spending(out).third_party
    )


@pytest.mark.parametrize("noise", ["seeded", "os"])
def test_a_missing_or_empty_ledger_is_refused(noise: str, tmp_path: Path) -> None:
    config = config_of(run={"noise": noise})
    out = crashed(config, tmp_path / "r", 3)
    with Ledger.open(out / "ledger.sqlite", readonly=True) as ledger:
        meta = dict(ledger.meta)
    for path in out.glob("ledger.sqlite*"):
        path.unlink()
    with pytest.raises(DpfedError, match="ledger"):
        resumed(config, out)
    # An empty ledger in its place.
    own = ("format", "kind", "owner", "created", "dpfed")
    Ledger.create(
        out / "ledger.sqlite", run=meta["owner"], **{k: v for k, v in meta.items() if k not in own}
    ).close()
    with pytest.raises(DpfedError, match="lacks rounds"):
        resumed(config, out)


def test_a_ledger_of_another_statement_is_refused(half: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(half, tmp_path / "r"))
    with Ledger.open(out / "ledger.sqlite", readonly=True) as ledger:
        meta = dict(ledger.meta)
    for path in out.glob("ledger.sqlite*"):
        path.unlink()
    own = ("format", "kind", "owner", "created", "dpfed", "delta")
    fields = {k: v for k, v in meta.items() if k not in own}
    Ledger.create(out / "ledger.sqlite", run=meta["owner"], delta=1e-7, **fields).close()
    with pytest.raises(DpfedError, match="another delta"):
        resumed(config_of(), out)


def test_a_running_run_is_refused(half: Path, tmp_path: Path) -> None:
    """The ledger's lock refuses before the metrics are shortened."""
    out = Path(shutil.copytree(half, tmp_path / "r"))
    before = (out / "metrics.jsonl").read_bytes()
    with Ledger.open(out / "ledger.sqlite"), pytest.raises(DpfedError):
        resumed(config_of(), out)
    assert (out / "metrics.jsonl").read_bytes() == before
    resumed(config_of(), out)


# --- the command ---


QUICK = [
    "model.name=linear",
    "run.rounds=2",
    "run.local_steps=1",
    "run.participation=0.3",
    "privacy.batch=16",
    "privacy.sigma=2",
]


def test_the_command_resumes_or_refuses_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    sets = [word for key in QUICK for word in ("--set", key)]

    with monkeypatch.context() as patch:
        patch.setattr(ProgressDisplay, "on_round", lambda self, round: stop_after(2)(round))
        with pytest.raises(CrashError):
            dpfed("run", *sets, "--out", str(out))
    for args, words in (
        (["--resume", str(out), "--out", str(out)], "leave out --out"),
        (["--resume", str(out), "--force"], "leave out --out"),
        (["--resume", str(tmp_path / "nowhere")], "not the folder of a run"),
        (["--resume", str(out), "--set", "privacy.sigma=1"], "privacy.sigma was 2.0"),
        (["digits", "--resume", str(out)], "when the run began"),
    ):
        capsys.readouterr()
        assert dpfed("run", *args) == 2, args
        err = capsys.readouterr().err.strip()
        assert words in err
        assert len(err.splitlines()) == 1
    assert dpfed("run", "--resume", str(out), "--set", "run.eval_every=2", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rounds"] == 2
    assert dpfed("run", "--resume", str(out)) == 2
    assert "finished" in capsys.readouterr().err
