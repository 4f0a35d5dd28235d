"""Run a study, which compares arms (methods with their settings) on one model and data set.

A search first finds the best learning rates of each arm. The reported runs then use these rates
with several seeds. Finished runs alone determine the next runs, so a study can be resumed.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from dpfed.config import Registry, to_dict
from dpfed.config.key_history import as_first_written
from dpfed.errors import DpfedError, phrase
from dpfed.report.measures import Measure, measure_of
from dpfed.report.run_reader import STUDY_FILE
from dpfed.studies.arms import Arm
from dpfed.studies.outcomes import Outcome, Task, clear, cost_of, key_of, read_outcome
from dpfed.studies.packs import ALONE, Packing, packs_of
from dpfed.studies.search import (
    EXTRA,
    LIMIT,
    Point,
    Score,
    at_edges,
    best,
    initial,
    largest,
    mean,
    next_points,
    points_per_arm,
)
from dpfed.training.run_folder.files import MODEL

# The seeds of search runs begin at run.seed + TUNING_SEED, far above those of reported runs.
TUNING_SEED = 1_000_003
STUDY = STUDY_FILE
RUNS = "runs"
LOCK = ".lock"


@dataclass(frozen=True)
class Study:
    """The description of a study, which compares arms (methods with their settings).

    base          the configuration that each arm changes
    seeds         number of runs of each arm that the table reports
    extra, limit  for each arm, the search adds `extra` to `limit` learning rates to the first ones
    search_seeds  number of seeds over which the search averages the score of a learning rate
    given         hash of the data and the model that a program holds in memory; "" if none
    """

    base: Mapping[str, Any]
    arms: tuple[Arm, ...]
    seeds: int
    title: str = "Comparison"
    axis: str = ""
    extra: int = EXTRA
    limit: int = LIMIT
    search_seeds: int = 1
    given: str = ""

    @property
    def asked(self) -> dict[str, Any]:
        """The description as JSON values. Studies are identical if these values are equal."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        # Older versions of dpfed did not store these keys, and older descriptions must stay equal.
        for key, default in (("search_seeds", 1), ("given", "")):
            if plain[key] == default:
                del plain[key]
        return plain

    @property
    def measure(self) -> Measure:
        """The kind of score, accuracy or R2, by which the table compares the methods."""
        return measure_of(str(self.base["model"].get("task")))

    @property
    def name(self) -> str:
        return f"compare-{self.base['data']['name']}-{key_of(self.asked)[:8]}"


@dataclass(frozen=True)
class ArmResult:
    """The results of an arm (a method). `point`: best learning rates, None if a run has failed.

    tuned  validation score of each point (learning rates) that the search tried
    """

    arm: Arm
    point: Point | None
    tuned: Mapping[Point, Score]
    at_edge: bool
    reported: tuple[Outcome, ...]
    failed: str | None = None


@dataclass(frozen=True)
class Planned:
    """The number of runs that a study needs. `at_least` is True if its search may add more."""

    runs: int
    at_least: bool


@dataclass(frozen=True)
class EndedRun:
    """A run of a study that has ended, for a display of the progress.

    fresh    True if this process started the run, False if an earlier process had finished it
    done     number of ended runs, including this run
    """

    task: Task
    outcome: Outcome
    fresh: bool
    done: int
    planned: Planned


class Runner(Protocol):
    """An object that computes the runs that tasks describe, such as the worker processes `Pool`."""

    def free(self) -> bool: ...
    def start(self, task: Task, folder: Path) -> None: ...
    def start_pack(self, pack: Sequence[tuple[Task, Path]]) -> None: ...
    def wait(self) -> tuple[str, str | None]: ...


