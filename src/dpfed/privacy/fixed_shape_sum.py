"""Clipped sums over a fixed number of slots: one computation of one shape serves every step of every round.

Poisson batches differ in size, and neither a compiler nor a CUDA graph likes that. So the records of all clients share M
slots; a slot that is not used has weight zero, and a batch that needs more takes one more pass: no record is ever left
out. On a GPU the whole pass (gather, forward, backward, clip, sum) is captured once and replayed.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpfed.accel import seen_right, usable
from dpfed.privacy.clipping import Clipping, factors
from dpfed.privacy.record_batch import (
    Augmentations,
    Gradients,
    Records,
    augmentation_keys,
    each_augmentation,
    mean_over_augmentations,
)

LOG = logging.getLogger("dpfed")
ALIGNED = 64  # numbers
LARGE = (
    2**15
)  # numbers of a tensor from which on joining it with others costs more than a few kernels of its own


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
        total, count = clip_and_sum_slots(grads, client, valid, self.clients, clip, self._rule)
        return self._gradients.ordered(total), count


def alike(found: Tensor, wanted: Tensor, most: float = 0.05) -> bool:
    """Whether these are the same sums but for rounding, which in half precision is coarse."""
    return bool((found - wanted).norm() <= most * wanted.norm())


def restore_generator(device: torch.device) -> None:
    """A capture that failed leaves torch's generator waiting for its end; the same numbers go on from a copy of it."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


def clip_and_sum_slots(
    grads: list[Tensor], client: Tensor, valid: Tensor, clients: int, clip: Tensor, rule: Clipping
) -> tuple[Tensor, Tensor]:
    """`clipping.clip_and_sum` for one record per unit and masked slots, through few matrices of many gradients.

    clip  one number for all, or one for each slot `[M]`
    Gradients may come in half precision; norms, factors and sums are float32 all the same. Those of a record that is not
    finite may be overwritten.
    """
    groups = grouped(grads)
    matrices = [matrix_of([grads[i] for i in group]) for group in groups]
    norm = row_norms(*matrices)
    good = valid.bool() & norm.isfinite()
    factor = factors(norm, clip, rule)
    member = torch.nn.functional.one_hot(client, clients).to(torch.float32).t()
    weights = member * torch.where(good, factor, 0.0)
    for matrix in matrices:
        clear(matrix, norm)  # a product with zero would keep what is not finite
    total = in_order(weighted_sums(weights, matrices), groups, [g.shape[1] for g in grads])
    count = member @ torch.where(good, (norm <= clip).float() - 0.5, 0.0).unsqueeze(1)
    return total, count


def grouped(grads: Sequence[Tensor]) -> list[list[int]]:
    """Which gradients share a matrix: large ones are matrices by themselves, the others are copied into one."""
    alone = [i for i, g in enumerate(grads) if _is_matrix(g)]
    together = [i for i, g in enumerate(grads) if not _is_matrix(g)]
    return [*([i] for i in alone), *([together] if together else [])]


def _is_matrix(grad: Tensor) -> bool:
    """Whether kernels are as fast on it as on a copy: rows that begin at whole lines of memory, and enough in them."""
    return grad.shape[1] >= LARGE and grad.shape[1] % ALIGNED == 0 and grad.is_contiguous()


def matrix_of(grads: Sequence[Tensor]) -> Tensor:
    """`[M, n]`, in which zeros may follow the numbers, so that rows begin at whole lines of memory; they change no sum."""
    if len(grads) == 1 and _is_matrix(grads[0]):
        return grads[0]
    size = sum(g.shape[1] for g in grads)
    return torch.cat([*grads, grads[0].new_zeros(len(grads[0]), -size % ALIGNED)], dim=1)


def in_order(
    sums: Sequence[Tensor], groups: Sequence[Sequence[int]], sizes: Sequence[int]
) -> Tensor:
    """The sums of the groups' matrices -> those of all gradients `[S, P]`, one after another."""
    if len(groups) == 1:
        return sums[0][:, : sum(sizes)]
    parts: dict[int, Tensor] = {}
    for summed, group in zip(sums, groups, strict=True):
        at = 0
        for i in group:
            parts[i] = summed[:, at : at + sizes[i]]
            at += sizes[i]
    return torch.cat([parts[i] for i in range(len(sizes))], dim=1)


def row_norms(*matrices: Tensor) -> Tensor:
    """Norms `[M]` in float32 of rows of any type, each the row of all matrices, right to the last digits however long it is.

    One float32 number that takes up millions of squares loses the small ones, and a norm that is too small lets a record
    pass C; so squares are added in short pieces, and the pieces in double precision. A row whose squares add up to more than
    float32 holds, or that has an entry which is no number, has a norm that is not finite.
    """
    squares = [row_squares(rows).sum(1, dtype=torch.float64) for rows in matrices]
    return torch.stack(squares).sum(0).float().sqrt()


def row_squares(rows: Tensor) -> Tensor:
    """Sums of squares `[M, pieces]` of each row's pieces."""
    kernels = kernels_for(rows)
    squares: Tensor = piece_squares(rows) if kernels is None else kernels.squares(rows)
    return squares


def piece_squares(rows: Tensor, piece: int = 256) -> Tensor:
    """Sums of squares `[M, pieces]` of each row's pieces."""
    whole = rows.shape[1] // piece * piece
    norms = torch.linalg.vector_norm(
        rows[:, :whole].view(len(rows), whole // piece, piece), dim=2, dtype=torch.float32
    )
    rest = torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True, dtype=torch.float32)
    return torch.cat([norms, rest], dim=1).double().square()


def clear(rows: Tensor, norm: Tensor) -> None:
    """Takes out of the rows, in place, every entry that is not finite: such entries are in rows without a finite norm only."""
    kernels = kernels_for(rows)
    if kernels is None:
        rows.nan_to_num_(0.0, 0.0, 0.0)
    else:
        kernels.zero_rows(rows, norm.isfinite())


def kernels_for(rows: Tensor) -> ModuleType | None:
    """The kernels over rows, where they can be used and were seen to be right."""
    return _checked_kernels(rows.device, rows.dtype) if usable(rows) else None


@functools.cache
def _checked_kernels(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Once for each device and type, before any capture."""
    from dpfed.accel import rows

    return (
        rows
        if seen_right("kernels over rows of gradients", device, lambda: rows.right(device, dtype))
        else None
    )


def weighted_sums(weights: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
    """`[S, M]` float32 times each of `[M, n]`, in float32 whatever the type of the rows.

    Half-precision rows are not widened: a float32 weight is the sum of three bfloat16 numbers, products of such numbers
    are exact in float32, and the matrix unit adds them up in float32.
    """
    parts, sums = None, []
    for rows in matrices:
        if rows.dtype != torch.bfloat16 or rows.device.type != "cuda":
            sums.append(weights @ rows.float())
            continue
        parts = three_parts(weights) if parts is None else parts
        sums.append(whole(torch.mm(parts, rows, out_dtype=torch.float32)))
    return sums


def three_parts(weights: Tensor) -> Tensor:
    """`[3*S, M]` in bfloat16 for `[S, M]` in float32, of which they are the sum."""
    parts, rest = [], weights
    for _ in range(3):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].float()
    return torch.cat(parts)


def whole(thrice: Tensor) -> Tensor:
    """`[3*S, n]` -> `[S, n]`: what the three parts of each row of weights gave, added up."""
    return thrice.view(3, len(thrice) // 3, -1).sum(0)


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
