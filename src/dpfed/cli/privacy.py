"""`dpfed privacy`: what a plan will spend, or what a run has spent, for both observers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.privacy.published import show_delta, show_loss, show_setting

if TYPE_CHECKING:
    from dpfed.privacy.accounting.guarantee import Planned
    from dpfed.training.budget.recorded_spending import OwnSpending, RecordedSpending

NUMBERS = [
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
]


def privacy(
    target: Annotated[
        str | None, typer.Argument(help="configuration, preset, or folder of a run")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a key")
    ] = None,
    records: Annotated[int | None, typer.Option(help="records of a client R")] = None,
    batch: Annotated[float | None, typer.Option(help="expected batch size B")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds T")] = None,
    local_steps: Annotated[int | None, typer.Option(help="local steps K")] = None,
    participation: Annotated[
        float | None, typer.Option(help="share of clients in a round L; default 1")
    ] = None,
    sigma: Annotated[float | None, typer.Option(help="noise multiplier")] = None,
    delta: Annotated[float | None, typer.Option(help="delta; default 1e-5")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="algorithm; some release a batch more than once")
    ] = None,
    sampling: Annotated[str | None, typer.Option(help="poisson (default) or fixed_wor")] = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="find sigma for this epsilon")
    ] = None,
    view: Annotated[
        str | None, typer.Option(help="whose epsilon the target is; default server_worst")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="number of clients N, for --asymptotic and --colluding")
    ] = None,
    colluding: Annotated[
        int, typer.Option(help="clients that collude against another one (third party)")
    ] = 0,
    tuning_runs: Annotated[
        int | None, typer.Option(help="how many runs on the same data were tried")
    ] = None,
    meaning: Annotated[
        bool, typer.Option("--meaning", help="what the number allows: advantage, other figures")
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="only what may be published together")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="epsilon over rounds as PNG or SVG")] = None,
    asymptotic: Annotated[
        bool, typer.Option("--asymptotic", help="the paper's formulas: not a guarantee")
    ] = False,
    debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line of stdout")
    ] = False,
) -> None:
    """What a plan spends, or what a run has spent.

    Example: dpfed privacy --records 1000 --batch 16 --rounds 100 --local-steps 20 --participation 0.1 --sigma 1
    """
    numbers = {name: value for name, value in locals().items() if name in NUMBERS}
    from dpfed.training.budget.recorded_spending import own_ledger, own_spending

    if target is not None and (ledger := own_ledger(Path(target))) is not None:
        refuse_given({**numbers, "set": overrides or None}, "cannot change what a client has spent")
        return show_own(own_spending(ledger), as_json)
    planned, accounts, clients = asked_for(target, overrides or [], numbers, colluding)
    figures = figures_of(planned, accounts, public)
    extras = extras_of(
        accounts.realised if accounts else planned, meaning, tuning_runs, asymptotic, clients
    )
    for line in table(planned, accounts, figures, extras, public):
        print(line)
    if plot is not None:
        from dpfed.studies.plots import epsilon_over_rounds

        epsilon_over_rounds(planned, plot)
        print(f"plot written to {plot}")
    if as_json:
        print(json.dumps({**figures, **extras}, allow_nan=False))


def show_own(account: OwnSpending, as_json: bool) -> None:
    """What a real client has spent, by its own ledger."""
    print(
        f"{account.client} has spent epsilon {show_loss(account.epsilon, 4)} at delta {show_delta(account.delta)}, "
        f"over {account.runs} run(s) and {account.rows - account.void} charges"
    )
    if account.void:
        print(
            f"{account.void} charges of test mode are void: their noise was repeatable, and protected nothing"
        )
    if as_json:
        from dataclasses import asdict

        print(json.dumps(asdict(account), allow_nan=False))


def asked_for(
    target: str | None, overrides: list[str], numbers: dict[str, Any], colluding: int
) -> tuple[Planned, RecordedSpending | None, int | None]:
    """The plan in question, the accounts where it is a run, and the number of clients where it is known."""
    from dpfed.errors import DpfedError
    from dpfed.registry import registry
    from dpfed.training.budget.recorded_spending import is_run, read_recorded_spending

    keys = {"set": overrides or None}
    if target is None:
        refuse_given(keys, "belongs to a configuration")
        return from_flags(numbers, colluding), None, numbers["clients"]
    if is_run(Path(target)):
        refuse_given({**numbers, **keys}, "cannot change what a run has spent")
        accounts = read_recorded_spending(Path(target), colluding)
        return accounts.planned, accounts, accounts.clients
    refuse_given(numbers, "is part of the configuration: change it there or with --set")
    if "/" in target and target not in registry().presets and not Path(target).exists():
        raise DpfedError(f"there is no run, client's folder or configuration {target}")
    planned, clients = from_config(target, overrides, colluding)
    return planned, None, clients


def refuse_given(flags: dict[str, Any], why: str) -> None:
    """A flag that would have no effect is refused, so that nobody reads a figure as an answer to another question."""
    from dpfed.errors import DpfedError

    for name, value in flags.items():
        if value is not None:
            raise DpfedError(f"--{name.replace('_', '-')} {why}")


def from_flags(numbers: dict[str, Any], colluding: int) -> Planned:
    """A plan from numbers alone, checked by the same rules as a configuration."""
    from dpfed.algorithms import REGISTRY
    from dpfed.config import nearest
    from dpfed.errors import DpfedError
    from dpfed.privacy.accounting.planner import PlanNumbers

    usual = {
        "participation": 1.0,
        "delta": 1e-5,
        "algorithm": "dp-fedadamw",
        "sampling": "poisson",
        "view": "server_worst",
    }
    given = {**numbers, **{key: value for key, value in usual.items() if numbers[key] is None}}
    needed = ("records", "batch", "rounds", "local_steps")
    missing = [f"--{name.replace('_', '-')}" for name in needed if given[name] is None]
    if missing:
        raise DpfedError(f"give a configuration, a run, or {', '.join(missing)}")
    algorithm = given.pop("algorithm")
    if algorithm not in REGISTRY:
        raise DpfedError(f"--algorithm {algorithm} is not known{nearest(algorithm, REGISTRY)}")
    releases = REGISTRY[algorithm]().releases  # type: ignore[call-arg]
    return PlanNumbers(
        **given, batches=releases.batches, releases=releases.releases, colluding=colluding
    ).planned()


def from_config(target: str, overrides: list[str], colluding: int) -> tuple[Planned, int]:
    from dpfed.config import load
    from dpfed.errors import DpfedError
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


VIEWS = (
    "server_worst",
    "server_expected",
    "third_party",
    "rdp_server_worst",
    "server_max",
    "server_min",
    "server_median",
)


def figures_of(planned: Planned, accounts: RecordedSpending | None, public: bool) -> dict[str, Any]:
    noise = [kind.noise_multiplier for kind in planned.kinds]
    out: dict[str, Any] = {
        "server_worst": accounts.server_worst if accounts else planned.server_worst,
        "server_expected": planned.server_expected,
        "third_party": accounts.third_party if accounts else planned.third_party,
        "rdp_server_worst": (accounts.realised if accounts else planned).rdp_server_worst,
        "sigma": noise[0] if min(noise) == max(noise) else [min(noise), max(noise)],
        "delta": planned.delta,
        "guarantee": planned.assumptions(),
        "warnings": planned.warnings,
    }
    if accounts is not None and not public:
        import numpy as np

        out["server_max"] = accounts.server_max
        out["server_min"] = float(accounts.epsilons.min())
        out["server_median"] = float(np.median(accounts.epsilons))
        out["ledger_rows"] = accounts.rows
    return out


def extras_of(
    planned: Planned, meaning: bool, tuning_runs: int | None, paper: bool, clients: int | None
) -> dict[str, Any]:
    from dpfed.privacy.accounting.guarantee import asymptotic

    out: dict[str, Any] = {}
    if meaning:
        out |= planned.meaning()
        out["delta_curve"] = planned.curve([0.5, 1.0, 2.0, 4.0, 8.0])
    if tuning_runs is not None:
        out["server_worst_with_tuning"] = planned.tuned(tuning_runs)
    if paper:
        out["asymptotic_not_a_guarantee"] = asymptotic(planned, clients)
    return out


def table(
    planned: Planned,
    accounts: RecordedSpending | None,
    figures: dict[str, Any],
    extras: dict[str, Any],
    public: bool,
) -> list[str]:
    """The statement in words."""
    from dpfed.privacy.accounting.guarantee import NOT_COVERED, PUBLIC

    unit = planned.unit
    shown = {view: show_loss(figures[view], 4) for view in VIEWS if view in figures}
    lines = [
        "who sees what                                                              epsilon",
        f"  the server, of a client in every round                                   {shown['server_worst']:>8}",
    ]
    if "server_max" in figures:
        both = f"{shown['server_median']:>8} / {shown['server_min']}"
        lines += [
            f"  the server, of the client that spent most so far                         {shown['server_max']:>8}",
            f"  the server, of the median client / of the one that spent least           {both}",
        ]
    else:
        lines.append(
            f"  the server, of a client in its expected number of rounds                 {shown['server_expected']:>8}"
        )
    lines.append(
        f"  a third party who sees all global models but not who took part           {shown['third_party']:>8}"
    )
    lines += [
        "",
        f"guarantee: {planned.assumptions()}; {unit} level.",
        f"check:     Renyi accountant for a client in every round: {shown['rdp_server_worst']} (must not be smaller).",
        f"assumed public: {PUBLIC}.",
        f"not covered: {NOT_COVERED}.",
    ]
    lines += [f"warning: {sentence}." for sentence in planned.warnings]
    return lines + notes(accounts, public) + told(extras)


def notes(accounts: RecordedSpending | None, public: bool) -> list[str]:
    lines = []
    if accounts is not None and accounts.void:
        lines.append(f"third party: {accounts.void}.")
    elif not public:
        lines.append(
            "the third-party figure holds only while the seed, the cohorts and every figure of a single client stay secret: "
            "publish it with --public, never beside the others."
        )
    if accounts is not None and accounts.seeded:
        lines.append("noise was seeded: this run is a simulation, not for release.")
    return lines


def told(extras: dict[str, Any]) -> list[str]:
    lines = []
    if "membership_advantage" in extras:
        lines.append(
            "largest advantage (true minus false positive rate) of anyone who guesses whether a record was used: "
            f"{show_loss(extras['membership_advantage'])}"
        )
    if "replace_one" in extras:
        lines.append(
            f"if neighbours differ by replacing a record instead: epsilon {show_loss(extras['replace_one'], 4)}"
        )
    if "delta_curve" in extras:
        pairs = ", ".join(
            f"{show_setting(e)}: {show_delta(d, 3)}" for e, d in extras["delta_curve"]
        )
        lines.append(f"delta at other epsilons: {pairs}")
    if "server_worst_with_tuning" in extras:
        lines.append(
            "with tuning, when all runs are counted (client in every round): "
            f"epsilon {show_loss(extras['server_worst_with_tuning'], 4)}"
        )
    for name, value in extras.get("asymptotic_not_a_guarantee", {}).items():
        lines.append(
            f"{name.replace('_', ' ')}: {show_loss(value, 4)} (asymptotic formula with constant 1, NOT A GUARANTEE)"
        )
    return lines
