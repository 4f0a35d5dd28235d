"""`dpfed audit`: try to disprove the claimed epsilon with canaries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.privacy.published import show_delta, show_loss, show_lower_bound, show_setting

if TYPE_CHECKING:
    from dpfed.training.audit import Audit

DISPROVED = 4


def audit(
    config: Annotated[
        str | None, typer.Argument(help="TOML file or preset; without it: the digits demonstration")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a key")
    ] = None,
    canaries: Annotated[
        int, typer.Option(help="canaries in one run, and independent draws of one canary")
    ] = 1000,
    confidence: Annotated[
        float, typer.Option(help="probability with which each lower bound holds")
    ] = 0.95,
    debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line of stdout")
    ] = False,
) -> None:
    """Try to disprove the claimed epsilon: lower bounds from canaries beside the claim. Exit code 4 if it is disproved.

    Example: dpfed audit --canaries 2000 --confidence 0.99
    """
    from dpfed.config import load
    from dpfed.registry import DEFAULT, registry

    # Canaries stand in for the records: nothing is to be computed for all of them first.
    settings = load(config or DEFAULT, [*(overrides or []), "run.features=false"], registry())
    import torch

    from dpfed.privacy.audit import disproofs
    from dpfed.training.audit import audit as run_audit
    from dpfed.training.job.job import prepare

    torch.set_num_threads(1)  # many small tensors: further threads only wait for each other
    found = run_audit(prepare(settings), canaries, confidence)
    against = list(disproofs(found.reports, found.laws))
    for line in table(found, against):
        print(line)
    if as_json:
        print(json.dumps(plain(found, against), allow_nan=False))
    if against:
        raise typer.Exit(DISPROVED)


NAMES = {
    ("one run", "oracle"): "one run, every released gradient",
    ("many draws", "oracle"): "many draws, every released gradient",
    ("one run", "server"): "one run, the clients' messages",
}


def table(found: Audit, against: list[str]) -> list[str]:
    first = found.reports[0]
    lines = [
        f"epsilon at delta {show_delta(first.delta)}, worst client; "
        f"lower bounds hold with confidence {show_setting(first.confidence)} each",
        f"{'audit':38}{'at least':>9}{'claimed':>9}{'steps':>7}{'canaries':>10}{'clients':>9}",
    ]
    for r in found.reports:
        name = NAMES[r.audit, r.seen]
        clients = "1" if r.audit == "many draws" else str(r.clients)
        bounds = f"{show_lower_bound(r.lower):>9}{show_loss(r.claimed):>9}"
        lines.append(f"{name:38}{bounds}{r.steps:7}{r.canaries:10}{clients:>9}  {r.verdict}")
    lines += [
        f"{law.what + ' of the oracle':38}{law.verdict} (p = {law.p_value:.2g})"
        for law in found.laws
    ]
    if against:
        return [
            *lines,
            "DISPROVED: the privacy claim of this build does not hold",
            *(f"  {s}" for s in against),
        ]
    return [
        *lines,
        "nothing speaks against the claim; a lower bound far below it is usual and proves nothing more",
    ]


def plain(found: Audit, against: list[str]) -> dict[str, Any]:
    return {
        "disproved": bool(against),
        "reasons": against,
        "lower": max(r.lower for r in found.reports),
        "claimed": max(r.claimed for r in found.reports),
        "delta": found.reports[0].delta,
        "confidence": found.reports[0].confidence,
        "audits": [
            {
                "audit": r.audit,
                "seen": r.seen,
                "lower": r.lower,
                "claimed": r.claimed,
                "canaries": r.canaries,
                "clients": r.clients,
                "steps": r.steps,
                "disproved": r.disproved,
            }
            for r in found.reports
        ],
        "laws": [
            {"what": law.what, "p_value": law.p_value, "broken": law.broken, "tests": law.tests}
            for law in found.laws
        ],
    }
