"""Tables by hand numbers: means, paired intervals, bold, footnotes, escaping."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from scipy import stats

from dpfed.studies.tables import (
    Row,
    Table,
    best_of,
    escape,
    grid_words,
    larger_epsilon,
    paired,
    size,
    to_csv,
    to_json,
    to_latex,
    to_markdown,
)

OURS, THEIRS = (0.90, 0.92, 0.94), (0.89, 0.93, 0.90)
EPS = {"server_worst": 2.0, "third_party": 1.0}
TRAFFIC = {
    "up_numbers": 1000,
    "up_bytes": 4000,
    "down_numbers": 2_500_000,
    "down_bytes": 10_000_000,
}


def table(**changes: object) -> Table:
    rows = (
        Row(
            "dp-fedavg",
            rates={"lr": 0.1},
            tuning_runs=6,
            accuracies=THEIRS,
            reference=OURS,
            epsilon=EPS,
        ),
        Row(
            "dp-fedsam",
            tuning_runs=6,
            accuracies=(0.99, 0.99, 0.99),
            epsilon={"server_worst": 4.5, "third_party": 2},
        ),
        Row(
            "dp-fedadamw",
            rates={"lr": 0.01},
            tuning_runs=6,
            accuracies=OURS,
            epsilon=EPS,
            traffic=TRAFFIC,
        ),
    )
    return Table(
        **{
            "title": "t",
            "axis": "",
            "rows": rows,
            "reference": "dp-fedadamw",
            "notes": ("n",),
            **changes,
        }
    )  # type: ignore[arg-type]


def test_the_paired_interval_by_hand_and_by_scipy() -> None:
    # gaps 0.01, -0.01, 0.04: mean 0.04/3; squared deviations sum to 0.0018 - 3 (0.04/3)^2 = 0.0012667, s = 0.025166;
    # the t quantile of 2 degrees is 4.3027, so the half width is 4.3027 * 0.025166 / sqrt(3) = 0.062516
    mean, half = paired(OURS, THEIRS)
    assert mean == pytest.approx(0.04 / 3)
    assert half == pytest.approx(0.062516, abs=1e-5)
    gaps = [a - b for a, b in zip(OURS, THEIRS, strict=True)]
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((low, high))


def test_nobody_is_the_best_of_one() -> None:
    """Where every arm spends another epsilon, the cheapest has nobody to compare with."""
    cheap, dear = Row("a", accuracies=(0.5,)), Row("b", accuracies=(0.6,))
    assert best_of([cheap, dear], {"b"}) == set()
    assert best_of([cheap, dear], set()) == {"b"}
    assert best_of([], set()) == set()
    assert best_of([cheap], set(), least=1) == {"a"}


def test_without_privacy_nobody_is_best_beside_private_arms() -> None:
    eight = {"server_worst": 8.0, "third_party": 2.0}
    rows = [
        Row(name, accuracies=(a,), epsilon=e)
        for name, a, e in (("a", 0.5, eight), ("b", 0.6, eight), ("c", 0.9, {}))
    ]
    assert best_of(rows, set()) == {"b"}
    assert best_of(rows[2:], set(), least=1) == {"c"}
    assert best_of([Row("a", epsilon=eight), rows[2]], set(), least=1) == {"c"}, (
        "one that has no score yet hides nobody"
    )


def test_the_columns_of_one_method_are_compared_on_equal_terms_only() -> None:
    def words(epsilons: tuple[float, float]) -> list[list[str]]:
        both = zip(("1", "2"), (0.5, 0.6), epsilons, strict=True)
        rows = tuple(
            Row(c, "a", c, accuracies=(x,), epsilon={"server_worst": e}) for c, x, e in both
        )
        laid_out = grid_words(Table("t", "axis", rows), lambda text: f"**{text}**")
        assert laid_out is not None
        return laid_out[1]

    assert words((1.0, 1.0)) == [["a", "50.00", "**60.00**"]]
    assert words((1.0, 2.0)) == [["a", "50.00", "60.00"]]


def test_one_seed_has_no_interval_and_no_deviation() -> None:
    row = Row("a", accuracies=(0.5,), reference=(0.4,))
    assert row.std is None
    assert row.difference is not None
    assert row.difference == (pytest.approx(0.1), None)
    assert "| 50.00 | +10.00 |" in to_markdown(Table("t", "", (row,)))


def test_mean_and_sample_deviation() -> None:
    row = Row("a", accuracies=OURS)
    assert row.mean == pytest.approx(0.92)
    assert row.std == pytest.approx(0.02)  # squares 4e-4 + 0 + 4e-4 over n - 1 = 2


def test_a_larger_epsilon_is_marked_and_never_best() -> None:
    assert larger_epsilon(table()) == {"dp-fedsam"}
    text = to_markdown(table())
    assert "dp-fedsam †" in text
    assert "\n- † spends" in text, "a mark that begins no list of its own"
    assert "larger epsilon" in text
    assert "**92.00 ± 2.00**" in text, "the best on equal terms"
    assert "**99.00" not in text
    assert best_of(table().rows, {"dp-fedsam"}) == {"dp-fedadamw"}


def test_equal_targets_reached_almost_equally_are_equal() -> None:
    rows = (Row("a", epsilon={"server_worst": 7.990}), Row("b", epsilon={"server_worst": 7.997}))
    assert larger_epsilon(Table("t", "", rows)) == set()


def test_epsilons_are_compared_within_a_column() -> None:
    rows = tuple(
        Row(f"a | {c}", "a", c, epsilon={"server_worst": e}) for c, e in (("0.5", 20.0), ("1", 4.0))
    )
    assert larger_epsilon(Table("t", "sigma", rows)) == set()


def test_json_and_csv_hold_the_same_numbers() -> None:
    rows = json.loads(to_json(table()))["rows"]
    lines = list(csv.DictReader(io.StringIO(to_csv(table()))))
    assert [line["method"] for line in lines] == [row["method"] for row in rows]
    assert rows[0]["difference"] == pytest.approx(-0.04 / 3)
    assert (
        float(lines[0]["interval_low"])
        == rows[0]["interval"][0]
        == pytest.approx(-0.04 / 3 - 0.062516, abs=1e-5)
    )
    assert lines[0]["rates"] == "lr=0.1"
    assert lines[0]["up_bytes"] == ""
    assert lines[2]["down_numbers"] == "2500000"
    assert rows[2]["interval"] is None
    assert rows[0]["epsilon"] == EPS
    assert "server_max" not in to_json(table()), (
        "realised figures of clients do not stand beside the third party's"
    )


def test_footnotes_say_what_is_wrong_with_a_row() -> None:
    rows = (
        Row("edge", accuracies=(0.5,), at_edge=True),
        Row("gone", accuracies=(0.0,), diverged=1),
        Row("never", failed="needs equal clients"),
        Row("open", accuracies=(0.7,), epsilon={"server_worst": None, "third_party": None}),
    )
    text = to_markdown(Table("t", "", rows))
    assert "| edge ¶ |" in text
    assert "| gone ‡ |" in text
    assert "| never § |" in text
    assert "needs equal clients" in text
    assert "no privacy" in text
    assert "* spends" not in text


def test_a_preset_is_laid_out_by_its_axis() -> None:
    rows = tuple(
        Row(f"{m} | {c}", m, c, accuracies=(a, a), epsilon=EPS)
        for m, c, a in [("x", "1", 0.5), ("x", "2", 0.7), ("y", "1", 0.6), ("y", "2", 0.4)]
    )
    text = to_markdown(Table("t", "sigma", rows))
    assert "| method | sigma 1 | sigma 2 |" in text
    assert "| x | 50.00 ± 0.00 | **70.00 ± 0.00** |" in text
    assert "| y | **60.00 ± 0.00** | 40.00 ± 0.00 |" in text
    assert "x \\| 1" in text, "a bar inside a cell"


def test_latex_is_escaped_and_balanced() -> None:
    rows = (Row(r"a_b:x=1;y=50%&#${}~^\ |", accuracies=OURS), Row("c", accuracies=THEIRS))
    text = to_latex(Table("50% of _all_", "", rows, notes=("100 % & more",)))
    assert (
        r"\textbf{a\_b:x=1;y=50\%\&\#\$\{\}\textasciitilde{}\textasciicircum{}\textbackslash{} \textbar{}}"
        in text
    )
    assert r"\textbf{92.00 $\pm$ 2.00}" in text
    assert r"\caption{50\% of \_all\_}" in text
    assert text.count(r"\begin{") == text.count(r"\end{")
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len({line.replace(r"\&", "").count("&") for line in body}) == 1, (
        "as many cells in every line"
    )
    assert not re.search(r"(?<!\\)[_#]", text)
    assert "\x00" not in text
    assert escape("±") == r"$\pm$"


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (4000, "4 kB"), (24_360, "24.4 kB"), (3e9, "3 GB")]
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text
