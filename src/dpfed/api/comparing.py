"""`dpfed.compare`: compare methods on one model and one data set, each at its best rate."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from dpfed.api.memory_model import base_folder, identity_of, refuse_tokenizer, save_model
from dpfed.api.options import Terms, listing
from dpfed.api.settings import configured, is_plain_module, task_of
from dpfed.config import Config, nearest, to_dict
from dpfed.data.sources.in_memory import given_source, source_of
from dpfed.data.tables import Source
from dpfed.errors import DpfedError, StoppedError, python_phrases, warn_user
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
        out: The folder of the study, with its tables, figures and runs.
        title: The title of the table.
    """

    out: Path
    title: str
    _curves: tuple[Curve, ...] = field(default=(), repr=False)
    _measure: Measure = field(default=ACCURACY, repr=False)

    @property
    def table(self) -> pandas.DataFrame:
        """One row for each method: score, difference, rates, epsilon and more.

        Epsilon is that of one run. It does not include the search.
        """
        return self._read("table.csv")

    @property
    def search(self) -> pandas.DataFrame:
        """One row for each point of the search, with its validation scores."""
        return self._read(SEARCH)

    def plot(self) -> Any:
        """Draw the score over rounds for each method; return the figure of matplotlib."""
        from matplotlib import pyplot

        figure = pyplot.figure(layout="constrained")
        draw_scores(figure, self._curves, self.title, self._measure)
        return figure

    def report(self, path: str | Path, public: bool = False) -> Path:
        """Write the study as one HTML page that needs no network, and return its path.

        public  True to leave out what a published page must not show, such as who took part
        """
        with python_phrases():
            write_page([self.out], Path(path), public, read_study)
        return Path(path)

    def _read(self, name: str) -> pandas.DataFrame:
        import pandas

        return pandas.read_csv(self.out / name).set_index("method")

    def _repr_html_(self) -> str:
        """Return the table, which notebooks show."""
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
    """Compare methods, each at its own best learning rate, found with equal effort.

    The runs are seeded simulations in this process. The same call continues a study that was
    stopped.

    Args:
        model: As for `fine_tune`.
        train: As for `fine_tune`.
        test: Public records. One half chooses the rates, the other half scores the methods.
        algorithms: Methods, and variants such as "dp-fedadamw:gamma=0;agg=off".
        rates: Learning rates with which the search of a method begins, by method.
        preset: Name of an ablation or grid of the paper, such as "epsilon".
        seeds: Number of runs for each method, with the seeds from run.seed on.
        search_seeds: Number of seeds over which the search averages the score of a rate.
        out: Folder of the study; default: one under runs/, named after the question.
        progress: Show the runs.
        options: What is trained, on what terms; see `Terms`.

    Mistakes raise `dpfed.DpfedError`. A method that fails is a warning and a row without accuracy.
    """
    with python_phrases():
        _refuse_other(options)
        about = None if isinstance(model, str) else f"{type(model).__name__} on given records"
        question = Question(
            _names(algorithms, preset), _texts(rates), preset, seeds, search_seeds, about
        )
        source = source_of(train, test, options.get("classes"), task_of(options))
        return _Start(model, source, options, out, progress).compared(question)


@dataclass(frozen=True)
class _Start:
    """Everything that a study begins with, besides its question.

    model     as it was given
    source    the data
    options   keywords of `Terms`
    out       folder of the study; None for one under runs/
    progress  True to show the runs
    """

    model: Any
    source: Source
    options: Terms
    out: str | Path | None
    progress: bool

    def compared(self, question: Question) -> Comparison:
        """Run the study of a question, write its files, and return it."""
        refuse_tokenizer(self.model, self.options.get("tokenizer"))
        config = configured(self.options, self.model, self.source)
        study = study_from(config, question, registry())
        study = dataclasses.replace(study, given=identity_of(self.model, self.source))
        check(study, registry())
        folder = Path(self.out) if self.out is not None else Path("runs") / study.name
        base_is_ours = not base_folder(folder).exists()
        try:
            study = self._with_weights(study, folder, config)
            results = self._results(study, folder)
        finally:
            # Remove the saved model if an error stopped the study before it began.
            if base_is_ours and not (folder / STUDY).is_file():
                shutil.rmtree(base_folder(folder), ignore_errors=True)
        table = write(study, results, folder)
        _tell_failures(results)
        several = len({row.row for row in table.rows}) > 1
        curves = curves_of(results, study.axis if several else "")
        return Comparison(folder, table.title, tuple(curves), table.measure)

    def _with_weights(self, study: Study, folder: Path, config: Config) -> Study:
        """Return the study with the folder of its weights, if the model is in memory.

        The weights are saved beside the folder of the study, unless an earlier call has begun it.
        """
        if isinstance(self.model, str | Path):
            return study
        base = base_folder(folder)
        if not ((folder / STUDY).is_file() and base.is_dir()):
            save_model(self.model, self.options.get("tokenizer"), folder, config)
        weights = dataclasses.replace(config.model, weights=str(base))
        return dataclasses.replace(study, base=to_dict(dataclasses.replace(config, model=weights)))

    def _results(self, study: Study, folder: Path) -> list[ArmResult]:
        """Run the study, and return the results of its arms."""
        module = self.model if is_plain_module(self.model) else None
        _, gpus = default_workers(str(study.base["run"]["device"]))
        packing = Packing(pack_size("auto", gpus), 1)
        watch: dict[str, Callable[[EndedRun], None]] = {}
        with ExitStack() as stack:
            stack.enter_context(claim(folder, study, force=False))
            stack.enter_context(given_module(module))
            stack.enter_context(given_source(self.source))
            if self.progress:
                watch["on_run"] = stack.enter_context(StudyWatch()).run
            return conduct(study, folder, InProcess(), registry(), packing=packing, **watch)


def _refuse_other(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in Terms.__annotations__:
            raise DpfedError(
                f"{name} is no keyword of compare{nearest(name, Terms.__annotations__)}: "
                'give switches to a method, such as algorithms=["dp-fedadamw:gamma=0"]'
            )


def _names(algorithms: str | Sequence[str], preset: str | None) -> str | None:
    """Return the methods as one text; None for the methods of a preset."""
    if preset is not None and algorithms == "all":
        return None
    return algorithms if isinstance(algorithms, str) else ",".join(algorithms)


def _texts(rates: Mapping[str, Sequence[float]] | None) -> tuple[str, ...]:
    """Return the rates as texts of the form NAME=v1,v2."""
    if rates is None:
        return ()
    if not isinstance(rates, Mapping):
        raise DpfedError(
            'rates must be a dictionary such as {"dp-fedavg": [0.1, 0.3]}, '
            f"not {type(rates).__name__}"
        )
    lists = {name: v if isinstance(v, Sequence) else [v] for name, v in rates.items()}
    return tuple(f"{name}={','.join(map(str, values))}" for name, values in lists.items())


def _tell_failures(results: Sequence[ArmResult]) -> None:
    """Warn about methods that could not be run; raise StoppedError if no method could."""
    failed = failures(results)
    if len(failed) == len(results):
        raise StoppedError(f"no method could be run; the first, {failed[0]}")
    warn_user([f"could not be run: {line}" for line in failed])
