"""Published figures promise no more than was computed, and no code formats them otherwise."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpfed
from dpfed.privacy.published import (
    PLOTTED_DIGITS,
    plotted_loss,
    show_delta,
    show_loss,
    show_lower_bound,
    show_percent,
    show_rate,
    show_score,
    show_setting,
    show_sigma,
)

NUMBERS = st.floats(min_value=0, max_value=1e300, allow_subnormal=False)
PLACES = st.integers(0, 6)
DIGITS = st.integers(1, 12)


@given(NUMBERS, PLACES, DIGITS)
def test_losses_are_never_shown_smaller_than_they_are(
    value: float, places: int, digits: int
) -> None:
    assert float(show_loss(value, places)) >= value
    assert float(show_delta(value, digits)) >= value
    assert float(show_rate(value, digits)) >= value
    assert plotted_loss(value) >= value


@given(NUMBERS, PLACES, DIGITS)
def test_noise_and_lower_bounds_are_never_shown_larger(
    value: float, places: int, digits: int
) -> None:
    assert float(show_sigma(value, digits)) <= value
    assert float(show_lower_bound(value, places)) <= value


@given(st.floats(0, 1e6), PLACES)
def test_rounding_moves_a_figure_by_less_than_one_unit_of_the_last_place(
    value: float, places: int
) -> None:
    unit = 10.0**-places
    assert float(show_loss(value, places)) - value <= unit * (1 + 1e-6)
    assert value - float(show_lower_bound(value, places)) <= unit * (1 + 1e-6)
    assert abs(float(show_score(value, places)) - value) <= unit / 2 * (1 + 1e-6)


@given(st.integers(0, 10**9), PLACES)
def test_a_figure_that_fits_stays_itself(whole: int, places: int) -> None:
    text = f"{whole // 10**places}" + (f".{whole % 10**places:0{places}}" if places else "")
    value = float(text)
    assert (
        show_loss(value, places)
        == show_lower_bound(value, places)
        == show_score(value, places)
        == text
    )
    assert float(show_delta(value, 12)) == float(show_sigma(value, 12)) == value


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (lambda x: show_loss(x), 4.3620001, "4.363"),
        (lambda x: show_loss(x, 4), 4.362208982621435, "4.3623"),
        (lambda x: show_loss(x), 1.1, "1.100"),
        (lambda x: show_loss(x, 2), 0.1 + 0.2, "0.31"),
        (lambda x: show_loss(x), 1e-9, "0.001"),
        (lambda x: show_loss(x), 0.0, "0.000"),
        (lambda x: show_loss(x), math.inf, "inf"),
        (lambda x: show_loss(x), math.nan, "nan"),
        (lambda x: show_loss(x), None, "none"),
        (lambda x: show_loss(x), np.float64(2.0004), "2.001"),
        (lambda x: show_loss(x, 2), 9.999, "10.00"),
        (lambda x: show_delta(x), 1e-5, "1e-05"),
        (lambda x: show_delta(x), 1 / 60000, "1.66667e-05"),
        (lambda x: show_delta(x, 3), 0.2061, "0.207"),
        (lambda x: show_delta(x), 0.0, "0"),
        (lambda x: show_sigma(x), 1.99999, "1.999"),
        (lambda x: show_sigma(x), 0.5, "0.5"),
        (lambda x: show_sigma(x), None, "none"),
        (lambda x: show_rate(x), 0.0160001, "0.01601"),
        (lambda x: show_lower_bound(x), 2.0009, "2.000"),
        (lambda x: show_score(x), 0.9465, "0.946"),
        (lambda x: show_score(x), 0.9466, "0.947"),
        (lambda x: show_percent(x, 0), 0.285, "28"),
        (lambda x: show_percent(x, 1), 0.285, "28.5"),
        (lambda x: show_percent(x, 2, sign=True), 0.0123, "+1.23"),
        (lambda x: show_percent(x, 2, sign=True), -0.0123, "-1.23"),
        (lambda x: show_percent(x), None, "none"),
        (lambda x: show_setting(x), 8.0, "8"),
        (lambda x: show_setting(x), 8.00000001, "8.00000001"),
        (lambda x: show_setting(x), 1e-5, "1e-05"),
    ],
)
def test_examples(show: Callable[[float | None], str], value: float | None, text: str) -> None:
    assert show(value) == text


# --- no format beside these functions ---

ROOT = Path(dpfed.__file__).parent
SHOWING = ("privacy", "training", "report", "cli", "federation", "studies", "api")
FLOAT_SPEC = re.compile(r"[-+ #0-9,_<>^]*(\.[0-9]+)?[eEfFgGn%]")
PERCENT_FORMAT = re.compile(r"%[-+ #0-9]*(\.[0-9]+)?[eEfFgG](?![A-Za-z])")
# Times, sizes, learning rates and settings that say nothing about privacy, by their own names.
HARMLESS = frozenset(
    [
        "seconds",
        "milliseconds",
        "processor",
        "ratio",
        "wait",
        "timeout",
        "limit",
        "norm_limit",
        "up",
        "up_bytes",
        "down_bytes",
        "peak",
        "total_memory",
        "size",
        "sizes",
        "count",
        "units",
        "needed",
        "rounds",
        "steps",
        "clients",
        "right",
        "wrong",
        "lr",
        "speed",
        "created",
        "ahead",
        "COMMAND_S",
        "max_lr",
        "base",
        "alpha",
        "clip",
        "max_clip",
        "factor",
        "sharpen",
        "participation",
        "p_value",
        "norm",
        "expected",
        "batch",
        "median",
        "mean",
        "MAX_NOISE",
        "MAX_TENSOR_VALUE",
        "MAX_ALGORITHM_VALUE",
        "CLIPS",
        "distance",
        "white",
    ]
)


def formats(source: str) -> Iterator[str]:
    """Yield every expression of a source that is formatted with its own float format."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            spec = "".join(
                str(p.value) for p in ast.walk(node.format_spec) if isinstance(p, ast.Constant)
            )
            if FLOAT_SPEC.fullmatch(spec):
                yield ast.unparse(node.value)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            left = node.left
            if (
                isinstance(left, ast.Constant)
                and isinstance(left.value, str)
                and PERCENT_FORMAT.search(left.value)
            ):
                yield ast.unparse(node.right)
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name in ("format", "round") and len(node.args) == 2:
                yield ast.unparse(node.args[0])
            match node.func:
                case ast.Attribute(value=ast.Constant(), attr="format"):
                    yield ast.unparse(node)


