"""Examples of generated texts in results, also in damaged ones."""

from __future__ import annotations

from typing import Any

import pytest

from dpfed.report.generated_texts import MOST_LETTERS, examples

TEXTS = {"prompt": "p", "expected": "e", "before": "b", "after": "a"}


def test_texts_are_one_line_of_limited_length() -> None:
    long = "x" * MOST_LETTERS
    found = examples(
        {"examples": [{**TEXTS, "prompt": f"q{long}", "after": f"{long}y", "before": "a\n```\nb"}]}
    )
    assert found == [
        {"prompt": f"… {long}", "expected": "e", "before": "a ``` b", "after": f"{long} …"}
    ]


@pytest.mark.parametrize("value", [None, 3, [3], [{**TEXTS, "after": None}], [{"prompt": "p"}]])
def test_damaged_examples_are_left_out(value: Any) -> None:
    assert examples({"examples": value}) == []
    assert examples({}) == []
