"""Worker processes that stay alive between runs, so that imports are paid once. They print nothing.

A worker takes a configuration, runs it into its folder and answers with nothing or a sentence that says what went wrong.
One that dies takes only its own run with it. Workers end with their parent, however that ends: a run that went on
alone would write into a folder that the next start has given to another.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from dpfed.compare.outcomes import Task
from dpfed.errors import DpfedError, StoppedError


class Pool:
    """`start` a task while one is `free`, `wait` for the next to end."""

    def __init__(self, workers: int, gpus: int = 0) -> None:
        self.workers, self._gpus = workers, gpus
        self._context = multiprocessing.get_context("spawn")
        self._idle: list[Worker] = []
        self._busy: dict[str, Worker] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for worker in [*self._idle, *self._busy.values()]:
            worker.end()

    def free(self) -> bool:
        return len(self._busy) < self.workers

    def start(self, task: Task, folder: Path) -> None:
        if not self._idle:
            taken = {worker.place for worker in self._busy.values()}
            place = next(i for i in range(self.workers) if i not in taken)
            self._idle.append(Worker(self._context, place, visible_gpu(place, self._gpus)))
        worker = self._idle.pop()
        worker.give(task, folder)
        self._busy[task.key] = worker

    def wait(self) -> tuple[str, str | None]:
        """(key, None or what went wrong) of a run that has ended."""
        ready = wait([worker.connection for worker in self._busy.values()])
        key, worker = next(item for item in self._busy.items() if item[1].connection in ready)
        del self._busy[key]
        try:
            answer: str | None = worker.connection.recv()
        except (EOFError, OSError):
            return key, worker.obituary()
        self._idle.append(worker)
        return key, answer


class Worker:
    def __init__(self, context: Any, place: int, gpu: str | None) -> None:
        self.place = place
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, gpu), daemon=True)
        with _ctrl_c_ignored():  # inherited: Ctrl-C is for the parent, who ends its workers
            self._process.start()
        theirs.close()

    def give(self, task: Task, folder: Path) -> None:
        with contextlib.suppress(OSError):  # it has died since: `wait` will find out
            self.connection.send((dict(task.tables), str(folder), task.tuning))

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

    torch.set_num_threads(1)  # one per process: sums then do not depend on how many cores there are
    sources: dict[Any, Any] = {}
    while True:
        try:
            tables, folder, tuning = connection.recv()
        except EOFError:
            return
        connection.send(run_one(tables, Path(folder), tuning, sources))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def run_one(tables: Mapping[str, Any], folder: Path, tuning: bool, sources: dict[Any, Any]) -> str | None:
    """One run; a run that stopped has left its results, so that is no failure."""
    from dpfed.config import build
    from dpfed.engine.folder import MODEL
    from dpfed.engine.run import run
    from dpfed.registry import registry

    try:
        config = build(tables, registry())
        loader: Any = config.data
        if loader not in sources:
            sources.clear()  # one at a time: data may be large
            sources[loader] = loader.load()
        with contextlib.suppress(StoppedError):
            run(config, folder, source=sources[loader])
        if tuning:
            (folder / MODEL).unlink(missing_ok=True)
        return None
    except DpfedError as error:
        return str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = str(error).splitlines()[0] if str(error) else ""
        return f"{type(error).__name__}: {detail} ({Path(where.filename).name}, line {where.lineno})"


def default_workers(device: str) -> tuple[int, int]:
    """(workers, GPUs): one process per GPU where runs are computed on GPUs, else one per core."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 1
        return gpus, gpus
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, 0
