"""`dpfed privacy`: compute the epsilon of a planned run, or of a run so far.

Each view has its own epsilon. A view is an observer of training, such as the server.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.cli.options import AsJson, Debug, Overrides, show
from dpfed.cli.privacy_statement import drawn, own_ledger_of, show_own, show_published
from dpfed.errors import DpfedError
from dpfed.privacy.published import show_delta, show_loss, show_setting

if TYPE_CHECKING:
    from dpfed.privacy.accounting.guarantee import Planned
    from dpfed.training.budget.recorded_spending import RecordedSpending

NUMBERS = (
    "records",
    "batch",
    "rounds",
    "local_steps",
    "participation",
    "sigma",
    "delta",
    "algorithm",
    "sampling",
    "target_epsilon",
    "view",
    "clients",
    "max_rounds",
)
# Options for numbers that the output of --statement and --ledgers does not contain. The command
# refuses them together with --statement or --ledgers.
UNSTATED = ("colluding", "tuning_runs", "meaning", "plot", "curve", "asymptotic")
REQUIRED = ("records", "batch", "rounds", "local_steps")
DEFAULTS = {
    "participation": 1.0,
    "delta": 1e-5,
    "algorithm": "dp-fedadamw",
    "sampling": "poisson",
    "view": "server_worst",
}
VIEWS = (
    "server_worst",
    "server_expected",
    "third_party",
    "rdp_server_worst",
    "server_max",
    "server_min",
    "server_median",
)
# Numbers that are printed only if an option asks for them. Each has a text to print before it, and
# a number of decimals.
EXTRAS = {
    "membership_advantage": (
        "largest advantage (true minus false positive rate) "
        "of anyone who guesses whether a record was used: ",
        3,
    ),
    "replace_one": ("if neighbours differ by replacing a record instead: epsilon ", 4),
    "server_worst_with_tuning": (
        "with tuning, when all runs are counted (the server, as above): epsilon ",
        4,
    ),
}
CURVE = [0.5, 1.0, 2.0, 4.0, 8.0]

PlanOrRun = Annotated[
    list[str] | None, typer.Argument(help="configuration, preset, or folder of a run")
]
Records = Annotated[int | None, typer.Option(help="records of a client R")]
Batch = Annotated[float | None, typer.Option(help="expected batch size B")]
Rounds = Annotated[int | None, typer.Option(help="rounds T")]
LocalSteps = Annotated[int | None, typer.Option(help="local steps K")]
Participation = Annotated[
    float | None, typer.Option(help="share of clients in a round L; default 1")
]
Sigma = Annotated[float | None, typer.Option(help="noise multiplier")]
Delta = Annotated[float | None, typer.Option(help="delta; default 1e-5")]
AlgorithmName = Annotated[
    str | None, typer.Option(help="algorithm; some release a batch more than once")
]
SamplingName = Annotated[str | None, typer.Option(help="poisson (default) or fixed_wor")]
TargetEpsilon = Annotated[float | None, typer.Option(help="find sigma for this epsilon")]
ViewName = Annotated[
    str | None, typer.Option(help="view that the target epsilon is for; default server_worst")
]
Clients = Annotated[
    int | None, typer.Option(help="number of clients N, for --asymptotic and --colluding")
]
MaxRounds = Annotated[
    int | None, typer.Option(help="most rounds of a client; default: all, as in uniform cohorts")
]
Colluding = Annotated[
    int, typer.Option(help="clients that collude against another one (third party)")
]
TuningRuns = Annotated[int | None, typer.Option(help="number of runs tried on the same data")]
Meaning = Annotated[
    bool, typer.Option("--meaning", help="consequences of epsilon: advantage, other figures")
]
Public = Annotated[bool, typer.Option("--public", help="only what may be published together")]
Plot = Annotated[Path | None, typer.Option(help="epsilon over rounds as PNG or SVG")]
Curve = Annotated[
    Path | None, typer.Option(help="errors that an attacker must make, as PNG or SVG")
]
StatementPage = Annotated[
    bool, typer.Option("--statement", help="one page to publish, and statement.json in the run")
]
Ledgers = Annotated[
    bool, typer.Option("--ledgers", help="add up the ledgers of several runs or clients' folders")
]
Asymptotic = Annotated[
    bool, typer.Option("--asymptotic", help="the paper's formulas: not a guarantee")
]


def privacy(
    target: PlanOrRun = None,
    overrides: Overrides = None,
    records: Records = None,
    batch: Batch = None,
    rounds: Rounds = None,
    local_steps: LocalSteps = None,
    participation: Participation = None,
    sigma: Sigma = None,
    delta: Delta = None,
    algorithm: AlgorithmName = None,
    sampling: SamplingName = None,
    target_epsilon: TargetEpsilon = None,
    view: ViewName = None,
    clients: Clients = None,
    max_rounds: MaxRounds = None,
    colluding: Colluding = 0,
    tuning_runs: TuningRuns = None,
    meaning: Meaning = False,
    public: Public = False,
    plot: Plot = None,
    curve: Curve = None,
    statement: StatementPage = False,
    ledgers: Ledgers = False,
    asymptotic: Asymptotic = False,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Compute the privacy loss of a plan, or of a run so far.

    Example: dpfed privacy --records 1000 --batch 16 --rounds 100 --local-steps 20 --sigma 1
    """
    numbers = {name: value for name, value in locals().items() if name in NUMBERS}
    unstated = {name: value or None for name, value in locals().items() if name in UNSTATED}
    given = {**numbers, "set": overrides or None}
    if statement or ledgers:
        refuse_given(given, "cannot change what was spent")
        refuse_given(unstated, "is no part of a statement or of a sum of ledgers")
        return show_published(target or [], statement, ledgers, as_json)
    folder = only(target)
    if (own := own_ledger_of(folder)) is not None:
        refuse_given(given, "cannot change what a client has spent")
        return show_own(own, as_json)
    planned, spending, clients = asked_for(folder, overrides or [], numbers, colluding)
    figures = figures_of(planned, spending, public)
    realised = spending.realised if spending else planned
    extras = extras_of(realised, meaning, tuning_runs, asymptotic, clients)
    lines = [*table(planned, spending, figures, public), *extra_lines(extras)]
    lines += drawn(planned, realised, plot, curve)
    show(lines, {**figures, **extras}, as_json)


