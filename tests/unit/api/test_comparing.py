"""`dpfed.compare`: the table of the command line, from records and models in memory."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch

import dpfed
from dpfed.api import comparing
from dpfed.api.memory_model import identity_of
from dpfed.data.sources.in_memory import source_of
from dpfed.errors import DpfedError, StoppedError
from dpfed.studies import pool

METHODS = ["dp-fedavg", "dp-fedadamw:gamma=0"]
RATES = {"dp-fedavg": [0.3], "dp-fedadamw": (0.03,)}


def records(seed: int, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    return (rng.normal(size=(count, 4)) + 2 * labels[:, None]).astype("float32"), labels


def module(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 2))


def compared(out: Path, model: Any = "linear", seed: int = 0, **keys: Any) -> dpfed.Comparison:
    keys = {"algorithms": METHODS, "rates": RATES, "seeds": 2, **keys}
    return dpfed.compare(
        model,
        records(seed),
        records(9),
        clients=2,
        rounds=2,
        out=out,
        progress=False,
        **keys,
        settings={"run.local_steps": 2, "privacy.batch": 8.0},
    )


def test_a_comparison_has_a_table_a_search_and_figures(tmp_path: Path) -> None:
    backend = matplotlib.get_backend()
    found = compared(tmp_path / "study", module())
    assert found.title == "Sequential on given records"
    assert list(found.table.index) == METHODS
    written = json.loads((found.out / "table.json").read_text())["rows"]
    assert found.table["accuracy"].tolist() == [row["accuracy"] for row in written]
    assert len(written[0]["accuracies"]) == 2
    assert (found.table["tuning_runs"] >= 3).all()
    assert set(found.search.index) == set(METHODS)
    assert (found.search["chosen"] == "yes").sum() == 2
    assert [axes.get_title() for axes in found.plot().axes] == [found.title]
    assert (found.out / "curves.svg").is_file()
    assert matplotlib.get_backend() == backend
    assert "<table" in found._repr_html_()
    assert "dp-fedavg" in found.report(tmp_path / "page.html").read_text()


def test_runs_of_a_torch_module_can_share_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of a pack see the module and the records, and find what runs alone find."""
    alone = compared(tmp_path / "alone", module())
    monkeypatch.setattr(comparing, "pack_size", lambda asked, gpus: 4)
    packed = compared(tmp_path / "packed", module())
    assert alone.table["failed"].isna().all()
    assert packed.table["failed"].isna().all()
    assert packed.search["validation_loss"].tolist() == pytest.approx(
        alone.search["validation_loss"].tolist(), rel=1e-4
    )


def test_the_same_call_continues_and_another_is_refused(tmp_path: Path) -> None:
    """Other records in the same folder are another study: their runs are never mixed."""
    out = tmp_path / "study"
    first = compared(out, module())
    stamps = {p: p.stat().st_mtime_ns for p in out.glob("runs/*/run.json")}
    again = compared(out, module())
    assert again.table.equals(first.table)
    assert {p: p.stat().st_mtime_ns for p in out.glob("runs/*/run.json")} == stamps
    for other in ({"seed": 1}, {"model": module(1)}):
        with pytest.raises(DpfedError, match="another study: choose another out, or remove that"):
            compared(out, **{"model": module(), **other})


def test_a_study_that_cannot_begin_leaves_no_weights(tmp_path: Path) -> None:
    out = tmp_path / "study"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(DpfedError, match="is not empty and not a study: choose another out"):
        compared(out, module())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["study"]
    (tmp_path / "other-base").mkdir()
    with pytest.raises(DpfedError, match="other-base exists: choose another out"):
        compared(tmp_path / "other", module())
    assert (tmp_path / "other-base").is_dir()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"algorithms": ["dp-fedavq"]}, "^algorithms: 'dp-fedavq' is not a method, did you mean"),
        ({"algorithms": []}, "^algorithms names no method"),
        ({"rates": {"dp-fedavg": [-1.0]}}, "^rates 'dp-fedavg=-1.0' is not of the form"),
        ({"rates": {"dp-fedsam": [0.1]}}, "^rates names dp-fedsam, which is not among the arms"),
        ({"rates": [0.1]}, "^rates must be a dictionary such as"),
        ({"seeds": 0}, "^seeds 0 must be a whole number of at least 1"),
        ({"search_seeds": 0}, "^search_seeds 0 must be a whole number of at least 1"),
        ({"seeds": 1.5}, "^seeds 1.5 must be a whole number"),
        ({"seeds": "3"}, "^seeds '3' must be a whole number"),
        ({"algorithms": None}, "^algorithms must be a list of names, not None"),
        ({"algorithms": [1]}, r"^algorithms must be a list of names, not \[1\]"),
        ({"metric": "loss"}, "^metric is no keyword of compare: give it to fine_tune$"),
        ({"epochs": 3}, "^epochs is no keyword of compare: give rounds$"),
        ({"preset": "gama"}, "^preset 'gama' is not known"),
        ({"lr": 0.1}, "^lr is no keyword of compare"),
    ],
)
def test_mistakes_are_named_in_words_of_python(
    tmp_path: Path, keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DpfedError, match=sentence) as error:
        compared(tmp_path / "study", **keys)
    assert "--" not in str(error.value)


def test_methods_that_fail_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning names the method that could not be run. If none could, it is an error."""
    usual = pool.run_one
    broken = ["dp-fedavg"]

    def run_one(tables: Any, *rest: Any, **more: Any) -> str | None:
        if tables["algorithm"]["name"] in broken:
            return "no space"
        return usual(tables, *rest, **more)

    monkeypatch.setattr(pool, "run_one", run_one)
    with pytest.warns(dpfed.DpfedWarning, match="could not be run: dp-fedavg: no space") as said:
        found = compared(tmp_path / "study", seeds=1)
    assert said[0].filename == __file__
    assert found.table["failed"].isna().tolist() == [False, True]
    assert found.table["accuracy"].isna().tolist() == [True, False]
    broken.append("dp-fedadamw")
    with pytest.raises(StoppedError, match="no method could be run; the first, dp-fedavg: no sp"):
        compared(tmp_path / "none", seeds=1)


def test_the_identity_changes_with_every_value() -> None:
    base = source_of(records(0), records(9))
    text = {"text": ["a", "b"], "label": [0, 1]}
    texts = source_of(text, {"text": ["a", "c"], "label": [0, 1]})
    other = source_of({"text": ["a", "bb"], "label": [0, 1]}, {"text": ["a", "c"], "label": [0, 1]})
    found = {
        identity_of("linear", base),
        identity_of("other", base),
        identity_of(module(), base),
        identity_of(module(1), base),
        identity_of("linear", source_of(records(1), records(9))),
        identity_of("linear", source_of(records(0), records(8))),
        identity_of("linear", texts),
        identity_of("linear", other),
    }
    assert len(found) == 8
    assert identity_of(module(), base) == identity_of(module(), source_of(records(0), records(9)))


def test_the_signature_lists_every_keyword() -> None:
    names = inspect.signature(dpfed.compare).parameters
    assert {"algorithms", "epsilon", "settings", "clients"} <= set(names)
    assert "lr" not in names
    assert "options" not in names