def words(node: ast.AST) -> set[str]:
    """Return the names that say what an expression is: of `self.plan.sigma` only `sigma`."""
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Subscript):
        key = node.slice
        return (
            {key.value}
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
            else words(node.value)
        )
    return set().union(*(words(child) for child in ast.iter_child_nodes(node)))


def bypasses(source: str) -> list[str]:
    """Return the expressions that should be shown by a function of `published` and are not."""
    found = {text: words(ast.parse(text, mode="eval")) for text in formats(source)}
    return [text for text, named in found.items() if not named or not named <= HARMLESS]


@pytest.mark.parametrize(
    "source",
    [
        'f"{epsilon:.3f}"',
        'f"{self.plan.sigma:g}"',
        "f\"{figures['server_worst']:8.4f}\"",
        'f"{value:.2e}"',
        'f"{100 * accuracy:.1f}"',
        'f"{epsilon * rate:.3f}"',
        'f"{delta:{width}.3f}"',
        '"%.3f" % epsilon',
        '"{:.3f}".format(epsilon)',
        'format(epsilon, ".3f")',
        "round(epsilon, 3)",
    ],
)
def test_a_format_beside_the_functions_is_found(source: str) -> None:
    assert bypasses(source)


@pytest.mark.parametrize(
    "source",
    [
        'f"{seconds:.1f} s"',
        'f"{config.algorithm.lr:g}"',
        'f"{show_loss(epsilon):>8}"',
        'f"{epsilon}"',
        "round(x)",
    ],
)
def test_harmless_formats_pass(source: str) -> None:
    assert bypasses(source) == []


SOURCES = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0] in SHOWING and path.name != "published.py"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_are_shown_by_these_functions_alone(path: Path) -> None:
    assert bypasses(path.read_text(encoding="utf-8")) == []


def test_the_page_shows_as_many_digits_as_its_losses_have() -> None:
    script = (ROOT / "report" / "assets" / "page.js").read_text(encoding="utf-8")
    assert re.findall(r"to(?:Fixed|Precision)\((\d+)\)", script) == [str(PLOTTED_DIGITS)]
