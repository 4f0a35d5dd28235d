"""Worker processes that stay alive between runs, so that imports are paid once. They print nothing.

A worker takes configurations, runs them into their folders and answers for each with nothing or a sentence that says what
went wrong. Several are a pack, computed together (engine/packed.py). A worker that dies takes only its own run with it; the
runs of a pack that it has not answered for are then done one by one. Workers end with their parent, however that ends: a
run that went on alone would write into a folder that the next start has given to another.
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
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dpfed.errors import DpfedError, StoppedError
from dpfed.studies.outcomes import Task, clear

if TYPE_CHECKING:
    from dpfed.training.backends.batched_runs import BatchedRun
    from dpfed.training.job.job_cache import JobCache


BROKEN = "CUDA error"  # after which everything on the device fails in this process, whatever run it is of


class Pool:
    """`start` a task while one is `free`, `wait` for the next to end."""

    def __init__(self, workers: int, gpus: int = 0) -> None:
        self.workers, self._gpus = workers, gpus
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[Worker] = []
        self._busy: dict[str, Worker] = {}  # by the first run of what it was given
        self._again: deque[tuple[Task, Path]] = deque()  # runs whose pack has died

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for worker in [*self._idle, *self._busy.values()]:
            worker.end()

    def free(self) -> bool:
        return len(self._busy) < self.workers and not self._again

    def start(self, task: Task, folder: Path) -> None:
        self.start_pack([(task, folder)])

    def start_pack(self, pack: Sequence[tuple[Task, Path]]) -> None:
        """Several runs for one worker, computed together."""
        if not self._idle:
            taken = {worker.place for worker in self._busy.values()}
            place = next(i for i in range(self.workers) if i not in taken)
            self._idle.append(Worker(self._context, place, visible_gpu(place, self._gpus)))
        worker = self._idle.pop()
        worker.give(pack)
        self._busy[pack[0][0].key] = worker

    def wait(self) -> tuple[str, str | None]:
        """(key, None or what went wrong) of a run that has ended."""
        while True:
            while self._again and len(self._busy) < self.workers:
                task, folder = self._again.popleft()
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
                self._again.extend(worker.owes.values())
                continue
            del worker.owes[key]
            if not worker.owes:
                del self._busy[first]
                if answer is not None and BROKEN in answer:
                    worker.end()
                else:
                    self._idle.append(worker)
            return key, answer


class Worker:
    def __init__(self, context: Any, place: int, gpu: str | None) -> None:
        self.place = place
        self.owes: dict[str, tuple[Task, Path]] = {}  # runs that it has not answered for
        self.packed = False
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, gpu), daemon=True)
        with _ctrl_c_ignored():  # inherited: Ctrl-C is for the parent, who ends its workers
            self._process.start()
        theirs.close()

    def give(self, pack: Sequence[tuple[Task, Path]]) -> None:
        self.owes, self.packed = {task.key: (task, folder) for task, folder in pack}, len(pack) > 1
        with contextlib.suppress(OSError):  # it has died since: `wait` will find out
            self.connection.send(
                [(task.key, dict(task.tables), str(folder), task.tuning) for task, folder in pack]
            )

    def obituary(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        self.end()
        why = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return f"its process ended ({why}), which is often a lack of memory: try fewer --workers"

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.join(5)


def visible_gpu(place: int, gpus: int) -> str | None:
    """With several GPUs each worker sees one."""
    if gpus < 2:
        return None
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (named or [str(i) for i in range(gpus)])[place % gpus]


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
    """The life of a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from dpfed.training.job.job_cache import JobCache

    torch.set_num_threads(1)  # one per process: sums then do not depend on how many cores there are
    sources: dict[Any, Any] = {}
    shared = JobCache()
    while True:
        try:
            pack = connection.recv()
        except EOFError:
            return
        run_pack(pack, sources, shared, lambda key, answer: connection.send((key, answer)))


Given = tuple[str, Mapping[str, Any], str, bool]
"""(key, tables, folder, tuning) of a run."""


def run_pack(
    pack: Sequence[Given],
    sources: dict[Any, Any],
    shared: JobCache,
    ended: Callable[[str, str | None], None],
) -> None:
    """The runs of a pack side by side; one run as it always was. `ended` is told of each as it ends."""
    from dpfed.training.backends.batched_runs import run_batched

    def task(given: Given) -> Callable[[BatchedRun | None], str | None]:
        _, tables, folder, tuning = given
        return lambda place: run_one(tables, Path(folder), tuning, sources, place)

    key, tables, folder, tuning = pack[0]
    shared.only_for(purpose_of(tables))
    if len(pack) == 1:
        head_alone = (
            tables.get("model", {}).get("train") == "head"
        )  # whose features take longer than its rounds
        if not head_alone:
            shared.clear()
        ended(
            key,
            run_one(tables, Path(folder), tuning, sources, shared=shared if head_alone else None),
        )
    else:
        run_batched(
            [task(given) for given in pack], shared, lambda i, answer: ended(pack[i][0], answer)
        )


def purpose_of(tables: Mapping[str, Any]) -> str:
    """Of what a worker keeps between runs: the data, the model, and where and how precisely it computes."""
    run = tables.get("run", {})
    return repr((tables.get("data"), tables.get("model"), run.get("device"), run.get("precision")))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def run_one(
    tables: Mapping[str, Any],
    folder: Path,
    tuning: bool,
    sources: dict[Any, Any],
    place: BatchedRun | None = None,
    shared: JobCache | None = None,
) -> str | None:
    """One run; a run that stopped has left its results, so that is no failure. `place`: among runs computed together;
    `shared`: what the run before it has left, for a run by itself."""
    from dpfed.config import build
    from dpfed.privacy.oracle import out_of_memory
    from dpfed.registry import registry
    from dpfed.training.backends.batched_runs import UnbatchableError
    from dpfed.training.backends.execution import InProcess
    from dpfed.training.run import run
    from dpfed.training.run_folder.files import MODEL

    try:
        config = build(tables, registry())
        loader: Any = config.data
        with place.shared.lock if place else contextlib.nullcontext():
            if loader not in sources:
                sources.clear()  # one at a time: data may be large
                sources[loader] = loader.load()
        with contextlib.suppress(StoppedError):
            execution = InProcess(cache=shared, batch=place)
            run(config, folder, source=sources[loader], execution=execution)
        if tuning:
            (folder / MODEL).unlink(missing_ok=True)
        return None
    except DpfedError as error:
        return str(error)
    except Exception as error:
        if place is not None and str(error).startswith(BROKEN):
            raise  # the process ends of it, and the pool does the runs of the pack one by one
        crowded = place is not None and (
            isinstance(error, UnbatchableError) or out_of_memory(error)
        )
        if not crowded:
            return _defect(error)
    clear(folder)  # a seeded simulation, done again from its beginning
    raise UnbatchableError  # outside the handler, as the first error would hold the run's model


def _defect(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    detail = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {detail} ({Path(where.filename).name}, line {where.lineno})"


def default_workers(device: str) -> tuple[int, int]:
    """(workers, GPUs): one process per GPU where runs are computed on GPUs, else one per core."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 1
        return gpus, gpus
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return cores, 0
