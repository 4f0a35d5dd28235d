"""Keys that may change when a run resumes; added rounds are in the ledger before they run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from callback_case import Watcher
from resume_case import SOURCE, CrashError
from safetensors.torch import load_file
from torch import equal

from dpfed.config import Config, build, to_toml
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.registry import registry
from dpfed.training.budget.ledgers import EXTENSION
from dpfed.training.budget.recorded_spending import read_recorded_spending
from dpfed.training.open_run import Mode
from dpfed.training.rounds import Round
from dpfed.training.run import run
from dpfed.training.run_folder.resume import extendable


def config_of(**run: Any) -> Config:
    privacy = {"sigma": 2.0, "batch": 4, **run.pop("privacy", {})}
    if "target_epsilon" in privacy or privacy.get("enabled") is False:
        del privacy["sigma"]
    table = {
        "rounds": 3,
        "local_steps": 2,
        "participation": 0.4,
        "lr_schedule": "constant",
        "device": "cpu",
        **run,
    }
    return build(
        {
            "data": {"name": "digits", "clients": 5},
            "model": {"name": "linear"},
            "algorithm": {"name": "dp-fedavg", "lr": 0.1},
            "privacy": privacy,
            "run": table,
        },
        registry(),
    )


def go(config: Config, out: Path, mode: Mode = "new", crash: int | None = None) -> dict[str, Any]:
    def observe(round: Round) -> None:
        if round.t == crash:
            raise CrashError

    if crash is None:
        return run(config, out, mode, SOURCE)
    with pytest.raises(CrashError):
        run(config, out, mode, SOURCE, [Watcher(on_round=observe)])
    return {}


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a finished run of three rounds."""
    out = tmp_path_factory.mktemp("short") / "r"
    go(config_of(), out)
    return out


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Make a run that has five rounds from the start."""
    out = tmp_path_factory.mktemp("long") / "r"
    return out, go(config_of(rounds=5), out)


def same_model(one: Path, two: Path) -> bool:
    a, b = (load_file(out / "model.safetensors") for out in (one, two))
    return all(equal(a[name], b[name]) for name in a)


def test_added_rounds_give_the_results_of_a_longer_run(
    short: Path, long: Any, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(short, tmp_path / "r"))
    before = read_recorded_spending(out)
    result = go(config_of(rounds=5), out, mode="resume")
    assert same_model(out, long[0])
    assert result["epsilon"] == long[1]["epsilon"]
    after, planned = read_recorded_spending(out), read_recorded_spending(long[0])
    assert (after.server_worst, after.third_party) == (planned.server_worst, planned.third_party)
    # By hand: 20 records per client, batch 4, ten steps at noise 2.
    kind = Mechanism("poisson", 0.2, 2.0)
    assert after.server_worst == pytest.approx(epsilon([(kind, 10)], 1e-5), rel=1e-9)
    assert after.server_worst > before.server_worst
    assert after.third_party > before.third_party
    assert after.void is None
    lines = (out / "config.toml").read_text().splitlines()
    assert lines[1] == "# after round 3: run.rounds was 3, is 5"
    assert "rounds = 5" in lines
    with pytest.raises(DpfedError, match="finished"):
        go(config_of(rounds=5), out, mode="resume")


def test_the_ledger_has_the_new_number_of_rounds_before_they_run(
    short: Path, long: Any, tmp_path: Path
) -> None:
    """`dpfed privacy RUN` reports the larger figure after a stop at any point."""
    out = Path(shutil.copytree(short, tmp_path / "r"))
    charge = Ledger.charge

    def killed(self: Ledger, charges: Any, run: str | None = None) -> Any:
        rows = charge(self, charges, run)
        if charges[0].client == EXTENSION:
            raise CrashError
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "charge", killed)
        with pytest.raises(CrashError):
            go(config_of(rounds=5), out, mode="resume")
    assert read_recorded_spending(out).server_worst == read_recorded_spending(long[0]).server_worst
    go(config_of(rounds=5), out, mode="resume")
    assert read_recorded_spending(out).server_worst == read_recorded_spending(long[0]).server_worst
    with Ledger.open(out / "ledger.sqlite", readonly=True) as ledger:
        assert sum(row.charge.void for row in ledger.rows()) == 1


def test_fewer_rounds_than_in_the_ledger_are_refused(short: Path, tmp_path: Path) -> None:
    """A kill between the writes of ledger and configuration leaves too few rounds."""
    out = Path(shutil.copytree(short, tmp_path / "r"))
    old = (out / "config.toml").read_bytes()
    go(config_of(rounds=5), out, mode="resume", crash=4)
    (out / "config.toml").write_bytes(old)
    with pytest.raises(DpfedError, match=r"states 5 rounds: go on with run\.rounds = 5 or more"):
        go(config_of(rounds=3), out, mode="resume")
    assert go(config_of(rounds=6), out, mode="resume")["rounds"] == 6
    assert read_recorded_spending(out).planned.rounds == 6


def test_extended_twice_with_a_budget_and_real_noise(tmp_path: Path) -> None:
    keys = {"privacy": {"budget": 1.6}, "noise": "os", "min_clients": 1, "participation": 0.2}
    out = tmp_path / "r"
    go(config_of(**keys), out)
    go(config_of(**keys, rounds=6), out, mode="resume", crash=5)
    result = go(config_of(**keys, rounds=12), out, mode="resume")
    whole = go(config_of(**keys, rounds=12), tmp_path / "whole")
    accounts, planned = read_recorded_spending(out), read_recorded_spending(tmp_path / "whole")
    assert accounts.planned.chances == planned.planned.chances
    # The budget leaves fewer clients to draw from.
    assert len(planned.planned.chances) > 1
    assert result["epsilon"]["server_worst"] == whole["epsilon"]["server_worst"]
    # The rows that add rounds are not noise.
    assert not accounts.seeded


def test_without_privacy_rounds_may_be_added_too(tmp_path: Path) -> None:
    off = {"privacy": {"enabled": False}}
    go(config_of(**off), tmp_path / "r", crash=2)
    assert go(config_of(**off, rounds=5), tmp_path / "r", mode="resume")["rounds"] == 5
    go(config_of(**off, rounds=5), tmp_path / "whole")
    assert same_model(tmp_path / "r", tmp_path / "whole")


def test_changes_that_affect_completed_rounds_are_refused(short: Path, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    shutil.copy(short / "config.toml", tmp_path / "r")
    with pytest.raises(
        DpfedError, match=r"run\.rounds was 3 .* is 2 now: rounds may be added but not taken away"
    ):
        go(config_of(rounds=2), tmp_path / "r", mode="resume")
    for number, keys in enumerate(
        ({"lr_schedule": "cosine"}, {"privacy": {"target_epsilon": 4.0}})
    ):
        out = tmp_path / f"fixed{number}"
        assert not extendable(config_of(**keys))
        go(config_of(**keys), out)
        with pytest.raises(DpfedError, match=r"run\.rounds was 3 .* is 5 now.*constant"):
            go(config_of(**keys, rounds=5), out, mode="resume")


def test_differences_are_listed_and_allowed_changes_recorded(tmp_path: Path) -> None:
    out = tmp_path / "r"
    go(config_of(), out, crash=2)
    with pytest.raises(
        DpfedError,
        match=r"run\.local_steps was 2 .* is 3 now, run\.seed was 0 .* is 4 now: .*eval_every",
    ):
        go(config_of(local_steps=3, seed=4), out, mode="resume")
    assert (out / "config.toml").read_text().count("#") == 1
    go(config_of(eval_every=2), out, mode="resume", crash=3)
    go(config_of(eval_every=2, checkpoint_every=2), out, mode="resume")
    assert [
        line
        for line in (out / "config.toml").read_text().splitlines()
        if line.startswith("# after")
    ] == [
        "# after round 1: run.eval_every was 1, is 2",
        "# after round 2: run.checkpoint_every was 'auto', is 2",
    ]


def test_a_run_killed_before_it_had_a_name_gets_one(tmp_path: Path, long: Any) -> None:
    out = tmp_path / "r"
    go(config_of(rounds=5), out, crash=0)
    for path in [*out.glob("ledger*"), out / "run.json", out / "metrics.jsonl"]:
        path.unlink()
    go(config_of(rounds=5), out, mode="resume")
    assert same_model(out, long[0])
    assert json.loads((out / "run.json").read_text())["state"] == "finished"


def test_a_new_run_refuses_a_large_delta_and_an_old_one_resumes_with_a_warning(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    large = config_of(privacy={"delta": 0.05, "rate": 0.2, "batch": None})
    with pytest.raises(
        DpfedError, match=r"privacy\.delta = 0\.05 is at least 1 / 20.*allow_large_delta = true"
    ):
        run(large, out, source=SOURCE)
    assert not out.exists()
    allowed = config_of(privacy={"delta": 0.05, "allow_large_delta": True})

    def crash(round: Round) -> None:
        if round.t == 2:
            raise CrashError

    with pytest.raises(CrashError):
        run(allowed, out, source=SOURCE, callbacks=[Watcher(on_round=crash)])
    # The folder of a version without the key, which did not refuse.
    text = (out / "config.toml").read_text()
    (out / "config.toml").write_text(text.replace("allow_large_delta = true\n", ""))
    before = config_of(privacy={"delta": 0.05})
    result = run(before, out, source=SOURCE, mode="resume")
    assert any("privacy.delta = 0.05 is at least 1 / 20" in said for said in result["warnings"])
    assert any(
        "is at least 1 / 20" in said for said in read_recorded_spending(out).planned.warnings
    )
    stored = json.loads((out / "run.json").read_text())
    assert stored.pop("largest_client") == 20
    (out / "run.json").write_text(json.dumps(stored))
    assert any(
        "is at least 1 / 20" in said for said in read_recorded_spending(out).planned.warnings
    )


def test_an_old_configuration_gets_no_new_keys() -> None:
    assert "allow_large_delta" not in to_toml(config_of())
