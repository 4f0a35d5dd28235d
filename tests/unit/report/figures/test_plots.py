"""Curves: a file in each format, equal for equal studies, with every method in the legend."""

from __future__ import annotations

from pathlib import Path

from dpfed.report.figures.plots import Curve, scores_over_rounds
from dpfed.report.measures import ACCURACY


def test_curves_are_drawn_the_same_each_time(tmp_path: Path) -> None:
    curves = [
        Curve(name, panel, (0, 1, 2), ((0.1, 0.5, 0.8), (0.2, 0.4, 0.9)))
        for name in ("dp-fedavg", "dp-fedadamw")
        for panel in ("sigma 1", "sigma 2")
    ]
    for turn in ("a", "b"):
        paths = [tmp_path / f"{turn}.svg", tmp_path / f"{turn}.png"]
        scores_over_rounds(curves, "title", ACCURACY, paths)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "a.svg").read_text()
    for words in (
        "dp-fedavg",
        "dp-fedadamw",
        "sigma 1",
        "sigma 2",
        "round",
        "accuracy on the test half",
    ):
        assert f"<!-- {words}" in text
