"""`dpfed.compare`: compare methods on one model and data set, each at its best learning rate."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, get_type_hints

from dpfed.api.configuring import is_plain_module, prepared
from dpfed.api.memory_model import identity_of, model_beside
from dpfed.api.options import Switches, Terms, listing
from dpfed.api.words import python_words, refuse_arguments, refuse_unknown
from dpfed.config import to_dict
from dpfed.data.sources.in_memory import given_source
from dpfed.errors import DpfedError, StoppedError, warn_user
from dpfed.model.given_module import given_module
from dpfed.registry import registry
from dpfed.report.figures.plots import Curve, draw_scores
from dpfed.report.measures import ACCURACY, Measure
from dpfed.report.page import write_page
from dpfed.studies.in_process import InProcess
from dpfed.studies.output import SEARCH, curves_of, failures, write
from dpfed.studies.packs import Packing
from dpfed.studies.pool import default_workers
from dpfed.studies.question import Question, study_from
from dpfed.studies.study import STUDY, ArmResult, EndedRun, Study, check, claim, conduct
from dpfed.studies.study_reader import read_study
from dpfed.studies.study_watch import StudyWatch
from dpfed.training.backends.batched_runs import pack_size

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Comparison:
    """A finished comparison, as `dpfed.compare` returns it.

    Attributes:
        out: The folder of the comparison, with its tables, plots and runs.
        title: The title of the table of results.
    """

    out: Path
    title: str
    _curves: tuple[Curve, ...] = field(default=(), repr=False)
    _measure: Measure = field(default=ACCURACY, repr=False)

    @property
    def table(self) -> pandas.DataFrame:
        """One row for each method: score, difference from the reference method, rates and epsilon.

        Epsilon is that of one run. It does not count the runs that searched for the rates.
        """
        return self._read("table.csv")

    @property
    def search(self) -> pandas.DataFrame:
        """One row for each learning rate that the search tried, with its validation score."""
        return self._read(SEARCH)

    def plot(self) -> Any:
        """Draw the score over rounds for each method; return the matplotlib figure."""
        from matplotlib import pyplot

        figure = pyplot.figure(layout="constrained")
        draw_scores(figure, self._curves, self.title, self._measure)
        return figure

    def report(self, path: str | Path, public: bool = False) -> Path:
        """Write the comparison as one HTML page that needs no network, and return its path.

        public  True to leave out values that a published page must not show, such as which clients
                took part in a round
        """
        with python_words():
            write_page([self.out], Path(path), public, read_study)
        return Path(path)

    def _read(self, name: str) -> pandas.DataFrame:
        import pandas

        return pandas.read_csv(self.out / name).set_index("method")

    def _repr_html_(self) -> str:
        """Return the table of results as HTML, which notebooks show."""
        html: str = self.table.to_html()
        return html


@listing(Terms)
def compare(
    model: Any,
    train: Any,
    test: Any,
    *,
    algorithms: str | Sequence[str] = "all",
    rates: Mapping[str, Sequence[float]] | None = None,
    preset: str | None = None,
    seeds: int = 3,
    search_seeds: int = 1,
    out: str | Path | None = None,
    progress: bool = True,
    **options: Unpack[Terms],
) -> Comparison:
    """Compare methods, each at its best learning rate, found with equally many runs.

    The runs are seeded simulations in this process. The same call continues a stopped comparison.

    Args:
        model: As for `fine_tune`.
        train: As for `fine_tune`.
        test: Public records: one half to choose learning rates, the other to score the methods.
        algorithms: Methods, and variants such as "dp-fedadamw:gamma=0;agg=off".
        rates: The first learning rates that the search tries, by method.
        preset: Name of an experiment of the DP-FedAdamW paper, such as "epsilon".
        seeds: Number of runs for each method, with the seeds from run.seed on.
        search_seeds: Number of seeds over which the search averages the score of a rate.
        out: Folder of the comparison; default: one under runs/, with its name from the arguments.
        progress: True to show a progress bar over the runs.
        options: Other keywords, such as clients, epsilon and rounds; see `Terms`.

    Wrong arguments raise `dpfed.DpfedError`. A method that fails causes a warning, not an error.
    """
    with python_words(options, model):
        _refuse_keywords(options)
        refuse_arguments(out, progress=progress)
        about = None if isinstance(model, str) else f"{type(model).__name__} on given records"
        names = _names(algorithms, preset)
        question = Question(names, _texts(rates), preset, seeds, search_seeds, about)
        source, config = prepared(model, train, test, options)
        study = study_from(config, question, registry(), identity_of(model, source))
        check(study, registry())
        folder = Path(out or Path("runs") / study.name)
        with (
            model_beside(model, options.get("tokenizer"), folder, config, STUDY) as config,
            given_module(model if is_plain_module(model) else None),
            given_source(source),
        ):
            return _finished(dataclasses.replace(study, base=to_dict(config)), folder, progress)


def _finished(study: Study, folder: Path, progress: bool) -> Comparison:
    """Run all runs of the study, write its files, and return the comparison."""
    _, gpus = default_workers(str(study.base["run"]["device"]))
    packing = Packing(pack_size("auto", gpus), 1)
    watch: dict[str, Callable[[EndedRun], None]] = {}
    with ExitStack() as stack:
        stack.enter_context(claim(folder, study, force=False))
        if progress:
            watch["on_run"] = stack.enter_context(StudyWatch()).run
        results = conduct(study, folder, InProcess(), registry(), packing=packing, **watch)
    table = write(study, results, folder)
    _tell_failures(results)
    several = len({row.row for row in table.rows}) > 1
    curves = curves_of(results, study.axis if several else "")
    return Comparison(folder, table.title, tuple(curves), table.measure)


def _refuse_keywords(options: Mapping[str, Any]) -> None:
    """Raise DpfedError for a keyword in `options` that `compare` does not have."""
    for name in options:
        if name in get_type_hints(Switches):
            raise DpfedError(
                f"{name} is no keyword of compare: give switches to a method, such as "
                f'algorithms=["dp-fedadamw:{name}=..."]'
            )
        if name in ("metric", "keep", "early_stopping"):
            raise DpfedError(f"{name} is no keyword of compare: give it to fine_tune")
    refuse_unknown("compare", options, list(inspect.signature(compare).parameters))


def _names(algorithms: str | Sequence[str], preset: str | None) -> str | None:
    """Return the method names joined by commas; None to use the methods of the preset."""
    if preset is not None and algorithms == "all":
        return None
    names = [algorithms] if isinstance(algorithms, str) else algorithms
    if not isinstance(names, Sequence) or any(not isinstance(name, str) for name in names):
        raise DpfedError(f"algorithms must be a list of names, not {algorithms!r:.60}")
    return ",".join(names)


def _texts(rates: Mapping[str, Sequence[float]] | None) -> tuple[str, ...]:
    """Return the learning rates as strings METHOD=v1,v2, as on the command line."""
    if rates is None:
        return ()
    if not isinstance(rates, Mapping):
        raise DpfedError(
            'rates must be a dictionary such as {"dp-fedavg": [0.1, 0.3]}, '
            f"not {type(rates).__name__}"
        )
    lists = {name: [v] if isinstance(v, str | float | int) else v for name, v in rates.items()}
    return tuple(f"{name}={','.join(map(str, values))}" for name, values in lists.items())


def _tell_failures(results: Sequence[ArmResult]) -> None:
    """Warn about methods that could not be run; raise StoppedError if no method could."""
    failed = failures(results)
    if len(failed) == len(results):
        raise StoppedError(f"no method could be run; the first, {failed[0]}")
    warn_user([f"could not be run: {line}" for line in failed])
