"""Pack studies without their models, and unpack them on another machine."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from results_specs import RUNS

from dpfed.errors import DpfedError

ASKED = "asked.json"
TABLE = "table.json"
STUDY = "study.json"
# Packed files of a run and of a study.
RUN_FILES = ("run.json", "metrics.jsonl", "config.toml")
STUDY_FILES = (STUDY, ASKED, TABLE, "table.csv", "table.md", "search.csv")


def pack(out: Path, archive: Path) -> int:
    """Write the archive as a whole, without unfinished runs; return the number of runs."""
    files = sorted(path for name in STUDY_FILES for path in out.glob(f"*/{name}"))
    runs = [path.parent for path in sorted((out / RUNS).glob("*/run.json")) if _finished(path)]
    files += [run / name for run in runs for name in RUN_FILES]
    if not files:
        raise DpfedError(f"there are no studies in {out}")
    scratch = archive.with_name(f"{archive.name}.tmp")
    with tarfile.open(scratch, "w:gz") as tar:
        for path in files:
            tar.add(path, str(path.relative_to(out)))
    scratch.replace(archive)
    return len(runs)


def _finished(path: Path) -> bool:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    whole = all((path.parent / name).exists() for name in RUN_FILES)
    return whole and state in ("finished", "stopped")


def unpack(archive: Path, out: Path) -> int:
    """Add an archive's studies and runs to a folder; runs of the same name are equal."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(out, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise DpfedError(f"{archive} cannot be unpacked: {error}") from None
    (out / RUNS).mkdir(exist_ok=True)
    for path in out.glob(f"*/{STUDY}"):
        share_runs(path.parent)
    return sum(1 for _ in (out / RUNS).glob("*/run.json"))


def share_runs(folder: Path) -> None:
    """Make DIR/STUDY/runs a link to DIR/runs."""
    link = folder / RUNS
    if not link.is_symlink():
        if link.exists():
            raise DpfedError(
                f"{link} is a folder of its own: this study was not made by results.py, "
                "choose another --out"
            )
        link.symlink_to(Path("..") / RUNS)
