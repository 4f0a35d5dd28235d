"""A run that was stopped anywhere goes on bitwise as if it had not been; what is damaged, other or finished is refused."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from callback_case import Watcher
from command import dpfed
from safetensors.torch import load_file
from torch import Tensor

from dpfed.algorithms.base import (
    Algorithm,
    Averaging,
    ClientState,
    Context,
    Message,
    Oracle,
    Point,
    spread,
)
from dpfed.config import Config, Registry, build
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError
from dpfed.privacy.ledger.ledger import Charge, Ledger
from dpfed.registry import registry
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.budget.recorded_spending import read_recorded_spending
from dpfed.training.job.job import Job
from dpfed.training.rounds import Progress, Round
from dpfed.training.run import run
from dpfed.training.run_folder import atomic_file, checkpoint
from dpfed.training.run_folder.atomic_file import write_file
from dpfed.training.run_folder.checkpoint import Checkpoints
from dpfed.training.run_folder.folder import RunFolder
from dpfed.training.run_identity import run_identity
from dpfed.training.server_state import State

ROUNDS = 4

# --- an algorithm with a memory ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    theta: Tensor
    before: Tensor


@dataclass(frozen=True)
class Local:
    theta: Tensor
    c: Tensor
    total: Tensor
    seen: Tensor


@dataclass(frozen=True)
class Remembering(Averaging):
    """Each client steps away from the mean gradient of its own last round; the server's two fields start as one tensor."""

    name = "remembering"
    lr_grid = (0.1,)
    summary = "for tests"

    lr: float = 0.1
    weight_decay: float = 0.0

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("c",)

    def init(self, ctx: Context, theta: Tensor) -> Any:
        return Server(theta, theta)

    def start(self, ctx: Context, server: Any, memory: ClientState) -> Any:
        zero = torch.zeros_like(memory["c"])
        return Local(spread(server.theta, ctx.S), memory["c"], zero, memory["seen"])

    def step(self, ctx: Context, local: Local, oracle: Oracle, k: Tensor) -> Local:
        g, _ = oracle(local.theta)
        step = g - torch.where(local.seen.unsqueeze(1), 0.5 * local.c, 0.0)
        return dataclasses.replace(local, theta=local.theta - ctx.lr * step, total=local.total + g)

    def finish(self, ctx: Context, server: Any, local: Local) -> tuple[Message, ClientState]:
        return {"delta": local.theta - server.theta}, {"c": local.total / ctx.K}

    def aggregate(self, ctx: Context, server: Any, mean: Message) -> Any:
        theta = server.theta + mean["delta"]
        return Server(theta, theta if int(ctx.t) % 2 else server.theta)


def known() -> Registry:
    found = registry()
    algorithms: dict[str, type[Algorithm]] = {**found.algorithm, "remembering": Remembering}
    return dataclasses.replace(found, algorithm=algorithms)


def config_of(name: str = "dp-fedadamw", **sections: dict[str, Any]) -> Config:
    raw: dict[str, dict[str, Any]] = {
        "data": {"clients": 5, "partition": "iid"},
        "model": {"name": "linear", "liveness": sections.get("run", {}).get("noise") == "os"},
        "algorithm": {"name": name, "lr": 0.05},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 8},
        "run": {"rounds": ROUNDS, "local_steps": 2, "participation": 0.4, "device": "cpu"},
    }
    return build(
        {section: {**table, **sections.get(section, {})} for section, table in raw.items()}, known()
    )


def features() -> Source:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(140, 4)).astype(np.float32)
    y = (x @ rng.normal(size=(4, 3))).argmax(1)
    return Source(
        Table({"features": x[:100]}, y[:100]),
        Table({"features": x[100:]}, y[100:]),
        ("a", "b", "c"),
        "features",
    )


SOURCE = features()


class CrashError(Exception):
    """Power cut."""


def stop_after(t: int) -> Callable[[Round], None]:
    """Stops in round t after its metrics were written, before its checkpoint."""

    def observe(round: Round) -> None:
        if round.t == t:
            raise CrashError

    return observe


def crashed(config: Config, out: Path, t: int) -> Path:
    with pytest.raises(CrashError):
        run(config, out, source=SOURCE, callbacks=[Watcher(on_round=stop_after(t))])
    return out


def resumed(config: Config, out: Path, **more: Any) -> dict[str, Any]:
    return run(config, out, source=SOURCE, mode="resume", **more)


