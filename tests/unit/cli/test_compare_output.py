"""The output of `dpfed compare`: the deciding score, a correct count, a table that fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpfed.cli.compare import PLAIN_WIDTH, choices, show_table
from dpfed.report.tables import Row, Table, cells, shown_columns
from dpfed.studies.arms import Arm
from dpfed.studies.outcomes import Outcome, Task
from dpfed.studies.search import Score
from dpfed.studies.study import ArmResult, EndedRun, Planned
from dpfed.studies.study_watch import StudyWatch

ACCURACIES = (0.9106, 0.9217, 0.8994)
TRAFFIC = {
    "up_numbers": 1_006_090,
    "up_bytes": 4_024_360,
    "down_numbers": 2_012_116,
    "down_bytes": 8_048_464,
}
LABELS = (
    "dp-fedavg",
    "dp-fedadamw",
    "dp-fedadamw:gamma=0;agg=off;bc=false;granularity=tensor;lr=0.01",
)


def table() -> Table:
    rows = tuple(
        Row(
            label,
            rates={"lr": 0.00932, "server_lr": 0.0316},
            tuning_runs=7,
            scores=ACCURACIES,
            difference=(0.0, 0.0),
            epsilon={"server_worst": 8.0, "third_party": 7.99},
            traffic=TRAFFIC,
        )
        for label in LABELS
    )
    return Table("glyph-vit on digits", "", rows, "dp-fedadamw", ("a note " * 40,))


def ended(accuracy: float, loss: float, planned: Planned) -> EndedRun:
    task = Task("key", "dp-fedavg  lr=0.1  tuning", {}, tuning=True)
    return EndedRun(task, Outcome(accuracy, loss), True, 3, planned)


def test_a_line_of_the_search_has_the_loss_and_a_true_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StudyWatch() as watch:
        watch.run(ended(0.946, 0.19031, Planned(14, at_least=True)))
        watch.run(ended(0.946, 0.58027, Planned(16, at_least=False)))
    assert capsys.readouterr().err.splitlines() == [
        "3 of at least 14 runs  dp-fedavg  lr=0.1  tuning  accuracy 0.946  loss 0.1903",
        "3 of 16 runs  dp-fedavg  lr=0.1  tuning  accuracy 0.946  loss 0.5803",
    ]


def test_the_choice_says_what_decided() -> None:
    arm = Arm("dp-fedavg", ("algorithm.name=dp-fedavg",), {"lr": (0.1, 1.0)})
    close = {
        (0.1,): Score(0.946, 0.58, 0.02),
        (1.0,): Score(0.93, 0.37, 0.02),
        (9.0,): Score(0.1, 3.0, 0.02),
    }
    apart = {(0.1,): Score(0.946, 0.58, 0.001), (1.0,): Score(0.93, 0.37, 0.001)}
    lines = choices(
        [ArmResult(arm, (1.0,), close, False, ()), ArmResult(arm, (0.1,), apart, False, ())]
    )
    assert lines == [
        "dp-fedavg  chosen lr=1: the lowest loss, 0.3700, of 2 tries "
        "within one standard error of the highest accuracy, 0.946",
        "dp-fedavg  chosen lr=0.1: the highest accuracy, 0.946",
    ]


def test_a_table_in_a_file_has_at_most_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(table(), Path("runs/study"))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= PLAIN_WIDTH == 100
    assert "left out for the width: " in said
    assert "runs/study/table.md has all columns" in said.replace("\n", " ")
    assert "91.06 ± 1.12" in said


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 400])
def test_columns_are_dropped_by_importance(width: int) -> None:
    head, body = cells(table())
    widths = shown_columns(head, body, width)
    assert sum(widths.values()) + 3 * len(widths) + 1 <= width
    shown = [head[i] for i in widths]
    assert shown[0] == "method"
    assert "accuracy %" in shown
    assert width < 400 or shown == head
    if "down" in shown:
        assert "tuning runs" in shown
