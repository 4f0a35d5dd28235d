"""A figure of the HTML report as plain data for plotly, and functions that make its traces.

A trace is one series in plotly's format, such as a line, a band or bars. The entry `meta` of a
trace holds its number and its role. The script of the HTML page chooses colours, dashes and markers
from `meta`, because only the script knows if the page is light or dark.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpfed.privacy.published import show_delta

Trace = dict[str, Any]
ROUNDS = "round"
MAX_MARKED_POINTS = 12


@dataclass(frozen=True)
class Figure:
    """One figure of the HTML report, with labels, units, a caption and its numbers.

    id, section  names of the figure and of its section on the page
    x, y         axes in plotly's format
    traces       lines, bands, bars or a heat map in plotly's format
    head, rows   column names and rows of the table below the figure and of its CSV file
    more         other entries of plotly's layout
    wide         True for a figure as wide as the page
    height       height in pixels
    """

    id: str
    section: str
    title: str
    caption: str
    x: Mapping[str, Any]
    y: Mapping[str, Any]
    traces: Sequence[Trace]
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    more: Mapping[str, Any] = field(default_factory=dict)
    wide: bool = False
    height: int = 340

    def plain(self) -> dict[str, Any]:
        """Return the figure as a JSON-serialisable dict, which the script of the page draws."""
        return {
            "data": list(self.traces),
            "layout": {"xaxis": dict(self.x), "yaxis": dict(self.y), **self.more},
            "height": self.height,
            "wide": self.wide,
            "name": self.id,
            "head": list(self.head),
            "rows": [list(row) for row in self.rows],
        }

    @property
    def description(self) -> str:
        """Text that screen readers read out for the figure."""
        series = len({str(row[0]) for row in self.rows})
        numbers = f"{series} series; the numbers are in the table below the figure."
        return f"{self.title}. {self.caption} {numbers}"


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def line(x: Sequence[Any], y: Sequence[float], name: str, series: int, **meta: Any) -> Trace:
    most_markers = 0 if len(x) <= MAX_MARKED_POINTS else 8
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": list(x),
        "y": list(y),
        "name": inert(name),
        "legendgroup": str(series),
        "marker": {"maxdisplayed": most_markers},
        "meta": {"series": series, "role": "line", **meta},
    }


def band(x: Sequence[int], values: np.ndarray, series: int) -> Trace:
    """Return a band: the plotly trace that fills the area between the lowest and the highest seed.

    x       round numbers
    values  one value per seed and round, `[seeds, rounds]`
    series  number of the method, which gives the colour
    """
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(x)],
        "y": [*values.max(0).tolist(), *reversed(values.min(0).tolist())],
        "fill": "toself",
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": str(series),
        "meta": {"series": series, "role": "band"},
    }


def bars(x: Sequence[Any], y: Sequence[Any], name: str, series: int, **more: Any) -> Trace:
    meta = {"series": series, "role": "bar"}
    return {"type": "bar", **more, "x": x, "y": y, "name": name, "meta": meta}


def inert(text: str) -> str:
    """Return a name with <, > and & escaped, because plotly would interpret them as HTML."""
    return html.escape(str(text), quote=False)


def joined(names: Sequence[str]) -> str:
    """Join names for a label: "a and b" for two names, "a and 4 more" for five."""
    return " and ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more"


def short(delta: float) -> str:
    """Return a delta as short text: "1e-5" instead of "1e-05"."""
    return show_delta(delta).replace("e-0", "e-")
