"""The liveness check: on synthetic inputs, before any private record is read, does everything train?

A dead adapter (its gradient zero, its update without effect) and a module whose per-sample gradients are wrong are
errors, not results. Every trainable tensor is first perturbed at random, because LoRA's B = 0 makes A's gradient zero.

A gradient jumps where a ReLU is at zero, and which side of zero a number is on may be a matter of rounding. So a small
difference counts only if it is there in double precision as well, where no number is that close to zero by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpfed.errors import DpfedError
from dpfed.model.per_sample import Batch, PerSample

RECORDS = 3
TOLERANCE, JUMP, EXACT = 1e-3, 0.1, 1e-7  # of a tensor's gradient: rounding; what a ReLU may add; double precision
ROUNDING = 1e-6  # of the whole gradient: a key's bias has gradient zero behind a softmax, and only rounding is left


def check_alive(model: PerSample, theta: Tensor, inputs: Batch, classes: int, generator: torch.Generator) -> None:
    """Raises DpfedError that names the tensor; costs a handful of forward passes on `RECORDS` synthetic records."""
    buffers = {name: b.clone() for name, b in model.model.named_buffers()}
    wiggle = 0.02 * torch.randn(2, len(theta), generator=generator)
    rows = theta + wiggle.to(theta.device)
    labels = (torch.arange(RECORDS) % classes).to(theta.device)
    client = torch.tensor([0, 1, 0], device=theta.device)
    try:
        together = model.grads(rows, client, inputs, labels)
    except Exception as error:
        raise DpfedError(
            f"per-sample gradients of {type(model.model).__name__} cannot be computed: {_first_line(error)}; "
            "freeze the module named there, or train = lora or head"
        ) from error
    alone = _one_by_one(model, rows, client, inputs, labels)
    for name, gradient in zip(model.space.names, alone, strict=True):
        if not gradient.norm() > 0:
            raise DpfedError(
                f"the trainable tensor {name} has no gradient: it is not used by the model, or it is dead; freeze it"
            )
    name, off = _farthest(model, together, alone)
    if not off <= TOLERANCE and not (off <= JUMP and _agrees_in_double(model, rows, client, inputs, labels)):
        raise DpfedError(
            f"the per-sample gradients of {name} differ from those of its records one by one: something in the model "
            "mixes records or folds them in an unknown way; freeze that tensor"
        )
    after = dict(model.model.named_buffers())  # once: each look walks the whole model
    for name, before in buffers.items():
        if not torch.equal(before, after[name]):
            raise DpfedError(
                f"the buffer {name} changes during a forward pass, so it would carry records out of the oracle"
            )
    moved = (model.scores(rows[0], inputs) - model.scores(rows[1], inputs)).abs().max()
    if not moved > 0:
        raise DpfedError(
            "changing every trainable tensor does not change the model's output: the adapters are not in use"
        )


def _one_by_one(model: PerSample, rows: Tensor, client: Tensor, inputs: Batch, labels: Tensor) -> list[Tensor]:
    """The records' gradients `[M, n]` for each tensor, each by itself with its own client's plain weights: no twin, no copies."""
    records = [_single(model, rows, client, inputs, labels, j) for j in range(RECORDS)]
    return [torch.stack(of_tensor) for of_tensor in zip(*records, strict=True)]


def _single(model: PerSample, rows: Tensor, client: Tensor, inputs: Batch, labels: Tensor, j: int) -> list[Tensor]:
    weights = {n: w.clone().requires_grad_() for n, w in model.space.unflatten(rows[client[j]]).items()}
    one = {name: x[j : j + 1] for name, x in inputs.items()}
    with torch.enable_grad():
        loss = model.loss(model.forward(model.model, dict(weights), one), labels[j : j + 1]).sum()
        grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return [
        torch.zeros_like(w).flatten() if g is None else g.flatten()
        for w, g in zip(weights.values(), grads, strict=True)
    ]


def _farthest(model: PerSample, together: Sequence[Tensor], alone: Sequence[Tensor]) -> tuple[str, float]:
    """The tensor whose gradients differ most, and by which share of their size."""
    rounding = ROUNDING if alone[0].dtype == torch.float32 else ROUNDING**2
    floor = rounding * torch.cat(list(alone), dim=1).norm()
    off = [float(((a - b).norm() - floor) / b.norm()) for a, b in zip(together, alone, strict=True)]
    worst = max(range(len(off)), key=lambda i: math.inf if math.isnan(off[i]) else off[i])
    return model.space.names[worst], off[worst]


def _agrees_in_double(model: PerSample, rows: Tensor, client: Tensor, inputs: Batch, labels: Tensor) -> bool:
    """Not all devices have it, and not all models can: then it does not."""
    before = model.dtype
    try:
        model.to(torch.float64)
        rows = rows.double()
        together = model.grads(rows, client, inputs, labels)
        return _farthest(model, together, _one_by_one(model, rows, client, inputs, labels))[1] <= EXACT
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    finally:
        model.to(before)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
