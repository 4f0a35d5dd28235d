"""Train one run on several processes, on one machine or many, started by `torchrun ... dpfed run`.

Every process builds the same job. Rank 0 runs the round loop; it alone has the ledger, checkpoints,
metrics and evaluation. A round on W processes has these steps:

    rank 0 -> all      header (integers: command, round, cohort size, clip norm); cohort; state
    rank 0 -> rank r   the stored vectors of rank r's clients, if the algorithm stores vectors
    every rank         compute every W-th client of the cohort: clients[r::W]
    all -> all         the sum of the weighted messages (all-reduce), in float32
    rank r -> rank 0   the new stored vectors of rank r's clients

Stored vectors are those that clients keep between rounds, such as SCAFFOLD's control variates. Rank
0 stores all of them, so a resumed run may have another number of processes. Each round and client
has its own random stream. With seeded noise, several processes therefore compute the result of a
single process, up to the order of additions. With `noise = "os"` each process draws batches and
noise from the operating system. Processes exchange only integers and flat tensors, so nothing is
pickled.
"""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from dpfed.algorithms.base import Message
from dpfed.config import Config
from dpfed.errors import DpfedError, StoppedError
from dpfed.model.frozen.model_hash import model_hash
from dpfed.training.backends.base import WaitForCharge, no_charge
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job.job import Job
from dpfed.training.round_context import first_state
from dpfed.training.run_folder.run_identity import run_identity
from dpfed.training.server_state import State

# Commands that rank 0 sends to the other processes, as the first integer of `Group.header`.
STOP = 0
AGREE = 1
ROUND = 2
HEADER_SIZE = 5
# Longest time that other ranks wait for rank 0's next command, because an evaluation may be slow.
# They do not wait if rank 0 dies, because its connections then close.
FOLLOWER_TIMEOUT = timedelta(days=7)
HOW_TO_RESUME = "start it again with --resume and it goes on from its last checkpoint"


