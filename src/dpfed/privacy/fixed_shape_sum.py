"""Clipped sums over a fixed number of slots: one computation of one shape serves every step of every round.

Poisson batches differ in size, and neither a compiler nor a CUDA graph likes that. So the records of all clients share M
slots; a slot that is not used has weight zero, and a batch that needs more takes one more pass: no record is ever left
out. On a GPU the whole pass (gather, forward, backward, clip, sum) is captured once and replayed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpfed.privacy.clipping import Clipping, Units, clip_and_sum
from dpfed.privacy.record_batch import (
    Augmentations,
    Gradients,
    Records,
    augmentation_keys,
    each_augmentation,
    mean_over_augmentations,
)

LOG = logging.getLogger("dpfed")


def slots_for(mean: float, step: int = 8) -> int:
    """The number of slots, at least the mean, with the least expected work M·E[⌈X/M⌉] for a Poisson number X of records.

    Fewer than the mean would mean two passes as a rule, each with its own overhead.
    """
    most = math.ceil(mean + 6 * math.sqrt(mean) + 8)
    k = np.arange(most + 1)
    logs = k * math.log(max(mean, 1e-9)) - mean - np.array([math.lgamma(i + 1) for i in k])
    chance = np.exp(logs)
    first = max(step, -(-math.ceil(mean) // step) * step)
    best, least = first, math.inf
    for slots in range(first, -(-most // step) * step + step, step):
        work = slots * float((chance * np.maximum(1, np.ceil(k / slots))).sum())
        if work < least - 1e-9:
            best, least = slots, work
    return best


@dataclass(frozen=True)
class Pass:
    """One filling of the slots, on the device, as one matrix `[5, M]` so that it is brought there in one go.

    Its rows: which record, whose; 1 for a record and 0 for an unused slot; keys of dropout and of the random view.
    """

    packed: Tensor

    @classmethod
    def of(cls, row: Tensor, client: Tensor, valid: Tensor, dropout: Tensor, view: Tensor) -> Pass:
        return cls(torch.stack([row, client, valid, dropout, view]))


class Sums(Protocol):
    """Clipped sums of a batch in passes of a fixed size: a run's own (`FixedSum`), or a seat among others (`shared.py`).

    What they give is the caller's own, who adds noise to it in place."""

    def sums(
        self, theta: Tensor, arrays: Mapping[str, np.ndarray], clip: float
    ) -> tuple[Tensor, Tensor]: ...


