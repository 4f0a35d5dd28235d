"""Train a pack of runs at once: one pass computes the gradients of J runs with S clients each.

The runs may differ in seed, rates, method or noise. Each run has its own folder, ledger, random
streams, round loop and thread. Records and the frozen model are in memory once, and one pass
computes the clipped sums of all runs (privacy/batched_sums.py). The results of a run in a pack
equal the results of the run alone, up to the order of additions.
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
# Block options of an algorithm whose configuration has no key for the parameter blocks.
BLOCKS = {"granularity": "block"}
# Largest automatic pack: more runs in a pass gain little speed and need more memory.
MAX_RUNS = 16


class UnbatchableError(Exception):
    """The run cannot share passes with its pack: model or data differ, or memory is too small."""


def pack_key(config: Config) -> Hashable | None:
    """Return a key that is equal for runs that can share passes; None for a run that must be alone.

    The key contains everything that determines a pass: data, model, blocks, device, precision and
    clipping rule. It also contains rounds, local steps, participation and batch, so that all runs
    end at about the same time. Method, learning rate, sigma, C, budget, seed and evaluation may
    differ.
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
    # If frozen weights are drawn from the seed, runs with different seeds have different models.
    frozen_seed = run.seed if seeded else None
    clipping = (privacy.clip_mode, privacy.clip_stability) if privacy.enabled else ("flat", None)
    return repr((data, config.model, frozen_seed, blocks, clipping, computed, _size_of(config)))


def _size_of(config: Config) -> tuple[Hashable, ...]:
    """Return the settings that determine the length of a run and the records in a pass."""
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
    """Runs that share passes. A pass starts when every run in the pack has requested sums.

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
            # Call this without the lock, because it may compute a pass for the other runs.
            # They would have to wait for the lock during this pass.
            sums.leave(number)

    def end(self) -> None:
        """Free the memory of the shared model, records and passes, which later runs may need."""
        self._first = None
        self._sum = None
        self.shared.clear()

    def _union(self, runs: int) -> FixedSum:
        """Return the object that computes the clipped sums of `runs` runs in fixed-size passes.

        If the GPU has no memory for all runs, each pass has room for as many runs as fit.
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
    """One run of a pack: `number` is its position. All calls go to the pack."""

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
    """Return True if one pass can compute the clipped sums of both jobs.

    Both must use the same model and record objects, and have equal keys and clipping rules.
    """
    if one.model is not other.model or one.private.records is not other.private.records:
        return False
    key = pack_key(one.config)
    return key is not None and _pass_of(one) == _pass_of(other) and key == pack_key(other.config)


def _pass_of(job: Job) -> tuple[int, str, float, bool]:
    rule = job.plan.clipping
    return job.schedule.cohort, rule.mode, rule.stability, job.private.augmentations is None


def union_slots(job: Job, runs: int) -> int:
    """Return the number of record slots in a pass of `runs` runs.

    With `run.slots = "auto"`, one shared pass needs fewer slots than separate passes. Batch sizes
    are random, and the sum of many batch sizes has a smaller relative deviation than each size.
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
    """Run the tasks as one pack, each in its own thread, and return their answers in order.

    A task gets its BatchedRun and calls `training.run.run`. A task that raises UnbatchableError is
    called again after the other tasks, with None instead of a BatchedRun, and trains alone. When a
    task ends, `ended` is called with the task's number and answer, by one thread at a time.
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
            # Drop the traceback, because it would keep the run's model in memory.
            errors[number] = error.with_traceback(None)
        except BaseException as error:
            # Store the error, so that the calling thread raises it below.
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
    """Call `work` with each number in a thread of its own, and wait for all of them."""
    # Run each thread in a copy of the context variables, because some hold a user's model or data.
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
    """Return the number of runs in a pack; `auto` means 16 on a GPU and 1 on a CPU."""
    if asked == "auto":
        return MAX_RUNS if gpus else 1
    if not (asked.isascii() and asked.isdigit() and int(asked) > 0):
        raise DpfedError(f"--pack {asked} must be a whole number of runs, at least 1, or auto")
    return int(asked)
