"""Select the values of a run that may be published, for public pages and experiment trackers.

The epsilon against a third party, who sees only the global models, holds only while these are
secret: the seed, the clients of each round, and each client's epsilon and number of rounds
(docs/privacy.md, "Two observers"). Therefore this module lists the public fields. A new field of a
run is private until it is added here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpfed.privacy.accounting.guarantee import Planned
from dpfed.training.rounds import Round

PUBLIC_ROW_KEYS = ("round", "accuracy", "loss", "r2", "score", "clip")
PUBLIC_RESULT_KEYS = (
    "state",
    "diverged",
    "test_accuracy",
    "test_loss",
    "test_records",
    "start_accuracy",
    "test_perplexity",
    "start_perplexity",
    "test_r2",
    "start_r2",
    "delta",
    "sigma",
    "guarantee",
    "max_rounds_per_client",
    "release",
    "algorithm",
    "clients",
    "task",
    "classes",
    "parameters",
    "blocks",
    "traffic",
    "rounds",
    "kept_round",
    "metric",
    "metrics",
    "examples",
    "versions",
    "python",
)
# Names of the planned epsilons, which are public. The third one, server_max, is secret: it is the
# largest epsilon that a single client has spent.
FIGURES = ("server_worst", "third_party")
# Secret settings. The seed determines which clients take part; the others name folders and clients.
HIDDEN = ("run.seed", "run.trackers", "model.adapter", "federation.clients", "federation.held_out")
LEFT_OUT = (
    ("the seed", "it decides who takes part in which round"),
    ("cohorts, their sizes and how many clients could still be drawn", "they tell who took part"),
    ("every figure of a single client: its epsilon, its rounds, "
     "what the client that spent most has spent",
     "the third party's epsilon holds only while they are secret"),
    ("the table of clients and labels", "it counts private records without noise"),
    ("diagnostics of clients' states", "they are computed from private records without noise"),
    ("times of rounds, names of runs and folders",
     "times depend on batches, and names may hold any of the above"),
)  # fmt: skip


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys such as "run.rounds".

    prefix  text before every key
    """
    out: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def public_settings(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings without those in HIDDEN and without file paths.

    prefix  dotted name of the table that contains these settings, such as "run."
    """
    out: dict[str, Any] = {}
    for key, value in tables.items():
        name = f"{prefix}{key}"
        if name in HIDDEN:
            continue
        if isinstance(value, Mapping):
            out[key] = public_settings(value, f"{name}.")
        elif not _is_path(key, value):
            out[key] = value
    return out


def _is_path(key: str, value: Any) -> bool:
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
    """Return the entries of a row of metrics.jsonl that may be published."""
    return {key: row[key] for key in PUBLIC_ROW_KEYS if key in row}


def public_result(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a run's result that may be published."""
    out = {key: result[key] for key in PUBLIC_RESULT_KEYS if key in result}
    figures = result.get("epsilon")
    if isinstance(figures, Mapping):
        out["epsilon"] = {view: figures.get(view) for view in FIGURES}
    return out


def public_metrics(round: Round, planned: Planned | None) -> dict[str, float]:
    """Return the public metrics of a round: test scores, clip norm and planned epsilon.

    A metric is left out if its value is missing or not finite.

    planned  the plan of the run, from which epsilon is computed; None for a run without privacy
    """
    found: dict[str, float | None] = {
        "accuracy": round.accuracy,
        "loss": round.loss,
        "r2": round.r2,
        "clip": round.clip,
    }
    if planned is not None and round.loss is not None and 0 < round.t <= planned.rounds:
        found["epsilon_planned"] = planned.server_after(round.t)
    return {
        key: float(value)
        for key, value in found.items()
        if value is not None and math.isfinite(value)
    }
