"""`dpfed.tune`: search settings on private records, with an epsilon that counts every trial."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from dpfed.api.fine_tuning import fine_tune
from dpfed.api.memory_model import base_folder
from dpfed.api.options import Options, listing
from dpfed.api.trained_model import TrainedModel
from dpfed.api.words import python_words, refuse_arguments
from dpfed.errors import DpfedError, StoppedError
from dpfed.privacy.accounting.guarantee import Prior
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.mechanism import Mechanism
from dpfed.training.budget.recorded_spending import is_run, read_recorded_spending
from dpfed.training.budget.release import NO_PRIVACY
from dpfed.training.job.public_score import ERRORS
from dpfed.training.run_folder.files import read_result, read_settings

if TYPE_CHECKING:
    import pandas

# All trials of a search must agree in these keys, because they define the unit that epsilon
# protects. Epsilons for different units cannot be added.
SAME_FOR_ALL = ("data.unit_column", "privacy.sampling")


@dataclass(frozen=True)
class Trial:
    """A trial: one run of the search, with the values that it tried.

    number   number of the trial, from 1 on
    changes  the values that the trial tried, by keyword or configuration key
    folder   the run folder
    score    accuracy on the public records, or the value of `metric`, negated if smaller is
             better; None for a run that stopped early
    """

    number: int
    changes: Mapping[str, Any]
    folder: Path
    score: float | None


@dataclass(frozen=True)
class Tuning:
    """A finished search, as `dpfed.tune` returns it.

    Attributes:
        best: The trained model of the best trial. `best.epsilon` counts only this trial.
        settings: The values that the best trial tried, by keyword or configuration key.
        epsilon: Epsilon of all trials together, for every observer; None without privacy.
    """

    best: TrainedModel
    settings: Mapping[str, Any]
    epsilon: float | None
    _trials: tuple[Trial, ...] = field(repr=False)

    @property
    def trials(self) -> pandas.DataFrame:
        """One row for each trial: the values that it tried, and its score."""
        import pandas

        rows = [{"trial": t.number, **t.changes, "score": t.score} for t in self._trials]
        return pandas.DataFrame(rows).set_index("trial")


@listing(Options)
def tune(
    model: Any,
    train: Any,
    test: Any,
    *,
    space: Mapping[str, Sequence[Any]],
    trials: int | None = None,
    out: str | Path,
    progress: bool = True,
    **options: Unpack[Options],
) -> Tuning:
    """Fine-tune once for each combination of values in `space`, and return the best model.

    Every trial trains on the private records, and the server sees every trial. Therefore, `epsilon`
    of the result counts all trials. The same call continues a search that was stopped.

    Args:
        model: As for `fine_tune`.
        train: As for `fine_tune`.
        test: Public records, whose scores choose the best trial.
        space: Values to try, by keyword or configuration key, such as {"lr": [0.01, 0.1]}.
        trials: Number of combinations to try, drawn at random; default: all combinations.
        out: Folder of the search, with one run folder for each trial.
        progress: Show the rounds of each trial.
        options: Other keywords of `fine_tune`; see `Options`. `epsilon` is the target of one trial.
    """
    with python_words(options, model):
        refuse_arguments(out, progress=progress)
        points = points_of(space, trials, options)
        done: list[tuple[Trial, TrainedModel | None]] = []
        for number, changes in enumerate(points, 1):
            folder = Path(out) / f"trial-{number}"
            keywords = with_changes(options, changes)
            try:
                found = fine_tune(
                    model, train, test, out=folder, resume=True, progress=progress, **keywords
                )
                done.append((Trial(number, changes, folder, score_of(found.result)), found))
            except StoppedError:
                # Count the stopped run, too: it has spent privacy before it stopped.
                done.append((Trial(number, changes, folder, None), None))
        return _tuning(done)


def points_of(
    space: Mapping[str, Sequence[Any]], trials: int | None, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the combinations of values to try: all, or `trials` of them drawn at random."""
    if not isinstance(space, Mapping) or not space:
        raise DpfedError('space must be a dictionary of lists, such as {"lr": [0.01, 0.1]}')
    for name, values in space.items():
        if not isinstance(name, str):
            raise DpfedError(f"space has the key {name!r}: a key is a keyword such as 'lr'")
        if name in SAME_FOR_ALL:
            raise DpfedError(f"{name} must be the same in all trials, which share one epsilon")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise DpfedError(f"space[{name!r}] must be a list of values, not {values!r:.60}")
        settings = options.get("settings") or {}
        if name in options or name in settings:
            raise DpfedError(f"{name} is given, and space tries values of it: give one of them")
    points = [dict(zip(space, point, strict=True)) for point in itertools.product(*space.values())]
    if trials is None:
        return points
    if type(trials) is not int or not 1 <= trials <= len(points):
        raise DpfedError(
            f"trials = {trials!r} must be a whole number from 1 to {len(points)}, the size of space"
        )
    return random.Random(trials).sample(points, trials)


