"""The isolation check: every tensor trains, and no synthetic record changes another's gradient.

These are errors: a tensor has gradient zero, or a change of all trainable tensors leaves the output
unchanged. It is also an error if per-sample gradients differ from gradients of records that are
computed alone. Trainable tensors are first changed at random, because LoRA's B = 0 makes the
gradient of A zero.

The gradient of a ReLU jumps at zero, and rounding may decide on which side of zero its input lies.
A small difference is therefore accepted if both of these conditions hold:
1. The difference vanishes in double precision, where no input is so close to zero by chance.
2. For each record some other random weights give no difference. A layer that mixes records would
   cause a difference for all weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfed.errors import DpfedError, reason
from dpfed.model.frozen.quantised import has_quantised
from dpfed.model.per_sample.failing_layer import failing_layer
from dpfed.model.per_sample.gradients import Batch, PerSample

RECORDS = 3
# Largest difference between a record's gradient alone and in a batch that rounding can explain,
# relative to the norm of the tensor's gradient.
TOLERANCE = 1e-3
# Relative differences of gradients up to this value may come from a ReLU whose input is near zero.
RELU_TOLERANCE = 0.1
# Largest accepted relative difference if both gradients are computed in double precision.
DOUBLE_TOLERANCE = 1e-7
# How many other random weights to try. In a deep network, most random weights give some ReLU an
# input near zero, so the check needs many attempts.
MAX_DRAWS = 16
# Rounding errors are at most this fraction of the norm of all gradients. One example is the bias of
# an attention key: its true gradient is zero, so it has only rounding errors.
ROUNDING = 1e-6
# `records_mix` multiplies the weights of the other records by this factor, so that their
# activations become outliers.
OUTLIERS = 100.0


@dataclass(frozen=True)
class _Records:
    """Synthetic records with the trainable weights of two clients.

    theta   one vector of P trainable numbers for each client, `[2, P]`
    client  for each of M records, the row of theta that it uses, `[M]`
    """

    theta: Tensor
    client: Tensor
    inputs: Batch
    labels: Tensor

    def together(self, model: PerSample, keys: Tensor | None = None) -> list[Tensor]:
        """Return each tensor's per-sample gradients `[M, n]`, computed for all M records together.

        n is the number of elements of the tensor. `keys` are the records' dropout keys; None for no
        dropout.
        """
        return model.grads(self.theta, self.client, self.inputs, self.labels, keys)

    def one_by_one(self, model: PerSample) -> list[Tensor]:
        """Return the gradients `[M, n]` of each tensor by plain autograd, one record at a time.

        M is the number of records, and n the number of elements of the tensor.
        """
        records = [self._single(model, j) for j in range(RECORDS)]
        return [torch.stack(of_tensor) for of_tensor in zip(*records, strict=True)]

    def _single(self, model: PerSample, j: int) -> list[Tensor]:
        own = model.space.unflatten(self.theta[self.client[j]])
        weights = {name: w.clone().requires_grad_() for name, w in own.items()}
        inputs = {name: x[j : j + 1] for name, x in self.inputs.items()}
        with torch.enable_grad():
            scores = model.forward(model.model, dict(weights), inputs)
            loss = model.task.loss(scores, self.labels[j : j + 1]).sum()
            grads = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        return [grad.flatten() for grad in grads]


def _records_near(
    model: PerSample, theta: Tensor, inputs: Batch, classes: int, generator: torch.Generator
) -> _Records:
    client = torch.tensor([0, 1, 0], device=theta.device)
    labels = model.task.examples(RECORDS, classes).to(theta.device)
    return _Records(_perturbed(theta, generator), client, inputs, labels)


def _perturbed(theta: Tensor, generator: torch.Generator) -> Tensor:
    return theta + 0.02 * torch.randn(2, len(theta), generator=generator).to(theta.device)


def check_gradients(
    model: PerSample, theta: Tensor, inputs: Batch, classes: int, generator: torch.Generator
) -> None:
    """Raise DpfedError if a tensor does not train or if per-sample gradients are wrong.

    The message names the tensor. The check computes only a few batches of `RECORDS` synthetic
    records.

    theta  the initial trainable weights, `[P]` for P trainable numbers
    """
    buffers = {name: b.clone() for name, b in model.model.named_buffers()}
    records = _records_near(model, theta, inputs, classes, generator)
    _check_gradients(model, theta, records, generator)
    # Collect all buffers once, because each call of `named_buffers` visits the whole model.
    after = dict(model.model.named_buffers())
    for name, before in buffers.items():
        if not torch.equal(before, after[name]):
            raise DpfedError(
                f"the buffer {name} changes during a forward pass, so it would carry records "
                "out of the oracle"
            )
    one, other = (model.scores(vector, inputs) for vector in records.theta)
    if not (one - other).abs().max() > 0:
        raise DpfedError(
            "changing every trainable tensor does not change the model's output: "
            "the adapters are not in use"
        )


def _check_gradients(
    model: PerSample, theta: Tensor, records: _Records, generator: torch.Generator
) -> None:
    kind = type(model.model).__name__
    try:
        together = records.together(model)
    except Exception as error:
        layer = failing_layer(model.model, lambda: records.together(model))
        raise DpfedError(
            f"per-sample gradients of {kind} cannot be computed{layer} "
            f"({reason(error)}): {_remedy(model)}"
        ) from error
    alone = records.one_by_one(model)
    for name, gradient in zip(model.space.names, alone, strict=True):
        if not gradient.norm() > 0:
            raise DpfedError(
                f"the trainable tensor {name} has no gradient, as {kind} "
                f"does not use it or multiplies it by zero: {_remedy(model)}"
            )
    name, difference = _largest_difference(model, together, alone)
    if difference <= TOLERANCE:
        return
    explained = (
        difference <= RELU_TOLERANCE
        and _agrees_in_double(model, records)
        and _each_agrees_once(model, theta, records, generator)
    )
    if not explained:
        raise DpfedError(
            f"the per-sample gradients of {name} differ from those of its records one by one, so "
            f"{kind} mixes records or folds them in an unknown way: {_remedy(model)}"
        )


def _remedy(model: PerSample) -> str:
    if any(".lora_" in name for name in model.space.names):
        return 'leave that layer out of model.lora.targets, or set model.train = "head"'
    everything = sum(p.numel() for p in model.model.parameters())
    if 2 * model.space.size > everything:
        return 'set model.train = "lora" or "head"'
    return "choose another model"


def check_isolation(
    model: PerSample, theta: Tensor, inputs: Batch, classes: int, generator: torch.Generator
) -> None:
    """Raise DpfedError if a record with NaN changes the gradients of other records.

    The check uses synthetic records and runs in the dtype in which the model trains.
    """
    records = _records_near(model, theta, inputs, classes, generator)
    keys = torch.arange(RECORDS, device=theta.device) if model.has_dropout else None
    broken = replace(records, theta=records.theta.clone())
    broken.theta[1] = math.nan
    others = [0, 2]
    here = f"in run.precision = {str(model.dtype)[6:]!r}"
    try:
        gradients = [g[others].float() for g in records.together(model, keys)]
        with_broken = [g[others].float() for g in broken.together(model, keys)]
    except Exception as error:
        raise DpfedError(
            f"{here} a record that is not finite stops the pass of all: {reason(error)}; "
            "freeze the module named there"
        ) from error
    if not all(bool(g.isfinite().all()) for g in gradients):
        raise DpfedError(
            f"{here} gradients near the initial weights are not finite: take another precision"
        )
    name, difference = _largest_difference(
        model, with_broken, gradients, max(ROUNDING, torch.finfo(model.dtype).eps)
    )
    # A smaller difference is explained by rounding. If NaN has spread to another record, the
    # difference is NaN. The comparison with NaN is False, so `not` makes it an error.
    if not difference <= RELU_TOLERANCE:
        raise DpfedError(
            f"{here} a record whose gradient is not finite changes that of another in {name}: "
            "take another precision, or freeze that tensor"
        )


def records_mix(
    model: PerSample, theta: Tensor, inputs: Batch, classes: int, generator: torch.Generator
) -> bool:
    """Return True if other records in a batch change a record's gradient, even only by rounding.

    Two batches of the same shape are compared. In the second batch, the other records have other
    contents. Their client has large weights, so that their activations are outliers for
    quantisation. A model that mixes records must compute each record alone in exact isolation, the
    setting in which not even rounding may depend on other records.
    """
    records = _records_near(model, theta, inputs, classes, generator)
    keys = torch.arange(RECORDS, device=theta.device) if model.has_dropout else None
    records = replace(records, client=torch.tensor([0, 1, 1], device=theta.device))
    order = torch.tensor([0, 2, 1], device=theta.device)
    others = {name: x.index_select(0, order) for name, x in records.inputs.items()}
    changed = replace(records, theta=records.theta.clone(), inputs=others)
    changed.theta[1] *= OUTLIERS
    try:
        one = records.together(model, keys)
        other = changed.together(model, keys)
    except Exception:
        # The contents of one record made the computation of all records fail, so the model mixes
        # records. Models raise errors of any class here.
        return True
    return any(not torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))


def _largest_difference(
    model: PerSample,
    together: Sequence[Tensor],
    alone: Sequence[Tensor],
    rounding: float = ROUNDING,
) -> tuple[str, float]:
    """Return the name of the tensor whose two gradients differ most, and the relative difference.

    Rounding errors can be as large as `rounding` times the norm of the whole gradient. This amount
    is subtracted from each difference.

    together  gradient of each tensor, computed for all records together
    alone     gradient of each tensor, computed record by record
    """
    floor = rounding * torch.cat(list(alone), dim=1).norm()
    differences = [
        float(((a - b).norm() - floor) / b.norm()) for a, b in zip(together, alone, strict=True)
    ]
    worst = max(
        range(len(differences)),
        key=lambda i: math.inf if math.isnan(differences[i]) else differences[i],
    )
    return model.space.names[worst], differences[worst]


def _each_agrees_once(
    model: PerSample, theta: Tensor, records: _Records, generator: torch.Generator
) -> bool:
    """Return True if, for some random weights, each record has one gradient alone and in a batch.

    The batch contains all records. At most `MAX_DRAWS` random weights are tried, and one of them
    with equal gradients suffices for a record.
    """
    unequal = set(range(RECORDS))
    for _ in range(MAX_DRAWS):
        drawn = replace(records, theta=_perturbed(theta, generator))
        together, alone = drawn.together(model), drawn.one_by_one(model)
        for j in sorted(unequal):
            one = slice(j, j + 1)
            _, difference = _largest_difference(
                model, [g[one] for g in together], [g[one] for g in alone]
            )
            if difference <= TOLERANCE:
                unequal.remove(j)
        if not unequal:
            return True
    return False


def _agrees_in_double(model: PerSample, records: _Records) -> bool:
    """Return True if gradients in a batch and gradients of single records agree in float64.

    Return False if the gradients differ or if the model cannot run in double precision. Quantised
    models cannot.
    """
    if has_quantised(model.model):
        return False
    before = model.dtype
    numbers = {name: p.data for name, p in model.model.named_parameters()}
    buffers = [(module, dict(module._buffers)) for module in model.model.modules()]
    try:
        model.to(torch.float64)
        exact = replace(records, theta=records.theta.double())
        _, difference = _largest_difference(
            model, exact.together(model), exact.one_by_one(model), ROUNDING**2
        )
        return difference <= DOUBLE_TOLERANCE
    except Exception:
        # Catch all errors, because models and devices without double precision raise many classes.
        return False
    finally:
        # Put back the original tensors. A conversion of the model would not restore tensors that
        # had another dtype before.
        model.dtype = before
        for name, p in model.model.named_parameters():
            p.data = numbers[name]
        for module, stored in buffers:
            module._buffers.clear()
            module._buffers.update(stored)
