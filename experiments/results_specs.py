"""The studies of results/studies.toml: what each asks of `dpfed compare`."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfed.errors import DpfedError

if TYPE_CHECKING:
    from dpfed.studies.study import Study

RUNS = "runs"
STARTS = "starts"
# Settings with paths of a machine, and the names that a published command has in their place.
PATHS = {
    "data.path": "DATA",
    "data.test_path": "TEST",
    "model.weights": "WEIGHTS",
    "model.tokenizer": "TOKENIZER",
}


@dataclass(frozen=True)
class Spec:
    """A study of results/studies.toml, which explains the keys."""

    name: str
    title: str
    question: str
    base: str
    algorithms: tuple[str, ...] = ()
    preset: str | None = None
    seeds: int = 3
    search_seeds: int = 1
    lr: Mapping[str, Sequence[float]] = field(default_factory=dict)
    set: tuple[str, ...] = ()
    best_of: str | None = None
    best: int = 3
    start: tuple[str, ...] = ()
    plot: bool = False
    findings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").isalnum() or self.name in (RUNS, STARTS):
            raise DpfedError(
                f"the study {self.name!r} needs a name of letters, digits and hyphens, "
                f"other than {RUNS!r} and {STARTS!r}"
            )


def read_specs(path: Path) -> list[Spec]:
    """Return the studies of a file, in order."""
    try:
        specs = []
        for table in tomllib.loads(path.read_text(encoding="utf-8"))["study"]:
            lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
            specs.append(Spec(**{**table, **lists}))
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise DpfedError(f"{path} is not a list of studies: {error}") from None
    if len({spec.name for spec in specs}) != len(specs):
        raise DpfedError(f"{path} names a study twice")
    return specs


def overrides_of(spec: Spec, given: Sequence[str]) -> list[str]:
    """Return the caller's --set that are for this base, then the study's own, which win."""
    mine = []
    for item in given:
        base = base_of(item)
        if base is None:
            mine.append(item)
        elif f"{base}.toml" == spec.base:
            mine.append(item.partition(":")[2])
    return [*mine, *spec.set]


def base_of(item: str) -> str | None:
    """Return BASE of a setting `BASE:key=value`, which is for studies of that base alone."""
    base, colon, _ = item.partition("=")[0].partition(":")
    return base if colon else None


def words_of(
    spec: Spec, base: str, overrides: Sequence[str], algorithms: Sequence[str]
) -> list[str]:
    """Return the words after `dpfed`."""
    words = ["compare", base]
    words += ["--preset", spec.preset] if spec.preset else []
    words += ["--algorithms", ",".join(algorithms)] if algorithms else []
    for grid in grids_of(spec):
        words += ["--lr", grid]
    for item in overrides:
        words += ["--set", item]
    words += ["--search-seeds", str(spec.search_seeds)] if spec.search_seeds > 1 else []
    return [*words, "--seeds", str(spec.seeds)]


def grids_of(spec: Spec) -> list[str]:
    return [f"{name}={','.join(f'{v:g}' for v in values)}" for name, values in spec.lr.items()]


def published(spec: Spec, overrides: Sequence[str], algorithms: Sequence[str]) -> str:
    """Return the command for readers, with names in place of this machine's paths."""
    shown = []
    for item in overrides:
        key, _, value = item.partition("=")
        shown.append(f"{key}={PATHS[key]}" if key in PATHS and value != "random" else item)
    base = f"results/{spec.base}"
    compare = shlex.join(
        ["dpfed", *words_of(spec, base, started(spec, shown, "START"), algorithms)]
    )
    if not spec.start:
        return compare
    first = shlex.join(["dpfed", *first_words(spec, base, shown, "FIRST")])
    return f"{first} && dpfed export FIRST START && {compare}"


def first_words(spec: Spec, base: str, overrides: Sequence[str], out: str) -> list[str]:
    """Return the words after `dpfed` of the run whose model the study starts from."""
    own = [item for item in overrides if item not in spec.set]
    return [
        "run",
        base,
        *(word for item in (*own, *spec.start) for word in ("--set", item)),
        "--out",
        out,
    ]


def started(spec: Spec, overrides: Sequence[str], model: str) -> list[str]:
    """Return the settings of the study's own runs, which start from `model` if the spec says so."""
    if not spec.start:
        return list(overrides)
    return [
        *(item for item in overrides if not item.startswith("model.weights=")),
        f"model.weights={model}",
        "model.head=kept",
    ]


def best_arms(table: Mapping[str, Any], count: int) -> list[str]:
    """Return the best private arms on equal terms and the reference, with their rates fixed."""
    from dpfed.studies.arms import REFERENCE, SHORT

    able = [row for row in table["rows"] if row["accuracy"] is not None]
    fair = [
        row
        for row in able
        if row["epsilon"]["server_worst"] is not None and not row["larger_epsilon"]
    ]
    first = sorted(fair, key=lambda row: -row["accuracy"])[:count]
    first += [row for row in able if row["method"] == REFERENCE and row not in first]
    out = []
    for row in first:
        name, _, changes = SHORT.get(row["method"], row["method"]).partition(":")
        keys = [changes] if changes else []
        keys += [f"{key}={value!r}" for key, value in row["rates"].items()]
        out.append(f"{name}:{';'.join(keys)}" if keys else name)
    return out


def study_from(
    spec: Spec, folder: Path, overrides: Sequence[str], algorithms: Sequence[str]
) -> Study:
    """Return the checked study of a spec."""
    from dpfed.cli.compare import study_of
    from dpfed.registry import registry
    from dpfed.studies.study import check

    study = study_of(
        str(folder / spec.base),
        list(overrides),
        ",".join(algorithms) or None,
        spec.preset,
        grids_of(spec),
        spec.seeds,
        spec.search_seeds,
    )
    check(study, registry())
    return study


def named(label: str) -> str:
    """Return a label; a variant looks as on the command line."""
    return f"`{label}`" if ":" in label and "|" not in label else label
