"""The paper's ablations and grids on any configuration: each preset is a list of arms laid out in rows and columns.

Values are the paper's where it names them. Every arm tunes its own learning rate: most of these switches also rescale
the step, so that a comparison at one rate would compare rates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dpfed.config import Config, Registry, RunSection, nearest, to_dict
from dpfed.errors import DpfedError
from dpfed.privacy.published import show_setting
from dpfed.studies.arms import REFERENCE, Arm, make_arm

SIX = ("dp-fedavg", "dp-scaffold", "dp-fedavg-ls", "dp-fedsam", "dp-local-adamw", REFERENCE)
Grids = Mapping[str, tuple[float, ...]]
Methods = Mapping[str, str]
"""label -> arm as on the command line."""
Cells = list[tuple[str, str, str]]
"""(row, column, arm as on the command line); the reference of a column is its dp-fedadamw row, if it has one."""


@dataclass(frozen=True)
class Preset:
    """axis: what the columns are, empty for one column; methods: those of the rows, None where they are fixed."""

    title: str
    axis: str
    methods: tuple[str, ...] | None
    cells: Callable[[Config, Methods], Cells]
    reference: str | None = None  # "row" or "row | column" that all differences are taken against


def along(key: str, values: Sequence[float | int]) -> Callable[[Config, Methods], Cells]:
    """Every method at every value of one key."""
    return lambda base, methods: [
        (label, show_setting(value), joined(arm, f"{key}={value}"))
        for label, arm in methods.items()
        for value in values
    ]


def joined(method: str, *changes: str) -> str:
    """A method or variant with further changes; they come last, so they win."""
    name, _, own = method.partition(":")
    return f"{name}:{';'.join([part for part in (own, *changes) if part])}"


def components(base: Config, methods: Methods) -> Cells:
    off = {"w/o Agg": "agg=off", "w/o BC": "bc=false", "w/o Align": "gamma=0.0"}
    parts = {"none": ";".join(off.values()), **off, "full": ""}
    return [(row, "", joined(REFERENCE, change)) for row, change in parts.items()]


def aggregation(base: Config, methods: Methods) -> Cells:
    rows = {"NoAgg": "off", "Agg-v": "full_v", "Agg-mean-v": "mean"}
    return [(row, "", joined(REFERENCE, f"agg={value}")) for row, value in rows.items()]


def skew(base: Config, methods: Methods) -> Cells:
    """Dirichlet's alpha as in the paper, and records dealt at random."""
    rule = base.data.partition if base.data.partition.startswith("dirichlet") else "dirichlet_equal"
    columns: dict[str, tuple[str, ...]] = {
        show_setting(alpha): (f"data.partition={rule}", f"data.alpha={alpha}")
        for alpha in (0.1, 0.6, 0.8)
    }
    columns["iid"] = ("data.partition=iid",)
    return [
        (m, column, joined(arm, *changes))
        for m, arm in methods.items()
        for column, changes in columns.items()
    ]


def clip_norms(base: Config, methods: Methods) -> Cells:
    """The scale of gradients is the model's, so these are multiples of the configuration's own clip norm."""
    values = [float(f"{base.privacy.clip * factor:.3g}") for factor in (0.1, 0.3, 1, 3, 10)]
    return along("privacy.clip", values)(base, methods)


def local_steps(base: Config, methods: Methods) -> Cells:
    """A quarter to four times the configuration's K, at the same number of rounds."""
    steps = base.run.local_steps
    values = sorted({max(1, steps // 4), max(1, steps // 2), steps, 2 * steps, 4 * steps})
    return along("run.local_steps", values)(base, methods)


def diagnostics(base: Config, methods: Methods) -> Cells:
    """What the noise and the skew each do to the moments: both switched, and two methods without privacy."""
    rule = base.data.partition if base.data.partition.startswith("dirichlet") else "dirichlet_equal"
    skews = {"non-IID": f"data.partition={rule}", "IID": "data.partition=iid"}
    watch = (
        ("run.diagnostics=true",)
        if "diagnostics" in {f.name for f in dataclasses.fields(RunSection)}
        else ()
    )
    off = "privacy.enabled=false"
    cells = [
        (f"{REFERENCE}, {name}", "DP", joined(REFERENCE, part, *watch))
        for name, part in skews.items()
    ]
    cells += [
        (f"{REFERENCE}, {name}", "no DP", joined(REFERENCE, part, off, *watch))
        for name, part in skews.items()
    ]
    return cells + [
        (name, "no DP", joined(name, off, *watch)) for name in ("dp-fedavg", "dp-local-adamw")
    ]


ONE, SAM = (REFERENCE,), "dp-fedsam"
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
    """The arms of a preset, for the given methods where it takes any."""
    if name not in PRESETS:
        raise DpfedError(
            f"--preset {name!r} is not known{nearest(name, PRESETS)}; there are: {', '.join(PRESETS)}"
        )
    preset = PRESETS[name]
    if algorithms is not None and preset.methods is None:
        raise DpfedError(f"--preset {name} has its own arms: leave out --algorithms")
    methods = algorithms or {
        name: name for name in preset.methods or () if name in registry.algorithm
    }
    cells = preset.cells(base, methods)
    labels = {(row, column): f"{row} | {column}" if column else row for row, column, _ in cells}
    arms = []
    for row, column, text in cells:
        against = preset.reference or labels.get((REFERENCE, column))
        arms.append(
            make_arm(
                labels[row, column],
                text,
                registry,
                grids,
                row=row,
                column=column,
                reference=against,
            )
        )
    home = _home(arms, [text for _, _, text in cells], base, registry)
    if len({arm.row for arm in arms}) == 1 and preset.reference is None:
        arms = [dataclasses.replace(arm, reference=home) for arm in arms]
    return preset, arms


def _home(
    arms: Sequence[Arm], texts: Sequence[str], base: Config, registry: Registry
) -> str | None:
    """With one method only: the arm that is the configuration as it stands, if the axis holds its value."""
    if len({arm.row for arm in arms}) != 1:
        return None
    name = texts[0].partition(":")[0]
    plain = make_arm(name, name, registry, {})
    tables, start = to_dict(base), tuple(grid[0] for grid in plain.space)
    unchanged = plain.configure(tables, start, registry)
    return next(
        (arm.label for arm in arms if arm.configure(tables, start, registry) == unchanged), None
    )
