"""Group the runs of a study into packs: runs that one worker process computes together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dpfed.config import Registry, build
from dpfed.studies.outcomes import Task
from dpfed.training.backends.batched_runs import pack_key


class Packing(NamedTuple):
    """Limits for packs (groups of runs that one worker process computes together).

    most     largest number of runs in a pack
    workers  number of worker processes among which all runs are divided
    """

    most: int = 1
    workers: int = 1


ALONE = Packing()


def packs_of(tasks: Sequence[Task], packing: Packing, registry: Registry) -> list[list[Task]]:
    """Return the tasks, divided into packs (groups of runs that one worker computes together).

    All runs of a pack can share forward and backward passes. If there are enough tasks, packs are
    small enough for every worker to get one.
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