def only(targets: list[str] | None) -> str | None:
    """Return the only target (a configuration, a preset or a folder), or None without a target.

    Raise DpfedError if several are given.
    """
    if targets and len(targets) > 1:
        raise DpfedError(
            f"{targets[1]} is one target too many: give one, or --ledgers to add several up"
        )
    return targets[0] if targets else None


def asked_for(
    target: str | None, overrides: list[str], numbers: dict[str, Any], colluding: int
) -> tuple[Planned, RecordedSpending | None, int | None]:
    """Return the plan, the recorded spending and the number of clients that the user asks for.

    The spending is the privacy that a run has used up; it is None unless `target` is a run's
    folder. The number of clients is None if unknown.

    numbers    options that describe a plan, by name; None for an option that is not given
    colluding  clients that collude against another one, for the epsilon of a third party who sees
               only the global models
    """
    from dpfed.registry import registry
    from dpfed.training.budget.recorded_spending import is_run, read_recorded_spending

    keys = {"set": overrides or None}
    if target is None:
        refuse_given(keys, "belongs to a configuration")
        return from_flags(numbers, colluding), None, numbers["clients"]
    if is_run(Path(target)):
        refuse_given({**numbers, **keys}, "cannot change what a run has spent")
        spending = read_recorded_spending(Path(target), colluding)
        return spending.planned, spending, spending.clients
    refuse_given(numbers, "is part of the configuration: change it there or with --set")
    if "/" in target and target not in registry().presets and not Path(target).exists():
        raise DpfedError(f"there is no run, client's folder or configuration {target}")
    planned, clients = from_config(target, overrides, colluding)
    return planned, None, clients


def refuse_given(flags: dict[str, Any], why: str) -> None:
    """Raise DpfedError if the user gave one of these options, which have no effect here.

    Without the error, the user would think that the printed epsilon depends on the option.

    flags  value of each option by name; None for an option that is not given
    why    end of the message, after the option's name
    """
    for name, value in flags.items():
        if value is not None:
            raise DpfedError(f"--{name.replace('_', '-')} {why}")


def from_flags(numbers: dict[str, Any], colluding: int) -> Planned:
    """Return the plan that the command-line options describe, such as --records and --sigma.

    The options are checked like the keys of a configuration.
    """
    from dpfed.errors import DpfedError
    from dpfed.privacy.accounting.planner import PlanNumbers
    from dpfed.registry import releases_of

    chosen = {name: value for name, value in numbers.items() if value is not None}
    given = {**numbers, **DEFAULTS, **chosen}
    missing = [f"--{name.replace('_', '-')}" for name in REQUIRED if name not in chosen]
    if missing:
        raise DpfedError(f"give a configuration, a run, or {', '.join(missing)}")
    releases = releases_of(given.pop("algorithm"))
    return PlanNumbers(
        **given, batches=releases.batches, releases=releases.releases, colluding=colluding
    ).planned()


def from_config(target: str, overrides: list[str], colluding: int) -> tuple[Planned, int]:
    from dpfed.config import load
    from dpfed.registry import registry
    from dpfed.training.budget.prior_spending import prior_spending_of, refuse_target
    from dpfed.training.budget.spending import budget_of
    from dpfed.training.job.plan import plan_of

    config = load(target, overrides, registry())
    past = prior_spending_of(config)
    refuse_target(config, past)
    plan, schedule = plan_of(config)
    if not plan.private:
        raise DpfedError(
            "this configuration has no privacy: privacy.enabled is false or sigma is 0"
        )
    spending = budget_of(
        plan, schedule, config.privacy.delta, config.privacy.budget, colluding, past
    )
    return spending.planned, schedule.clients


