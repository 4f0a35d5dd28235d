"""What may be published of a run, in one place: public pages and trackers hold this and nothing else.

SPEC 6.2 (b): the third party's epsilon is void as soon as a seed, a cohort, or any client's own epsilon or number of
rounds is public. So this is a list of what is let through, not of what is held back; a new field of a run is private
until somebody puts it here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpfed.privacy.accounting.guarantee import Planned
from dpfed.training.round_loop import Round

ROW = ("round", "accuracy", "loss", "clip")
RESULT = (
    "state",
    "diverged",
    "test_accuracy",
    "test_loss",
    "test_records",
    "start_accuracy",
    "delta",
    "sigma",
    "guarantee",
    "release",
    "algorithm",
    "clients",
    "classes",
    "parameters",
    "blocks",
    "traffic",
    "rounds",
    "metrics",
    "versions",
    "python",
)
FIGURES = ("server_worst", "third_party")  # of the plan; server_max is what one client really spent
# The seed decides who takes part; the others name somebody's folders and clients.
HIDDEN = ("run.seed", "run.trackers", "model.adapter", "federation.clients", "federation.held_out")
LEFT_OUT = (
    ("the seed", "it decides who takes part in which round"),
    ("cohorts, their sizes and how many clients could still be drawn", "they tell who took part"),
    ("every figure of a single client: its epsilon, its rounds, what the client that spent most has spent",
     "the third party's epsilon holds only while they are secret"),
    ("the table of clients and labels", "it counts private records without noise"),
    ("diagnostics of clients' states", "they are computed from private records without noise"),
    ("times of rounds, names of runs and folders", "times depend on batches, and names may hold any of the above"),
)  # fmt: skip


def flat(tables: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{before}{key}.")
        else:
            out[f"{before}{key}"] = value
    return out


def public_settings(tables: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Settings are assumed public, except what decides who takes part and where things lie on somebody's disk."""
    out: dict[str, Any] = {}
    for key, value in tables.items():
        name = f"{before}{key}"
        if name in HIDDEN:
            continue
        if isinstance(value, Mapping):
            out[key] = public_settings(value, f"{name}.")
        elif not _is_place(key, value):
            out[key] = value
    return out


def _is_place(key: str, value: Any) -> bool:
    if key == "path" or key.endswith("_path"):
        return True
    if not isinstance(value, str) or not value:
        return False
    try:
        return (
            value[0] in "/~."
            or "\\" in value
            or (len(Path(value).parts) > 1 and Path(value).exists())
        )
    except (OSError, ValueError):
        return True


def public_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ROW if key in row}


def public_result(result: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: result[key] for key in RESULT if key in result}
    figures = result.get("epsilon")
    if isinstance(figures, Mapping):
        out["epsilon"] = {view: figures.get(view) for view in FIGURES}
    return out


def public_metrics(round: Round, planned: Planned | None) -> dict[str, float]:
    """What a tracker is told of a round: the test set is the server's own, epsilon is the plan's."""
    found: dict[str, float | None] = {
        "accuracy": round.accuracy,
        "loss": round.loss,
        "clip": round.clip,
    }
    if planned is not None and round.accuracy is not None and 0 < round.t <= planned.rounds:
        found["epsilon_planned"] = planned.server(round.t)
    return {
        key: float(value)
        for key, value in found.items()
        if value is not None and math.isfinite(value)
    }
