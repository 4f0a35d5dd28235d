"""Format numbers for publication, rounded so that no number promises too much privacy.

    privacy losses (epsilon, delta, mu, attack rates), sampling rates    up
    noise multipliers and lower bounds of audits                         down
    accuracies and other scores                                          to nearest

Rounding is decimal and starts from Python's shortest text of the float, so 0.1 is shown as 0.1. The
published text is never below the true privacy loss and never above the true noise multiplier.
Every function shows None as "none".
"""

from __future__ import annotations

import decimal
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from typing import TypeGuard

# Number of significant digits of an epsilon in a plot.
PLOTTED_DIGITS = 5
# Decimal context with enough digits to represent every float exactly, so that it never rounds.
_EXACT = decimal.Context(prec=1200)


def show_loss(value: float | None, places: int = 3) -> str:
    """Return a privacy loss with `places` decimals, rounded up.

    The loss is an epsilon, the mu of Gaussian DP, or the advantage of an attacker.
    """
    return _fixed(value, places, ROUND_CEILING)


def show_delta(value: float | None, digits: int = 6) -> str:
    """Return a delta with at most `digits` significant digits, rounded up."""
    return _significant(value, digits, ROUND_CEILING)


def show_rate(value: float | None, digits: int = 4) -> str:
    """Return a sampling rate rounded up, because a larger rate means a larger privacy loss."""
    return _significant(value, digits, ROUND_CEILING)


def show_sigma(value: float | None, digits: int = 4) -> str:
    """Return a noise multiplier rounded down, because less noise means a larger privacy loss."""
    return _significant(value, digits, ROUND_FLOOR)


def show_lower_bound(value: float | None, places: int = 3) -> str:
    """Return an audit's lower bound on epsilon, or an unspent privacy budget, rounded down."""
    return _fixed(value, places, ROUND_FLOOR)


def show_score(value: float | None, places: int = 3) -> str:
    """Return an accuracy or another score with `places` decimals, rounded to nearest."""
    text = _fixed(value, places, ROUND_HALF_EVEN)
    # Show no minus sign if a negative score such as -0.0001 is rounded to zero.
    is_zero = "0" in text and not text.strip("-0.")
    return text.removeprefix("-") if is_zero else text


def show_perplexity(value: float | None) -> str:
    """Return a perplexity with at most four significant digits, rounded to nearest."""
    return show_number(value)


def show_number(value: float | None) -> str:
    """Return a number with at most four significant digits, rounded to nearest."""
    return f"{value:.4g}" if _is_finite(value) else _no_number(value)


def show_percent(value: float | None, places: int = 1, sign: bool = False) -> str:
    """Return a fraction (0.25 for 25 %) as a percentage, rounded to nearest.

    With `sign`, a plus sign precedes numbers that are not negative.
    """
    text = _fixed(value, places, ROUND_HALF_EVEN, factor=100)
    return f"+{text}" if sign and text[0].isdigit() else text


def show_percent_loss(value: float | None, places: int = 1) -> str:
    """Return an attacker's rate (0.25 for 25 %) as a percentage, rounded up and at most 100."""
    capped = min(value, 1.0) if _is_finite(value) else value
    return _fixed(capped, places, ROUND_CEILING, factor=100)


def show_setting(value: float) -> str:
    """Return the value of a setting without rounding: 8.0 gives "8", and 1e-05 gives "1e-05"."""
    text = repr(float(value))
    return text.removesuffix(".0")


def plotted_loss(value: float) -> float:
    """Return an epsilon rounded up to PLOTTED_DIGITS digits, for a plot of a report page."""
    return float(_significant(value, PLOTTED_DIGITS, ROUND_CEILING))


def _decimal(value: float) -> Decimal:
    return Decimal(repr(float(value)))


def _unit(exponent: int) -> Decimal:
    return Decimal((0, (1,), exponent))


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _no_number(value: float | None) -> str:
    """Return the text that is shown for a value that is None, infinity or NaN."""
    return "none" if value is None else repr(float(value))


def _fixed(value: float | None, places: int, rounding: str, factor: int = 1) -> str:
    """Return `factor` times the value, with `places` decimals."""
    if not _is_finite(value):
        return _no_number(value)
    product = _EXACT.multiply(_decimal(value), Decimal(factor))
    return format(product.quantize(_unit(-places), rounding, _EXACT), "f")


def _significant(value: float | None, digits: int, rounding: str) -> str:
    """Return the value with at most `digits` significant digits."""
    if not _is_finite(value):
        return _no_number(value)
    exact = _decimal(value)
    last = exact.adjusted() - digits + 1
    rounded = exact if exact.is_zero() else exact.quantize(_unit(last), rounding, _EXACT)
    return f"{float(rounded):.{digits}g}"