def figures_of(planned: Planned, spending: RecordedSpending | None, public: bool) -> dict[str, Any]:
    """Return the numbers to show, by name: epsilons, noise multiplier, delta and guarantee.

    spending  privacy that a run has used up; None if there is only a plan
    public    True to leave out the epsilons of single clients
    """
    import numpy as np

    noise = [kind.noise_multiplier for kind in planned.kinds]
    out: dict[str, Any] = {
        "server_worst": planned.server_worst,
        "server_expected": planned.server_expected,
        "third_party": planned.third_party,
        "rdp_server_worst": planned.rdp_server_worst,
        "sigma": noise[0] if min(noise) == max(noise) else [min(noise), max(noise)],
        "delta": planned.delta,
        "max_rounds_per_client": planned.cap,
        "guarantee": planned.assumptions(),
        "warnings": planned.warnings,
    }
    if spending is not None:
        out["server_worst"] = spending.server_worst
        out["third_party"] = spending.third_party
        out["rdp_server_worst"] = spending.realised.rdp_server_worst
    if spending is not None and not public:
        out["server_max"] = spending.server_max
        out["server_min"] = float(spending.epsilons.min())
        out["server_median"] = float(np.median(spending.epsilons))
        out["ledger_rows"] = spending.rows
    return out


def extras_of(
    planned: Planned,
    meaning: bool,
    tuning_runs: int | None,
    asymptotic: bool,
    clients: int | None,
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if meaning:
        out |= planned.meaning()
        out["delta_curve"] = planned.curve(CURVE)
    if tuning_runs is not None:
        out["server_worst_with_tuning"] = planned.tuned(tuning_runs)
    if asymptotic:
        from dpfed.privacy.accounting.guarantee import asymptotic as paper_formulas

        out["asymptotic_not_a_guarantee"] = paper_formulas(planned, clients)
    return out


def table(
    planned: Planned, spending: RecordedSpending | None, figures: dict[str, Any], public: bool
) -> list[str]:
    """Return lines that show the epsilon of each observer, the guarantee and its conditions.

    figures  epsilons and other numbers by name, as `figures_of` returns them
    public   True to leave out the epsilons of single clients
    """
    from dpfed.privacy.accounting.guarantee import NOT_COVERED, PUBLIC

    shown = {key: show_loss(figures[key], 4) for key in VIEWS if key in figures}
    rows = [(f"the server, of {planned.worst_client}", shown["server_worst"])]
    if "server_max" in shown:
        median = f"{shown['server_median']:>8} / {shown['server_min']}"
        rows += [
            ("the server, of the client that spent most so far", shown["server_max"]),
            ("the server, of the median client / of the one that spent least", median),
        ]
    else:
        expected = "the server, of a client in its expected number of rounds"
        rows.append((expected, shown["server_expected"]))
    third_party = "a third party who sees all global models but not who took part"
    rows.append((third_party, shown["third_party"]))
    return [
        f"{'who sees what':75}epsilon",
        *(f"  {view:73}{loss:>8}" for view, loss in rows),
        "",
        f"guarantee: {planned.assumptions()}; {planned.unit} level.",
        f"check:     Renyi accountant for {planned.worst_client}: "
        f"{shown['rdp_server_worst']} (must not be smaller).",
        f"assumed public: {PUBLIC}.",
        f"not covered: {NOT_COVERED}.",
        *(f"warning: {sentence}." for sentence in planned.warnings),
        *notes(planned, spending, public),
    ]


def notes(planned: Planned, spending: RecordedSpending | None, public: bool) -> list[str]:
    """Return notes for the user: sentences on when the printed epsilons are valid.

    public  True if the output has no epsilon of a single client
    """
    lines = []
    void = spending.void if spending is not None else planned.third_party_void
    if void:
        lines.append(f"third party: {void}.")
    elif not public:
        lines.append(
            "the third-party figure holds only while the seed, the cohorts "
            "and every figure of a single client stay secret: "
            "publish it with --public, never beside the others."
        )
    if spending is not None and spending.seeded:
        lines.append("noise was seeded: this run is a simulation, not for release.")
    return lines


def extra_lines(extras: dict[str, Any]) -> list[str]:
    lines = [
        sentence + show_loss(extras[key], places)
        for key, (sentence, places) in EXTRAS.items()
        if key in extras
    ]
    if "delta_curve" in extras:
        pairs = [f"{show_setting(e)}: {show_delta(d, 3)}" for e, d in extras["delta_curve"]]
        lines.append(f"delta at other epsilons: {', '.join(pairs)}")
    for name, value in extras.get("asymptotic_not_a_guarantee", {}).items():
        lines.append(
            f"{name.replace('_', ' ')}: {show_loss(value, 4)} "
            "(asymptotic formula with constant 1, NOT A GUARANTEE)"
        )
    return lines
