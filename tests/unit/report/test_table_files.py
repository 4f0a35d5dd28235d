"""Table files: equal numbers in CSV and JSON, valid LaTeX."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from table_case import EPS, OURS, THEIRS, three_rows

from dpfed.report.table_files import escape, to_csv, to_json, to_latex
from dpfed.report.tables import Row, Table


def test_json_and_csv_hold_the_same_numbers() -> None:
    rows = json.loads(to_json(three_rows()))["rows"]
    lines = list(csv.DictReader(io.StringIO(to_csv(three_rows()))))
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
    assert "server_max" not in to_json(three_rows()), (
        "clients' realised epsilon is never published together with the third party's"
    )


def test_latex_is_escaped_and_balanced() -> None:
    rows = (Row(r"a_b:x=1;y=50%&#${}~^\ |", scores=OURS), Row("c", scores=THEIRS))
    text = to_latex(Table("50% of _all_", "", rows, notes=("100 % & more",)))
    escaped = (
        r"a\_b:x=1;y=50\%\&\#\$\{\}\textasciitilde{}\textasciicircum{}\textbackslash{} \textbar{}"
    )
    assert rf"\textbf{{{escaped}}}" in text
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