@dataclass
class Progress:
    """The state of a study. `outcomes` has the results of its ended runs, by their tasks' keys."""

    study: Study
    registry: Registry
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _tasks: dict[tuple[int, Point, int, bool], Task] = field(default_factory=dict)

    def task(self, arm: int, point: Point, seed: int, tuning: bool = False) -> Task:
        """Return the task (description) of one run; `tuning` is True for a run of the search."""
        place = (arm, point, seed, tuning)
        if place not in self._tasks:
            self._tasks[place] = make_task(self.study, arm, point, seed, self.registry, tuning)
        return self._tasks[place]

    def tries(self, arm: int, point: Point) -> list[Task]:
        """Return the tasks that score a point (learning rates), one for each seed of the search."""
        return [self.task(arm, point, seed, tuning=True) for seed in range(self.study.search_seeds)]

    def failure(self, arm: int) -> str | None:
        """Return the reason why a run of the arm failed; None if no run failed."""
        for (number, *_), task in self._tasks.items():
            outcome = self.outcomes.get(task.key)
            if number == arm and outcome is not None and outcome.failed:
                return outcome.failed
        return None

    def scored(self, arm: int) -> dict[Point, Score]:
        """Return the mean score of each point (learning rates) whose search runs have all ended."""
        points = dict.fromkeys(point for a, point, _, tuning in self._tasks if a == arm and tuning)
        out = {}
        for point in points:
            found = [self.outcomes.get(task.key) for task in self.tries(arm, point)]
            scores = [outcome.score for outcome in found if outcome is not None]
            if len(scores) == len(found):
                out[point] = mean(scores)
        return out

    def _first_points(self) -> int:
        return largest([arm.space for arm in self.study.arms])

    def _working_arms(self) -> list[int]:
        """Return the numbers of the arms (methods with their settings) without a failed run."""
        return [i for i in range(len(self.study.arms)) if self.failure(i) is None]

    def wanted(self) -> list[Task]:
        """Return the tasks to start now, longest first. Reported runs come after all searches."""
        study = self.study
        arms = self._working_arms()
        points = next_points(
            [study.arms[i].space for i in arms],
            [self.scored(i) for i in arms],
            study.extra,
            study.limit,
            self._first_points(),
        )
        tasks = [
            task
            for i, todo in zip(arms, points, strict=True)
            for point in todo
            for task in self.tries(i, point)
        ]
        if not tasks:
            tasks = [
                self.task(i, self.chosen(i), seed) for i in arms for seed in range(study.seeds)
            ]
        missing = {task.key: task for task in tasks if task.key not in self.outcomes}
        return sorted(missing.values(), key=lambda task: -task.cost)

    def planned(self) -> Planned:
        """Return the number of runs that the study needs, as far as ended runs determine it."""
        study = self.study
        live = self._working_arms()
        tuned = [i for i in live if study.arms[i].grids]
        scored = [self.scored(i) for i in tuned]
        first = self._first_points()
        points = points_per_arm(scored, first, study.extra, study.limit)
        searching = any(len(scores) < points for scores in scored)
        done_of_failed = {task.key for (arm, *_), task in self._tasks.items() if arm not in live}
        done_of_failed &= self.outcomes.keys()
        if not searching:
            return Planned(len(self.keys_of(live) | done_of_failed), at_least=False)
        runs_of_arm = {self.signature(i): study.seeds for i in live}
        runs_of_arm |= {self.signature(i): study.seeds + points * study.search_seeds for i in tuned}
        runs = sum(runs_of_arm.values()) + len(done_of_failed)
        return Planned(runs, at_least=points < first + study.limit)

    def keys_of(self, arms: Sequence[int]) -> set[str]:
        """Return the task keys of all runs of these arms. The search must have ended before."""
        searched = {task.key for (arm, *_), task in self._tasks.items() if arm in arms}
        seeds = range(self.study.seeds)
        return searched | {self.task(i, self.chosen(i), seed).key for i in arms for seed in seeds}

    def signature(self, arm: int) -> tuple[str, Any]:
        """Return a value that is equal for methods with equal settings, which share their runs."""
        space = self.study.arms[arm].space
        first = initial(space, 1)[0] if space else ()
        return make_task(self.study, arm, first, 0, self.registry).key, space

    def chosen(self, arm: int) -> Point:
        return best(self.scored(arm)) if self.study.arms[arm].grids else ()

    def results(self) -> list[ArmResult]:
        out = []
        for i, arm in enumerate(self.study.arms):
            failed, tuned = self.failure(i), self.scored(i)
            if failed is not None:
                out.append(ArmResult(arm, None, tuned, False, (), failed))
                continue
            point = self.chosen(i)
            reported = tuple(
                self.outcomes[self.task(i, point, s).key] for s in range(self.study.seeds)
            )
            out.append(ArmResult(arm, point, tuned, bool(tuned) and any(at_edges(tuned)), reported))
        return out


def make_task(
    study: Study, arm: int, point: Point, seed: int, registry: Registry, tuning: bool = False
) -> Task:
    """Return the task (description) of one run: arm number, learning rates, number of the seed.

    Search runs (`tuning`) use other seeds, and another half of the test data, than reported runs.
    """
    this = study.arms[arm]
    config = this.configure(study.base, point, registry)
    run = config.run
    changes: dict[str, Any] = {"seed": run.seed + seed, "eval_on": "test"}
    phase = f"seed {run.seed + seed}"
    if tuning:
        # The search needs only the last score. With a privacy budget, any round may be the last.
        every = run.rounds if config.privacy.budget is None else run.eval_every
        seed_of_search = run.seed + TUNING_SEED + seed
        changes = {"seed": seed_of_search, "eval_on": "validation", "eval_every": every}
        phase = f"tuning {seed + 1}" if study.search_seeds > 1 else "tuning"
    run = dataclasses.replace(run, **changes, checkpoint_every=0)
    tables = to_dict(dataclasses.replace(config, run=run))
    rates = " ".join(f"{key}={lr:g}" for key, lr in zip(this.grids, point, strict=True))
    # Leave out an empty `given`: older versions of dpfed computed the key without it.
    given = {"given": study.given} if study.given else {}
    key = key_of(as_first_written(tables) | given)
    return Task(key, f"{this.label}  {rates}  {phase}", tables, tuning, cost_of(config))


