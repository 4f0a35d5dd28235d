"""One run on several processes, on one machine or many: `torchrun ... dpfed run`.

Every process builds the same job. Rank 0 leads: it alone has ledger, checkpoints, metrics, evaluation and output, and
runs the one round loop. The others follow. A round is

    rank 0 -> all      header (command, round, cohort size, clip norm), the cohort, what the algorithm broadcasts
    rank 0 -> rank r   what the clients of rank r remember, for algorithms with a memory
    every rank         its share of the cohort, clients[r::W], as a fleet
    all -> all         the sum of the weighted messages (all-reduce), in float32
    rank r -> rank 0   what its clients remember now

Clients' memory stays with rank 0. Were it kept where it is used, cohorts would have to be split by owner, so unevenly, and
a checkpoint would have to collect it all the same; so a run may also go on with another number of processes. Streams are
named by round and client, not by process, so with seeded noise the result is that of one process up to the order of
additions. With `noise = "os"` rank 0 draws the cohort, and every process draws batches and noise of its own clients
from its own entropy. Nothing is pickled: what travels is whole numbers and flat tensors.
"""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpfed.algorithms.base import Message
from dpfed.config import Config
from dpfed.errors import DpfedError, StoppedError
from dpfed.model.model_hash import model_hash
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job.job import Job
from dpfed.training.round_loop import first_state
from dpfed.training.server_state import State

STOP, AGREE, ROUND = 0, 1, 2
HEADER = 5
# Followers wait for rank 0's next word while it evaluates and writes. Should it die, its connections close at once.
# Rank 0 has no reason to be as patient: gloo sends a word only when the other asks for it, and one that is frozen never does.
PATIENCE = timedelta(days=7)
GO_ON = "start it again with --resume and it goes on from its last checkpoint"


class Group:
    """The processes of a run. All of them make the same calls in the same order."""

    def __init__(
        self, rank: int, world: int, timeout: int, backend: str = "gloo", init: str = "env://"
    ) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.broken = False  # some process is gone, or is in the middle of a round: there is no more talking to them
        wait = timedelta(seconds=timeout)
        try:
            dist.init_process_group(
                backend, init_method=init, rank=rank, world_size=world, timeout=wait
            )
            self._control = dist.new_group(backend="gloo", timeout=PATIENCE if rank else wait)
        except (RuntimeError, ValueError) as error:
            raise DpfedError(
                f"the {world} processes of the run did not find one another in {timeout} seconds "
                f"({str(error).splitlines()[0]}): start all of them by torchrun, or raise run.timeout"
            ) from None

    @contextmanager
    def reaching(self, what: str) -> Iterator[None]:
        """A process that is gone, or late, is one sentence."""
        try:
            yield
        except RuntimeError as error:
            self.broken = True
            raise StoppedError(
                f"while {what} another process of the run was lost or took longer than run.timeout = {self.timeout} "
                f"seconds: {GO_ON}"
            ) from error

    def header(self, *words: int) -> list[int]:
        """What to do next: said by rank 0, heard by the others."""
        numbers = torch.tensor([*words] + [0] * (HEADER - len(words)), dtype=torch.int64)
        with self.reaching("agreeing on the next step"):
            dist.broadcast(numbers, src=0, group=self._control)
        return [int(x) for x in numbers]

    def agree(self, mine: str, theirs: Sequence[int]) -> None:
        """All processes must have built the same job; a wrong one stops all of them."""
        same = torch.tensor([int(list(theirs) == words_of(mine))], dtype=torch.int64)
        with self.reaching("comparing jobs"):
            dist.all_reduce(same, op=dist.ReduceOp.MIN, group=self._control)
        if not int(same):
            self.broken = True
            raise DpfedError(
                "the processes of the run have different settings, data, weights or versions: give all machines the same"
            )

    def broadcast(self, flat: Tensor) -> None:
        with self.reaching("sending the server's state"):
            dist.broadcast(flat, src=0)

    def total(self, flat: Tensor) -> None:
        with self.reaching("summing messages"):
            dist.all_reduce(flat)

    def send(self, rows: Tensor, to: int) -> None:
        with self.reaching("moving clients' memory"):
            dist.send(rows.contiguous(), to)

    def receive(self, rows: Tensor, source: int) -> None:
        with self.reaching("moving clients' memory"):
            dist.recv(rows, source)

    def close(self) -> None:
        """Rank 0 lets the others go, however its run has ended."""
        if self.broken:
            return  # a group that has lost someone cannot be taken down in order; the end of the process does it
        if self.rank == 0:
            with suppress(DpfedError):
                self.header(STOP)
        dist.destroy_process_group()

    def stop_on_sigterm(self) -> None:
        """torchrun sends it to all when one has died: rank 0 then still has time to write down what it has."""

        def told(signum: int, frame: FrameType | None) -> None:
            if not self.broken:
                self.broken = True
                raise StoppedError(
                    f"the run was told to stop, by torchrun when another process was lost: {GO_ON}"
                )

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, told)


