"""The arms of a study, which are compared in a table.

An arm is a method, or a variant of a method, with its settings and the learning rates to tune.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpfed.config import Config, Registry, build, nearest, overlay
from dpfed.config.parsing import overrides_layer
from dpfed.errors import DpfedError, phrase
from dpfed.studies.search import Point, Space

REFERENCE = "dp-fedadamw"
# Order of the methods in tables, as in the DP-FedAdamW paper. The method REFERENCE, with which the
# others are compared, is last.
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
)
EQUAL_EPS = "dp-fedsam (equal eps)"
FFA_LORA = "ffa-lora"
SHORT = {
    EQUAL_EPS: "dp-fedsam:equal_eps=true",
    "dp-fedsam-equal-eps": "dp-fedsam:equal_eps=true",
    FFA_LORA: "dp-fedavg:model.lora.freeze_a=true",
}


@dataclass(frozen=True)
class Arm:
    """An arm of a study: a method, or a variant of a method, with its settings.

    label        name of the arm in tables
    overrides    changes of the study's base configuration, `key=value` as on the command line
    grids        learning rates to tune, such as "lr", each with the values that are tried first
    row, column  position in the table of a preset; without a preset there is one column
    reference    label of the arm with which this arm's score is compared
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
        """Return the configuration of this method: `base`, the overrides and the rates in `point`.

        point  one value for each learning rate in `grids`, in this order
        """
        tables = overlay(dict(base), overrides_layer(self.overrides))
        rates = {"algorithm": dict(zip(self.grids, point, strict=True))}
        return build(overlay(tables, rates), registry)


def parse_arms(
    text: str, base: Config, registry: Registry, grids: Mapping[str, tuple[float, ...]]
) -> list[Arm]:
    names = parse_names(text, base, registry)
    return [make_arm(label, variant, registry, grids) for label, variant in names.items()]


def parse_names(text: str, base: Config, registry: Registry) -> dict[str, str]:
    """Parse the option `--algorithms`. Return a string `NAME` or `NAME:key=value` for each label.

    Commas separate methods and variants of methods. The word `all` means every method.
    Example: "dp-fedavg,dp-fedadamw:gamma=0;agg=off".
    """
    words = [word.strip() for word in re.split(r",(?![^\[]*\])", text) if word.strip()]
    if not words:
        raise DpfedError(
            f"{phrase('algorithms')} names no method: give names separated by commas, or all"
        )
    labels: list[str] = []
    for word in words:
        labels += everything(base, registry) if word == "all" else [word]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise DpfedError(
            f"{phrase('algorithms')} names {twice[0]} twice: every arm can be there once"
        )
    return {label: SHORT.get(label, label) for label in labels}


def everything(base: Config, registry: Registry) -> list[str]:
    """Return the labels of all methods, and of the predefined variants that suit `base`."""
    names = [name for name in ORDER if name in registry.algorithm]
    names += [name for name in registry.algorithm if name not in (*ORDER, REFERENCE)]
    if "dp-fedsam" in names and base.privacy.enabled and base.privacy.target_epsilon is None:
        # This variant of DP-FedSAM has more noise, so that it spends as much epsilon as the other
        # methods. With a target epsilon every method spends the target, so the variant is not
        # needed.
        names.insert(names.index("dp-fedsam") + 1, EQUAL_EPS)
    if base.model.train == "lora":
        names.append(FFA_LORA)
    return [*names, REFERENCE]


def make_arm(
    label: str,
    text: str,
    registry: Registry,
    grids: Mapping[str, tuple[float, ...]],
    **place: str | None,
) -> Arm:
    """Return the arm (method with its settings) that a string such as `NAME:key=value` describes.

    Without settings the string is `NAME`; semicolons separate several settings. Keys without a dot
    belong to the configuration section [algorithm].

    grids  learning rates that the search tries first, by label or method; without an entry, these
           are the default rates of the method
    place  for a preset: the arm's fields row, column and reference
    """
    name, _, changes = text.partition(":")
    known = [*registry.algorithm, *SHORT]
    if name not in registry.algorithm:
        raise DpfedError(
            f"{phrase('algorithms')}: {name!r} is not a method{nearest(name, known)}; "
            "`dpfed list algorithms` shows what there is"
        )
    overrides = [f"algorithm.name={name}"]
    for item in (part.strip() for part in changes.split(";") if part.strip()):
        key, equals, _ = item.partition("=")
        if not equals or not key.strip():
            raise DpfedError(
                f"{phrase('algorithms')} {text!r}: {item!r} is not of the form key=value"
            )
        overrides.append(item if "." in key else f"algorithm.{item}")
    fixed = {item.partition("=")[0].strip().removeprefix("algorithm.") for item in overrides}
    tuned = {}
    for key, suffix in (("lr", ""), ("server_lr", ".server_lr")):
        declared = getattr(registry.algorithm[name], f"{key}_grid", None)
        if declared is not None and key not in fixed:
            tuned[key] = grids.get(label + suffix, grids.get(name + suffix, declared))
    return Arm(label, tuple(overrides), tuned, **place)  # type: ignore[arg-type]


def parse_grids(items: Sequence[str], registry: Registry) -> dict[str, tuple[float, ...]]:
    """Parse items `METHOD=v1,v2,...` of the option `--lr`. Return the learning rates by method.

    The search tries these rates first. An item METHOD.server_lr=v1,v2,... is for the learning rate
    of the server.
    """
    out = {}
    for item in items:
        name, equals, text = item.rpartition("=")
        try:
            values = tuple(sorted({float(word) for word in text.split(",")}))
        except ValueError:
            values = ()
        if not equals or not values or not all(0 < value < float("inf") for value in values):
            raise DpfedError(
                f"{phrase('rates')} {item!r} is not of the form NAME=v1,v2,... with numbers above 0"
            )
        method, _, key = name.strip().partition(":")[0].partition(".")
        if method not in registry.algorithm and method not in SHORT:
            raise DpfedError(
                f"{phrase('rates')} {item!r}: {method!r} is not a method"
                f"{nearest(method, list(registry.algorithm))}"
            )
        has_second_rate = hasattr(registry.algorithm.get(method), "server_lr_grid")
        if key and not (key == "server_lr" and has_second_rate):
            raise DpfedError(f"{phrase('rates')} {item!r}: {method} has no rate {key!r} to tune")
        out[name.strip()] = values
    return out