class Group:
    """The processes of a torchrun run, and the operations by which they communicate.

    Every process must call the same operations in the same order, to avoid a deadlock.

    rank     number of this process; rank 0 leads the run
    world    number of processes
    timeout  seconds to wait for another process
    """

    def __init__(
        self, rank: int, world: int, timeout: int, backend: str = "gloo", init: str = "env://"
    ) -> None:
        self.rank = rank
        self.world = world
        self.timeout = timeout
        # True after a process was lost or did not finish a round: every later operation would fail.
        self.broken = False
        wait = timedelta(seconds=timeout)
        try:
            dist.init_process_group(
                backend, init_method=init, rank=rank, world_size=world, timeout=wait
            )
            patience = FOLLOWER_TIMEOUT if rank else wait
            self._control = dist.new_group(backend="gloo", timeout=patience)
        except (RuntimeError, ValueError) as error:
            raise DpfedError(
                f"the {world} processes of the run did not find one another in {timeout} seconds "
                f"({str(error).splitlines()[0]}): start all of them by torchrun, "
                "or raise run.timeout"
            ) from None

    @contextmanager
    def reaching(self, what: str) -> Iterator[None]:
        """Within this context, turn the loss or timeout of another process into StoppedError.

        what  the activity for the error message, such as "summing messages"
        """
        try:
            yield
        except RuntimeError as error:
            self.broken = True
            raise StoppedError(
                f"while {what} another process of the run was lost or took longer than "
                f"run.timeout = {self.timeout} seconds: {HOW_TO_RESUME}"
            ) from error

    def header(self, *words: int) -> list[int]:
        """Send a few integers (a header) from rank 0 to all ranks, and return them on every rank.

        words  on rank 0 the integers, usually a command and its arguments; empty on other ranks
        """
        numbers = torch.zeros(HEADER_SIZE, dtype=torch.int64)
        numbers[: len(words)] = torch.tensor(words, dtype=torch.int64)
        with self.reaching("agreeing on the next step"):
            dist.broadcast(numbers, src=0, group=self._control)
        return [int(x) for x in numbers]

    def agree(self, mine: str, theirs: Sequence[int]) -> None:
        """Raise DpfedError on all processes unless all of them have built the same job.

        mine    hash of this process's job, in hexadecimal
        theirs  hash of rank 0's job, as `words_of` returns it
        """
        same = torch.tensor([int(list(theirs) == words_of(mine))], dtype=torch.int64)
        with self.reaching("comparing jobs"):
            dist.all_reduce(same, op=dist.ReduceOp.MIN, group=self._control)
        if not int(same):
            self.broken = True
            raise DpfedError(
                "the processes of the run have different settings, data, weights or versions: "
                "give all machines the same"
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
        """Leave the group of processes. Rank 0 first sends STOP, so that the other processes end.

        Rank 0 calls this at the end of every run, also if the run has failed.
        """
        if self.broken:
            # A process is lost, so a shutdown would fail. The end of this process frees the group.
            return
        if self.rank == 0:
            with suppress(DpfedError):
                self.header(STOP)
        dist.destroy_process_group()

    def stop_on_sigterm(self) -> None:
        """Install a handler that raises StoppedError on SIGTERM, for an orderly end of the run.

        If one process dies, torchrun sends SIGTERM to all others.
        """

        def on_sigterm(signum: int, frame: FrameType | None) -> None:
            if not self.broken:
                self.broken = True
                raise StoppedError(
                    "the run was told to stop, by torchrun when another process was lost: "
                    f"{HOW_TO_RESUME}"
                )

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def join(config: Config) -> Group | None:
    """Return the group of processes that torchrun started, or None for a single process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world <= 1:
        return None
    if not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise DpfedError(
            f"WORLD_SIZE = {world} without RANK, MASTER_ADDR and MASTER_PORT: "
            "start the run by torchrun"
        )
    rank = int(os.environ["RANK"])
    device = config.run.device
    if config.run.diagnostics:
        raise DpfedError(
            "run.diagnostics reads the clients' states in one process: leave it out, "
            "or leave out torchrun"
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
        # If another process is lost, NCCL then raises an error instead of killing this process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        backend = "cpu:gloo,cuda:nccl"
    group = Group(rank, world, config.run.timeout, backend)
    if rank == 0:
        group.stop_on_sigterm()
    return group


def agree(job: Job, group: Group) -> None:
    """On rank 0, check that all processes have built the same job, before anything is released.

    Raise DpfedError if a job differs. Then send the noise multipliers of the plan to all processes.
    """
    digest = fingerprint(job)
    group.agree(digest, group.header(AGREE, *words_of(digest))[1:])
    group.broadcast(torch.from_numpy(job.plan.multipliers.copy()))


def with_received_noise(job: Job, group: Group) -> Job:
    """Return the job with the noise multipliers that rank 0 sends to all other ranks.

    In a resumed run rank 0 reads the multipliers from the ledger, which other processes cannot
    read.
    """
    multipliers = torch.empty(job.plan.clients, dtype=torch.float64)
    group.broadcast(multipliers)
    return replace(job, plan=replace(job.plan, multipliers=multipliers.numpy()))


class Distributed:
    """The backend on rank 0 of torchrun, which computes each cohort on all processes."""

    def __init__(self, job: Job, group: Group, memory: ClientStates) -> None:
        self._job = job
        self._group = group
        self._fleet = Fleet(job, memory)

    def run_cohort(
        self,
        t: int,
        state: State,
        clients: Sequence[int],
        wait_for_charge: WaitForCharge = no_charge,
    ) -> tuple[Message, int]:
        # The other processes cannot see the ledger, so rank 0 waits for it before they start.
        wait_for_charge()
        clip_bits = struct.unpack("<q", struct.pack("<d", state.clip))[0]
        self._group.header(ROUND, t, len(clients), clip_bits)
        try:
            return self._together(t, state, clients), len(clients)
        except BaseException:
            # The other processes are still computing this round and cannot receive a command. Mark
            # the group as broken, so that `close` does not send STOP.
            self._group.broken = True
            raise

    def _together(self, t: int, state: State, clients: Sequence[int]) -> Message:
        job = self._job
        group = self._group
        memory = self._fleet.memory
        names = job.algorithm.remembers
        group.broadcast(torch.tensor(clients, dtype=torch.int64, device=job.device))
        group.broadcast(packed(sent(job, state)))
        shares = [(r, list(clients[r :: group.world])) for r in range(1, group.world)]
        remembering = [(r, part) for r, part in shares if part and names]
        for r, part in remembering:
            held = memory.gather(part, torch.device("cpu"))
            group.send(held["seen"].to(torch.int64), r)
            group.send(torch.stack([held[name] for name in names], dim=1), r)
        message = share_of(self._fleet, group, t, state, clients)
        flat = torch.cat([value.reshape(-1) for value in message.values()])
        group.header(flat.numel())
        group.total(flat)
        for r, part in remembering:
            rows = torch.empty(len(part), len(names), job.space.size)
            group.receive(rows, r)
            memory.put(t, part, {name: rows[:, j] for j, name in enumerate(names)})
        pieces = torch.split(flat, [value.numel() for value in message.values()])
        return {
            name: x.reshape(message[name].shape) for name, x in zip(message, pieces, strict=True)
        }


def follow(job: Job, group: Group) -> None:
    """On ranks except 0, compute this process's clients in every round until rank 0 stops."""
    fleet = Fleet(job)
    first = first_state(job)
    while True:
        command, *words = group.header()
        if command == STOP:
            return
        if command == AGREE:
            group.agree(fingerprint(job), words)
            job = with_received_noise(job, group)
            fleet = Fleet(job)
        else:
            _follow_round(job, group, fleet, first, words)


def share_of(fleet: Fleet, group: Group, t: int, state: State, clients: Sequence[int]) -> Message:
    """Return the weighted sum of the messages of this process's clients; `{}` without clients.

    clients  the whole cohort, of which this rank computes every `world`-th client
    """
    mine = slice(group.rank, None, group.world)
    weights = fleet.weights(clients)[mine]
    return fleet.run_cohort(t, state, list(clients[mine]), weights=weights)[0]


def _follow_round(
    job: Job, group: Group, fleet: Fleet, first: State, header: Sequence[int]
) -> None:
    """On ranks other than 0, compute this process's clients in one round.

    header  the integers that rank 0 has sent: round, cohort size and clip norm
    """
    t, count, clip_bits = header[:3]
    clip = struct.unpack("<d", struct.pack("<q", clip_bits))[0]
    names = job.algorithm.remembers
    size = job.space.size
    cohort = torch.empty(count, dtype=torch.int64, device=job.device)
    group.broadcast(cohort)
    clients = cohort.tolist()
    wanted = sent(job, first)
    flat = torch.empty_like(packed(wanted))
    group.broadcast(flat)
    state = first.with_tensors({**first.tensors(), **unpacked(flat, wanted)}, clip)
    part = clients[group.rank :: group.world]
    # Rank 0 keeps all stored vectors. This process gets those of its clients for one round.
    fleet.memory = ClientStates(names, size, Path(), int(1e18))
    if names and part:
        seen = torch.empty(len(part), dtype=torch.int64)
        rows = torch.empty(len(part), len(names), size)
        group.receive(seen, 0)
        group.receive(rows, 0)
        known = seen.bool()
        before = [i for i, had in zip(part, known.tolist(), strict=True) if had]
        fleet.memory.put(t - 1, before, {name: rows[known, j] for j, name in enumerate(names)})
    message = share_of(fleet, group, t, state, clients)
    # Rank 0 sends the length of the sum, because a process without clients has no message.
    length = group.header()[0]
    sums = torch.zeros(length, device=job.device)
    if part:
        sums = torch.cat([x.reshape(-1) for x in message.values()])
    group.total(sums)
    if names and part:
        held = fleet.memory.gather(part, torch.device("cpu"))
        group.send(torch.stack([held[name] for name in names], dim=1), 0)


def sent(job: Job, state: State) -> dict[str, Tensor]:
    """Return the tensors of the server's state that are sent to clients, by name."""
    tensors = state.tensors()
    return {name: tensors[name] for name in job.algorithm.broadcast}


def packed(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the bytes of all tensors, joined into one flat uint8 tensor."""
    return torch.cat(
        [x.detach().reshape(-1).contiguous().view(torch.uint8) for x in tensors.values()]
    )


def unpacked(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `packed` joined into `flat`, named and shaped as those in `like`."""
    pieces = torch.split(flat, [x.numel() * x.element_size() for x in like.values()])
    return {
        name: piece.clone().view(x.dtype).reshape(x.shape)
        for (name, x), piece in zip(like.items(), pieces, strict=True)
    }


def fingerprint(job: Job) -> str:
    """Return a SHA-256 of a job's settings, records and weights, to compare processes."""
    found = hashlib.sha256(repr(run_identity(job)).encode())
    found.update(model_hash(job.adapted.model, job.space).encode())
    private = job.private
    # Hash inputs, not features: two machines may round the features of one input differently.
    inputs = private.records.inputs if private.raw_inputs is None else private.raw_inputs
    for x in [private.shards.records, job.theta, private.records.labels, *inputs.values()]:
        flat = torch.as_tensor(x).detach().reshape(-1).contiguous().view(torch.uint8)
        found.update(flat.cpu().numpy().tobytes())
    return found.hexdigest()


def words_of(digest: str) -> list[int]:
    """Return a SHA-256 in hexadecimal as four signed 64-bit integers, which fit into a header."""
    return list(struct.unpack("<4q", bytes.fromhex(digest)))