def join(config: Config) -> Group | None:
    """The group that torchrun has made of this process and others; None where there is only this one."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world <= 1:
        return None
    if not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise DpfedError(
            f"WORLD_SIZE = {world} without RANK, MASTER_ADDR and MASTER_PORT: start the run by torchrun"
        )
    rank, device = int(os.environ["RANK"]), config.run.device
    if config.run.diagnostics:
        raise DpfedError(
            "run.diagnostics reads the clients' states in one process: leave it out, or leave out torchrun"
        )
    if device.startswith("cuda:"):
        raise DpfedError(
            f'run.device = "{device}" would put all processes on one GPU: use "cuda" or "auto"'
        )
    backend = "gloo"
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        local = int(os.environ.get("LOCAL_RANK", rank))
        if local >= torch.cuda.device_count():
            raise DpfedError(
                f"process {local} of this machine has no GPU: start as many as it has GPUs"
            )
        torch.cuda.set_device(local)
        os.environ.setdefault(
            "TORCH_NCCL_BLOCKING_WAIT", "1"
        )  # a lost process is an error here, not the end of us
        backend = "cpu:gloo,cuda:nccl"
    group = Group(rank, world, config.run.timeout, backend)
    if rank == 0:
        group.stop_on_sigterm()
    return group


def agree(job: Job, group: Group) -> None:
    """Rank 0 asks whether all have the same job, before anything is written or released."""
    digest = fingerprint(job)
    group.agree(digest, group.header(AGREE, *words_of(digest))[1:])


class Distributed:
    """The backend that computes a cohort on all processes; rank 0 has it."""

    def __init__(self, job: Job, group: Group, memory: ClientStates) -> None:
        self._job, self._group, self._fleet = job, group, Fleet(job, memory)

    def run_cohort(
        self,
        t: int,
        state: State,
        clients: Sequence[int],
        wait_for_charge: Callable[[], None] = lambda: None,
    ) -> tuple[Message, int]:
        wait_for_charge()  # the others cannot see the ledger
        group = self._group
        group.header(ROUND, t, len(clients), struct.unpack("<q", struct.pack("<d", state.clip))[0])
        try:
            return self._together(t, state, clients), len(clients)
        except BaseException:
            group.broken = True  # the others wait in the middle of a round
            raise

    def _together(self, t: int, state: State, clients: Sequence[int]) -> Message:
        job, group, memory = self._job, self._group, self._fleet.memory
        names = job.algorithm.remembers
        group.broadcast(torch.tensor(clients, dtype=torch.int64, device=job.device))
        group.broadcast(packed(sent(job, state)))
        others = [
            (r, part) for r in range(1, group.world) if (part := list(clients[r :: group.world]))
        ]
        for r, part in others if names else []:
            held = memory.gather(part, torch.device("cpu"))
            group.send(held["seen"].to(torch.int64), r)
            group.send(torch.stack([held[name] for name in names], dim=1), r)
        mine = list(clients[:: group.world])
        message = self._fleet.weighted_sum(
            t, state, mine, self._fleet.weights(clients)[:: group.world]
        )
        flat = torch.cat([value.reshape(-1) for value in message.values()])
        group.header(flat.numel())
        group.total(flat)
        for r, part in others if names else []:
            rows = torch.empty(len(part), len(names), job.space.size)
            group.receive(rows, r)
            memory.put(t, part, {name: rows[:, j] for j, name in enumerate(names)})
        pieces = torch.split(flat, [value.numel() for value in message.values()])
        return {
            name: x.reshape(message[name].shape) for name, x in zip(message, pieces, strict=True)
        }


def follow(job: Job, group: Group) -> None:
    """Every rank but 0: does its share of each round until it is told to stop."""
    fleet, first = Fleet(job), first_state(job)
    while True:
        command, *words = group.header()
        if command == STOP:
            return
        if command == AGREE:
            group.agree(fingerprint(job), words)
        else:
            t, count, clip = words[0], words[1], struct.unpack("<d", struct.pack("<q", words[2]))[0]
            _share(job, group, fleet, first, t, count, clip)


def _share(
    job: Job, group: Group, fleet: Fleet, first: State, t: int, count: int, clip: float
) -> None:
    names, size = job.algorithm.remembers, job.space.size
    cohort = torch.empty(count, dtype=torch.int64, device=job.device)
    group.broadcast(cohort)
    clients = cohort.tolist()
    wanted = sent(job, first)
    flat = torch.empty_like(packed(wanted))
    group.broadcast(flat)
    state = first.with_tensors({**first.tensors(), **unpacked(flat, wanted)}, clip)
    part = clients[group.rank :: group.world]
    fleet.memory = ClientStates(names, size, Path(), int(1e18))  # lent for this round
    if names and part:
        seen, rows = (
            torch.empty(len(part), dtype=torch.int64),
            torch.empty(len(part), len(names), size),
        )
        group.receive(seen, 0)
        group.receive(rows, 0)
        known = seen.bool()
        before = [i for i, had in zip(part, known.tolist(), strict=True) if had]
        fleet.memory.put(t - 1, before, {name: rows[known, j] for j, name in enumerate(names)})
    message: Message = {}
    if part:
        message = fleet.weighted_sum(
            t, state, part, fleet.weights(clients)[group.rank :: group.world]
        )
    numbers = group.header()[0]  # a process without clients has no message to learn the length from
    sums = (
        torch.cat([x.reshape(-1) for x in message.values()])
        if part
        else torch.zeros(numbers, device=job.device)
    )
    group.total(sums)
    if names and part:
        held = fleet.memory.gather(part, torch.device("cpu"))
        group.send(torch.stack([held[name] for name in names], dim=1), 0)


def sent(job: Job, state: State) -> dict[str, Tensor]:
    """The part of the server's state that clients read."""
    tensors = state.tensors()
    return {name: tensors[name] for name in job.algorithm.broadcast}


