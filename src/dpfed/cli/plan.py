"""`dpfed plan`: recommend batch, noise and cohorts for a federation and a target epsilon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfed.cli.options import AsJson, Debug, show

Records = Annotated[
    str,
    typer.Option(help="records of each client: one number, or one for each client: 400,900,1200"),
]
Epsilon = Annotated[float, typer.Option(help="target epsilon, for the server's view")]
Clients = Annotated[
    int | None, typer.Option(help="number of clients N, if --records is one number")
]
Cohort = Annotated[
    int | None,
    typer.Option(help="clients in each round S; default: all of up to 20 clients, else a tenth"),
]
Rounds = Annotated[int, typer.Option(help="rounds T")]
LocalSteps = Annotated[int, typer.Option(help="local steps K")]
Delta = Annotated[float, typer.Option(help="delta")]
MaxRecords = Annotated[
    int, typer.Option(help="most records of all clients in a local step that you can compute")
]
AlgorithmName = Annotated[str, typer.Option(help="algorithm; some release a batch more than once")]
TryRounds = Annotated[str | None, typer.Option(help="compare other numbers of rounds: 50,200")]
TryLocalSteps = Annotated[
    str | None, typer.Option(help="compare other numbers of local steps: 10,40")
]
Plot = Annotated[Path | None, typer.Option(help="noise over batch as PNG or SVG")]


def plan(
    records: Records,
    epsilon: Epsilon,
    clients: Clients = None,
    cohort: Cohort = None,
    rounds: Rounds = 100,
    local_steps: LocalSteps = 20,
    delta: Delta = 1e-5,
    max_records: MaxRecords = 2048,
    algorithm: AlgorithmName = "dp-fedadamw",
    try_rounds: TryRounds = None,
    try_local_steps: TryLocalSteps = None,
    plot: Plot = None,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Compare privacy plans for a federation and recommend one.

    Example: dpfed plan --clients 50 --records 1000 --epsilon 4
    """
    from dpfed.privacy.planning.federation import federation_of, plan_federation
    from dpfed.registry import releases_of

    releases = releases_of(algorithm)
    federation = federation_of(
        whole_numbers(records, "--records"),
        clients,
        cohort,
        rounds=rounds,
        local_steps=local_steps,
        epsilon=epsilon,
        delta=delta,
        max_records=max_records,
        batches=releases.batches,
        releases=releases.releases,
        algorithm=algorithm,
    )
    found = plan_federation(
        federation,
        whole_numbers(try_rounds, "--try-rounds"),
        whole_numbers(try_local_steps, "--try-local-steps"),
    )
    lines = str(found).splitlines()
    if plot is not None:
        from dpfed.report.figures.plan_plot import noise_over_batch

        noise_over_batch(found, plot)
        lines.append(f"plot written to {plot}")
    show(lines, found.as_json(), as_json)


def whole_numbers(text: str | None, option: str) -> list[int]:
    """Return the whole numbers of an option's value such as "400,900".

    Raise DpfedError if the value is another text.

    option  name of the option, for the error message
    """
    from dpfed.errors import DpfedError

    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise DpfedError(
            f"{option} {text} must be whole numbers, separated by commas: 400,900"
        ) from None
