"""Worker processes that stay alive between runs, so that each imports its libraries once.

A worker receives configurations, trains with each, and writes the results into the run's folder.
For each run it answers None, or a sentence that names the failure. Configurations in one message
are a pack: the worker computes their runs together.
If a worker dies while it computes a pack, the pool repeats its unfinished runs one by one. Workers
end with their parent process: otherwise, they would write into the folders of a resumed study.
Workers print nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dpfed.errors import DpfedError, StoppedError
from dpfed.studies.outcomes import Task, clear

if TYPE_CHECKING:
    from dpfed.config import Config
    from dpfed.data.tables import Source
    from dpfed.training.backends.batched_runs import BatchedRun
    from dpfed.training.job.job_cache import JobCache


# If the text of an error begins with this string, the process can no longer use the GPU.
BROKEN = "CUDA error"
STDOUT_AND_STDERR = (1, 2)
WAIT_FOR_EXIT_S = 5


Request = tuple[str, Mapping[str, Any], str, bool]
"""The request to run: key, configuration, folder, and True for a run of the search."""


class Pool:
    """Worker processes that compute runs in parallel.

    Call `start` or `start_pack` as long as `free()` is True, then `wait` for a result.
    """

    def __init__(self, workers: int, gpus: int = 0) -> None:
        self.workers = workers
        self._gpus = gpus
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[Worker] = []
        # Busy workers, by the key of the first run that the worker was given.
        self._busy: dict[str, Worker] = {}
        # Runs to repeat, because their worker died while it computed several runs together.
        self._repeat: deque[tuple[Task, Path]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in [*self._idle, *self._busy.values()]:
            worker.end()

    def free(self) -> bool:
        return len(self._busy) < self.workers and not self._repeat

    def start(self, task: Task, folder: Path) -> None:
        self.start_pack([(task, folder)])

    def start_pack(self, pack: Sequence[tuple[Task, Path]]) -> None:
        """Give several runs to one worker, which computes them together."""
        if not self._idle:
            taken = {worker.number for worker in self._busy.values()}
            number = next(i for i in range(self.workers) if i not in taken)
            self._idle.append(Worker(self._context, number, visible_gpu(number, self._gpus)))
        worker = self._idle.pop()
        worker.give(pack)
        self._busy[pack[0][0].key] = worker

    def wait(self) -> tuple[str, str | None]:
        """Wait until a run ends. Return its key, and None or a sentence about its failure."""
        while True:
            while self._repeat and len(self._busy) < self.workers:
                task, folder = self._repeat.popleft()
                clear(folder)
                self.start(task, folder)
            ready = wait([worker.connection for worker in self._busy.values()])
            first, worker = next(item for item in self._busy.items() if item[1].connection in ready)
            try:
                key, answer = worker.connection.recv()
            except (EOFError, OSError):
                del self._busy[first]
                why = worker.obituary()
                if not worker.packed:
                    return first, why
                self._repeat.extend(worker.unanswered.values())
                continue
            del worker.unanswered[key]
            if not worker.unanswered:
                del self._busy[first]
                if answer is not None and BROKEN in answer:
                    worker.end()
                else:
                    self._idle.append(worker)
            return key, answer


class Worker:
    """A worker process of the pool, and the connection to it."""

    def __init__(self, context: Any, number: int, gpu: str | None) -> None:
        self.number = number
        self.unanswered: dict[str, tuple[Task, Path]] = {}
        self.packed = False
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, gpu), daemon=True)
        # Let the worker process ignore Ctrl-C, a setting that it inherits. Ctrl-C then stops only
        # the parent process, which ends the workers.
        with _ctrl_c_ignored():
            self._process.start()
        theirs.close()

    def give(self, pack: Sequence[tuple[Task, Path]]) -> None:
        self.unanswered = {task.key: (task, folder) for task, folder in pack}
        self.packed = len(pack) > 1
        requests = [(t.key, dict(t.tables), str(folder), t.tuning) for t, folder in pack]
        # Ignore a failed send: `Pool.wait` notices a process that has died.
        with contextlib.suppress(OSError):
            self.connection.send(requests)

    def obituary(self) -> str:
        """Clean up after a dead worker process, and return a sentence about why it died."""
        self._process.join(WAIT_FOR_EXIT_S)
        code = self._process.exitcode
        self.end()
        why = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"its process ended ({why}), which is often a lack of memory: try fewer --workers"

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.join(WAIT_FOR_EXIT_S)


def visible_gpu(number: int, gpus: int) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES for the worker `number`, which gets one GPU.

    Return None if there are fewer than two GPUs.
    """
    if gpus < 2:
        return None
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(i) for i in range(gpus)])[number % gpus]


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