def packed(tensors: Mapping[str, Tensor]) -> Tensor:
    """All tensors as one row of bytes: one message, whatever their types."""
    return torch.cat(
        [x.detach().reshape(-1).contiguous().view(torch.uint8) for x in tensors.values()]
    )


def unpacked(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The opposite of `packed`, by the shapes and types of `like`."""
    pieces = torch.split(flat, [x.numel() * x.element_size() for x in like.values()])
    return {
        name: piece.clone().view(x.dtype).reshape(x.shape)
        for (name, x), piece in zip(like.items(), pieces, strict=True)
    }


def fingerprint(job: Job) -> str:
    """A hash of all that a client's message follows from: settings, records and who holds them, weights."""
    from dpfed.training.run import (
        follows_from,
    )  # the run knows what may differ, and calls this module

    found = hashlib.sha256(repr(follows_from(job)).encode())
    found.update(model_hash(job.adapted.model, job.space).encode())
    # Features differ between processes by rounding, so the inputs before them are compared.
    inputs = job.records.inputs if job.raw_inputs is None else job.raw_inputs
    arrays: list[Any] = [job.shards.records, job.theta, job.records.labels, *inputs.values()]
    for x in arrays:
        tensor = (
            torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x.detach()
        )
        found.update(tensor.reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def words_of(digest: str) -> list[int]:
    return list(struct.unpack("<4q", bytes.fromhex(digest)))
