"""The arms of a study: an arm is a method or a variant of one, what it changes in a configuration and what is tuned."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpfed.config import Config, LoraSection, Registry, build, nearest, overlay
from dpfed.config.parsing import overrides_layer
from dpfed.errors import DpfedError
from dpfed.studies.search import Point, Space

REFERENCE = "dp-fedadamw"
ORDER = (
    "dp-fedavg",
    "dp-scaffold",
    "dp-fedavg-ls",
    "dp-fedsam",
    "dp-local-adamw",
    "dp-fedopt",
    "dp-fafed",
    "dp-fedlada",
    "dp-adambc",
)  # as in the paper's tables, the reference last
EQUAL_EPS, FFA_LORA = "dp-fedsam (equal eps)", "ffa-lora"
SHORT = {
    EQUAL_EPS: "dp-fedsam:equal_eps=true",
    "dp-fedsam-equal-eps": "dp-fedsam:equal_eps=true",
    FFA_LORA: "dp-fedavg:model.lora.freeze_a=true",
}


@dataclass(frozen=True)
class Arm:
    """row, column  where the arm stands in a preset's grid; a plain comparison has one column
    grids           tuned keys of [algorithm] and the values the search begins with; empty: nothing is tuned
    reference       label of the arm that differences are taken against
    """

    label: str
    overrides: tuple[str, ...]
    grids: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    row: str = ""
    column: str = ""
    reference: str | None = REFERENCE

    @property
    def space(self) -> Space:
        return tuple(self.grids.values())

    def configure(self, base: Mapping[str, Any], point: Point, registry: Registry) -> Config:
        """The base with the arm's overrides and the tuned values."""
        tables = overlay(dict(base), overrides_layer(self.overrides))
        return build(
            overlay(tables, {"algorithm": dict(zip(self.grids, point, strict=True))}), registry
        )


def parse_arms(
    text: str, base: Config, registry: Registry, grids: Mapping[str, tuple[float, ...]]
) -> list[Arm]:
    return [
        make_arm(label, arm, registry, grids)
        for label, arm in parse_names(text, base, registry).items()
    ]


def parse_names(text: str, base: Config, registry: Registry) -> dict[str, str]:
    """`all`, or names and variants separated by commas: "dp-fedavg,dp-fedadamw:gamma=0;agg=off"; label -> variant."""
    words = [word.strip() for word in re.split(r",(?![^\[]*\])", text) if word.strip()]
    if not words:
        raise DpfedError("--algorithms names no method: give names separated by commas, or all")
    labels = [
        label
        for word in words
        for label in (everything(base, registry) if word == "all" else [word])
    ]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise DpfedError(f"--algorithms names {twice[0]} twice: every arm can be there once")
    return {label: SHORT.get(label, label) for label in labels}


def everything(base: Config, registry: Registry) -> list[str]:
    """Every method there is, and the two variants that need only a switch, where the configuration allows them."""
    names = [name for name in ORDER if name in registry.algorithm]
    names += [name for name in registry.algorithm if name not in (*ORDER, REFERENCE)]
    if "dp-fedsam" in names and base.privacy.enabled and base.privacy.target_epsilon is None:
        names.insert(
            names.index("dp-fedsam") + 1, EQUAL_EPS
        )  # a target is reached by every method alike
    if base.model.train == "lora" and "freeze_a" in {
        f.name for f in dataclasses.fields(LoraSection)
    }:
        names.append(FFA_LORA)
    return [*names, REFERENCE]


def make_arm(
    label: str,
    text: str,
    registry: Registry,
    grids: Mapping[str, tuple[float, ...]],
    **place: str | None,
) -> Arm:
    """An arm from `NAME` or `NAME:key=value;key=value`; keys without a dot belong to [algorithm]."""
    name, _, changes = text.partition(":")
    known = [*registry.algorithm, *SHORT]
    if name not in registry.algorithm:
        raise DpfedError(
            f"--algorithms: {name!r} is not a method{nearest(name, known)}; `dpfed list algorithms` shows what there is"
        )
    overrides = [f"algorithm.name={name}"]
    for item in (part.strip() for part in changes.split(";") if part.strip()):
        key, equals, _ = item.partition("=")
        if not equals or not key.strip():
            raise DpfedError(f"--algorithms {text!r}: {item!r} is not of the form key=value")
        overrides.append(item if "." in key else f"algorithm.{item}")
    fixed = {item.partition("=")[0].strip().removeprefix("algorithm.") for item in overrides}
    tuned = {
        key: grid
        for key, grid in _grids(label, name, registry.algorithm[name], grids).items()
        if key not in fixed
    }
    return Arm(label, tuple(overrides), tuned, **place)  # type: ignore[arg-type]


def _grids(
    label: str, name: str, algorithm: type[Any], given: Mapping[str, tuple[float, ...]]
) -> dict[str, tuple[float, ...]]:
    declared = {"lr": algorithm.lr_grid}
    if hasattr(algorithm, "server_lr_grid"):
        declared["server_lr"] = algorithm.server_lr_grid
    out = {}
    for key, grid in declared.items():
        suffix = "" if key == "lr" else f".{key}"
        out[key] = given.get(label + suffix, given.get(name + suffix, grid))
    return out


def parse_grids(items: Sequence[str], registry: Registry) -> dict[str, tuple[float, ...]]:
    """`--lr NAME=v1,v2,...`: the values a method's search begins with; NAME.server_lr for a second rate."""
    out = {}
    for item in items:
        name, equals, text = item.rpartition("=")
        try:
            values = tuple(sorted({float(word) for word in text.split(",")}))
        except ValueError:
            values = ()
        if not equals or not values or not all(0 < value < float("inf") for value in values):
            raise DpfedError(
                f"--lr {item!r} is not of the form NAME=v1,v2,... with numbers above 0"
            )
        method, _, key = name.strip().partition(":")[0].partition(".")
        if method not in registry.algorithm and method not in SHORT:
            raise DpfedError(
                f"--lr {item!r}: {method!r} is not a method{nearest(method, list(registry.algorithm))}"
            )
        if key and not (
            key == "server_lr" and hasattr(registry.algorithm.get(method), "server_lr_grid")
        ):
            raise DpfedError(f"--lr {item!r}: {method} has no rate {key!r} to tune")
        out[name.strip()] = values
    return out
