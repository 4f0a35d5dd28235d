"""Runs that differ in seed, rates, method or noise, computed together: J runs x S clients in one pass.

Every run is whole, with its folder, ledger, streams and round loop, in a thread of its own. Records and the frozen model
are held once, and the clipped sums of all runs come from one union (privacy/shared.py). A run's numbers are those that it
has alone, but for the order of additions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

from dpfed.config import Config
from dpfed.errors import DpfedError
from dpfed.privacy.batched_sums import BatchedSum, BatchedSums
from dpfed.privacy.fixed_shape_sum import FixedSum, PassShape, slots_for
from dpfed.training.backends.memory_fit import fits, most_that_fit, slots_of
from dpfed.training.job.job import Job, block_rules
from dpfed.training.job.job_cache import JobCache

Answer = TypeVar("Answer")
BLOCKS = {"granularity": "block"}  # of a method that has none
MOST = 16  # more runs in a pass bring little more, and take their memory


class UnbatchableError(Exception):
    """This run differs from its pack in something that a pass shares, or finds no room beside it: it has to run by itself."""


def pack_key(config: Config) -> Hashable | None:
    """Runs with the same key can be packed; one without a key runs by itself.

    The same: what a pass is made of (data, model, blocks, device, precision, the rule of clipping but for C), and how
    often and for how much (rounds, local steps, participation, batch), so that all end at about the same time. Method, rates,
    sigma, C, budget, seed and evaluation are the run's own.
    """
    data, privacy, run = config.data, config.privacy, config.run
    grouped = data.unit_column is not None  # not record by record
    split = run.fleet_size != "auto"
    beside = (
        run.diagnostics or run.trackers or run.checkpoint_every
    )  # others at work in this process, or on its device
    alone = privacy.isolation == "exact"
    if grouped or split or beside or alone or privacy.grid is True or run.noise == "os":
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
    drawn = run.seed if seeded else None  # frozen weights that follow from the seed: another model
    asked = (
        run.rounds,
        run.local_steps,
        run.participation,
        privacy.batch,
        privacy.rate,
        privacy.batch_per_client,
    )
    clipping = (privacy.clip_mode, privacy.clip_stability) if privacy.enabled else ("flat", None)
    return repr((data, config.model, drawn, blocks, clipping, computed, asked))


class Pack:
    """So many runs side by side. Each is given a `Place`, and all of them are waited for until they leave it."""

    def __init__(self, runs: int, shared: JobCache | None = None) -> None:
        self.shared = shared or JobCache()
        self._runs, self._lock = runs, threading.Lock()
        self._gone: set[int] = set()
        self._first: Job | None = None
        self._sum: BatchedSums | None = None

    def place(self, number: int) -> BatchedRun:
        return BatchedRun(self, number)

    def join_batch(self, job: Job, number: int) -> BatchedSum:
        with self._lock:
            if self._sum is None:
                self._first, self._sum = (
                    job,
                    BatchedSums(self._runs, job.schedule.cohort, self._union),
                )
                for gone in self._gone:
                    self._sum.leave(gone)
            assert self._first is not None
            if not together(self._first, job):
                raise UnbatchableError
            return self._sum.batched_sum(number)

    def leave(self, number: int) -> None:
        with self._lock:
            self._gone.add(number)
            shared = self._sum
        if (
            shared is not None
        ):  # outside the lock: whoever leaves last may have to compute for the others
            shared.leave(number)

    def end(self) -> None:
        """Lets go of what its runs had in common: whoever runs by itself needs the room."""
        self._first = self._sum = None
        self.shared.clear()

    def _union(self, runs: int) -> FixedSum:
        """The fixed sum of so many runs, or of as many as find room on the GPU."""
        job = self._first
        assert job is not None
        cohort, device = job.schedule.cohort, job.device
        if device.type == "cuda":
            runs = most_that_fit(runs, lambda n: fits(job, n * cohort, union_slots(job, n)))
            torch.cuda.empty_cache()
        return FixedSum(
            job.model,
            job.records,
            job.plan.clipping,
            job.view,
            PassShape(runs * cohort, union_slots(job, runs), job.space.size),
            capture=job.config.run.graphs is not False,
        )


class BatchedRun:
    """One run's place in a pack."""

    def __init__(self, pack: Pack, number: int) -> None:
        self._pack, self._number = pack, number

    @property
    def shared(self) -> JobCache:
        return self._pack.shared

    def join_batch(self, job: Job) -> BatchedSum:
        return self._pack.join_batch(job, self._number)

    def leave(self) -> None:
        self._pack.leave(self._number)


def together(one: Job, other: Job) -> bool:
    """Whether one pass can serve both: the very same model and records, which equal settings alone do not promise."""
    rules, keys = (
        (one.plan.clipping, other.plan.clipping),
        (pack_key(one.config), pack_key(other.config)),
    )
    return (
        one.model is other.model
        and one.records is other.records
        and one.schedule.cohort == other.schedule.cohort
        and rules[0].mode == rules[1].mode
        and rules[0].stability == rules[1].stability
        and (one.view is None) == (other.view is None)
        and keys[0] is not None
        and keys[0] == keys[1]
    )


def union_slots(job: Job, runs: int) -> int:
    """Slots of a pass for so many runs like this one: fewer than theirs together, as large batches meet small ones."""
    cohort, given = job.schedule.cohort, job.config.run.slots
    if given != "auto":
        return given * runs
    if runs == 1:
        return slots_of(job, cohort)
    return slots_for(runs * float(job.plan.expected.mean()) * cohort)


def run_batched(
    tasks: Sequence[Callable[[BatchedRun | None], Answer]],
    shared: JobCache | None = None,
    ended: Callable[[int, Answer], None] = lambda number, answer: None,
) -> list[Answer]:
    """Runs every task in a thread of its own, with a place in one pack; those that do not fit in run alone afterwards.

    A task calls `engine.run.run` with the place it is given and lets `UnpackableError` pass; it is then called again
    without one, and finds nothing of the first attempt. `ended` is told of each answer as it comes, by one thread at a time.
    """
    pack, telling = Pack(len(tasks), shared), threading.Lock()
    answers: dict[int, Answer] = {}
    errors: dict[int, BaseException] = {}

    def work(number: int) -> None:
        place = pack.place(number)
        try:
            answer = tasks[number](place)
            with telling:
                answers[number] = answer
                ended(number, answer)
        except UnbatchableError as error:
            errors[number] = error.with_traceback(None)  # which would hold the run's model
        except BaseException as error:  # raised again below, in the thread that waits
            errors[number] = error
        finally:
            place.leave()

    threads = [
        threading.Thread(target=work, args=(i,), name=f"dpfed-run-{i}", daemon=True)
        for i in range(len(tasks))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, error in sorted(errors.items()):
        if not isinstance(error, UnbatchableError):
            raise error
    if errors:
        pack.end()
    for number in sorted(errors):
        answers[number] = tasks[number](None)
        ended(number, answers[number])
    return [answers[number] for number in range(len(tasks))]


def pack_size(asked: str, gpus: int) -> int:
    """How many runs a worker is given at once: `auto` is 16 on a GPU (fewer share a pass where that many do not fit)."""
    if asked == "auto":
        return MOST if gpus else 1
    if not (asked.isascii() and asked.isdigit() and int(asked) > 0):
        raise DpfedError(f"--pack {asked} must be a whole number of runs, at least 1, or auto")
    return int(asked)
