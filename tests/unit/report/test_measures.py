"""Scores as text: accuracies in per cent, R2 without a unit."""

from __future__ import annotations

from dpfed.report.measures import ACCURACY, R2, measure_of


def test_an_accuracy_is_shown_in_per_cent() -> None:
    assert ACCURACY.shown(0.912, 0.0045) == "91.20 ± 0.45"
    assert ACCURACY.shown(0.01, None, sign=True) == "+1.00"
    assert ACCURACY.shown(None, None) == "–"
    assert ACCURACY.label("on the test half") == "accuracy on the test half, %"
    assert ACCURACY.title == "Accuracy"


def test_r2_has_no_unit_and_can_be_negative() -> None:
    assert R2.shown(0.912, 0.0045) == "0.912 ± 0.004"
    assert R2.shown(0.25, 0.5, sign=True) == "+0.250 ± 0.500"
    assert R2.shown(-0.25, None, sign=True) == "-0.250"
    assert R2.label() == "R2"


def test_numbers_alone_are_measured_by_r2() -> None:
    tasks = ("classify", "multilabel", "regress", "causal")
    assert [measure_of(task) for task in tasks] == [ACCURACY, ACCURACY, R2, ACCURACY]
