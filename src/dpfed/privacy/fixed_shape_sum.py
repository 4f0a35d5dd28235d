"""Clipped sums in passes of a fixed shape, which compilers and CUDA graphs require.

A pass is one forward and backward computation of several records, and a slot is room for one record
in it. Poisson batches differ in size, but every pass has M slots, which the records of all clients
share. An unused slot has weight zero. A batch with more than M records takes several passes, so no
record is left out. On a GPU one pass (gather, forward, backward, clip, sum) is captured once as a
CUDA graph and then replayed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from scipy.stats import poisson
from torch import Tensor

from dpfed.privacy.clipping import Clipping, UnitRows, clip_and_sum
from dpfed.privacy.record_batch import Augmentations, AugmentedRecords, Gradients, Records

LOG = logging.getLogger("dpfed")
# Largest accepted relative difference between the sums of a pass that was captured as a CUDA graph
# and of an ordinary pass. Half precision alone can cause differences of this size.
TOLERANCE = 0.05


def slots_for(mean: float, step: int = 8) -> int:
    """Return the number of slots M (records per pass) that minimises the expected work of a batch.

    A batch has X records, a Poisson variable with this `mean`. It needs ⌈X/M⌉ passes of M slots, so
    the expected work is M·E[⌈X/M⌉]. M is a multiple of `step` and at least the mean: with fewer
    slots most batches would need two passes, and each pass has an overhead.
    """
    most = math.ceil(mean + 6 * math.sqrt(mean) + 8)
    records = np.arange(most + 1)
    choices = step * np.arange(max(1, math.ceil(mean / step)), math.ceil(most / step) + 1)
    passes = np.maximum(1, np.ceil(records / choices[:, None]))
    work = choices * (passes @ poisson.pmf(records, mean))
    # Round the work, so that the smallest M wins among choices that differ by rounding only.
    return int(choices[np.argmin(np.round(work, 8))])


@dataclass(frozen=True)
class Pass:
    """The records in the M slots of a pass, as one matrix that is copied to the device at once.

    packed  `[5, M]` int64 with five rows: index of the record, row of theta (parameters) of its
            client, 1 for a used slot (else 0), seed of its dropout mask, seed of its augmentation
    """

    packed: Tensor

    @classmethod
    def of(
        cls, row: Tensor, client: Tensor, valid: Tensor, dropout: Tensor, augment: Tensor
    ) -> Pass:
        return cls(torch.stack([row, client, valid, dropout, augment]))


@dataclass(frozen=True)
class PassShape:
    """The fixed sizes of a pass, a forward and backward computation of at most M records.

    clients  number S of clients, which are the rows of the parameters theta
    slots    number M of slots, each with room for one record
    size     number P of trainable parameters
    """

    clients: int
    slots: int
    size: int


class Sums(Protocol):
    """Computes clipped sums in passes of a fixed shape, for one run or for runs trained together.

    The tensors that `sums` returns belong to the caller: no later call writes into them, and the
    caller may add noise in place.
    """

    def sums(
        self, theta: Tensor, arrays: Mapping[str, np.ndarray], clip: float
    ) -> tuple[Tensor, Tensor]: ...


class FixedSum:
    """Computes sums of clipped gradients `[S, P]` and counts `[S, 1]` in passes of M slots.

    S is the number of clients and P the number of trainable parameters. A count adds +1/2 for each
    record with a gradient norm of at most the clip norm C, else -1/2. A slot holds one record, and
    the model computes all augmentations of the record. The results have no noise, so only the
    oracle may use this class on private records.

    rule     the clipping rule
    capture  True: capture a pass as a CUDA graph if the records are on a GPU
    """

    def __init__(
        self,
        gradients: Gradients,
        records: Records,
        rule: Clipping,
        augmentations: Augmentations | None,
        shape: PassShape,
        capture: bool = True,
    ) -> None:
        self._gradients = gradients
        self._records = records
        self._augmented = AugmentedRecords(gradients, records, augmentations)
        self._rule = rule
        self.clients = shape.clients
        self.slots = shape.slots
        device = records.labels.device
        self._in = torch.zeros(5, shape.slots, dtype=torch.int64, device=device)
        self._theta = torch.zeros(shape.clients, shape.size, device=device)
        self._clip = torch.ones(shape.clients, device=device)
        self._capturing = capture and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: tuple[Tensor, Tensor] | None = None

    def __call__(self, theta: Tensor, filling: Pass, clip: float) -> tuple[Tensor, Tensor]:
        """Compute one pass and return its sums `[S, P]` and counts `[S, 1]`.

        filling  the records in the slots of the pass

        The next call may overwrite the returned tensors, because a CUDA graph reuses its memory.
        """
        self.load(theta, clip)
        return self._pass(filling)

    def sums(
        self, theta: Tensor, arrays: Mapping[str, np.ndarray], clip: float
    ) -> tuple[Tensor, Tensor]:
        """Return the sums `[S, P]` and counts `[S, 1]` of a whole batch, from one or more passes.

        arrays  the batch, as columns of `RecordGradients.columns`
        """
        self.load(theta, clip)
        return self.loaded_sums(arrays)

    def load(self, theta: Tensor, clip: float, first: int = 0) -> None:
        """Set the parameters theta and the clip norm of the clients from row `first` on."""
        self._theta[first : first + len(theta)].copy_(theta)
        self._clip[first : first + len(theta)].fill_(clip)

    def loaded_sums(self, arrays: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor]:
        """Return sums and counts of a batch, for the theta and clip norms that `load` has set."""
        first, *others = passes_of(arrays, self.slots, self._in.device)
        summed, counted = self._pass(first)
        total = summed.clone()
        count = counted.clone()
        for filling in others:
            summed, counted = self._pass(filling)
            total += summed
            count += counted
        return total, count

    def wait(self) -> None:
        """Wait until the GPU is idle, because a captured pass must not be deleted while it runs."""
        if self._graph is not None:
            torch.cuda.synchronize(self._in.device)

    def _pass(self, filling: Pass) -> tuple[Tensor, Tensor]:
        self._in.copy_(filling.packed)
        if self._capturing and self._graph is None:
            self._capture()
        if self._graph is None or self._out is None:
            return self._compute()
        self._graph.replay()
        return self._out

    def _capture(self) -> None:
        """Capture a pass as a CUDA graph; if that fails, compute all passes without a graph."""
        device = self._in.device
        # Each thread has its own current device. Without this line, a capture made for another
        # device would be empty.
        with torch.cuda.device(device):
            warm = self._warmed_up()
            graph = torch.cuda.CUDAGraph()
            try:
                out = self._captured(graph)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._capturing = False
                LOG.warning(
                    "a step cannot be captured and runs without it: %s",
                    str(error).splitlines()[0][:160],
                )
                restore_generator(device)
                return
            graph.replay()
            # Compare with an ordinary pass, because a capture without compiler guards can be wrong.
            if not alike(out[0], warm):
                self._capturing = False
                LOG.warning("a captured step gives other sums than the step itself: it is not used")
                return
        self._out = out
        self._graph = graph

    def _warmed_up(self) -> Tensor:
        """Compute three passes, so that compilers choose kernels before a capture; return a sum."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                warm, _ = self._compute()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        return warm

    def _captured(self, graph: torch.cuda.CUDAGraph) -> tuple[Tensor, Tensor]:
        """Capture one pass in `graph`; return the tensors into which its replays write.

        During the capture, the compiler does not check if compiled code fits its arguments
        ("guards"), so it compiles nothing. Threads of other runs may use the GPU meanwhile.
        """
        with (
            torch.compiler.set_stance("default", skip_guard_eval_unsafe=True),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            return self._compute()

    def _compute(self) -> tuple[Tensor, Tensor]:
        row, client, valid, dropout, augment = self._in
        compute = self._gradients.raw_grads
        grads = self._augmented.mean_gradients(compute, self._theta, client, row, dropout, augment)
        rows = UnitRows(client, valid, self.clients)
        clip = self._clip.index_select(0, client)
        total, counted = clip_and_sum(grads, rows, clip, self._rule)
        return self._gradients.ordered(total), counted


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Return True if the L2 norm of the sums' difference, relative to `wanted`, is <= TOLERANCE."""
    return bool((found - wanted).norm() <= TOLERANCE * wanted.norm())


def restore_generator(device: torch.device) -> None:
    """Replace the state of torch's CUDA random generator by a copy, after a failed graph capture.

    Without this call the generator would stay in its capture mode and raise errors.
    """
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


def passes_of(arrays: Mapping[str, np.ndarray], slots: int, device: torch.device) -> list[Pass]:
    """Split a batch into as many passes of `slots` records as it needs, at least one.

    All passes are copied to the device at once.

    arrays  the batch, as columns of `RecordGradients.columns`
    slots   number of slots M of each pass
    """
    count = len(arrays["row"])
    passes = max(1, -(-count // slots))
    names = ("row", "client", "valid", "dropout", "augment")
    # Use pinned memory, because a copy from other memory waits for all earlier work of the GPU.
    host = torch.zeros(
        len(names), passes * slots, dtype=torch.int64, pin_memory=device.type == "cuda"
    )
    packed = host.numpy()
    for i, name in enumerate(names):
        packed[i, :count] = 1 if name == "valid" else arrays[name]
    filled = host.to(device, non_blocking=True).view(len(names), passes, slots)
    return [Pass(filled[:, p]) for p in range(passes)]
