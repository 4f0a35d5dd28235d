"""A study: search, then the reported seeds. What is still to be done follows from what is done, so it can be resumed."""

from __future__ import annotations

import dataclasses
import fcntl
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

from dpfed.config import Config, Registry, build, to_dict
from dpfed.config.key_history import as_first_written
from dpfed.errors import DpfedError
from dpfed.studies.arms import Arm
from dpfed.studies.outcomes import Outcome, Task, clear, key_of, read_outcome
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
from dpfed.training.backends.batched_runs import pack_key
from dpfed.training.run_folder.files import MODEL

TUNING_SEED = 1_000_003  # so far from the reported ones that no study reaches it
STUDY, RUNS, LOCK = "study.json", "runs", ".lock"


@dataclass(frozen=True)
class Study:
    """What is asked: arms on a base configuration, so many reported seeds, so large a search, each of its points so often."""

    base: Mapping[str, Any]
    arms: tuple[Arm, ...]
    seeds: int
    title: str = "Comparison"
    axis: str = ""
    extra: int = EXTRA
    limit: int = LIMIT
    search_seeds: int = 1

    @property
    def asked(self) -> dict[str, Any]:
        """As JSON: two studies with the same answer are the same study."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        if self.search_seeds == 1:
            del plain["search_seeds"]  # as in studies that are older than it
        return plain

    @property
    def name(self) -> str:
        return f"compare-{self.base['data']['name']}-{key_of(self.asked)[:8]}"


@dataclass(frozen=True)
class ArmResult:
    """What an arm came to. `tuned`: every point of its search and its score on the validation half."""

    arm: Arm
    point: Point | None
    tuned: Mapping[Point, Score]
    at_edge: bool
    reported: tuple[Outcome, ...]
    failed: str | None = None


@dataclass(frozen=True)
class Planned:
    """The number of runs of a study, `at_least` so many while its search can still grow."""

    runs: int
    at_least: bool


@dataclass(frozen=True)
class EndedRun:
    """A run of a study that is done.

    fresh  it was run just now, not found in the folder
    done   runs so far, this one included
    """

    task: Task
    outcome: Outcome
    fresh: bool
    done: int
    planned: Planned


class Runner(Protocol):
    def free(self) -> bool: ...
    def start(self, task: Task, folder: Path) -> None: ...
    def start_pack(self, pack: Sequence[tuple[Task, Path]]) -> None: ...
    def wait(self) -> tuple[str, str | None]: ...


@dataclass
class Progress:
    """The study as far as it has come: outcomes by key of the run."""

    study: Study
    registry: Registry
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    _tasks: dict[tuple[int, Point, int, bool], Task] = field(default_factory=dict)

    def task(self, arm: int, point: Point, seed: int, tuning: bool = False) -> Task:
        """The run of an arm at a point with the reported seed of that number, or with that of the search."""
        if (arm, point, seed, tuning) not in self._tasks:
            self._tasks[arm, point, seed, tuning] = make_task(
                self.study, arm, point, seed, self.registry, tuning
            )
        return self._tasks[arm, point, seed, tuning]

    def tries(self, arm: int, point: Point) -> list[Task]:
        """The runs of the search at a point."""
        return [self.task(arm, point, seed, tuning=True) for seed in range(self.study.search_seeds)]

    def failure(self, arm: int) -> str | None:
        mine = [task for (a, *_), task in self._tasks.items() if a == arm]
        return next(
            (o.failed for t in mine if (o := self.outcomes.get(t.key)) is not None and o.failed),
            None,
        )

    def scored(self, arm: int) -> dict[Point, Score]:
        """The points of the search that are done, by the mean over its seeds."""
        points = dict.fromkeys(point for a, point, _, tuning in self._tasks if a == arm and tuning)
        found = {p: [self.outcomes.get(task.key) for task in self.tries(arm, p)] for p in points}
        return {
            p: mean([o.score for o in all_ if o is not None])
            for p, all_ in found.items()
            if None not in all_
        }

    def wanted(self) -> list[Task]:
        """What can be run now, the longest first: points of the search, or, when that is over, reported seeds."""
        arms = [i for i in range(len(self.study.arms)) if self.failure(i) is None]
        spaces = [self.study.arms[i].space for i in arms]
        first = largest([arm.space for arm in self.study.arms])
        points = next_points(
            spaces, [self.scored(i) for i in arms], self.study.extra, self.study.limit, first
        )
        tasks = [
            t
            for i, todo in zip(arms, points, strict=True)
            for point in todo
            for t in self.tries(i, point)
        ]
        if not tasks:
            tasks = [
                self.task(i, self.chosen(i), seed) for i in arms for seed in range(self.study.seeds)
            ]
        missing = {task.key: task for task in tasks if task.key not in self.outcomes}
        return sorted(missing.values(), key=lambda task: -task.cost)

    def planned(self) -> Planned:
        """Return how many different runs the study takes, by what is known now."""
        study = self.study
        live = [i for i in range(len(study.arms)) if self.failure(i) is None]
        tuned = [i for i in live if study.arms[i].grids]
        scored = [self.scored(i) for i in tuned]
        first = largest([arm.space for arm in study.arms])
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
        """Return the keys of all runs of these arms, whose search is over."""
        searched = {task.key for (arm, *_), task in self._tasks.items() if arm in arms}
        seeds = range(self.study.seeds)
        return searched | {self.task(i, self.chosen(i), seed).key for i in arms for seed in seeds}

    def signature(self, arm: int) -> tuple[str, Any]:
        """Return what is equal for arms with equal configurations, which share their runs."""
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
    this = study.arms[arm]
    config = this.configure(study.base, point, registry)
    first, run = config.run.seed, config.run
    if tuning:
        # scored once, at its end; with a budget the end may come sooner
        every = run.eval_every if config.privacy.budget is not None else run.rounds
        run = dataclasses.replace(
            run,
            seed=first + TUNING_SEED + seed,
            eval_on="validation",
            eval_every=every,
            checkpoint_every=0,
        )
    else:
        run = dataclasses.replace(run, seed=first + seed, eval_on="test", checkpoint_every=0)
    config = dataclasses.replace(config, run=run)
    tables = to_dict(config)
    rates = " ".join(f"{key}={lr:g}" for key, lr in zip(this.grids, point, strict=True))
    phase = (
        f"seed {first + seed}"
        if not tuning
        else f"tuning {seed + 1}"
        if study.search_seeds > 1
        else "tuning"
    )
    # The same key in every version, so that a study goes on where an earlier one stopped.
    key = key_of(as_first_written(tables))
    return Task(key, f"{this.label}  {rates}  {phase}", tables, tuning, cost_of(config))


def cost_of(config: Config) -> float:
    """Gradients of records that a run computes, but for constants."""
    run, releases = config.run, config.algorithm.releases
    batch = config.privacy.batch or (config.privacy.rate or 0) * 1000
    per_step = run.participation * config.data.clients * batch
    return float(run.rounds * run.local_steps * per_step * releases.batches * releases.releases)


def check(study: Study, registry: Registry) -> None:
    """Everything that can be refused before the first run is."""
    if study.base["run"]["noise"] == "os":
        raise DpfedError(
            'dpfed compare runs many times on the same records, which real noise would have to pay for each time: set run.noise = "seeded"'
        )
    if study.seeds < 1:
        raise DpfedError(f"--seeds {study.seeds} must be at least 1")
    if study.search_seeds < 1:
        raise DpfedError(f"--search-seeds {study.search_seeds} must be at least 1")
    for arm in study.arms:
        run = arm.configure(study.base, tuple(grid[0] for grid in arm.space), registry).run
        if (run.noise, run.seed, run.eval_on) != ("seeded", study.base["run"]["seed"], "all"):
            raise DpfedError(
                f"{arm.label}: run.seed, run.noise and run.eval_on are set by the study, leave them out"
            )


def claim(out: Path, study: Study, force: bool) -> TextIO:
    """Makes the folder this study's; nobody else can write to it until the returned file is closed."""
    mine = out / STUDY
    if (
        out.exists()
        and not mine.exists()
        and (not out.is_dir() or any(p.name != LOCK for p in out.iterdir()))
    ):
        raise DpfedError(f"{out} is not empty and not a study: choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK).open("w")
        try:
            fcntl.flock(
                lock, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # ends with the process, however that ends
        except BlockingIOError:
            raise DpfedError(
                f"another dpfed compare is at work in {out}: wait for it or stop it"
            ) from None
        asked = json.dumps(study.asked, indent=2) + "\n"
        if mine.exists() and mine.read_bytes() != asked.encode() and not force:
            raise DpfedError(
                f"{out} holds another study: choose another --out, or --force to replace it (runs that both need are kept)"
            )
        scratch = mine.with_suffix(".tmp")
        scratch.write_text(asked, encoding="utf-8")
        scratch.replace(mine)
    except OSError as error:
        raise DpfedError(f"the folder {out} cannot be written: {error.strerror or error}") from None
    return lock


def conduct(
    study: Study,
    out: Path,
    runner: Runner,
    registry: Registry,
    on_run: Callable[[EndedRun], None] = lambda ended: None,
    pack: int = 1,
    workers: int = 1,
) -> list[ArmResult]:
    """Run all that is not done yet and return the arms' results.

    `on_run` is called with every run that is done.

    With `pack` up to so many runs go to a worker at once, where they can be computed together.
    """
    progress = Progress(study, registry)
    running: dict[str, Task] = {}
    done = 0

    def tell(task: Task, outcome: Outcome, fresh: bool) -> None:
        nonlocal done
        done += 1
        on_run(EndedRun(task, outcome, fresh, done, progress.planned()))

    while True:
        wanted = [task for task in progress.wanted() if task.key not in running]
        found = {
            task.key: o for task in wanted if (o := read_outcome(out / RUNS / task.key)) is not None
        }
        if found:
            progress.outcomes.update(found)
            for task in wanted:
                if task.key in found:
                    if task.tuning:  # of a study that was killed before it had removed it
                        (out / RUNS / task.key / MODEL).unlink(missing_ok=True)
                    tell(task, found[task.key], False)
            continue
        if runner.free():
            _fill(runner, packs_of(wanted, pack, workers, registry), running, out)
        if not running:
            return progress.results()
        key, failed = runner.wait()
        task = running.pop(key)
        outcome = read_outcome(out / RUNS / key) if failed is None else None
        outcome = outcome or Outcome(failed=failed or "the run left no result")
        progress.outcomes[key] = outcome
        tell(task, outcome, True)


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


def packs_of(
    tasks: Sequence[Task], most: int, workers: int, registry: Registry
) -> list[list[Task]]:
    """Tasks that can be computed together, up to `most`, in the order given; no more than leaves every worker a share."""
    if most == 1:
        return [[task] for task in tasks]
    kinds: dict[Any, list[Task]] = {}
    for task in tasks:
        key = pack_key(build(task.tables, registry))
        kinds.setdefault(task.key if key is None else ("pack", key), []).append(task)
    packs = []
    for kind in kinds.values():
        count = max(-(-len(kind) // most), min(workers, len(kind)))
        size = -(-len(kind) // count)
        packs += [kind[i : i + size] for i in range(0, len(kind), size)]
    return packs