def check(study: Study, registry: Registry) -> None:
    """Raise DpfedError if the options of a study, or the settings of an arm, are not allowed."""
    if study.base["run"]["noise"] == "os":
        raise DpfedError(
            f"{phrase('compare')} runs many times on the same records, which real noise would "
            'have to pay for each time: set run.noise = "seeded"'
        )
    for name, count in {"seeds": study.seeds, "search seeds": study.search_seeds}.items():
        if type(count) is not int or count < 1:
            raise DpfedError(f"{phrase(name)} {count!r} must be a whole number of at least 1")
    for arm in study.arms:
        config = arm.configure(study.base, tuple(grid[0] for grid in arm.space), registry)
        if to_dict(config)["model"].get("task") != study.base["model"].get("task"):
            raise DpfedError(f"{arm.label}: model.task must be the same for all methods")
        run = config.run
        fixed = (run.noise, run.seed, run.eval_on, run.keep, run.early_stopping)
        if fixed != ("seeded", study.base["run"]["seed"], "all", "last", None):
            raise DpfedError(
                f"{arm.label}: run.seed, noise, eval_on, keep and early_stopping are set by the "
                "study, leave them out"
            )


def claim(out: Path, study: Study, force: bool) -> TextIO:
    """Create the folder `out`, write the study's description, and lock out other processes.

    Closing the returned file ends the lock. `force` replaces another study's description.
    """
    description = out / STUDY
    occupied = out.exists() and (not out.is_dir() or any(p.name != LOCK for p in out.iterdir()))
    if occupied and not description.exists():
        raise DpfedError(f"{out} is not empty and not a study: {phrase('another out')}")
    asked = json.dumps(study.asked, indent=2) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK).open("w")
        try:
            # The operating system releases this lock when the process ends, even if it is killed.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DpfedError(
                f"another {phrase('compare')} is at work in {out}: wait for it or stop it"
            ) from None
        is_other = description.exists() and description.read_bytes() != asked.encode()
        if is_other and not force:
            raise DpfedError(
                f"{out} holds another study: {phrase('another out')}{phrase('replace study')}"
            )
        scratch = description.with_suffix(".tmp")
        scratch.write_text(asked, encoding="utf-8")
        scratch.replace(description)
    except OSError as error:
        raise DpfedError(f"the folder {out} cannot be written: {error.strerror or error}") from None
    return lock


def conduct(
    study: Study,
    out: Path,
    runner: Runner,
    registry: Registry,
    on_run: Callable[[EndedRun], None] = lambda ended: None,
    packing: Packing = ALONE,
) -> list[ArmResult]:
    """Run all tasks of the study that have no result yet, and return the results of all methods.

    on_run  is called for each ended run, also if an earlier process has finished the run
    """
    progress = Progress(study, registry)
    running: dict[str, Task] = {}

    def end(task: Task, outcome: Outcome, fresh: bool, done: int) -> None:
        on_run(EndedRun(task, outcome, fresh, done, progress.planned()))

    while True:
        wanted = [task for task in progress.wanted() if task.key not in running]
        done = len(progress.outcomes)
        finished = _finished(wanted, out)
        progress.outcomes |= finished
        if finished:
            for task in wanted:
                if task.key in finished:
                    done += 1
                    end(task, finished[task.key], False, done)
            continue
        if runner.free():
            _fill(runner, packs_of(wanted, packing, registry), running, out)
        if not running:
            return progress.results()
        key, failed = runner.wait()
        outcome = read_outcome(out / RUNS / key) if failed is None else None
        progress.outcomes[key] = outcome or Outcome(failed=failed or "the run left no result")
        end(running.pop(key), progress.outcomes[key], True, len(progress.outcomes))


def _finished(tasks: Sequence[Task], out: Path) -> dict[str, Outcome]:
    """Return, by key, the outcomes of the tasks that an earlier process has finished."""
    found = {}
    for task in tasks:
        outcome = read_outcome(out / RUNS / task.key)
        if outcome is not None:
            found[task.key] = outcome
            # A search run keeps no model, but a killed study may have left the file.
            if task.tuning:
                (out / RUNS / task.key / MODEL).unlink(missing_ok=True)
    return found


def _fill(
    runner: Runner, packs: Sequence[Sequence[Task]], running: dict[str, Task], out: Path
) -> None:
    for pack in packs:
        if not runner.free():
            return
        for task in pack:
            clear(out / RUNS / task.key)
        if len(pack) == 1:
            runner.start(pack[0], out / RUNS / pack[0].key)
        else:
            runner.start_pack([(task, out / RUNS / task.key) for task in pack])
        running.update({task.key: task for task in pack})
