"""`dpfed audit`: try to disprove a claimed epsilon with canaries.

A canary is a record for which a fair coin decides if it is in the data.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.cli.options import AsJson, Debug, Overrides, Target, settings_of, show
from dpfed.privacy.published import (
    show_delta,
    show_loss,
    show_lower_bound,
    show_score,
    show_setting,
)

if TYPE_CHECKING:
    from dpfed.config import Config
    from dpfed.training.auditing.audit import Audit

DISPROVED = 4
NAMES = {
    "oracle": "released gradients",
    "server": "the clients' messages",
    "model": "released gradients of the own model",
}
REPORT_KEYS = (
    "seen",
    "assumes",
    "lower",
    "claimed",
    "canaries",
    "clients",
    "runs",
    "steps",
    "disproved",
)
LAW_KEYS = ("what", "p_value", "broken", "tests")


def audit(
    config: Target = None,
    overrides: Overrides = None,
    canaries: Annotated[
        int, typer.Option(help="records that are in the data or not, by a coin each")
    ] = 4000,
    confidence: Annotated[
        float, typer.Option(help="probability with which all lower bounds hold together")
    ] = 0.95,
    own_model: Annotated[
        bool, typer.Option("--own-model", help="audit records with their own gradients too")
    ] = False,
    server: Annotated[
        bool,
        typer.Option("--server", help="search thetas at which one record moves others instead"),
    ] = False,
    seconds: Annotated[float, typer.Option(help="time of the search of --server")] = 60.0,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Try to disprove the claimed epsilon: compare it with lower bounds from canaries.

    Exit code 4 if it is disproved. Example: dpfed audit --canaries 2000 --confidence 0.99
    """
    settings = settings_of(config, overrides)
    import torch

    from dpfed.privacy.auditing.report import disproofs
    from dpfed.training.auditing.audit import audit as run_audit
    from dpfed.training.job.job import prepare

    # Use one thread: with many small tensors, more threads are slower.
    torch.set_num_threads(1)
    if server:
        return attack(settings, seconds, as_json)
    found = run_audit(prepare(settings), canaries, confidence, own_model)
    reasons = list(disproofs(found.reports, found.laws))
    show(table(found, confidence, reasons), plain(found, confidence, reasons), as_json)
    if reasons:
        raise typer.Exit(DISPROVED)


def table(found: Audit, confidence: float, reasons: list[str]) -> list[str]:
    """Return the audit's results as lines of a table, with a conclusion at the end.

    It has the lower bounds on epsilon beside the claim, and the tests of batches and noise.

    confidence  probability that no lower bound exceeds the true epsilon
    reasons     sentences that say which results disprove the claim; empty if none does
    """
    first = found.reports[0]
    lines = [
        f"epsilon at delta {show_delta(first.delta)}, worst client; "
        f"all lower bounds hold together with confidence {show_setting(confidence)}",
        f"{'seen':37}{'assumed':21}{'at least':>9}{'claimed':>9}{'steps':>7}{'canaries':>10}"
        f"{'clients':>9}{'runs':>6}",
    ]
    for r in found.reports:
        bounds = f"{show_lower_bound(r.lower):>9}{show_loss(r.claimed):>9}"
        counts = f"{r.steps:7}{r.canaries:10}{r.clients:9}{r.runs:6}"
        lines.append(f"{NAMES[r.seen]:37}{r.assumes:21}{bounds}{counts}  {r.verdict}")
    for law in found.laws:
        name = f"{law.what} of the oracle"
        lines.append(f"{name:37}{law.verdict} (p = {law.p_value:.2g})")
    if not reasons:
        lines.append(
            "nothing speaks against the claim; "
            "a lower bound far below it is usual and proves nothing more"
        )
        return lines
    lines.append("DISPROVED: the privacy claim of this build does not hold")
    return lines + [f"  {reason}" for reason in reasons]


def plain(found: Audit, confidence: float, reasons: list[str]) -> dict[str, Any]:
    """Return the audit's results as plain values for JSON.

    confidence  probability that no lower bound exceeds the true epsilon
    reasons     sentences that say which results disprove the claim; empty if none does
    """
    return {
        "disproved": bool(reasons),
        "reasons": reasons,
        "lower": max(r.lower for r in found.reports),
        "claimed": max(r.claimed for r in found.reports),
        "delta": found.reports[0].delta,
        "confidence": confidence,
        "audits": [{key: getattr(r, key) for key in REPORT_KEYS} for r in found.reports],
        "laws": [{key: getattr(law, key) for key in LAW_KEYS} for law in found.laws],
    }


def attack(settings: Config, seconds: float, as_json: bool) -> None:
    """Attack as a malicious server, and print how much deleting a unit changes a clipped sum.

    A unit is one record, or all records of one person. The attack searches for model weights at
    which the change is larger than the clip norm C.

    seconds  duration of the search
    """
    from dpfed.training.auditing.server_attack import attack_server
    from dpfed.training.job.job import prepare

    found = attack_server(prepare(settings), seconds)
    moved = show_score(found.moved, 6)
    lines = [
        f'isolation = "{found.isolation}": deleting one of {found.units} units moved the clipped '
        f"sum by at most {moved} C, over {found.thetas} thetas",
    ]
    if found.broken:
        lines.append("DISPROVED: with exact isolation the sum moves by at most C")
    elif found.isolation == "fast" and found.moved > 1:
        lines.append(
            "more than C: a server that chooses theta learns more than epsilon states; "
            'simulations do not need it, others set privacy.isolation = "exact"'
        )
    show(lines, {**asdict(found), "disproved": found.broken}, as_json)
    if found.broken:
        raise typer.Exit(DISPROVED)
