"""The liveness check: on synthetic inputs, before any private record is read, does everything train?

A dead adapter (its gradient zero, its update without effect) and a module whose per-sample gradients are wrong are
errors, not results. Every trainable tensor is first perturbed at random, because LoRA's B = 0 makes A's gradient zero.

A gradient jumps where a ReLU is at zero, and which side of zero a number is on may be a matter of rounding. So a small
difference is no error if it is not there in double precision, where no number is that close to zero by chance, and if every
record has none with some other weights: what mixes records does so with all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpfed.errors import DpfedError
from dpfed.model.per_sample.gradients import Batch, PerSample

RECORDS = 3
TOLERANCE, JUMP, EXACT = (
    1e-3,
    0.1,
    1e-7,
)  # of a tensor's gradient: rounding; what a ReLU may add; double precision
DRAWS = 16  # of other weights; deep networks have a ReLU near zero with most of them
ROUNDING = 1e-6  # of the whole gradient: a key's bias has gradient zero behind a softmax, and only rounding is left


def check_alive(
    model: PerSample, theta: Tensor, inputs: Batch, classes: int, generator: torch.Generator
) -> None:
    """Raises DpfedError that names the tensor; costs a handful of forward passes on `RECORDS` synthetic records."""
    buffers = {name: b.clone() for name, b in model.model.named_buffers()}
    rows, client, labels = _wiggled(theta, generator), _clients(theta), _labels(theta, classes)
    try:
        together = model.grads(rows, client, inputs, labels)
    except Exception as error:
        raise DpfedError(
            f"per-sample gradients of {type(model.model).__name__} cannot be computed "
            f"({_first_line(error).rstrip('.')}): {_way_out(model)}"
        ) from error
    alone = _one_by_one(model, rows, client, inputs, labels)
    for name, gradient in zip(model.space.names, alone, strict=True):
        if not gradient.norm() > 0:
            raise DpfedError(
                f"the trainable tensor {name} has no gradient, as {type(model.model).__name__} "
                f"does not use it or multiplies it by zero: {_way_out(model)}"
            )
    name, off = _farthest(model, together, alone)
    if not off <= TOLERANCE and not (
        off <= JUMP
        and _agrees_in_double(model, rows, client, inputs, labels)
        and _each_agrees_once(model, theta, inputs, labels, generator)
    ):
        raise DpfedError(
            f"the per-sample gradients of {name} differ from those of its records one by one, so "
            f"{type(model.model).__name__} mixes records or folds them in an unknown way: "
            f"{_way_out(model)}"
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


def _way_out(model: PerSample) -> str:
    """Return what the user can change, given what is trained now."""
    if any(".lora_" in name for name in model.space.names):
        return 'leave that layer out of model.lora.targets, or set model.train = "head"'
    everything = sum(p.numel() for p in model.model.parameters())
    if 2 * model.space.size > everything:
        return 'set model.train = "lora" or "head"'
    return "choose another model"


def check_apart(
    model: PerSample, theta: Tensor, inputs: Batch, classes: int, generator: torch.Generator
) -> None:
    """In the run's own precision: a record whose numbers are no numbers must leave those of the others as they are."""
    rows, client, labels = _wiggled(theta, generator), _clients(theta), _labels(theta, classes)
    keys = torch.arange(RECORDS, device=theta.device) if model.has_dropout else None
    broken, others, here = rows.clone(), [0, 2], f"in run.precision = {str(model.dtype)[6:]!r}"
    broken[1] = math.nan
    try:
        sound = [g[others].float() for g in model.grads(rows, client, inputs, labels, keys)]
        beside = [g[others].float() for g in model.grads(broken, client, inputs, labels, keys)]
    except Exception as error:
        raise DpfedError(
            f"{here} a record that is not finite stops the pass of all: {_first_line(error)}; freeze the module named there"
        ) from error
    if not all(bool(g.isfinite().all()) for g in sound):
        raise DpfedError(
            f"{here} gradients near the initial weights are not finite: take another precision"
        )
    name, off = _farthest(model, beside, sound, max(ROUNDING, torch.finfo(model.dtype).eps))
    # Whatever NaN reaches is NaN too; the rest may be added up in another order.
    if not off <= JUMP:
        raise DpfedError(
            f"{here} a record whose gradient is not finite changes that of another in {name}: "
            "take another precision, or freeze that tensor"
        )


