"""Check that a run may resume: only a few keys of its configuration may have changed."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from dpfed.config import Config, to_dict
from dpfed.config.key_history import as_first_written
from dpfed.errors import DpfedError, phrase
from dpfed.training.run_folder.files import (
    CHECKPOINTS,
    COHORTS,
    LEDGER,
    METRICS,
    RESULT,
    read_result,
    read_settings,
)

# Keys of the section [run] that may change when a run resumes.
MAY_CHANGE = ("eval_every", "checkpoint_every", "memory_limit", "threads", "timeout", "trackers")
# Keys of other sections that may change, because no result of the run depends on them.
MAY_CHANGE_ELSEWHERE = {
    # This key is only read when a run begins.
    "privacy": ("allow_large_delta",),
    # These keys set how long and how often a federation server tries to reach its clients.
    "federation": ("timeout", "retries", "patience"),
}


def extendable(config: Config) -> bool:
    """Return True if a run can get more rounds without a change of its completed rounds.

    This needs a constant learning rate, and noise that does not depend on the number of rounds.
    """
    fixed_noise = not config.privacy.enabled or config.privacy.sigma is not None
    return config.run.lr_schedule == "constant" and fixed_noise


def fixed_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must not change when a run resumes, as nested tables."""
    tables = as_first_written(to_dict(config))
    free = {**MAY_CHANGE_ELSEWHERE, "run": MAY_CHANGE}
    if extendable(config):
        free["run"] += ("rounds",)
    for section, keys in free.items():
        if section in tables:
            tables[section] = {k: v for k, v in tables[section].items() if k not in keys}
    return tables


def changes(out: Path, config: Config) -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) of each setting that changed since the run's last start.

    out     the run folder
    config  the new configuration
    """
    stored = read_settings(out)
    if stored is None:
        raise DpfedError(
            f"{out} is not the folder of a run, so it cannot be resumed: {phrase('a run folder')}"
        )
    earlier = as_first_written({k: table for k, table in stored.items() if isinstance(table, dict)})
    found = []
    for section, table in as_first_written(to_dict(config)).items():
        before = earlier.get(section, {})
        for key in sorted({*table, *before}):
            if before.get(key) != table.get(key):
                found.append((f"{section}.{key}", before.get(key), table.get(key)))
    return found


def refuse_other(out: Path, config: Config) -> None:
    """Raise DpfedError if the run in `out` cannot resume with this configuration.

    This is so if the run is finished, or if a key changed that may not change.
    """
    changed = changes(out, config)
    result = read_result(out)
    rounds = result.get("rounds")
    complete = not isinstance(rounds, int) or rounds >= config.run.rounds
    wrong = [(key, old, new) for key, old, new in changed if not _allowed(key, old, new, config)]
    if result.get("state") == "finished" and complete and not wrong:
        raise DpfedError(f"the run in {out} is finished: there is nothing to resume")
    if not wrong:
        return
    shown = ", ".join(
        f"{key} was {old!r} when the run began and is {new!r} now" for key, old, new in wrong
    )
    if [key for key, _, _ in wrong] == ["run.rounds"] and extendable(config):
        raise DpfedError(f"{shown}: rounds may be added but not taken away")
    raise DpfedError(
        f"{shown}: a run goes on only with what it began with; run.{', run.'.join(MAY_CHANGE)} may "
        'change, and run.rounds may grow with run.lr_schedule = "constant" and a given '
        "privacy.sigma"
    )


def refuse_kind(out: Path, served: bool) -> None:
    """Raise DpfedError if a server resumes a simulation, or a simulation resumes a server's run.

    out     the run folder
    served  True if a federation server resumes the run
    """
    if (out / COHORTS).exists() != served and read_result(out):
        owner, command = ("a simulation", "dpfed run") if served else ("a server", "dpfed server")
        raise DpfedError(f"{out} holds the run of {owner}: go on with `{command}`")


def _allowed(key: str, old: Any, new: Any, config: Config) -> bool:
    section, _, name = key.partition(".")
    if key == "run.rounds":
        return extendable(config) and isinstance(old, int) and new > old
    return name in {**MAY_CHANGE_ELSEWHERE, "run": MAY_CHANGE}.get(section, ())


def run_name(out: Path) -> str:
    """Return the run's name from run.json, or a new name if the run has not begun to train.

    Raise DpfedError if a run that has begun has no name, because its ledger cannot be verified.
    """
    name = read_result(out).get("run")
    if isinstance(name, str):
        return name
    metrics = out / METRICS
    started = [out / RESULT, out / LEDGER, out / f"{LEDGER}.head", out / CHECKPOINTS]
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    if has_metrics or any(path.exists() for path in started):
        raise DpfedError(
            f"{out / RESULT} does not name the run, so its ledger cannot be trusted to be its own"
        )
    return uuid.uuid4().hex