def metrics(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def taken_in(out: Path) -> dict[str, int]:
    newest = max(
        (out / "checkpoint").glob("round-*.json"), key=lambda p: int(p.stem.removeprefix("round-"))
    )
    taken: dict[str, int] = json.loads(newest.read_text())["taken"]
    return taken


def same(one: Path, two: Path) -> None:
    a, b = (load_file(out / "model.safetensors") for out in (one, two))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert metrics(one) == metrics(two)
    assert taken_in(one) == taken_in(two)


KINDS: dict[str, dict[str, Any]] = {
    "dp-fedadamw": {},
    "dp-fedavg": {"privacy": {"clip_mode": "quantile"}},
    "remembering": {"run": {"participation": 0.6, "average": 0.7}},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Runs that nobody stopped."""
    done = {}
    for name, sections in KINDS.items():
        out = tmp_path_factory.mktemp("whole") / name
        done[name] = (out, run(config_of(name, **sections), out, source=SOURCE))
    return done


# --- bitwise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("t", [0, 1, ROUNDS - 1, ROUNDS])
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    name: str, t: int, whole: Any, tmp_path: Path
) -> None:
    config = config_of(name, **KINDS[name])
    out = crashed(config, tmp_path / "r", t)
    assert json.loads((out / "run.json").read_text())["state"] == "running"
    result = resumed(config, out)
    reference, wanted = whole[name]
    same(reference, out)
    for key in ("epsilon", "test_accuracy", "test_loss", "start_accuracy", "rounds", "guarantee"):
        assert result[key] == wanted[key], key
    rows = [read_recorded_spending(folder).rows for folder in (reference, out)]
    assert rows[0] == rows[1]  # seeded noise comes again: the same rows
    assert json.loads((out / "run.json").read_text())["state"] == "finished"


def test_quantile_clipping_goes_on_with_its_own_c(whole: Any) -> None:
    """So that the test above is about something: C has moved."""
    clips = [row["clip"] for row in metrics(whole["dp-fedavg"][0])]
    assert len(set(clips[1:])) == ROUNDS


def test_a_run_stopped_twice_and_with_rare_checkpoints(tmp_path: Path, whole: Any) -> None:
    config = config_of("remembering", run={**KINDS["remembering"]["run"], "checkpoint_every": 2})
    out = crashed(config, tmp_path / "r", 4)
    with pytest.raises(CrashError):
        resumed(config, out, callbacks=[Watcher(on_round=stop_after(3))])  # rounds 3 and 4 again
    assert [row["round"] for row in metrics(out)] == [0, 1, 2, 3]
    resumed(config, out)
    same(whole["remembering"][0], out)


def test_without_checkpoints_a_run_begins_again(tmp_path: Path, whole: Any) -> None:
    config = config_of(run={"checkpoint_every": 0})
    out = crashed(config, tmp_path / "r", 3)
    assert not (out / "checkpoint").exists()
    assert resumed(config, out)["epsilon"] == whole["dp-fedadamw"][1]["epsilon"]
    assert metrics(out) == metrics(whole["dp-fedadamw"][0])


def test_a_memory_in_files_is_the_same_memory(
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


def test_two_checkpoints_are_kept_and_what_they_name(whole: Any) -> None:
    folder = whole["remembering"][0] / "checkpoint"
    assert {p.stem for p in folder.glob("round-*")} == {f"round-{ROUNDS - 1}", f"round-{ROUNDS}"}
    named = {
        file
        for path in folder.glob("round-*.json")
        for file, _ in json.loads(path.read_text())["memory"].values()
    }
    assert {p.name for p in (folder / "memory").iterdir()} == named


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "what", ["round-3.json", "round-3.safetensors", "memory", "cut", "not JSON", "list"]
)
def test_a_damaged_newest_checkpoint_leaves_the_one_before_it(
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


def test_with_all_of_them_damaged_there_is_one_sentence_and_nothing_is_changed(
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


def test_a_line_of_metrics_cut_short_is_dropped(tmp_path: Path, whole: Any) -> None:
    config = config_of()
    out = crashed(config, tmp_path / "r", 2)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "accu')
    resumed(config, out)
    assert metrics(out) == metrics(whole["dp-fedadamw"][0])


def test_metrics_that_are_gone_are_not_made_up(tmp_path: Path) -> None:
    """The first line is where start_accuracy comes from."""
    config = config_of()
    out = crashed(config, tmp_path / "r", 3)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    for kept in ([], lines[1:], lines[:2]):
        (out / "metrics.jsonl").write_text("".join(f"{line}\n" for line in kept))
        with pytest.raises(DpfedError, match="rounds 0 to 2"):
            resumed(config, out)


def test_a_state_of_another_form_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """As after an update of the program that added a field."""
    memory = ClientStates((), 3, tmp_path / "memory", 1)
    checkpoints = Checkpoints(tmp_path, "job", memory)
    checkpoints.save(Progress(1, State(Point(torch.ones(3)), 1.0)), np.array([1, 0]))
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


def test_what_is_read_back_is_what_was_saved(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "job", ClientStates((), 3, tmp_path / "memory", 1))
    shared = torch.tensor([1e-30, -0.0, 3.0])
    state = State(Server(shared, shared), 0.1 + 0.2)  # one tensor in two fields
    checkpoints.save(Progress(7, state, 1.25), np.array([0, 3, 0]))
    saved, said = checkpoints.load(State(Server(torch.zeros(3), torch.zeros(3)), 1.0))
    assert saved is not None
    assert said == []
    assert (saved.progress.t, saved.progress.seconds, saved.progress.state.clip) == (
        7,
        1.25,
        0.1 + 0.2,
    )
    assert saved.taken.tolist() == [0, 3, 0]
    for value in saved.progress.state.tensors().values():
        assert value.numpy().tobytes() == shared.numpy().tobytes()
    checkpoints.save(Progress(8, State(state.server, float("inf"))), np.zeros(3, dtype=np.int64))
    again, _ = checkpoints.load(state)
    assert again is not None
    assert again.progress.state.clip == float("inf")


# --- what must not change ---------------------------------------------------------------------------------------------


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


def test_what_may_change_may_change(half: Path, tmp_path: Path, whole: Any) -> None:
    out = Path(shutil.copytree(half, tmp_path / "r"))
    config = config_of(
        run={"eval_every": 4, "checkpoint_every": 3, "memory_limit": 1, "threads": 1}
    )
    resumed(config, out)
    a, b = (load_file(folder / "model.safetensors") for folder in (whole["dp-fedadamw"][0], out))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert [row["accuracy"] is None for row in metrics(out)] == [False, False, False, True, False]


def test_other_data_under_the_same_settings_are_refused(half: Path, tmp_path: Path) -> None:
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


def test_a_finished_run_and_a_folder_that_is_none(whole: Any, tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="finished"):
        resumed(config_of(), whole["dp-fedadamw"][0])
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


def test_another_kind_of_device_is_another_run(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generators give other numbers for the same seed, so a round would be repeated with other noise."""
    out = shutil.copytree(half, tmp_path / "r")
    told = run_identity
    monkeypatch.setattr(
        "dpfed.training.open_run.run_identity", lambda job: {**told(job), "device": "cuda"}
    )
    with pytest.raises(DpfedError, match="another configuration"):
        resumed(config_of(), out)
    monkeypatch.undo()
    jobs: list[Job] = []
    resumed(config_of(), out, callbacks=[Watcher(on_start=jobs.append)])
    assert (
        run_identity(dataclasses.replace(jobs[0], device=torch.device("meta")))["device"] == "meta"
    )


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_real_noise_is_spent_for_every_attempt(tmp_path: Path) -> None:
    config = config_of(run={"noise": "os"})
    out = crashed(config, tmp_path / "r", 3)  # round 3 was charged, and will be again
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


def test_an_attempt_with_quite_other_clients_is_an_attempt_too(tmp_path: Path) -> None:
    """Two cohorts of round 1 that share no client: every row is a first attempt, yet everyone had two chances."""
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


def test_a_round_that_was_not_begun_is_no_second_attempt(tmp_path: Path) -> None:
    """Stopped between a checkpoint and the next charge: nothing was released twice."""
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
def test_a_ledger_that_is_gone_or_new_is_not_begun_anew(noise: str, tmp_path: Path) -> None:
    config = config_of(run={"noise": noise})
    out = crashed(config, tmp_path / "r", 3)
    with Ledger.open(out / "ledger.sqlite", readonly=True) as ledger:
        meta = dict(ledger.meta)
    for path in out.glob("ledger.sqlite*"):
        path.unlink()
    with pytest.raises(DpfedError, match="ledger"):
        resumed(config, out)
    own = ("format", "kind", "owner", "created", "dpfed")
    Ledger.create(
        out / "ledger.sqlite", run=meta["owner"], **{k: v for k, v in meta.items() if k not in own}
    ).close()  # an empty one in its place
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


def test_a_run_that_is_still_going_on_is_left_alone(half: Path, tmp_path: Path) -> None:
    """The ledger's lock is asked before the metrics are cut back."""
    out = Path(shutil.copytree(half, tmp_path / "r"))
    before = (out / "metrics.jsonl").read_bytes()
    with Ledger.open(out / "ledger.sqlite"), pytest.raises(DpfedError):
        resumed(config_of(), out)
    assert (out / "metrics.jsonl").read_bytes() == before
    resumed(config_of(), out)


# --- files that are whole or not there --------------------------------------------------------------------------------


def test_a_write_that_fails_midway_leaves_the_old_file(tmp_path: Path) -> None:
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
def test_it_is_replaced_only_when_it_is_on_the_disk(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_file(path, lambda file: file.write(b"old"))

    def broken(*_: object) -> None:
        assert path.read_bytes() == b"old"
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_file.os, call, broken)
        with pytest.raises(DpfedError, match="cannot be written"):
            write_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"old"
    digest = write_file(path, lambda file: file.write(b"new"))
    assert (path.read_bytes(), len(digest)) == (b"new", 64)


@pytest.mark.parametrize("nth", [1, 3, 4])
def test_a_disk_that_fills_up_during_a_checkpoint_ends_the_run_in_one_sentence(
    nth: int, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first state, the second state, the second index: in each case what was complete before is still there."""
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
def test_a_disk_that_is_full_for_the_metrics_is_one_sentence(tmp_path: Path, call: str) -> None:
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


# --- the command ------------------------------------------------------------------------------------------------------


QUICK = [
    "model.name=linear",
    "run.rounds=2",
    "run.local_steps=1",
    "run.participation=0.3",
    "privacy.batch=16",
    "privacy.sigma=2",
]


def test_the_command_resumes_and_refuses_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    sets = [word for key in QUICK for word in ("--set", key)]
    from dpfed.training.callbacks.progress import ProgressDisplay

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
