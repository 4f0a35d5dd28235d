"""The rounds of a run as a data frame: scores, epsilons for two observers, and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfed.privacy.accounting.guarantee import Planned
from dpfed.training.budget.recorded_spending import RecordedSpending, read_recorded_spending
from dpfed.training.budget.release import NO_PRIVACY
from dpfed.training.evaluation import perplexity
from dpfed.training.run_folder.files import METRICS, read_rows

if TYPE_CHECKING:
    import pandas

# Largest number of rounds for which planned epsilons are computed, because each computation takes
# time. A longer run has these epsilons only for evenly spaced rounds.
POINTS = 25


def history_of(folder: Path, result: Mapping[str, Any], task: str) -> pandas.DataFrame:
    """Return a data frame with one row per round; round 0 is the model before training.

    task  the task of the run; with "causal" (a language model) there is a column `perplexity`

    `epsilon_server_worst` is the planned epsilon after the round against the server, for the client
    with the most rounds. `epsilon_third_party` is the planned epsilon against an observer who sees
    only the global models. `epsilon_server_max` is the largest epsilon that a client has spent.
    """
    import pandas

    rows = [dict(row) for row in read_rows(folder / METRICS)]
    epsilons: dict[int, tuple[float, float]] = {}
    if result.get("release") != NO_PRIVACY:
        epsilons = _epsilons(read_recorded_spending(folder), [int(row["round"]) for row in rows])
    for row in rows:
        row.pop("release", None)
        if task == "causal":
            row["perplexity"] = perplexity(row.get("loss"))
        server, third_party = epsilons.get(row["round"], (None, None))
        row |= {"epsilon_server_worst": server, "epsilon_third_party": third_party}
        if "score" in row and result["metric"]["name"] != "given":
            row[result["metric"]["name"]] = row.pop("score")
    main = {"regress": ["r2", "loss"], "causal": ["accuracy", "loss", "perplexity"]}
    first = ["round", *main.get(task, ["accuracy", "loss"])]
    last = ["epsilon_server_worst", "epsilon_server_max", "epsilon_third_party", "seconds"]
    if task == "regress":
        rows = [{key: value for key, value in row.items() if key != "accuracy"} for row in rows]
    others = [key for row in rows for key in row if key not in {*first, *last}]
    frame = pandas.DataFrame(rows, columns=[*first, *last, *dict.fromkeys(others)])
    return frame.set_index("round")


def _epsilons(spending: RecordedSpending, rounds: list[int]) -> dict[int, tuple[float, float]]:
    """Return, by round, the planned epsilons (server, third party) for at most POINTS rounds.

    The third party is an observer who sees only the global models.
    """
    planned: Planned = spending.realised
    done = [t for t in rounds if 0 < t <= planned.rounds]
    step = max(1, -(-len(done) // POINTS))
    # Select rounds by counting backwards from the last round, so that it is always included.
    at = done[::-1][::step]
    figures = {}
    for t in at:
        server = planned.server_after(t)
        figures[t] = (server, server if spending.void else planned.third_party_after(t))
    return figures
