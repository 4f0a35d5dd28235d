"""Clipped sums in passes of a fixed shape, so that compilers and CUDA graphs can be used.

Poisson batches differ in size. The records of all clients share M slots; an unused slot has weight
zero, and a larger batch takes more passes, so no record is left out. On a GPU a pass (gather,
forward, backward, clip, sum) is captured once as a CUDA graph and then replayed.
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
# Largest relative difference between a captured pass and the pass itself, in half precision.
TOLERANCE = 0.05


def slots_for(mean: float, step: int = 8) -> int:
    """Return the number of slots M with the least expected work M·E[⌈X/M⌉].

    X is the Poisson number of records. M is at least its mean: fewer slots would need two passes
    most of the time, each with its own overhead.
    """
    most = math.ceil(mean + 6 * math.sqrt(mean) + 8)
    records = np.arange(most + 1)
    choices = step * np.arange(max(1, math.ceil(mean / step)), math.ceil(most / step) + 1)
    passes = np.maximum(1, np.ceil(records / choices[:, None]))
    work = choices * (passes @ poisson.pmf(records, mean))
    # Rounded, so that of equal choices the smallest is taken.
    return int(choices[np.argmin(np.round(work, 8))])


@dataclass(frozen=True)
class Pass:
    """The content of the slots as one matrix `[5, M]`, so that one copy brings it to the device.

    Its rows: record, client, 1 for a used slot, key of dropout, key of the augmentation.
    """

    packed: Tensor

    @classmethod
    def of(
        cls, row: Tensor, client: Tensor, valid: Tensor, dropout: Tensor, augment: Tensor
    ) -> Pass:
        return cls(torch.stack([row, client, valid, dropout, augment]))


@dataclass(frozen=True)
class PassShape:
    """Clients and slots of a pass, and the size P of the trainable vector."""

    clients: int
    slots: int
    size: int


class Sums(Protocol):
    """Clipped sums of a batch in passes of a fixed shape, of one run or together with others.

    The caller owns the results and adds noise to them in place.
    """

    def sums(
        self, theta: Tensor, arrays: Mapping[str, np.ndarray], clip: float
    ) -> tuple[Tensor, Tensor]: ...


class FixedSum:
    """Sums of clipped gradients `[S, P]` and counts at or below C `[S, 1]`, over M slots.

    A slot holds one record. The model receives a row for each augmentation of the record. Results
    have no noise, so only the oracle may call this class on private records.
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
        """Return the sums of one pass; the next call overwrites them."""
        self.load(theta, clip)
        return self._pass(filling)

    def sums(
        self, theta: Tensor, arrays: Mapping[str, np.ndarray], clip: float
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of all records of a batch, from as many passes as they need."""
        self.load(theta, clip)
        return self.loaded_sums(arrays)

    def load(self, theta: Tensor, clip: float, first: int = 0) -> None:
        """Set the weights and the clip norm of the clients from `first` on."""
        self._theta[first : first + len(theta)].copy_(theta)
        self._clip[first : first + len(theta)].fill_(clip)

    def loaded_sums(self, arrays: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor]:
        """Return `sums` for the loaded weights; no later pass writes into the results."""
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
        """Wait for the device; a captured pass must not be deleted while it runs."""
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
        """Capture the pass; if that fails, every pass is computed without a graph."""
        device = self._in.device
        # A thread has its own current device; a capture on another device would be empty.
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
            # The capture skipped compiler guards, so only this comparison finds an error.
            if not alike(out[0], warm):
                self._capturing = False
                LOG.warning("a captured step gives other sums than the step itself: it is not used")
                return
        self._out = out
        self._graph = graph

    def _warmed_up(self) -> Tensor:
        """Return the sum after three passes, in which compilers and autotuners choose kernels."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                warm, _ = self._compute()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        return warm

    def _captured(self, graph: torch.cuda.CUDAGraph) -> tuple[Tensor, Tensor]:
        """Capture one pass without compilation, while threads of other runs use the device."""
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
    """Return True if the sums differ by no more than rounding in half precision."""
    return bool((found - wanted).norm() <= TOLERANCE * wanted.norm())


def restore_generator(device: torch.device) -> None:
    """Replace torch's generator by a copy: after a failed capture it waits for its end."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


def passes_of(arrays: Mapping[str, np.ndarray], slots: int, device: torch.device) -> list[Pass]:
    """Fill as many passes as the records of a batch need, and copy all to the device at once."""
    count = len(arrays["row"])
    passes = max(1, -(-count // slots))
    names = ("row", "client", "valid", "dropout", "augment")
    # The GPU reads pinned memory by itself; other copies wait for its earlier work.
    host = torch.zeros(
        len(names), passes * slots, dtype=torch.int64, pin_memory=device.type == "cuda"
    )
    packed = host.numpy()
    for i, name in enumerate(names):
        packed[i, :count] = 1 if name == "valid" else arrays[name]
    filled = host.to(device, non_blocking=True).view(len(names), passes, slots)
    return [Pass(filled[:, p]) for p in range(passes)]
