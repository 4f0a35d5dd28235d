"""A study with a runner that trains nothing: which runs, seeds and halves, and how it resumes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from study_case import FakeRunner, leave, study

from dpfed.errors import DpfedError
from dpfed.registry import registry
from dpfed.studies.outcomes import Task, read_outcome
from dpfed.studies.output import FILES, write
from dpfed.studies.packs import Packing, packs_of
from dpfed.studies.study import TUNING_SEED, Study, check, claim, conduct, make_task

TOPS = {"dp-fedavg": 0.05, "dp-fedadamw": 0.02, "dp-fedsam": 0.05}


def score(tables: Mapping[str, Any]) -> float:
    """Return an accuracy with one maximum over the learning rate, shifted a little by the seed."""
    algorithm, run = tables["algorithm"], tables["run"]
    gap = abs(math.log10(algorithm["lr"] / TOPS[algorithm["name"]]))
    return (
        0.9
        - 0.1 * gap
        + 0.01 * (run["seed"] % 7)
        - (0.02 if algorithm["name"] == "dp-fedavg" else 0)
    )


def test_tuning_and_reporting_share_neither_seed_nor_half(tmp_path: Path) -> None:
    runner = FakeRunner(score)
    results = conduct(study(), tmp_path, runner, registry())
    tuning = [t for t in runner.ran if t.tuning]
    reported = [t for t in runner.ran if not t.tuning]
    assert {(t.tables["run"]["seed"], t.tables["run"]["eval_on"]) for t in tuning} == {
        (TUNING_SEED, "validation")
    }
    assert {(t.tables["run"]["seed"], t.tables["run"]["eval_on"]) for t in reported} == {
        (0, "test"),
        (1, "test"),
    }
    assert len({len(result.tuned) for result in results}) == 1, (
        "the same number of runs for every method"
    )
    assert len(runner.ran) == len(tuning) + 4
    for result in results:
        rate = result.arm.overrides[0].removeprefix("algorithm.name=")
        assert result.point is not None
        assert abs(math.log10(result.point[0] / TOPS[rate])) < 0.3
        assert not result.at_edge


def test_tuning_runs_are_scored_once_unless_a_budget_may_end_them(tmp_path: Path) -> None:
    plain, budget = FakeRunner(score), FakeRunner(score)
    conduct(study(seeds=1), tmp_path / "a", plain, registry())
    conduct(study(seeds=1, sets=("privacy.budget=3",)), tmp_path / "b", budget, registry())
    assert {t.tables["run"]["eval_every"] for t in plain.ran if t.tuning} == {2}
    assert {t.tables["run"]["eval_every"] for t in plain.ran if not t.tuning} == {1}
    assert {t.tables["run"]["eval_every"] for t in budget.ran} == {1}


def by_luck(tables: Mapping[str, Any]) -> float:
    """Return a good accuracy for rate 0.1, and a better one for larger rates with one seed only."""
    rate, seed = tables["algorithm"]["lr"], tables["run"]["seed"]
    if math.isclose(rate, 0.1):
        return 0.7
    return 0.9 if rate > 0.1 and seed == TUNING_SEED else 0.5


def test_with_several_seeds_the_search_uses_their_mean(tmp_path: Path) -> None:
    one = study("dp-fedavg", seeds=1)
    three = dataclasses.replace(one, search_seeds=3)
    (lucky,) = conduct(one, tmp_path / "one", FakeRunner(by_luck), registry())
    runner = FakeRunner(by_luck)
    results = conduct(three, tmp_path / "three", runner, registry())
    assert lucky.point is not None
    assert lucky.point[0] > 0.1
    assert results[0].point == (0.1,)
    tuning = [task for task in runner.ran if task.tuning]
    assert {task.tables["run"]["seed"] for task in tuning} == {
        TUNING_SEED,
        TUNING_SEED + 1,
        TUNING_SEED + 2,
    }
    assert len(tuning) == 3 * len(results[0].tuned)
    table = write(three, results, tmp_path / "three")
    assert table.rows[0].tuning_runs == len(tuning)
    assert any("the mean of 3 other seeds" in note for note in table.notes)
    again = FakeRunner(by_luck)
    conduct(three, tmp_path / "three", again, registry())
    assert again.ran == []


def test_a_study_of_one_seed_is_named_as_before_there_were_several() -> None:
    plain = study()
    assert "search_seeds" not in plain.asked
    assert dataclasses.replace(plain, search_seeds=2).asked == {**plain.asked, "search_seeds": 2}
    with pytest.raises(DpfedError, match="--search-seeds 0 must be a whole number of at least 1"):
        check(dataclasses.replace(plain, search_seeds=0), registry())


@pytest.mark.parametrize("after", [1, 6, 15])
def test_interrupted_and_started_again_it_ends_with_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    drawn: list[object] = []
    monkeypatch.setattr(
        "dpfed.studies.output.scores_over_rounds", lambda curves, *rest: drawn.append(curves)
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    calm = FakeRunner(score)
    write(study(), conduct(study(), whole, calm, registry()), whole)
    first = FakeRunner(score, dies_after=after)
    with pytest.raises(KeyboardInterrupt):
        conduct(study(), broken, first, registry())
    second = FakeRunner(score)
    write(study(), conduct(study(), broken, second, registry()), broken)
    assert len(first.ran) + len(second.ran) == len(calm.ran), "nothing is run twice"
    assert drawn[0] == drawn[1]
    for name in FILES:
        if not name.startswith("curves"):
            assert (whole / name).read_bytes() == (broken / name).read_bytes(), name


def test_a_finished_study_runs_nothing(tmp_path: Path) -> None:
    conduct(study(), tmp_path, FakeRunner(score), registry())
    again = FakeRunner(score)
    fresh: list[bool] = []
    conduct(study(), tmp_path, again, registry(), lambda ended: fresh.append(ended.fresh))
    assert again.ran == []
    assert fresh
    assert not any(fresh)


def test_an_arm_that_fails_leaves_the_others(tmp_path: Path) -> None:
    def refuse(tables: Mapping[str, Any]) -> float | str:
        return (
            "not with these clients"
            if tables["algorithm"]["name"] == "dp-fedavg"
            else score(tables)
        )

    results = conduct(study(), tmp_path, FakeRunner(refuse), registry())
    assert [r.failed for r in results] == ["not with these clients", None]
    table = write(study(), results, tmp_path)
    assert table.rows[1].scores
    assert "not with these clients" in (tmp_path / "table.md").read_text()
    calm = FakeRunner(score)
    assert [r.failed for r in conduct(study(), tmp_path, calm, registry())] == [None, None], (
        "failures are tried again"
    )


def test_an_arm_that_fails_does_not_change_the_effort_of_the_others(tmp_path: Path) -> None:
    """Otherwise the table would depend on the moment of the failure."""

    def refuse(tables: Mapping[str, Any]) -> float | str:
        return "no" if tables["algorithm"]["name"] == "dp-fedavg" else score(tables)

    base = study()
    arms = (
        dataclasses.replace(base.arms[0], grids={"lr": (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)}),
        base.arms[1],
    )
    results = conduct(
        dataclasses.replace(base, arms=arms), tmp_path, FakeRunner(refuse), registry()
    )
    assert len(results[1].tuned) >= 6 + 2


def test_a_diverged_run_has_accuracy_0(tmp_path: Path) -> None:
    leave(tmp_path / "r", 0.9, state="stopped", diverged=True)
    found = read_outcome(tmp_path / "r")
    assert found is not None
    assert (found.accuracy, found.diverged) == (0.0, True)


def test_a_run_that_a_budget_ended_keeps_its_accuracy(tmp_path: Path) -> None:
    leave(tmp_path / "r", 0.9, state="stopped", diverged=False)
    found = read_outcome(tmp_path / "r")
    assert found is not None
    assert found.accuracy == 0.9


@pytest.mark.parametrize("more", [{"state": "running"}, {"versions": {"torch": "0.1"}}])
def test_unfinished_runs_and_those_of_other_versions_are_not_done(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    leave(tmp_path / "r", 0.9, **more)
    assert read_outcome(tmp_path / "r") is None


def test_the_longest_runs_come_first(tmp_path: Path) -> None:
    runner = FakeRunner(score)
    conduct(study("dp-fedavg,dp-fedsam,dp-fedadamw", seeds=1), tmp_path, runner, registry())
    assert runner.ran[0].tables["algorithm"]["name"] == "dp-fedsam", "two gradients per step"


def test_a_killed_study_leaves_no_models_of_its_search(tmp_path: Path) -> None:
    """A worker removes them after the run; after a kill, the resumed study removes them."""
    runner = FakeRunner(score)
    conduct(study(), tmp_path, runner, registry())
    models = {task.key: tmp_path / "runs" / task.key / "model.safetensors" for task in runner.ran}
    for model in models.values():
        model.touch()
    conduct(study(), tmp_path, FakeRunner(score), registry())
    assert {task.key for task in runner.ran if models[task.key].exists()} == {
        task.key for task in runner.ran if not task.tuning
    }


def test_arms_with_equal_configurations_share_their_runs(tmp_path: Path) -> None:
    runner = FakeRunner(score)
    results = conduct(study("dp-fedadamw,dp-fedadamw:gamma=0.5"), tmp_path, runner, registry())
    assert len(runner.ran) == len({t.key for t in runner.ran})
    assert results[0].reported == results[1].reported


def test_a_folder_belongs_to_one_study(tmp_path: Path) -> None:
    with claim(tmp_path / "s", study(), force=False):
        pass
    with claim(tmp_path / "s", study(), force=False):
        pass
    other = study(seeds=3)
    with pytest.raises(DpfedError, match="holds another study"):
        claim(tmp_path / "s", other, force=False)
    with claim(tmp_path / "s", other, force=True):
        assert json.loads((tmp_path / "s" / "study.json").read_text())["seeds"] == 3
        with pytest.raises(DpfedError, match="at work"):
            claim(tmp_path / "s", other, force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(DpfedError, match="not a study"):
        claim(tmp_path / "mine", study(), force=True)


@pytest.mark.parametrize(
    ("algorithms", "sets", "words"),
    [
        ("dp-fedavg", ("run.noise=os",), "seeded"),
        ("dp-fedavg:run.seed=5", (), "set by the study"),
        ("dp-fedavg:run.noise=os", (), "set by the study"),
        ("dp-fedavg:gamma=1", (), "gamma is not a key"),
    ],
)
def test_a_study_is_refused_before_its_first_run(
    algorithms: str, sets: tuple[str, ...], words: str
) -> None:
    with pytest.raises(DpfedError, match=words):
        check(study(algorithms, sets=sets), registry())


def test_a_study_is_named_after_its_description() -> None:
    assert study().name == study().name
    assert study().name != study(seeds=3).name
    assert study().name.startswith("compare-digits-")


# ------------------------------------------------------------------ packs


def tasks_of(count: int, *sets: str) -> list[Task]:
    made = [make_task(study(sets=sets), 0, (0.1,), seed, registry()) for seed in range(count)]
    assert len({task.key for task in made}) == count
    return made


@pytest.mark.parametrize(
    ("count", "most", "workers", "sizes"),
    [
        (5, 1, 2, [1] * 5),
        (5, 16, 1, [5]),
        (33, 16, 1, [11, 11, 11]),
        (5, 16, 2, [3, 2]),
        (2, 16, 4, [1, 1]),
    ],
)
def test_packs_are_even_and_leave_no_worker_idle(
    count: int, most: int, workers: int, sizes: list[int]
) -> None:
    tasks = tasks_of(count)
    packs = packs_of(tasks, Packing(most, workers), registry())
    assert [len(pack) for pack in packs] == sizes
    assert [task for pack in packs for task in pack] == tasks


def test_runs_that_do_not_fit_together_are_not_packed() -> None:
    alone, others = tasks_of(2, "run.diagnostics=true"), tasks_of(2, "data.alpha=0.3")
    mine = tasks_of(2)
    packs = packs_of(
        [alone[0], mine[0], others[0], alone[1], mine[1], others[1]], Packing(8), registry()
    )
    assert packs == [[alone[0]], mine, others, [alone[1]]]


def test_a_packed_study_has_the_same_results(tmp_path: Path) -> None:
    plain, packed = FakeRunner(score), FakeRunner(score)
    wanted = conduct(study(), tmp_path / "a", plain, registry())
    assert conduct(study(), tmp_path / "b", packed, registry(), packing=Packing(4)) == wanted
    assert sorted(t.key for t in packed.ran) == sorted(t.key for t in plain.ran)
    assert packed.packs
    assert not plain.packs
    assert all(1 < len(pack) <= 4 for pack in packed.packs)
    assert len(packed.packs[0]) == 4


def counts(runner: FakeRunner, asked: Study, folder: Path) -> list[tuple[int, int, bool]]:
    """Return (done, planned, at least) after each run."""
    seen: list[tuple[int, int, bool]] = []
    conduct(
        asked,
        folder,
        runner,
        registry(),
        lambda ended: seen.append((ended.done, ended.planned.runs, ended.planned.at_least)),
    )
    return seen


def test_the_count_says_at_least_while_the_search_can_grow(tmp_path: Path) -> None:
    seen = counts(
        FakeRunner(lambda tables: min(1.0, float(tables["algorithm"]["lr"]))), study(), tmp_path
    )
    assert [done for done, *_ in seen] == list(range(1, len(seen) + 1))
    assert seen[0][2], "the search begins with an open end"
    assert seen[-1] == (len(seen), len(seen), False)
    planned = [runs for _, runs, _ in seen]
    assert planned == sorted(planned), "a count never promises more than there is"
    assert planned[0] < planned[-1], "this search grows"
    assert all(done < runs for done, runs, at_least in seen if at_least)


def test_the_count_of_a_study_without_search_is_final(tmp_path: Path) -> None:
    asked = study("dp-fedavg:lr=0.1,dp-fedadamw:lr=0.1")
    assert counts(FakeRunner(lambda tables: 0.5), asked, tmp_path) == [
        (i, 4, False) for i in range(1, 5)
    ]


def test_arms_that_share_their_runs_are_counted_once(tmp_path: Path) -> None:
    asked = study("dp-fedadamw,dp-fedadamw:gamma=0.5")
    seen = counts(FakeRunner(lambda tables: 0.5), asked, tmp_path)
    assert seen[-1] == (len(seen), len(seen), False)
    assert seen[0][1] <= seen[-1][1]


def test_the_count_after_a_failed_arm_holds(tmp_path: Path) -> None:
    def broken(tables: Mapping[str, Any]) -> float | str:
        return "broken" if tables["algorithm"]["name"] == "dp-fedavg" else 0.5

    seen = counts(FakeRunner(broken), study(), tmp_path)
    assert seen[-1] == (len(seen), len(seen), False)
