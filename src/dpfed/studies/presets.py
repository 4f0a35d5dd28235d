"""Presets of `dpfed compare`: the experiments of the DP-FedAdamW paper, for any configuration.

A preset is a list of arms (methods with their settings), each in a row and a column of a table.
Most values come from the paper. The learning rate of every arm is tuned, because most of the varied
settings also change the size of an update.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dpfed.config import Config, Registry, nearest, to_dict
from dpfed.errors import DpfedError, phrase
from dpfed.privacy.published import show_setting
from dpfed.studies.arms import REFERENCE, Arm, make_arm

SIX = ("dp-fedavg", "dp-scaffold", "dp-fedavg-ls", "dp-fedsam", "dp-local-adamw", REFERENCE)
Grids = Mapping[str, tuple[float, ...]]
Methods = Mapping[str, str]
"""The text of each method or variant as on the command line, by label."""
Cells = list[tuple[str, str, str]]
"""(row, column, text as on the command line) of each arm."""


@dataclass(frozen=True)
class Preset:
    """An experiment of the paper, as a table of arms (methods with their settings).

    title      title of the table
    axis       the setting that varies over the columns, empty for one column
    methods    methods of the rows, unless the user names others; None if the arms are fixed
    cells      function that returns the arms, from a configuration and the methods of the rows
    reference  "row" or "row | column" of the arm with which all arms are compared; None compares
               each arm with the dp-fedadamw arm of its column
    """

    title: str
    axis: str
    methods: tuple[str, ...] | None
    cells: Callable[[Config, Methods], Cells]
    reference: str | None = None


def along(key: str, values: Sequence[float | int]) -> Callable[[Config, Methods], Cells]:
    """Return a function that makes one arm for each method and each value of the setting `key`."""
    return lambda base, methods: [
        (label, show_setting(value), joined(arm, f"{key}={value}"))
        for label, arm in methods.items()
        for value in values
    ]


def joined(method: str, *changes: str) -> str:
    """Return the string of a method or variant, such as "dp-fedavg:lr=1", with further changes.

    If a key then occurs twice in the string, its last value counts.
    """
    name, _, own = method.partition(":")
    return f"{name}:{';'.join(filter(None, (own, *changes)))}"


def components(base: Config, methods: Methods) -> Cells:
    off = {"w/o Agg": "agg=off", "w/o BC": "bc=false", "w/o Align": "gamma=0.0"}
    parts = {"none": ";".join(off.values()), **off, "full": ""}
    return [(row, "", joined(REFERENCE, change)) for row, change in parts.items()]


def aggregation(base: Config, methods: Methods) -> Cells:
    rows = {"NoAgg": "off", "Agg-v": "full_v", "Agg-mean-v": "mean"}
    return [(row, "", joined(REFERENCE, f"agg={value}")) for row, value in rows.items()]


def skew(base: Config, methods: Methods) -> Cells:
    """Return arms to study label skew: each method with several Dirichlet alphas and iid data."""
    rule = _dirichlet_rule(base)
    columns: dict[str, tuple[str, ...]] = {
        show_setting(alpha): (rule, f"data.alpha={alpha}") for alpha in (0.1, 0.6, 0.8)
    }
    columns["iid"] = ("data.partition=iid",)
    return [
        (m, column, joined(arm, *changes))
        for m, arm in methods.items()
        for column, changes in columns.items()
    ]


def clip_norms(base: Config, methods: Methods) -> Cells:
    """Return arms (methods with settings) that have 0.1 to 10 times the configured clip norm.

    The paper's clip norms are not used, because the size of gradients depends on the model.
    """
    values = [float(f"{base.privacy.clip * factor:.3g}") for factor in (0.1, 0.3, 1, 3, 10)]
    return along("privacy.clip", values)(base, methods)


def local_steps(base: Config, methods: Methods) -> Cells:
    """Return arms (methods with settings) that have 1/4 to 4 times the configured local steps."""
    steps = base.run.local_steps
    values = sorted({max(1, steps // 4), max(1, steps // 2), steps, 2 * steps, 4 * steps})
    return along("run.local_steps", values)(base, methods)


def diagnostics(base: Config, methods: Methods) -> Cells:
    """Return arms that record diagnostics of the training (`run.diagnostics`).

    DP-FedAdamW has four arms: with or without noise, and with or without label skew. Two other
    methods have one arm each, without noise.
    """
    skews = {"non-IID": _dirichlet_rule(base), "IID": "data.partition=iid"}
    privacy: dict[str, tuple[str, ...]] = {"DP": (), "no DP": ("privacy.enabled=false",)}
    watch = "run.diagnostics=true"
    cells = [
        (f"{REFERENCE}, {name}", column, joined(REFERENCE, skew, *off, watch))
        for column, off in privacy.items()
        for name, skew in skews.items()
    ]
    others = ("dp-fedavg", "dp-local-adamw")
    return cells + [(name, "no DP", joined(name, *privacy["no DP"], watch)) for name in others]


def _dirichlet_rule(base: Config) -> str:
    rule = base.data.partition
    return f"data.partition={rule if rule.startswith('dirichlet') else 'dirichlet_equal'}"


ONE = (REFERENCE,)
SAM = "dp-fedsam"
PRESETS = {
    "ablation-components": Preset("Components of DP-FedAdamW", "", None, components, "full"),
    "ablation-aggregation": Preset(
        "Aggregation of second moments", "", None, aggregation, "Agg-mean-v"
    ),
    "gamma": Preset(
        "Alignment",
        "gamma",
        None,
        lambda b, m: along("gamma", (0, 0.25, 0.5, 0.75, 1))(b, {REFERENCE: REFERENCE}),
    ),
    "sigma": Preset("Noise multiplier", "sigma", SIX, along("privacy.sigma", (0.5, 1, 1.5, 2))),
    "epsilon": Preset("Privacy budget", "epsilon", SIX, along("privacy.target_epsilon", (1, 2, 3))),
    "alpha": Preset("Heterogeneity", "alpha", SIX, skew),
    "clip": Preset("Clip norm", "C", ONE, clip_norms),
    "rho": Preset(
        "Radius of DP-FedSAM",
        "rho",
        None,
        lambda b, m: along("rho", (0.01, 0.05, 0.1, 0.5))(b, {SAM: SAM}),
    ),
    "weight-decay": Preset(
        "Weight decay", "lambda", ONE, along("weight_decay", (0, 0.001, 0.01, 0.1))
    ),
    "cohort": Preset(
        "Share of clients in a round", "l", ONE, along("run.participation", (0.1, 0.2, 0.5, 1))
    ),
    "local-steps": Preset("Local steps", "K", ONE, local_steps),
    "diagnostics": Preset(
        "Noise and skew", "privacy", None, diagnostics, f"{REFERENCE}, non-IID | DP"
    ),
}


def preset_arms(
    name: str, algorithms: Methods | None, base: Config, registry: Registry, grids: Grids
) -> tuple[Preset, list[Arm]]:
    """Return the preset `name` and its arms.

    algorithms  methods of the table's rows; None for the default methods of the preset
    """
    if name not in PRESETS:
        raise DpfedError(
            f"{phrase('preset')} {name!r} is not known{nearest(name, PRESETS)}; "
            f"there are: {', '.join(PRESETS)}"
        )
    preset = PRESETS[name]
    if algorithms is not None and preset.methods is None:
        raise DpfedError(
            f"{phrase('preset')} {name} has its own arms: leave out {phrase('algorithms')}"
        )
    methods = algorithms or {
        name: name for name in preset.methods or () if name in registry.algorithm
    }
    cells = preset.cells(base, methods)
    labels = {(row, column): f"{row} | {column}" if column else row for row, column, _ in cells}
    arms = []
    for row, column, text in cells:
        against = preset.reference or labels.get((REFERENCE, column))
        place = {"row": row, "column": column, "reference": against}
        arms.append(make_arm(labels[row, column], text, registry, grids, **place))
    if len({arm.row for arm in arms}) == 1 and preset.reference is None:
        unchanged = _unchanged(arms, cells[0][2].partition(":")[0], base, registry)
        arms = [dataclasses.replace(arm, reference=unchanged) for arm in arms]
    return preset, arms


def _unchanged(arms: Sequence[Arm], name: str, base: Config, registry: Registry) -> str | None:
    """Return the label of the arm that does not change the base configuration; None if none.

    An arm is a method with its settings.
    """
    plain = make_arm(name, name, registry, {})
    tables = to_dict(base)
    start = tuple(grid[0] for grid in plain.space)
    wanted = plain.configure(tables, start, registry)
    found = (arm.label for arm in arms if arm.configure(tables, start, registry) == wanted)
    return next(found, None)
