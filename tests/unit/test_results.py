"""The results page: studies stop, move to another machine, finish there, and become tables."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from command import dpfed

from dpfed.errors import DpfedError
from dpfed.studies.outcomes import Task
from dpfed.studies.pool import run_one

ROOT = Path(__file__).parents[2]

BASE = """
[data]
name = "digits"
[model]
name = "linear"
[algorithm]
name = "dp-fedadamw"
[privacy]
clip = 1.0
sigma = 2.0
batch = 32
[run]
rounds = 2
local_steps = 1
participation = 0.5
device = "cpu"
"""
STUDIES = """
[[study]]
name = "main"
title = "Main"
question = "Which is best?"
base = "small.toml"
algorithms = ["dp-fedavg", "dp-fedadamw", "dp-fedavg:privacy.enabled=false"]
seeds = 2
plot = true
lr = { dp-fedavg = [0.3, 3], dp-fedadamw = [0.003, 0.03] }

[[study]]
name = "best"
title = "Best"
question = "Does it last?"
base = "small.toml"
best_of = "main"
best = 1
seeds = 3

[[study]]
name = "later"
title = "Later"
question = "And then?"
base = "small.toml"
algorithms = ["dp-fedavg:lr=1"]
seeds = 1
"""
PAGE = (
    "# Page\n\n"
    + "".join(f"<!-- results: {n} -->\n<!-- end -->\n\n" for n in ("main", "best", "later"))
    + "The end.\n"
)


@pytest.fixture(scope="module")
def results() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "experiments"))
    yield importlib.import_module("results")
    sys.path.remove(str(ROOT / "experiments"))


class Inline:
    """Run in this process, and interrupt after `left` runs."""

    left: ClassVar[int] = 10**6

    def __init__(self, workers: int, gpus: int) -> None:
        self._ended: list[tuple[str, str | None]] = []

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *anything: object) -> None:
        pass

    def free(self) -> bool:
        return not self._ended

    def start(self, task: Task, folder: Path) -> None:
        Inline.left -= 1
        if Inline.left < 0:
            raise KeyboardInterrupt
        self._ended.append((task.key, run_one(task.tables, folder, task.tuning, {})))

    def wait(self) -> tuple[str, str | None]:
        return self._ended.pop()


def in_process(words: Sequence[str], log: Path, seconds: float | None) -> int | None:
    """Call `dpfed compare` as results.py does."""
    code = dpfed(*words, "--workers", "1")
    return None if Inline.left < 0 else code


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfed.studies.pool.Pool", Inline)
    monkeypatch.setattr("dpfed.studies.output.scores_over_rounds", lambda *anything: None)
    monkeypatch.setattr(Inline, "left", 10**6)


@pytest.fixture
def studies(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(BASE)
    (tmp_path / "studies.toml").write_text(STUDIES)
    (tmp_path / "results.md").write_text(PAGE)
    return tmp_path / "studies.toml"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def paged(results: Any, studies: Path, *words: str) -> tuple[int, str]:
    """Return the exit code and the text of all pages, the page of findings first."""
    place = studies.parent
    flags = [
        "--studies",
        str(studies),
        "--csv",
        str(place / "csv"),
        "--docs",
        str(place / "results.md"),
    ]
    code = results.main(["page", *words, *flags])
    pages = [place / "results.md", *sorted((place / "results").glob("*.md"))]
    return code, "\n".join(page.read_text() for page in pages)


@pytest.mark.usefixtures("inline")
def test_an_interrupted_study_moves_finishes_and_becomes_a_page(
    results: Any, studies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, said = tmp_path / "here", tmp_path / "there", list[str]()

    def run(out: Path, **more: Any) -> int:
        return int(results.run(results.Sitting(out, (), studies, **more), in_process, said.append))

    monkeypatch.setattr(Inline, "left", 4)
    assert run(here, minutes=5.0) == 3
    assert said[0].startswith("main: stopped after")
    assert "4 runs done, at least 14 to do" in said[0], "3 arms x (2 + 2 tuned + 2 reported)"
    assert said[1] == "best: waits for main"
    code, text = paged(results, studies, str(here))
    assert code == 0
    assert "**Incomplete:** 4 runs are done, at least 14 are missing." in text
    assert "| rate |" not in text, "before a seed is reported a table has no number"
    assert "Does it last? Not measured yet." in text

    results.main(["pack", str(here), str(tmp_path / "all.tar.gz")])
    results.main(["unpack", str(tmp_path / "all.tar.gz"), str(there)])
    assert not list(there.rglob("*.safetensors"))
    monkeypatch.setattr(Inline, "left", 10**6)
    assert run(there) == 0
    used = 10**6 - Inline.left
    asked = json.loads((there / "main" / "study.json").read_text())
    best = json.loads((there / "best" / "study.json").read_text())
    total = len(list((there / "runs").iterdir()))
    assert used == total - 4, "what was done is not done again, and no run twice"
    assert [arm["grids"] for arm in best["arms"]] == [{}] * len(best["arms"]), "rates are fixed"
    assert len(asked["arms"]) == 3

    code, text = paged(results, studies, str(there))
    assert code == 0
    check_tables(tmp_path / "csv", there, text)
    assert paged(results, studies, "--check")[0] == 0
    for name in ("results.md", "results/main.md", "results/index.md"):
        written = (tmp_path / name).read_text()
        (tmp_path / name).write_text(written.replace("±", "+").replace("Best", "Worst"))
        assert paged(results, studies, "--check")[0] == 1, name
        (tmp_path / name).write_text(written)
    (tmp_path / "results" / "later.md").unlink()
    assert paged(results, studies, "--check")[0] == 1, "a page is missing"
    said.clear()
    assert run(there) == 0
    assert said[0] == "main: was complete, 18 runs"


def check_tables(folder: Path, out: Path, text: str) -> None:
    """Compare with the table of `dpfed compare` and with numpy."""
    runs, arms = rows_of(folder / "runs.csv"), rows_of(folder / "arms.csv")
    table = json.loads((out / "main" / "table.json").read_text())
    for row in table["rows"]:
        arm = next(a for a in arms if a["study"] == "main" and a["arm"] == row["method"])
        assert float(arm["mean"]) == pytest.approx(row["accuracy"])
        assert float(arm["std"]) == pytest.approx(row["std"])
        assert float(arm["lr"]) == row["rates"]["lr"]
        assert arm["inside_grid"] == ("no" if row["at_edge"] else "yes")
        assert int(arm["up_bytes"]) == row["traffic"]["up_bytes"]
        if row["difference"] is not None:
            assert [float(arm[f"interval_{end}"]) for end in ("low", "high")] == pytest.approx(
                row["interval"]
            )
        mine = [
            float(r["accuracy"])
            for r in runs
            if r["arm"] == arm["arm"] and r["phase"] == "reported"
        ][:2]
        assert np.mean(mine) == pytest.approx(row["accuracy"])
        assert f"{100 * row['accuracy']:.2f} ± {100 * row['std']:.2f}" in text
    assert "Incomplete" not in text
    assert "Seeds: reported 0, 1; of the search 1000003" in text
    findings = (folder.parent / "results.md").read_text()
    assert findings.startswith("# Page")
    assert findings.endswith("The end.\n")
    assert findings.count("± ") == 4, "three arms of main and one of best"
    page = (folder.parent / "results" / "main.md").read_text()
    assert page.count("| reported |") == 6, "three arms with two seeds"
    assert "(later.md) | 1 |" in (folder.parent / "results" / "index.md").read_text()
    later = next(arm for arm in arms if arm["study"] == "later")
    assert (later["n"], later["std"], later["difference"]) == ("1", "", "")
    assert rows_of(folder / "curves.csv")[0] == {
        **rows_of(folder / "curves.csv")[0],
        "study": "main",
        "round": "0",
    }
    assert (folder.parent / "images" / "results-main-dark.svg").read_text().count("<path") > 10


@pytest.mark.usefixtures("inline")
def test_an_arm_that_could_not_be_run_does_not_hide_the_others(
    results: Any, studies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Inline, task: Task, folder: Path) -> None:
        bad = task.label.startswith("dp-fedavg ")
        self._ended.append(
            (task.key, "no memory" if bad else run_one(task.tables, folder, task.tuning, {}))
        )

    monkeypatch.setattr(Inline, "start", failing)
    said: list[str] = []
    sitting = results.Sitting(tmp_path / "o", (), studies, ("main", "best"))
    assert results.run(sitting, in_process, said.append) == 1
    assert said[0].startswith("main: exit code 3, 12 runs done")
    assert said[1].startswith("best: complete, 3 runs"), (
        "the table is there, and says which arm has failed"
    )
    _, text = paged(results, studies, str(tmp_path / "o"))
    assert "Incomplete" not in text
    assert "dp-fedavg §" in text
    assert "§ could not be run: dp-fedavg: no memory" in text
    arms = {
        arm["arm"]: arm for arm in rows_of(tmp_path / "csv" / "arms.csv") if arm["study"] == "main"
    }
    assert [
        (arms[name]["n"], arms[name]["tuning_runs"]) for name in ("dp-fedavg", "dp-fedadamw")
    ] == [
        ("0", "0"),
        ("2", "4"),
    ]


def test_a_study_starts_from_the_model_of_a_first_run(results: Any, tmp_path: Path) -> None:
    # This model has a head that can be kept.
    (tmp_path / "small.toml").write_text(BASE.replace('"linear"', '"auto-image"'))
    start = 'start = ["model.weights=random", "run.rounds=1", "run.seed=9"]'
    (tmp_path / "s.toml").write_text(
        STUDIES[STUDIES.index('[[study]]\nname = "later"') :] + start + "\nset = ['run.rounds=3']"
    )
    said: list[list[str]] = []

    def call(words: Sequence[str], log: Path, seconds: float | None) -> int | None:
        said.append(list(words))
        if words[0] == "export":
            Path(words[2]).mkdir(parents=True)
        return 5 if words[0] == "compare" else 0

    sitting = results.Sitting(tmp_path / "out", ("model.weights=there",), tmp_path / "s.toml")
    assert results.run(sitting, call, lambda line: None) == 1
    first, export, compare = said
    (model,) = (tmp_path / "out" / "starts").glob("later-*")
    assert first[2:] == [
        "--set", "model.weights=there", "--set", "model.weights=random",
        "--set", "run.rounds=1", "--set", "run.seed=9",
        "--out", f"{model}.run", "--force",
    ]  # fmt: skip
    assert export == ["export", f"{model}.run", f"{model}.tmp"]
    settings = [compare[i + 1] for i, word in enumerate(compare) if word == "--set"]
    assert settings == ["run.rounds=3", f"model.weights={model}", "model.head=kept"]
    asked = json.loads((tmp_path / "out" / "later" / "asked.json").read_text())["command"]
    assert asked.startswith(
        "dpfed run results/small.toml --set model.weights=WEIGHTS --set model.weights=random"
    )
    assert " && dpfed export FIRST START && dpfed compare results/small.toml " in asked
    assert "model.weights=START" in asked
    assert str(tmp_path) not in asked

    def calls(sitting: Any) -> list[str]:
        said.clear()
        results.run(sitting, call, lambda line: None)
        return [words[0] for words in said]

    assert calls(sitting) == ["compare"], "what it starts from is there"
    assert calls(dataclasses.replace(sitting, anew=True)) == ["run", "export", "compare"]
    written = (tmp_path / "s.toml").read_text()
    (tmp_path / "s.toml").write_text(written.replace("run.seed=9", "run.seed=8"))
    assert calls(dataclasses.replace(sitting, out=tmp_path / "other")) == [
        "run",
        "export",
        "compare",
    ]
    # Another start has another path of weights.
    with pytest.raises(DpfedError, match="give the same one"):
        calls(sitting)
    (tmp_path / "s.toml").write_text(written.replace("run.seed=9", "run.sed=9"))
    with pytest.raises(DpfedError, match=r"run\.sed"):
        results.run(sitting, call, lambda line: None)


@pytest.mark.parametrize(("code", "answer"), [(None, 3), (2, 1)])
def test_a_start_that_was_not_done_is_none(
    results: Any, tmp_path: Path, code: int | None, answer: int
) -> None:
    (tmp_path / "small.toml").write_text(BASE.replace('"linear"', '"auto-image"'))
    later = STUDIES[STUDIES.index('[[study]]\nname = "later"') :]
    (tmp_path / "s.toml").write_text(later + 'start = ["model.weights=random", "run.rounds=1"]')
    sitting = results.Sitting(tmp_path / "out", (), tmp_path / "s.toml", minutes=1.0)
    given: list[float] = []

    def call(words: Sequence[str], log: Path, seconds: float) -> int | None:
        given.append(seconds)
        time.sleep(0.01)
        return code if words[0] == "export" else 0

    assert results.run(sitting, call, lambda line: None) == answer
    assert len(given) == 2
    assert given[1] < given[0] - 0.01, "the time that is left, not all of it again"
    assert not list((tmp_path / "out" / "starts").glob("later-????????????"))


def test_the_time_is_over_and_a_study_is_interrupted(results: Any, tmp_path: Path) -> None:
    """The child process reports SIGINT, as `dpfed compare` does."""
    code = (
        "import time, pathlib, sys\n"
        "try:\n    print('begun', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('in good order')"
    )
    log = tmp_path / "log"
    assert results.interruptible([sys.executable, "-c", code], log, 1.5) is None
    assert log.read_text() == "begun\nin good order\n"
    assert results.interruptible([sys.executable, "-c", "raise SystemExit(3)"], log, 60) == 3
    log.unlink()
    # As in the background of a script.
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert results.interruptible([sys.executable, "-c", code], log, 1.5) is None
    finally:
        signal.signal(signal.SIGINT, old)
    assert log.read_text() == "begun\nin good order\n"


def test_a_study_that_ignores_the_first_signal_gets_another(
    results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import signal, time\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: seen.append(1))\n"
        "print('begun', flush=True)\n"
        "while len(seen) < 2: time.sleep(0.01)\n"
        "print('heard')"
    )
    monkeypatch.setattr("results_process.PATIENCE", 0.3)
    log = tmp_path / "log"
    assert results.interruptible([sys.executable, "-c", code], log, 1.0) is None
    assert log.read_text() == "begun\nheard\n"
    deaf = code.replace("len(seen) < 2", "True")
    assert results.interruptible([sys.executable, "-c", deaf], log, 0.5) is None, (
        "it is ended in any case"
    )


def test_the_best_arms_are_private_on_equal_terms_and_keep_their_rates(results: Any) -> None:
    def row(
        method: str,
        accuracy: float | None,
        epsilon: float | None = 4.0,
        larger: bool = False,
        **rates: float,
    ) -> Any:
        return {
            "method": method,
            "accuracy": accuracy,
            "epsilon": {"server_worst": epsilon},
            "larger_epsilon": larger,
            "rates": rates,
        }

    rows = [
        row("dp-fedavg", 0.5, lr=0.3),
        row("dp-fedsam", 0.9, larger=True, lr=0.3),
        row("dp-fedavg:privacy.enabled=false", 0.95, None, lr=1.0),
        row("ffa-lora", 0.7, lr=0.1),
        row("dp-fedopt", 0.6, lr=0.03, server_lr=0.01),
        row("dp-scaffold", None),
        row("dp-fedadamw", 0.4, lr=0.001),
    ]
    assert results.best_arms({"rows": rows}, 2) == [
        "dp-fedavg:model.lora.freeze_a=true;lr=0.1",
        "dp-fedopt:lr=0.03;server_lr=0.01",
        "dp-fedadamw:lr=0.001",
    ]


def test_a_difference_is_taken_over_the_seeds_that_both_have(results: Any) -> None:
    from results_studies import COLUMNS, with_statistics  # type: ignore[import-not-found]

    def run(arm: str, seed: int, accuracy: float) -> dict[str, str]:
        values = {"arm": arm, "phase": "reported", "seed": str(seed), "accuracy": str(accuracy)}
        return {**dict.fromkeys(COLUMNS["runs"], ""), **values}

    arms = [{**dict.fromkeys(COLUMNS["arms"], ""), "arm": name, "reference": "b"} for name in "ab"]
    runs = [
        run("a", 0, 0.5),
        run("a", 1, 0.7),
        run("a", 2, 0.9),
        run("b", 0, 0.4),
        run("b", 1, 0.5),
    ]
    with_statistics(arms, runs)
    assert [arm["n"] for arm in arms] == ["3", "2"]
    assert float(arms[0]["mean"]) == pytest.approx(0.7)
    assert float(arms[0]["std"]) == pytest.approx(0.2)
    assert float(arms[0]["difference"]) == pytest.approx(0.15), "of 0.1 and 0.2"
    # Student's t with one degree of freedom.
    half = 12.7062047 * 0.0707106781 / 2**0.5
    assert float(arms[0]["interval_high"]) == pytest.approx(0.15 + half)
    assert arms[1]["difference"] == ""


@pytest.mark.usefixtures("inline")
def test_mistakes_are_said_before_anything_runs(
    results: Any, studies: Path, tmp_path: Path
) -> None:
    def refused(**more: Any) -> str:
        with pytest.raises(DpfedError) as error:
            results.run(
                results.Sitting(**{"out": tmp_path / "o", "given": (), "studies": studies, **more}),
                in_process,
            )
        return str(error.value)

    assert "there is no such study" in refused(only=("mian",))
    assert "is for no base" in refused(given=("visoin:data.path=x",))
    assert "algorithm.gamma = 7" in refused(given=("small:algorithm.gamma=7",))
    assert not (tmp_path / "o").exists()

    study = results.study_from(results.read_specs(studies)[2], tmp_path, [], ["dp-fedavg:lr=1"])
    assert results.prepare(results.read_specs(studies)[2], study, "dpfed", tmp_path / "o").is_dir()
    assert "data.path = None and is now given 'x'" in refused(
        given=("data.path=x",), only=("later",)
    )
    (tmp_path / "o" / "runs" / "a").mkdir()
    (tmp_path / "o" / "runs" / "a" / "run.json").write_text('{"versions": {"torch": "1"}}')
    assert "other versions (dpfed None not" in refused()


def test_a_changed_mean_is_found(results: Any, studies: Path, tmp_path: Path) -> None:
    from results_studies import COLUMNS, to_csv

    arm = {
        **dict.fromkeys(COLUMNS["arms"], ""),
        "study": "later",
        "arm": "a",
        "mean": "0.9",
        "n": "1",
    }
    run = {
        **dict.fromkeys(COLUMNS["runs"], ""),
        "study": "later",
        "arm": "a",
        "phase": "reported",
        "accuracy": "0.5",
    }
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "arms.csv").write_text(to_csv("arms", [arm]))
    (tmp_path / "csv" / "runs.csv").write_text(to_csv("runs", [run]))
    with pytest.raises(DpfedError, match=r"later is not what runs\.csv gives"):
        paged(results, studies, "--check")


def test_the_published_studies_can_be_asked_and_the_page_is_what_the_files_give(
    results: Any,
) -> None:
    specs = results.read_specs(results.STUDIES)
    given = ["vision:data.path=a", "vision:model.weights=b", "language:data.path=c"]
    for spec in specs:
        overrides = results.overrides_of(spec, given)
        if spec.best_of is None:
            study = results.study_from(spec, results.STUDIES.parent, overrides, spec.algorithms)
            assert len(study.arms) > 1 or spec.start
        assert not {"data.path=a", "data.path=c"} & set(
            results.published(spec, overrides, spec.algorithms).split()
        )
    assert results.main(["page", "--check"]) == 0


def test_a_gpu_that_is_not_there_made_no_run(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert results.machine("cuda") is None
    assert str(results.machine("auto")).startswith("CPU, ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    assert results.machine("cuda") == results.machine("auto") == "a GPU"
    assert str(results.machine("cpu")).startswith("CPU, ")


def test_language_models_have_perplexities_in_place_of_accuracies(results: Any) -> None:
    page = importlib.import_module("results_page")
    empty = dict.fromkeys(page.COLUMNS["arms"], "")
    private = {"n": "1", "epsilon_server_worst": "2.995", "up_bytes": "1000"}
    arms = [
        {**empty, "arm": "a", **private, "lr": "0.1", "inside_grid": "yes"},
        {**empty, "arm": "b", "n": "2"},
        {**empty, "arm": "later"},
    ]
    blank = dict.fromkeys(page.COLUMNS["runs"], "")
    scores = {"start_perplexity": "100", "exact_match": "0.25", "accuracy": "0.5"}
    runs = [
        {**blank, "arm": "a", "phase": "tuning", **scores, "perplexity": "7"},
        {**blank, "arm": "a", "phase": "reported", **scores, "perplexity": "20"},
        {**blank, "arm": "b", "phase": "reported", **scores, "perplexity": "30"},
        {**blank, "arm": "b", "phase": "reported", **scores, "perplexity": "50"},
    ]
    head, body = page.arm_cells({"axis": ""}, arms, runs)
    shown = [dict(zip(head, line, strict=True)) for line in body]
    assert [line["perplexity"] for line in shown] == ["20", "40", "–"]
    assert [line["of the seeds"] for line in shown] == ["20 to 20", "30 to 50", "–"]
    assert [line["before"] for line in shown] == ["100", "100", "–"]
    assert [line["exact match %"] for line in shown] == ["25.00", "25.00", "–"]
    assert [line["ε server"] for line in shown] == ["3.00", "no privacy", "–"]
    assert "accuracy %" not in head
    head, body = page.run_cells(runs)
    assert head[-2:] == ["perplexity", "ε server"]
    assert [line[-2] for line in body] == ["7", "20", "30", "50"]
    texts = [{**run, "exact_match": ""} for run in runs]
    assert "exact match %" not in page.arm_cells({"axis": ""}, arms, texts)[0]
    assert "of the seeds" not in page.arm_cells({"axis": ""}, arms[:1], runs)[0]
