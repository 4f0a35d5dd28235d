"""Whether a run may go on: under its own configuration, and with which keys changed."""

from __future__ import annotations

import json
import tomllib
import uuid
from pathlib import Path
from typing import Any

from dpfed.config import Config, to_dict
from dpfed.config.key_history import as_first_written
from dpfed.errors import DpfedError
from dpfed.training.run_folder.folder import CHECKPOINTS, COHORTS, CONFIG, LEDGER, METRICS, RESULT

# of [run], when a run goes on
MAY_CHANGE = ("eval_every", "checkpoint_every", "memory_limit", "threads", "timeout", "trackers")
LARGE_DELTA = "allow_large_delta"  # of [privacy]: only a new run asks for it
WAITING = (
    "timeout",
    "retries",
    "patience",
)  # of [federation]: how long a server waits changes no number


def extendable(config: Config) -> bool:
    """Whether rounds may be added: only where no round that is over would have been another one with more to come."""
    return config.run.lr_schedule == "constant" and (
        not config.privacy.enabled or config.privacy.sigma is not None
    )


def fixed_settings(config: Config) -> dict[str, Any]:
    """The settings that the numbers of a round follow from."""
    free = {*MAY_CHANGE, *(["rounds"] if extendable(config) else [])}
    tables = as_first_written(to_dict(config))
    tables["run"] = {key: value for key, value in tables["run"].items() if key not in free}
    tables["privacy"].pop(LARGE_DELTA, None)
    if "federation" in tables:
        tables["federation"] = {
            key: value for key, value in tables["federation"].items() if key not in WAITING
        }
    return tables


def changes(out: Path, config: Config) -> list[tuple[str, Any, Any]]:
    """(key, was, is) of everything that is not as it was when the run in `out` began or last went on."""
    try:
        stored = tomllib.loads((out / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise DpfedError(
            f"{out} is not the folder of a run: --resume needs one that `dpfed run` has made"
        ) from None
    found = []
    earlier = as_first_written(
        {name: table for name, table in stored.items() if isinstance(table, dict)}
    )
    for section, table in as_first_written(to_dict(config)).items():
        before = earlier.get(section, {})
        for key in sorted({*table, *before}):
            if before.get(key) != table.get(key):
                found.append((f"{section}.{key}", before.get(key), table.get(key)))
    return found


def refuse_other(out: Path, config: Config) -> None:
    """A run goes on under its own configuration only."""
    changed = changes(out, config)
    result = result_in(out)
    if result.get("state") == "finished" and _over(result, config):
        raise DpfedError(f"the run in {out} is finished: there is nothing to resume")
    wrong = [(key, old, new) for key, old, new in changed if not _allowed(key, old, new, config)]
    if not wrong:
        return
    shown = ", ".join(
        f"{key} was {old!r} when the run began and is {new!r} now" for key, old, new in wrong
    )
    if [key for key, _, _ in wrong] == ["run.rounds"] and extendable(config):
        raise DpfedError(f"{shown}: rounds may be added but not taken away")
    raise DpfedError(
        f"{shown}: a run goes on only with what it began with; run.{', run.'.join(MAY_CHANGE)} may change, and "
        'run.rounds may grow with run.lr_schedule = "constant" and a given privacy.sigma'
    )


def refuse_kind(out: Path, served: bool) -> None:
    """A server's run and a simulation are different runs, also of one configuration."""
    if (out / COHORTS).exists() != served and result_in(out):
        whose, command = ("a simulation", "dpfed run") if served else ("a server", "dpfed server")
        raise DpfedError(f"{out} holds the run of {whose}: go on with `{command}`")


def _over(result: dict[str, Any], config: Config) -> bool:
    rounds = result.get("rounds")
    return not isinstance(rounds, int) or rounds >= config.run.rounds


def _allowed(key: str, old: Any, new: Any, config: Config) -> bool:
    section, _, name = key.partition(".")
    if key == f"privacy.{LARGE_DELTA}":
        return True
    if key == "run.rounds":
        return extendable(config) and isinstance(old, int) and new > old
    return (section == "run" and name in MAY_CHANGE) or (
        section == "federation" and name in WAITING
    )


def name_of(out: Path) -> str:
    """The run's name. One that was stopped before it had a name has released nothing, and is given one now."""
    name = result_in(out).get("run")
    if isinstance(name, str):
        return name
    metrics = out / METRICS
    begun = [out / RESULT, out / LEDGER, out / f"{LEDGER}.head", out / CHECKPOINTS]
    if not any(path.exists() for path in begun) and not (
        metrics.exists() and metrics.stat().st_size
    ):
        return uuid.uuid4().hex
    raise DpfedError(
        f"{out / RESULT} does not name the run, so its ledger cannot be trusted to be its own"
    )


def result_in(out: Path) -> dict[str, Any]:
    try:
        found = json.loads((out / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
