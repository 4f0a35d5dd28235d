"""Group the runs of a study into packs. One worker computes the runs of a pack together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dpfed.config import Registry, build
from dpfed.studies.outcomes import Task
from dpfed.training.backends.batched_runs import pack_key


class Packing(NamedTuple):
    """The largest number of tasks in a pack, and the number of workers that share all tasks."""

    most: int = 1
    workers: int = 1


ALONE = Packing()


def packs_of(tasks: Sequence[Task], packing: Packing, registry: Registry) -> list[list[Task]]:
    """Return the tasks, divided into packs of runs that can share passes.

    Packs are kept small so that every worker gets a pack, if there are enough tasks.
    """
    if packing.most == 1:
        return [[task] for task in tasks]
    kinds: dict[Any, list[Task]] = {}
    for task in tasks:
        key = pack_key(build(task.tables, registry))
        kinds.setdefault(task.key if key is None else ("pack", key), []).append(task)
    packs = []
    for kind in kinds.values():
        count = max(-(-len(kind) // packing.most), min(packing.workers, len(kind)))
        size = -(-len(kind) // count)
        packs += [kind[i : i + size] for i in range(0, len(kind), size)]
    return packs
