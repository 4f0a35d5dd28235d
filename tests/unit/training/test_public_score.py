"""Early stopping and the choice of the best round, by scores on public data alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from callback_case import Watcher
from server_state_case import config_of

from dpfed.config import Config
from dpfed.data.tables import Table
from dpfed.errors import DpfedError, InterruptedRunError
from dpfed.model.task import CLASSIFY, NEXT_TOKEN, weighted
from dpfed.training.job import public_score
from dpfed.training.job.job import prepare
from dpfed.training.job.public_score import auroc
from dpfed.training.run import run
from dpfed.training.server_state import Best

SCORES = [0.1, 0.5, 0.7, 0.7, 0.6, 0.9]


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def chosen(**keys: Any) -> Config:
    return config_of(**{"rounds": 5, "eval_every": 1, "noise": "seeded", **keys})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The evaluation of round t finds SCORES[t], a further one of the best vector the best score.

    The list gets the evaluated vectors.
    """
    vectors: list[torch.Tensor] = []

    def evaluate(job: Any, theta: torch.Tensor) -> tuple[float, float]:
        vectors.append(theta.clone())
        return [*SCORES, max(SCORES)][len(vectors) - 1], 1.0

    monkeypatch.setattr(public_score, "evaluate", evaluate)
    return vectors


def test_the_best_round_by_hand() -> None:
    """A score must be larger: equal scores and NaN count as waiting."""
    best = Best.none_yet(torch.zeros(2))
    for t, score in enumerate([0.1, 0.5, 0.5, float("nan"), 0.4]):
        best = best.after(torch.full((2,), float(t)), score, t)
    found = (float(best.score), int(best.round), int(best.waited), best.theta.tolist())
    assert found == (0.5, 1, 3, [1.0, 1.0])
    assert bool(torch.isfinite(Best.none_yet(torch.zeros(2)).score))


@pytest.mark.parametrize(("patience", "last"), [(1, 3), (2, 4), (3, 5), (None, 5)])
def test_a_run_ends_after_the_patience(
    tmp_path: Path, scripted: list[torch.Tensor], patience: int | None, last: int
) -> None:
    """The best score of rounds 0 to 4 is that of round 2. The ledger charges the real rounds."""
    result = run(chosen(early_stopping=patience), tmp_path / "run")
    assert result["rounds"] == last
    assert [row["round"] for row in rows(tmp_path / "run")] == list(range(last + 1))
    ended = [note for note in result["notes"] if note.startswith("ended after round")]
    assert len(ended) == (last < 5)
    if last == 3:
        scripted.clear()
        whole = run(chosen(), tmp_path / "whole")
        assert result["epsilon"]["server_worst"] == whole["epsilon"]["server_worst"]
        assert result["epsilon"]["server_max"] < whole["epsilon"]["server_max"]
        assert "the stated epsilon allows for all 5 rounds" in ended[0]


def test_the_vector_of_the_best_round_is_kept(
    tmp_path: Path, scripted: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SCORES", [0.1, 0.5, 0.7, 0.7, 0.6, 0.2])
    result = run(chosen(keep="best"), tmp_path / "best")
    assert (result["rounds"], result["kept_round"]) == (5, 2)
    job = prepare(chosen(keep="best"))
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "best" / "model.safetensors")
    kept = job.space.unflatten(scripted[2])
    assert all(torch.equal(stored[name], x.cpu()) for name, x in kept.items())
    assert not torch.equal(scripted[2], scripted[5])
    assert any("the model is that of round 2" in note for note in result["notes"])


def test_an_interrupted_run_keeps_its_best_round(tmp_path: Path) -> None:
    """Resumed runs and whole runs choose the same round and the same numbers."""
    config = chosen(keep="best", early_stopping=2, metric="macro_f1")
    whole = run(config, tmp_path / "whole")

    def stop(round: Any) -> None:
        if round.t == 1:
            raise InterruptedRunError("SIGINT", 2)

    with pytest.raises(InterruptedRunError):
        run(config, tmp_path / "cut", callbacks=[Watcher(on_round=stop)])
    again = run(config, tmp_path / "cut", "resume")
    same = ("test_accuracy", "test_loss", "kept_round", "rounds", "metric", "metrics", "notes")
    assert {key: again[key] for key in same} == {key: whole[key] for key in same}
    first, second = (tmp_path / name / "model.safetensors" for name in ("whole", "cut"))
    assert first.read_bytes() == second.read_bytes()
    scores = [row["score"] for row in rows(tmp_path / "cut")]
    assert scores == [row["score"] for row in rows(tmp_path / "whole")]
    assert whole["metric"] == {"name": "macro_f1", "value": scores[whole["kept_round"]]}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"metric": "given"}, "this run's metric was handed over by a program"),
        ({"metric": "auroc"}, "needs test records with and without each class; see '3'"),
    ],
)
def test_a_score_that_cannot_be_computed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], sentence: str
) -> None:
    source = config_of().data.load()  # type: ignore[attr-defined]
    kept = np.flatnonzero(source.test.labels != 3)
    inputs = {name: x[kept] for name, x in source.test.inputs.items()}
    source = replace(source, test=Table(inputs, source.test.labels[kept]))
    with pytest.raises(DpfedError, match=sentence):
        run(chosen(**keys), tmp_path / "run", source=source)
    assert not (tmp_path / "run" / "run.json").exists()


def test_auroc_by_hand() -> None:
    """Class 1 has 0.8 and 0.3, class 0 has 0.5 and 0.1: three of four pairs are in order."""
    one = np.array([0.8, 0.3, 0.5, 0.1])
    assert auroc(np.array([1, 1, 0, 0]), np.stack([1 - one, one], 1)) == 0.75
    three = np.eye(3)[[0, 1, 2, 0]]
    assert auroc(np.array([0, 1, 2, 0]), three) == 1.0
    assert auroc(np.array([0, 1, 2, 1]), three) == pytest.approx((5 / 6 + 0.75 + 1) / 3)


def test_class_weights_scale_the_loss_of_a_record() -> None:
    scores, labels = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    plain = CLASSIFY.loss(scores, labels)
    found = weighted(CLASSIFY, (0.5, 4.0), 2).loss(scores, labels)
    assert found.tolist() == pytest.approx([0.5 * float(plain[0]), 4 * float(plain[1])])
    assert weighted(CLASSIFY, (), 2) is CLASSIFY
    with pytest.raises(DpfedError, match="has 3 numbers, and the data have 2 classes"):
        weighted(CLASSIFY, (1.0, 1.0, 1.0), 2)
    with pytest.raises(DpfedError, match="is for classes"):
        weighted(NEXT_TOKEN, (1.0, 1.0), 2)
