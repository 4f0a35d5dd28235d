"""Parts of `dpfed privacy`: a run's privacy statement, plots, and sums of several ledgers.

A ledger is the file in which a run or a client records each use of its privacy budget.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfed.cli.options import show
from dpfed.errors import DpfedError, counted
from dpfed.privacy.published import show_delta, show_loss

if TYPE_CHECKING:
    from dpfed.privacy.accounting.guarantee import Planned
    from dpfed.training.budget.recorded_spending import OwnSpending
    from dpfed.training.budget.site_spending import LedgerSpending, SiteSpending


def show_published(targets: list[str], statement: bool, ledgers: bool, as_json: bool) -> None:
    """Print a run's privacy statement (--statement), or the sum of several ledgers (--ledgers)."""
    if statement and ledgers:
        raise DpfedError("give one of --statement and --ledgers, not both")
    if not targets:
        option = "--statement" if statement else "--ledgers"
        raise DpfedError(f"{option} needs the folder of a run")
    if ledgers:
        return show_ledgers(list(map(Path, targets)), as_json)
    if len(targets) > 1:
        raise DpfedError(f"{targets[1]} is one run too many: a statement describes one run")
    show_statement(Path(targets[0]), as_json)


def show_statement(folder: Path, as_json: bool) -> None:
    """Print a run's privacy statement as one page, and write it as JSON to the run's folder.

    Also write a draft for the public registry of DP deployments, if the run has privacy.
    """
    from dpfed.report.statement.build import statement_of_run, write_json, write_statement
    from dpfed.report.statement.registry import registry_entry
    from dpfed.report.statement.text import page
    from dpfed.training.run_folder.files import REGISTRY_ENTRY, STATEMENT

    statement = statement_of_run(folder)
    print(page(statement), flush=True)
    write_statement(statement, folder / STATEMENT)
    lines = ["", f"written to {folder / STATEMENT}"]
    if statement.guarantee is not None:
        write_json(registry_entry(statement), folder / REGISTRY_ENTRY)
        lines.append(f"draft for the registry of DP deployments: {folder / REGISTRY_ENTRY}")
    show(lines, statement.as_dict(), as_json)


def show_ledgers(folders: list[Path], as_json: bool) -> None:
    """Print the epsilon of one record over all runs that the ledgers in these folders record."""
    from dpfed.training.budget.site_spending import read_site_spending

    spending = read_site_spending(folders)
    show(ledger_lines(spending), ledger_figures(spending), as_json)


def ledger_lines(spending: SiteSpending) -> list[str]:
    """Return lines to print about ledgers: warnings, and epsilon of each ledger and of all.

    spending  the spending of one record over all ledgers
    """
    from dpfed.training.budget.site_spending import NOT_STATED

    lines = [warning for ledger in spending.ledgers for warning in warnings_of(ledger)]
    lines.append(f"{'ledger':60}{'unit':>14}{'delta':>10}{'epsilon':>10}")
    for ledger in spending.ledgers:
        lines.append(
            f"{ledger.path!s:60}{ledger.unit:>14}{show_delta(ledger.delta):>10}"
            f"{show_loss(ledger.epsilon, 4):>10}"
        )
    unit = spending.unit if spending.unit != NOT_STATED else "protected unit"
    adjacency = "" if spending.adjacency is None else f" ({spending.adjacency})"
    return [
        *lines,
        f"one {unit}{adjacency} has spent at most epsilon {show_loss(spending.epsilon, 4)} at "
        f"delta {show_delta(spending.delta)}, over {counted(len(spending.ledgers), 'ledger')}",
    ]


def warnings_of(ledger: LedgerSpending) -> list[str]:
    out = []
    if ledger.seeded:
        out.append(
            f"{ledger.path}: NOT FOR RELEASE, some of its noise was seeded and protected nothing"
        )
    if ledger.uncounted:
        out.append(
            f"{ledger.path}: NOT ALL COUNTED, it started from weights whose spending is unknown"
        )
    return out


def ledger_figures(spending: SiteSpending) -> dict[str, Any]:
    return {
        "epsilon": spending.epsilon,
        "delta": spending.delta,
        "unit": spending.unit,
        "adjacency": spending.adjacency,
        "ledgers": [
            {
                "path": str(ledger.path),
                "owner": ledger.owner,
                "unit": ledger.unit,
                "delta": ledger.delta,
                "epsilon": ledger.epsilon,
                "seeded": ledger.seeded,
                "uncounted": ledger.uncounted,
            }
            for ledger in spending.ledgers
        ],
    }


def own_ledger_of(target: str | None) -> OwnSpending | None:
    """Return the privacy that a real client has spent, from its own ledger.

    target  the client's state folder or ledger; the result is None for anything else
    """
    from dpfed.training.budget.recorded_spending import own_ledger, own_spending

    path = None if target is None else own_ledger(Path(target))
    return None if path is None else own_spending(path)


def show_own(account: OwnSpending, as_json: bool) -> None:
    """Print the epsilon of a real client over all its runs, as computed from its own ledger."""
    lines = [
        f"{account.client} has spent epsilon {show_loss(account.epsilon, 4)} "
        f"at delta {show_delta(account.delta)}, "
        f"over {account.runs} run(s) and {account.rows - account.void} charges"
    ]
    if account.void:
        lines.append(
            f"{account.void} charges of test mode are void: "
            "their noise was repeatable, and protected nothing"
        )
    show(lines, asdict(account), as_json)


def drawn(planned: Planned, realised: Planned, plot: Path | None, curve: Path | None) -> list[str]:
    """Write plots of a run's privacy to files, and return lines to print about them.

    planned   the plan, whose epsilon over rounds is drawn
    realised  the plan with all rounds that the run was charged for, whose trade-off curve is drawn
    plot      file for the epsilon over rounds; None for no such plot
    curve     file for the trade-off curve; None for no such plot
    """
    lines = []
    if plot is not None:
        from dpfed.report.figures.plots import epsilon_over_rounds

        epsilon_over_rounds(planned, plot)
        lines.append(f"plot written to {plot}")
    if curve is not None:
        from dpfed.report.figures.plots import tradeoff_curve
        from dpfed.report.statement.build import attack_of
        from dpfed.report.statement.text import attack_sentences

        tradeoff_curve(realised, curve)
        lines += [f"{attack_sentences(attack_of(realised))}.", f"curve written to {curve}"]
    return lines
