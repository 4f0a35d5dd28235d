"""Configuration keys that were added or deleted after the first version of dpfed.

Older files keep their meaning. ADDED lists the added keys, each with the value that holds for a
file without the key. A deleted key is ignored if it has its old default. Any other value of a
deleted key raises an error with advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpfed.errors import DpfedError

ADDED: dict[str, Any] = {
    "privacy.isolation": "fast",
    "run.cohort_choice": "uniform",
    "run.max_rounds_per_client": "auto",
    "run.max_records_per_step": 2048,
    "run.metric": "auto",
    "run.keep": "last",
    "model.task": "auto",
    "model.class_weights": [],
    "model.gradient_checkpointing": False,
    "model.quantize": "none",
}


# Former defaults of keys whose default is now None, by (data.name, key). Each is the name of a
# column. A value of None still selects this column if the table has it.
FORMER_DEFAULTS = {
    ("text-table", "text"): "text",
    ("text-table", "label"): "label",
    ("hub", "label"): "label",
}


class Deleted(NamedTuple):
    """A configuration key that was deleted.

    default    the key's default value before it was deleted
    advice     text for the user if a file has another value
    algorithm  name of the algorithm that had the key; "" for a key outside [algorithm]
    """

    default: Any
    advice: str
    algorithm: str = "dp-fedadamw"


PRINTED = "the form printed in the paper is algorithm.name = dp-fedadamw-printed"
DELETED: dict[str, Deleted] = {
    "algorithm.align": Deleted("on", "set algorithm.gamma = 0 for no alignment"),
    "algorithm.v_exponent": Deleted("total", PRINTED),
    "algorithm.m_exponent": Deleted(
        "local", "the first moment is corrected with the local step count"
    ),
    "algorithm.v_send": Deleted("raw", "clients send raw second moments"),
    "algorithm.wd_sign": Deleted("decay", PRINTED),
    "algorithm.dg_lr": Deleted(
        "round", "the global direction is scaled by the learning rate of its round"
    ),
    "algorithm.lora_merge_ab": Deleted(False, "the factors A and B of LoRA are separate blocks"),
    "algorithm.cnn_blocks": Deleted("module", "each convolution is one block"),
    "algorithm.agg_center": Deleted("auto", "unequal noise levels are handled automatically"),
    "algorithm.bc_floor_abs": Deleted(None, "algorithm.name = dp-adambc has an absolute floor"),
    "algorithm.scale": Deleted("off", "gradients are not scaled before clipping"),
    "privacy.accounting": Deleted(
        "pld", "set privacy.enabled = false to train without privacy", ""
    ),
    "privacy.noise_scale": Deleted(
        "c", "the printed noise has the multiplier privacy.sigma times privacy.clip", ""
    ),
    "algorithm.ls_double_step": Deleted(False, "each gradient makes one step", "dp-fedavg-ls"),
}

# Values that a key accepted in earlier versions and no longer accepts, with advice for the user.
# The entries have the form (key, value): advice.
DELETED_VALUES = {
    ("algorithm.bc_floor", "none"): PRINTED,
    ("privacy.clip_mode", "batch_tensor"): (
        "clipping the mean of a batch protects nothing, so use flat"
    ),
    ("privacy.sampling", "shuffle"): "shuffled batches have no accounting, so use poisson",
}


def without_deleted(section: str, table: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return a section's table without the deleted keys that have their old defaults.

    Raise DpfedError for any other value of a deleted key, and for the values in DELETED_VALUES.

    section  name of the section, such as "privacy"
    table    keys and values of the section in a file
    known    the keys that the section still has
    """
    kept = {}
    for key, value in table.items():
        full = f"{section}.{key}"
        deleted = DELETED.get(full)
        advice = DELETED_VALUES.get((full, value)) if isinstance(value, str) else None
        if key not in known and deleted is not None and value != deleted.default:
            advice = deleted.advice
        if advice is not None:
            raise DpfedError(f"{full} = {value!r} is no longer supported: {advice}")
        if key in known or deleted is None:
            kept[key] = value
    return kept


def as_first_written(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the keys that the first version of dpfed would have written.

    Equal settings then have equal hashes, even if different versions of dpfed wrote them with more
    or fewer keys.
    """
    out = {name: dict(table) for name, table in tables.items()}
    for full, meaning in ADDED.items():
        section, _, key = full.partition(".")
        if out.get(section, {}).get(key) == meaning:
            del out[section][key]
    for (source, key), default in FORMER_DEFAULTS.items():
        if out.get("data", {}).get("name") == source:
            out["data"].setdefault(key, default)
    name = out.get("algorithm", {}).get("name")
    for full, deleted in DELETED.items():
        section, _, key = full.partition(".")
        if section in out and deleted.default is not None and deleted.algorithm in ("", name):
            out[section].setdefault(key, deleted.default)
    return out
