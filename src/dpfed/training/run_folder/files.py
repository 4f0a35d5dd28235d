"""Names of the files in the folder of a run, and functions that read these files."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from dpfed.training.run_folder.atomic_file import short_errors

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
LEDGER = "ledger.sqlite"
MODEL = "model.safetensors"
RESULT = "run.json"
CHECKPOINTS = "checkpoint"
COHORTS = "cohorts.key"
LABEL_COUNTS = "holdings.json"
STATEMENT = "statement.json"
REGISTRY_ENTRY = "registry.json"


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Return a run's configuration as nested tables; None if the file is missing or damaged."""
    try:
        return tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def read_result(folder: Path) -> dict[str, Any]:
    """Return the result of a run from run.json; `{}` if the file is missing or damaged."""
    return read_object(folder / RESULT)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; `{}` if the file is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file like metrics.jsonl, which has one JSON object per line and round.

    The rows are in the order of their rounds. If a round has several lines, its last line is used.
    A line that a crash cut short is left out.
    """
    if not path.exists():
        return []
    with short_errors(path, "read"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            row = json.loads(line)
            rows[int(row["round"])] = row
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return [rows[t] for t in sorted(rows)]
