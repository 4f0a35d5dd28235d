"""Tables: means, paired intervals, bold, footnotes."""

from __future__ import annotations

import pytest
from scipy import stats
from table_case import EPS, OURS, THEIRS, three_rows

from dpfed.report.table_files import to_markdown
from dpfed.report.tables import Row, Table, best_of, grid_words, larger_epsilon, paired, size


def test_the_paired_interval_by_hand_and_by_scipy() -> None:
    # Gaps 0.01, -0.01, 0.04: the mean is 0.04/3, the squared deviations sum to 0.0012667, so
    # s = 0.025166. With the t quantile 4.3027 (2 degrees) the half width is 4.3027 s / sqrt(3).
    mean, half = paired(OURS, THEIRS)
    assert mean == pytest.approx(0.04 / 3)
    assert half == pytest.approx(0.062516, abs=1e-5)
    gaps = [a - b for a, b in zip(OURS, THEIRS, strict=True)]
    low, high = stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((low, high))


def test_one_row_alone_is_not_the_best() -> None:
    """If every row spends another epsilon, the cheapest row has no competitor."""
    cheap, dear = Row("a", scores=(0.5,)), Row("b", scores=(0.6,))
    assert best_of([cheap, dear], {"b"}) == set()
    assert best_of([cheap, dear], set()) == {"b"}
    assert best_of([], set()) == set()
    assert best_of([cheap], set(), least=1) == {"a"}


def test_rows_without_privacy_do_not_compete_with_private_rows() -> None:
    eight = {"server_worst": 8.0, "third_party": 2.0}
    rows = [
        Row(name, scores=(a,), epsilon=e)
        for name, a, e in (("a", 0.5, eight), ("b", 0.6, eight), ("c", 0.9, {}))
    ]
    assert best_of(rows, set()) == {"b"}
    assert best_of(rows[2:], set(), least=1) == {"c"}
    assert best_of([Row("a", epsilon=eight), rows[2]], set(), least=1) == {"c"}, (
        "a private row without a score does not exclude others"
    )


def test_the_columns_of_one_method_are_compared_on_equal_terms_only() -> None:
    def words(epsilons: tuple[float, float]) -> list[list[str]]:
        both = zip(("1", "2"), (0.5, 0.6), epsilons, strict=True)
        rows = tuple(Row(c, "a", c, scores=(x,), epsilon={"server_worst": e}) for c, x, e in both)
        laid_out = grid_words(Table("t", "axis", rows), lambda text: f"**{text}**")
        assert laid_out is not None
        return laid_out[1]

    assert words((1.0, 1.0)) == [["a", "50.00", "**60.00**"]]
    assert words((1.0, 2.0)) == [["a", "50.00", "60.00"]]


def test_one_seed_has_no_interval_and_no_deviation() -> None:
    row = Row("a", scores=(0.5,), difference=paired((0.5,), (0.4,)))
    assert row.std is None
    assert row.difference == (pytest.approx(0.1), None)
    assert "| 50.00 | +10.00 |" in to_markdown(Table("t", "", (row,)))


def test_mean_and_sample_deviation() -> None:
    row = Row("a", scores=OURS)
    assert row.mean == pytest.approx(0.92)
    # The squares 4e-4 + 0 + 4e-4 over n - 1 = 2.
    assert row.std == pytest.approx(0.02)


def test_a_larger_epsilon_is_marked_and_never_best() -> None:
    assert larger_epsilon(three_rows()) == {"dp-fedsam"}
    text = to_markdown(three_rows())
    assert "dp-fedsam †" in text
    assert "\n- † spends" in text, "a mark that begins no list of its own"
    assert "larger epsilon" in text
    assert "**92.00 ± 2.00**" in text, "the best on equal terms"
    assert "**99.00" not in text
    assert best_of(three_rows().rows, {"dp-fedsam"}) == {"dp-fedadamw"}


def test_equal_targets_reached_almost_equally_are_equal() -> None:
    rows = (Row("a", epsilon={"server_worst": 7.990}), Row("b", epsilon={"server_worst": 7.997}))
    assert larger_epsilon(Table("t", "", rows)) == set()


def test_epsilons_are_compared_within_a_column() -> None:
    rows = tuple(
        Row(f"a | {c}", "a", c, epsilon={"server_worst": e}) for c, e in (("0.5", 20.0), ("1", 4.0))
    )
    assert larger_epsilon(Table("t", "sigma", rows)) == set()


def test_footnotes_say_what_is_wrong_with_a_row() -> None:
    rows = (
        Row("edge", scores=(0.5,), at_edge=True),
        Row("gone", scores=(0.0,), diverged=1),
        Row("never", failed="needs equal clients"),
        Row("open", scores=(0.7,), epsilon={"server_worst": None, "third_party": None}),
    )
    text = to_markdown(Table("t", "", rows))
    assert "| edge ¶ |" in text
    assert "| gone ‡ |" in text
    assert "| never § |" in text
    assert "needs equal clients" in text
    assert "no privacy" in text
    assert "* spends" not in text


def test_a_table_with_an_axis_begins_with_a_grid() -> None:
    rows = tuple(
        Row(f"{m} | {c}", m, c, scores=(a, a), epsilon=EPS)
        for m, c, a in [("x", "1", 0.5), ("x", "2", 0.7), ("y", "1", 0.6), ("y", "2", 0.4)]
    )
    text = to_markdown(Table("t", "sigma", rows))
    assert "| method | sigma 1 | sigma 2 |" in text
    assert "| x | 50.00 ± 0.00 | **70.00 ± 0.00** |" in text
    assert "| y | **60.00 ± 0.00** | 40.00 ± 0.00 |" in text
    assert "x \\| 1" in text, "a bar inside a cell"


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (4000, "4 kB"), (24_360, "24.4 kB"), (3e9, "3 GB")]
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text