def _wiggled(theta: Tensor, generator: torch.Generator) -> Tensor:
    """Two clients' weights near the given ones."""
    return theta + 0.02 * torch.randn(2, len(theta), generator=generator).to(theta.device)


def _clients(theta: Tensor) -> Tensor:
    return torch.tensor([0, 1, 0], device=theta.device)


def _labels(theta: Tensor, classes: int) -> Tensor:
    return (torch.arange(RECORDS) % classes).to(theta.device)


def _one_by_one(
    model: PerSample, rows: Tensor, client: Tensor, inputs: Batch, labels: Tensor
) -> list[Tensor]:
    """The records' gradients `[M, n]` for each tensor, each by itself with its own client's plain weights: no twin, no copies."""
    records = [_single(model, rows, client, inputs, labels, j) for j in range(RECORDS)]
    return [torch.stack(of_tensor) for of_tensor in zip(*records, strict=True)]


def _single(
    model: PerSample, rows: Tensor, client: Tensor, inputs: Batch, labels: Tensor, j: int
) -> list[Tensor]:
    weights = {
        n: w.clone().requires_grad_() for n, w in model.space.unflatten(rows[client[j]]).items()
    }
    one = {name: x[j : j + 1] for name, x in inputs.items()}
    with torch.enable_grad():
        loss = model.loss(model.forward(model.model, dict(weights), one), labels[j : j + 1]).sum()
        grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return [
        torch.zeros_like(w).flatten() if g is None else g.flatten()
        for w, g in zip(weights.values(), grads, strict=True)
    ]


def _farthest(
    model: PerSample,
    together: Sequence[Tensor],
    alone: Sequence[Tensor],
    rounding: float = ROUNDING,
) -> tuple[str, float]:
    """The tensor whose gradients differ most, and by which share of their size."""
    floor = rounding * torch.cat(list(alone), dim=1).norm()
    off = [float(((a - b).norm() - floor) / b.norm()) for a, b in zip(together, alone, strict=True)]
    worst = max(range(len(off)), key=lambda i: math.inf if math.isnan(off[i]) else off[i])
    return model.space.names[worst], off[worst]


def _each_agrees_once(
    model: PerSample, theta: Tensor, inputs: Batch, labels: Tensor, generator: torch.Generator
) -> bool:
    """Whether every record has the same gradient together and alone with some weights."""
    client, left = _clients(theta), set(range(RECORDS))
    for _ in range(DRAWS):
        rows = _wiggled(theta, generator)
        together = model.grads(rows, client, inputs, labels)
        alone = _one_by_one(model, rows, client, inputs, labels)
        for j in sorted(left):
            one = slice(j, j + 1)
            if (
                _farthest(model, [g[one] for g in together], [g[one] for g in alone])[1]
                <= TOLERANCE
            ):
                left.remove(j)
        if not left:
            return True
    return False


def _agrees_in_double(
    model: PerSample, rows: Tensor, client: Tensor, inputs: Batch, labels: Tensor
) -> bool:
    """Not all devices have it, and not all models can: then it does not."""
    before = model.dtype
    numbers = {name: p.data for name, p in model.model.named_parameters()}
    buffers = [(module, dict(module._buffers)) for module in model.model.modules()]
    try:
        model.to(torch.float64)
        rows = rows.double()
        together = model.grads(rows, client, inputs, labels)
        return (
            _farthest(
                model, together, _one_by_one(model, rows, client, inputs, labels), ROUNDING**2
            )[1]
            <= EXACT
        )
    except Exception:  # models fail in their own ways
        return False
    finally:  # what was there before, not a copy of it: that would take room, and other types would not come back
        model.dtype = before
        for name, p in model.model.named_parameters():
            p.data = numbers[name]
        for module, held in buffers:
            module._buffers.clear()
            module._buffers.update(held)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
