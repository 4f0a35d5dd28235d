"""Train a pack of runs at once: one pass computes the gradients of J runs with S clients each.

A pack is a set of runs that are trained together on one device. A pass is one forward and backward
computation of many records. The runs may differ in seed, learning rates, method or noise. Each run
has its own folder, ledger, random streams, round loop and thread. Records and the frozen model are
in memory once, and one pass computes the clipped sums of all runs (privacy/batched_sums.py). The
results of a run in a pack equal the results of the run alone, up to the order of additions.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

from dpfed.config import Config
from dpfed.errors import DpfedError
from dpfed.privacy.batched_sums import BatchedSum, BatchedSums
from dpfed.privacy.fixed_shape_sum import FixedSum, PassShape, slots_for
from dpfed.training.backends.memory_fit import fits, most_that_fit, slots_of
from dpfed.training.job.job import Job
from dpfed.training.job.job_cache import JobCache
from dpfed.training.job.model import block_rules

Answer = TypeVar("Answer")
# The way to divide parameters into blocks, for algorithms without an option for this.
BLOCKS = {"granularity": "block"}
# Number of runs that `--pack auto` trains together on a GPU. More runs would gain little speed and
# need more memory.
MAX_RUNS = 16


class UnbatchableError(Exception):
    """A run cannot be computed together with other runs, so it must train alone.

    Its model or data differ from theirs, or the memory is too small.
    """


def pack_key(config: Config) -> Hashable | None:
    """Return a key that is equal for runs that can be trained together in one pack.

    Return None for a run that must train alone. The key contains everything that determines a joint
    computation: data, model, blocks, device, precision and clipping rule. It also contains rounds,
    local steps, participation and batch, so that all runs end at about the same time. Method,
    learning rate, sigma, clip norm, budget, seed and evaluation may differ.
    """
    data, privacy, run = config.data, config.privacy, config.run
    runs_alone = (
        data.unit_column is not None,
        run.fleet_size != "auto",
        run.diagnostics,
        run.trackers,
        run.checkpoint_every,
        privacy.isolation == "exact",
        privacy.grid is True,
        run.noise == "os",
    )
    if any(runs_alone):
        return None
    computed = (
        run.device,
        run.precision,
        run.threads,
        run.slots,
        run.compile,
        run.graphs,
        run.features,
    )
    blocks = sorted({**BLOCKS, **block_rules(config)}.items())
    model = config.model
    seeded = (model.weights == "random" and model.train != "full") or (
        model.lora.freeze_a and model.train == "lora"
    )
    # If the frozen weights are drawn from the seed, runs with different seeds have different models
    # and cannot be computed together.
    frozen_seed = run.seed if seeded else None
    clipping = (privacy.clip_mode, privacy.clip_stability) if privacy.enabled else ("flat", None)
    return repr((data, config.model, frozen_seed, blocks, clipping, computed, _size_of(config)))


def _size_of(config: Config) -> tuple[Hashable, ...]:
    """Return the settings that determine the number of steps of a run and the records per step."""
    privacy, run = config.privacy, config.run
    size: tuple[Hashable, ...] = (
        run.rounds,
        run.local_steps,
        run.participation,
        privacy.batch,
        privacy.rate,
        privacy.batch_per_client,
    )
    if privacy.batch == "auto":
        cohorts = (run.cohort_choice, run.max_rounds_per_client, run.max_records_per_step)
        target = (privacy.target_epsilon, privacy.delta, privacy.view, privacy.sampling)
        size = (*size, *cohorts, *target, config.algorithm.releases)
    return size


class Pack:
    """Runs that are trained together: one pass (forward and backward) computes the sums of all.

    A pass starts when every run in the pack has requested its clipped sums.

    runs    number of runs
    shared  cache of records, models and features for all runs; None for a new cache
    """

    def __init__(self, runs: int, shared: JobCache | None = None) -> None:
        self.shared = shared or JobCache()
        self._runs = runs
        self._lock = threading.Lock()
        self._left: set[int] = set()
        self._first: Job | None = None
        self._sum: BatchedSums | None = None

    def join_batch(self, job: Job, number: int) -> BatchedSum:
        with self._lock:
            if self._sum is None:
                self._first = job
                self._sum = BatchedSums(self._runs, job.schedule.cohort, self._union)
                for left in self._left:
                    self._sum.leave(left)
            assert self._first is not None
            if not can_share_pass(self._first, job):
                raise UnbatchableError
            return self._sum.batched_sum(number)

    def leave(self, number: int) -> None:
        with self._lock:
            self._left.add(number)
            sums = self._sum
        if sums is not None:
            # Release the lock before `sums.leave`, which may compute a whole pass of all other
            # runs. These runs need the lock during the pass.
            sums.leave(number)

    def end(self) -> None:
        """Free the memory of the shared model and records, which runs that train later may need."""
        self._first = None
        self._sum = None
        self.shared.clear()

    def _union(self, runs: int) -> FixedSum:
        """Return a new `FixedSum`, which computes the clipped sums of `runs` runs together.

        If the GPU has no memory for all runs, it computes as many runs together as fit.
        """
        job = self._first
        assert job is not None
        cohort = job.schedule.cohort
        if job.device.type == "cuda":
            runs = most_that_fit(runs, lambda n: fits(job, n * cohort, union_slots(job, n)))
            torch.cuda.empty_cache()
        return FixedSum(
            job.model,
            job.private.records,
            job.plan.clipping,
            job.private.augmentations,
            PassShape(runs * cohort, union_slots(job, runs), job.space.size),
            capture=job.config.run.graphs is not False,
        )


class BatchedRun:
    """One run of a pack, which is a set of runs that are trained together.

    It forwards all calls to the pack, with `number` as the position of the run.
    """

    def __init__(self, pack: Pack, number: int) -> None:
        self._pack, self._number = pack, number

    @property
    def shared(self) -> JobCache:
        return self._pack.shared

    def join_batch(self, job: Job) -> BatchedSum:
        return self._pack.join_batch(job, self._number)

    def leave(self) -> None:
        self._pack.leave(self._number)


def can_share_pass(one: Job, other: Job) -> bool:
    """Return True if two jobs can be computed together in one forward and backward pass.

    Both must use the same model object and the same record object. Their clipping rules and the
    results of `pack_key` must be equal.
    """
    if one.model is not other.model or one.private.records is not other.private.records:
        return False
    key = pack_key(one.config)
    return key is not None and _pass_of(one) == _pass_of(other) and key == pack_key(other.config)


def _pass_of(job: Job) -> tuple[int, str, float, bool]:
    rule = job.plan.clipping
    return job.schedule.cohort, rule.mode, rule.stability, job.private.augmentations is None


def union_slots(job: Job, runs: int) -> int:
    """Return the number of records that one joint computation of `runs` runs has space for.

    The space for one record is a slot. With `run.slots = "auto"`, a joint computation needs fewer
    slots than separate ones. Batch sizes are random, and the sum of many batch sizes has a smaller
    relative deviation than each size.
    """
    cohort = job.schedule.cohort
    configured = job.config.run.slots
    if configured != "auto":
        return configured * runs
    if runs == 1:
        return slots_of(job, cohort)
    return slots_for(runs * float(job.plan.expected.mean()) * cohort)


def run_batched(
    tasks: Sequence[Callable[[BatchedRun | None], Answer]],
    shared: JobCache | None = None,
    ended: Callable[[int, Answer], None] = lambda number, answer: None,
) -> list[Answer]:
    """Train several runs together, each in its own thread; return the results of `tasks` in order.

    tasks   functions that train one run each by `training.run.run`, with the BatchedRun they get
    shared  cache of records, models and features; None for a new cache
    ended   called with a task's number and answer when it ends, by one thread at a time

    If a task raises UnbatchableError, it is called again after the other tasks, with None instead
    of a BatchedRun. Its run then trains alone.
    """
    pack = Pack(len(tasks), shared)
    reporting = threading.Lock()
    answers: dict[int, Answer] = {}
    errors: dict[int, BaseException] = {}

    def work(number: int) -> None:
        member = BatchedRun(pack, number)
        try:
            answer = tasks[number](member)
            with reporting:
                answers[number] = answer
                ended(number, answer)
        except UnbatchableError as error:
            # Remove the traceback, because it holds references that would keep the run's model in
            # memory.
            errors[number] = error.with_traceback(None)
        except BaseException as error:
            # An error in a thread does not reach its caller. Store the error, and raise it after
            # all threads have ended.
            errors[number] = error
        finally:
            member.leave()

    _in_threads(work, len(tasks))
    for _, error in sorted(errors.items()):
        if not isinstance(error, UnbatchableError):
            raise error
    if errors:
        pack.end()
    for number in sorted(errors):
        answers[number] = tasks[number](None)
        ended(number, answers[number])
    return [answers[number] for number in range(len(tasks))]


def _in_threads(work: Callable[[int], None], count: int) -> None:
    """Call `work` with each number below `count` in its own thread, and wait for all threads."""
    # Give each thread its own copy of the context variables, because some of them hold the model or
    # the data that the user has passed.
    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(work, i),
            name=f"dpfed-run-{i}",
            daemon=True,
        )
        for i in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def pack_size(asked: str, gpus: int) -> int:
    """Return the number of runs to train together; "auto" means 16 with a GPU and 1 without.

    asked  the value of `--pack`
    """
    if asked == "auto":
        return MAX_RUNS if gpus else 1
    if not (asked.isascii() and asked.isdigit() and int(asked) > 0):
        raise DpfedError(f"--pack {asked} must be a whole number of runs, at least 1, or auto")
    return int(asked)
