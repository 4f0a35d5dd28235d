"""History of added and deleted configuration keys, so that older files keep their meaning.

A file without an added key means the value in ADDED. A deleted key is ignored at its old default.
Any other value of a deleted key is refused with advice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpfed.errors import DpfedError

ADDED: dict[str, Any] = {"privacy.isolation": "fast"}


class Deleted(NamedTuple):
    """Default and replacement of a deleted key; `algorithm` had it, or "" in other sections."""

    default: Any
    instead: str
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

# Deleted values of keys that still exist.
DELETED_VALUES = {
    ("algorithm.bc_floor", "none"): PRINTED,
    ("privacy.clip_mode", "batch_tensor"): (
        "clipping the mean of a batch protects nothing, so use flat"
    ),
    ("privacy.sampling", "shuffle"): "shuffled batches have no accounting, so use poisson",
}


def without_deleted(section: str, table: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """Return the table without deleted keys at their old defaults; refuse their other values."""
    kept = {}
    for key, value in table.items():
        full = f"{section}.{key}"
        deleted = DELETED.get(full)
        instead = DELETED_VALUES.get((full, value)) if isinstance(value, str) else None
        if key not in known and deleted is not None and value != deleted.default:
            instead = deleted.instead
        if instead is not None:
            raise DpfedError(f"{full} = {value!r} is no longer supported: {instead}")
        if key in known or deleted is None:
            kept[key] = value
    return kept


def as_first_written(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in the form of the first version, to compare and hash across versions."""
    out = {name: dict(table) for name, table in tables.items()}
    for full, meaning in ADDED.items():
        section, _, key = full.partition(".")
        if out.get(section, {}).get(key) == meaning:
            del out[section][key]
    name = out.get("algorithm", {}).get("name")
    for full, deleted in DELETED.items():
        section, _, key = full.partition(".")
        if section in out and deleted.default is not None and deleted.algorithm in ("", name):
            out[section].setdefault(key, deleted.default)
    return out