class FixedSum:
    """Sum of clipped gradients `[S, P]` and count at or below C `[S, 1]` over M slots of S clients.

    A slot holds a record; with several views of it the model is given so many rows for each slot.
    """

    def __init__(
        self,
        gradients: Gradients,
        records: Records,
        rule: Clipping,
        view: Augmentations | None,
        clients: int,
        slots: int,
        size: int,
        capture: bool = True,
    ) -> None:
        self._gradients, self._records, self._rule, self._view = gradients, records, rule, view
        self.clients, self.slots = clients, slots
        device = records.labels.device
        self._in = torch.zeros(5, slots, dtype=torch.int64, device=device)
        self._theta = torch.zeros(clients, size, device=device)
        self._clip = torch.ones(clients, device=device)
        self._capturing = capture and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: tuple[Tensor, Tensor] | None = None

    def __call__(self, theta: Tensor, filling: Pass, clip: float) -> tuple[Tensor, Tensor]:
        """Not noised: only the oracle may call this. The results are overwritten by the next call."""
        self.load(theta, clip)
        return self._pass(filling)

    def sums(
        self, theta: Tensor, arrays: Mapping[str, np.ndarray], clip: float
    ) -> tuple[Tensor, Tensor]:
        """The same for all records of a batch, in as many passes as they need. Not noised either."""
        self.load(theta, clip)
        return self.loaded_sums(arrays)

    def load(self, theta: Tensor, clip: float, first: int = 0) -> None:
        """Sets the weights and the clip norm of the clients from `first` on; those of the others stay."""
        self._theta[first : first + len(theta)].copy_(theta)
        self._clip[first : first + len(theta)].fill_(clip)

    def loaded_sums(self, arrays: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor]:
        """`sums` with what was loaded. The results are the caller's own: no later pass writes into them."""
        first, *others = passes_of(arrays, self.slots, self._in.device)
        summed, counted = self._pass(first)
        total, count = summed.clone(), counted.clone()
        for filling in others:
            summed, counted = self._pass(filling)
            total += summed
            count += counted
        return total, count

    def wait(self) -> None:
        """Until the device is done with what was asked of it: a captured pass is not to be given up before."""
        if self._graph is not None:
            torch.cuda.synchronize(self._in.device)

    def _pass(self, filling: Pass) -> tuple[Tensor, Tensor]:
        self._in.copy_(filling.packed)
        if not self._capturing:
            return self._compute()
        if self._graph is None and not self._capture():
            return self._compute()
        assert self._graph is not None
        assert self._out is not None
        self._graph.replay()
        return self._out

    def _capture(self) -> bool:
        """Whether the pass could be captured; where it could not, it is computed anew each time."""
        # The current device is a thread's own, and a capture on another than the tensors' would hold nothing at all.
        with torch.cuda.device(self._in.device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # compilers and autotuners choose now, not while capturing
                    warm, _ = self._compute()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with (
                    torch.compiler.set_stance(
                        "default", skip_guard_eval_unsafe=True
                    ),  # as warmed up: nothing is compiled now
                    torch.cuda.graph(
                        graph, capture_error_mode="thread_local"
                    ),  # other runs' threads may be at work
                ):
                    self._out = self._compute()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                LOG.warning(
                    "a step cannot be captured and runs without it: %s",
                    str(error).splitlines()[0][:160],
                )
                self._capturing = False
                restore_generator(self._in.device)
                return False
            graph.replay()
            if not alike(self._out[0], warm):  # guards were skipped, so nothing else would tell
                LOG.warning("a captured step gives other sums than the step itself: it is not used")
                self._capturing, self._out = False, None
                return False
        self._graph = graph
        return True

    def _compute(self) -> tuple[Tensor, Tensor]:
        row, client, valid, dropout, view = self._in
        views = 1 if self._view is None else self._view.count
        inputs, labels = self._records.take(each_augmentation(row, views))
        if self._view is not None:
            inputs = self._view.view(inputs, augmentation_keys(view, views))
        keys = augmentation_keys(dropout, views) if self._gradients.has_dropout else None
        grads = self._gradients.raw_grads(
            self._theta, each_augmentation(client, views), inputs, labels, keys
        )
        grads = mean_over_augmentations(grads, views)
        clip = self._clip.index_select(0, client)
        units = Units(client, valid, self.clients)
        total, count = clip_and_sum(grads, units, clip, self._rule)
        return self._gradients.ordered(total), count


def alike(found: Tensor, wanted: Tensor, most: float = 0.05) -> bool:
    """Whether these are the same sums but for rounding, which in half precision is coarse."""
    return bool((found - wanted).norm() <= most * wanted.norm())


def restore_generator(device: torch.device) -> None:
    """A capture that failed leaves torch's generator waiting for its end; the same numbers go on from a copy of it."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


def passes_of(arrays: Mapping[str, np.ndarray], slots: int, device: torch.device) -> list[Pass]:
    """The records of one batch, in as many passes as they need, brought to the device together."""
    count = len(arrays["row"])
    passes = max(1, -(-count // slots))
    names = ("row", "client", "valid", "dropout", "view")
    # From memory that a GPU reads by itself: any other copy would first wait for all that the GPU has to do.
    here = torch.zeros(
        len(names), passes * slots, dtype=torch.int64, pin_memory=device.type == "cuda"
    )
    packed = here.numpy()
    for i, name in enumerate(names):
        packed[i, :count] = 1 if name == "valid" else arrays[name]
    there = here.to(device, non_blocking=True).view(len(names), passes, slots)
    return [Pass(there[:, p]) for p in range(passes)]