def work(connection: Connection, gpu: str | None) -> None:
    """Receive packs (runs to compute together) and compute them until the connection closes.

    This is the main function of a worker process.

    gpu  the only GPU that the worker may use; None for no restriction
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in STDOUT_AND_STDERR:
        os.dup2(silent, stream)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from dpfed.training.job.job_cache import JobCache

    # Use one thread per process, so that results do not depend on the number of cores.
    torch.set_num_threads(1)
    sources: dict[Any, Any] = {}
    cache = JobCache()
    while True:
        try:
            pack = connection.recv()
        except EOFError:
            return
        run_pack(pack, sources, cache, lambda key, answer: connection.send((key, answer)))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def run_pack(
    pack: Sequence[Request],
    sources: dict[Any, Any],
    cache: JobCache,
    on_end: Callable[[str, str | None], None],
) -> None:
    """Compute a pack: several runs together, or a single run by itself.

    sources  loaded data, by their configuration; they stay loaded for the next pack
    cache    objects that the previous pack has prepared, such as the model
    on_end   receives the key of each ended run, and None or a sentence about its failure
    """
    from dpfed.training.backends.batched_runs import run_batched

    def job(request: Request) -> Callable[[BatchedRun | None], str | None]:
        _, tables, folder, tuning = request
        return lambda place: run_one(tables, Path(folder), tuning, sources, place)

    key, tables, folder, tuning = pack[0]
    cache.only_for(cache_purpose(tables))
    if len(pack) > 1:
        run_batched(
            [job(request) for request in pack], cache, lambda i, said: on_end(pack[i][0], said)
        )
        return
    # If only a head is trained, keep the cache with the features that the frozen layers computed.
    # Computing these features takes longer than training a head.
    keeps_features = tables.get("model", {}).get("train") == "head"
    if not keeps_features:
        cache.clear()
    kept = cache if keeps_features else None
    on_end(key, run_one(tables, Path(folder), tuning, sources, cache=kept))


def cache_purpose(tables: Mapping[str, Any]) -> str:
    """Return a string that is equal for all runs that can use the same cached objects.

    Cached objects, such as the model, depend on the data, model, device and precision of a run.
    """
    run = tables.get("run", {})
    return repr((tables.get("data"), tables.get("model"), run.get("device"), run.get("precision")))


def _source_of(config: Config, sources: dict[Any, Any]) -> Source:
    """Return the data of a run: those in `sources` if they are there, else load them."""
    from dpfed.training.job.data import configured_source, label_task

    key = (config.data, label_task(config.model))
    if key not in sources:
        # Keep only one data set in memory, because data sets may be large.
        sources.clear()
        sources[key] = configured_source(config.data, config.model)
    found: Source = sources[key]
    return found


def run_one(
    tables: Mapping[str, Any],
    folder: Path,
    tuning: bool,
    sources: dict[Any, Any],
    place: BatchedRun | None = None,
    cache: JobCache | None = None,
) -> str | None:
    """Compute the run of one configuration. Return None, or a sentence that names the failure.

    A run that stopped early has not failed, because it has written its results.

    sources  loaded data, by their configuration
    place    connects the run with other runs that are computed together; None for a single run
    cache    objects that an earlier run has prepared, such as the model; None to prepare all anew
    """
    from dpfed.config import build
    from dpfed.privacy.oracle import out_of_memory
    from dpfed.registry import registry
    from dpfed.training.backends.batched_runs import UnbatchableError
    from dpfed.training.backends.execution import InProcess
    from dpfed.training.run import run
    from dpfed.training.run_folder.files import MODEL

    try:
        config = build(tables, registry())
        with place.shared.lock if place else contextlib.nullcontext():
            source = _source_of(config, sources)
        with contextlib.suppress(StoppedError):
            execution = InProcess(cache=cache, batch=place)
            run(config, folder, source=source, execution=execution)
        if tuning:
            (folder / MODEL).unlink(missing_ok=True)
        return None
    except DpfedError as error:
        return str(error)
    except Exception as error:
        if place is not None and str(error).startswith(BROKEN):
            # End this worker process, because it can no longer use the GPU. The pool then repeats
            # its runs one by one in another worker.
            raise
        if place is None or not (isinstance(error, UnbatchableError) or out_of_memory(error)):
            return _defect(error)
    # Remove the files of this attempt, because the run is repeated alone from its beginning.
    clear(folder)
    # Raise this error only after the `except` block. Inside the block it would refer to the first
    # error, whose traceback keeps the model in memory.
    raise UnbatchableError


def _defect(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    detail = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {detail} ({Path(where.filename).name}, line {where.lineno})"


def default_workers(device: str) -> tuple[int, int]:
    """Return the number of workers and of GPUs: one worker per GPU, without GPUs one per core."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 1
        return gpus, gpus
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)), 0
    return os.cpu_count() or 1, 0