def with_changes(options: Options, changes: Mapping[str, Any]) -> Options:
    """Return the options of one trial: `options` with the values in `changes`.

    A name with a dot, such as "run.rounds", is a configuration key and goes into `settings`.
    """
    keys = {name: value for name, value in changes.items() if "." in name}
    words: Any = {name: value for name, value in changes.items() if "." not in name}
    settings = {**(options.get("settings") or {}), **keys}
    changed: Options = {**options, **words, "settings": settings}
    return changed


def score_of(result: Mapping[str, Any]) -> float | None:
    """Return the score of a finished run, where larger is better: losses and errors are negated."""
    metric = result.get("metric") or {"name": "accuracy", "value": result["test_accuracy"]}
    if metric["value"] is None:
        return None
    return -float(metric["value"]) if metric["name"] in ERRORS else float(metric["value"])


def _tuning(done: Sequence[tuple[Trial, TrainedModel | None]]) -> Tuning:
    trials = tuple(trial for trial, _ in done)
    able = [(trial, found) for trial, found in done if found is not None]
    if not able:
        raise StoppedError(
            f"no trial finished: see {trials[0].folder}, and give space smaller learning rates"
        )
    lowest = -math.inf
    best, model = max(able, key=lambda pair: lowest if pair[0].score is None else pair[0].score)
    return Tuning(model, best.changes, composed_epsilon(trial_folders(trials)), trials)


def trial_folders(trials: Sequence[Trial]) -> list[Path]:
    """Return the run folders of the trials, and those of earlier calls in the same folder."""
    folders = [trial.folder for trial in trials]
    beside = sorted(folders[0].parent.glob("trial-*"))
    return [*folders, *(found for found in beside if found not in folders and is_run(found))]


def composed_epsilon(folders: Sequence[Path]) -> float | None:
    """Return the epsilon of all runs together, for a client in every round of every run.

    Return None if a run had no privacy. Privacy spent in earlier training of the starting weights
    counts once, even if several runs start from these weights.

    The value holds for every observer and for every way to choose the best run. A smaller epsilon
    is known only if the number of trials is random and only the chosen model is seen.
    """
    history: list[tuple[Mechanism, int]] = []
    starts: dict[tuple[Any, ...], Prior] = {}
    delta = 0.0
    for folder in folders:
        if read_result(folder).get("release") == NO_PRIVACY:
            return None
        planned = read_recorded_spending(folder).realised
        starts[(*_start_of(folder), planned.prior)] = planned.prior
        history += planned.bound[len(planned.prior) :]
        delta = max(delta, planned.delta)
    history += itertools.chain.from_iterable(starts.values())
    return epsilon(history, delta)


def _start_of(folder: Path) -> tuple[Any, Any]:
    """Return the paths of the weights and of the adapter from which a trial began its training.

    A model object is saved once for each trial, with equal weights but different paths. Its path is
    therefore returned as None.
    """
    section = (read_settings(folder) or {}).get("model", {})
    weights = section.get("weights")
    if weights is not None and Path(weights).resolve() == base_folder(folder).resolve():
        weights = None
    return weights, section.get("adapter")
