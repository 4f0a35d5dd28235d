"""Accuracy, F1 and scores of each class equal values by hand and those of scikit-learn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, precision_recall_fscore_support

from dpfed.cli.run import closing
from dpfed.model.task import CLASSIFY, NEXT_TOKEN
from dpfed.privacy.record_batch import Records
from dpfed.training.callbacks.activity import ignore
from dpfed.training.evaluation import class_scores, confusion, evaluate, task_metrics


def job_of(labels: list[int], answers: list[int], classes: int, batch: int = 1024) -> Any:
    """Return a job whose model returns its inputs as answers."""
    test = Records({"x": torch.tensor(answers)}, torch.tensor(labels))

    def scores(theta: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.one_hot(inputs["x"], classes).float()

    model = SimpleNamespace(scores=scores, task=CLASSIFY, records_at_once=lambda device: batch)
    names = tuple(f"class {c}" for c in range(classes))
    device = torch.device("cpu")
    public = SimpleNamespace(classes=names, test=test)
    return SimpleNamespace(model=model, public=public, device=device, on_activity=ignore)


THETA = torch.zeros(1)


def test_scores_equal_values_by_hand() -> None:
    """Ten records of three classes, with six correct answers."""
    labels, answers = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 0, 2, 2, 0]
    table = confusion(job_of(labels, answers, 3, batch=4), THETA)
    assert table.tolist() == [[3, 1, 0], [1, 2, 1], [1, 0, 1]]
    zero, one, two = class_scores(table)
    assert (zero.precision, zero.recall, zero.support) == (
        pytest.approx(3 / 5),
        pytest.approx(3 / 4),
        4,
    )
    assert zero.f1 == pytest.approx(2 * 0.6 * 0.75 / 1.35)
    assert (one.precision, one.recall, one.f1) == (
        pytest.approx(2 / 3),
        pytest.approx(1 / 2),
        pytest.approx(4 / 7),
    )
    assert (two.precision, two.recall, two.f1) == (
        pytest.approx(1 / 2),
        pytest.approx(1 / 2),
        pytest.approx(1 / 2),
    )
    found = task_metrics(job_of(labels, answers, 3), THETA)
    assert found["accuracy"] == 0.6
    assert found["macro_f1"] == pytest.approx((2 / 3 + 4 / 7 + 1 / 2) / 3)
    # F1 of one class is defined for two classes only.
    assert "f1" not in found
    assert found["per_class"]["class 1"]["support"] == 4


@given(
    st.integers(2, 5).flatmap(
        lambda k: st.tuples(
            st.just(k),
            st.lists(
                st.tuples(st.integers(0, k - 1), st.integers(0, k - 1)), min_size=1, max_size=30
            ),
        )
    ),
    st.integers(1, 7),
)
def test_scores_equal_those_of_scikit_learn(
    case: tuple[int, list[tuple[int, int]]], rows: int
) -> None:
    """Cases include classes without records or answers, and batches of any size."""
    classes, pairs = case
    labels, answers = [a for a, _ in pairs], [b for _, b in pairs]
    job = job_of(labels, answers, classes, batch=rows)
    every = list(range(classes))
    assert np.array_equal(
        confusion(job, THETA).numpy(), confusion_matrix(labels, answers, labels=every)
    )
    want = precision_recall_fscore_support(labels, answers, labels=every, zero_division=0)
    got = task_metrics(job, THETA)
    for c, name in enumerate(job.public.classes):
        row = got["per_class"][name]
        assert [row["precision"], row["recall"], row["f1"], row["support"]] == pytest.approx(
            [w[c] for w in want]
        )
    assert got["accuracy"] == pytest.approx(accuracy_score(labels, answers))
    assert got["macro_f1"] == pytest.approx(want[2].mean())
    if classes == 2:
        assert got["f1"] == pytest.approx(want[2][1])


def test_a_constant_answer_is_reported() -> None:
    found = task_metrics(job_of([0, 1, 1, 2], [1, 1, 1, 1], 3), THETA)
    assert found["one_answer"] == "class 1"
    assert "one_answer" not in task_metrics(job_of([0, 1, 1, 2], [1, 1, 1, 0], 3), THETA)
    # All records have one class, so one answer is correct.
    assert "one_answer" not in task_metrics(job_of([1, 1], [1, 1], 3), THETA)
    result = {
        "metrics": found, "test_accuracy": 0.5, "start_accuracy": 0.25, "rounds": 1,
        "seconds": 1.0, "out": "here", "epsilon": {"server_worst": None}, "release": "no",
    }  # fmt: skip
    said = closing(result)[1]
    assert "every test record is taken for 'class 1'" in said
    # Without privacy there is no clip norm.
    assert "privacy.clip" not in said
    private = {**result, "epsilon": {"server_worst": 1.0}, "served": True, "guarantee": ""}
    assert "privacy.clip" in closing(private)[1]
    assert "each try spends epsilon again" in closing(private)[1]
    assert "again" not in closing({**private, "release": "simulation: not for release"})[1]
    del found["one_answer"]
    assert not any("every" in line for line in closing(result))


def language_job(scores: list[list[float]], **inputs: list[int]) -> Any:
    """Return a job of a language model with these losses, accuracies and numbers of targets."""
    given = torch.tensor(scores)
    records = {"row": torch.arange(len(given)), **{k: torch.tensor(v) for k, v in inputs.items()}}
    model = SimpleNamespace(
        scores=lambda theta, inputs: given[inputs["row"]],
        task=NEXT_TOKEN,
        records_at_once=lambda device: 2,
    )
    test = Records(records, torch.zeros(len(given), dtype=torch.int64))
    device = torch.device("cpu")
    public = SimpleNamespace(test=test)
    return SimpleNamespace(model=model, public=public, device=device, on_activity=ignore)


def test_a_language_model_is_scored_by_its_targets() -> None:
    """Three records with 1, 3 and 0 targets; of the 4 targets, 1 + 1 are right."""
    scores = [[2.0, 1.0, 1.0], [1.0, 1 / 3, 3.0], [0.0, 0.0, 0.0]]
    job = language_job(scores)
    # (1 * 2.0 + 3 * 1.0) / 4 and (1 + 1) / 4
    assert evaluate(job, THETA) == pytest.approx((0.5, 1.25))
    expected = {"perplexity": np.exp(1.25), "token_accuracy": 0.5, "record_loss": 1.5}
    assert task_metrics(job, THETA) == pytest.approx(expected)
    job = language_job(scores, target_mask=[0, 0, 0])
    assert task_metrics(job, THETA)["exact_match"] == 0.5


def test_a_language_model_without_targets_has_no_scores() -> None:
    job = language_job([[0.0, 0.0, 0.0]])
    assert evaluate(job, THETA) == (None, None)
    assert task_metrics(job, THETA) == {}
