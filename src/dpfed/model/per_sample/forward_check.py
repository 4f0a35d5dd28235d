"""Check that a padded batch gives each record the outputs that the plain model gives it alone.

To compute per-sample gradients, the classes of a model's layers are replaced. Before that, the
plain model computes the outputs of synthetic records, each alone and without padding. Afterwards
the changed model computes the same records in one padded batch, as in a run. The outputs must
agree. No private record is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpfed.errors import DpfedError, reason
from dpfed.model.causal_loss import causal_logits, scores_of
from dpfed.model.parameter_vector import Space
from dpfed.model.per_sample.gradients import Batch, PerSample, call, cast
from dpfed.model.zoo.built import Built, Prepare

# Standard deviation of random numbers that are added to the trainable weights. Otherwise a head of
# zeros would give the output zero for every input and so hide errors.
SPREAD = 0.02
# Largest relative difference, explained by rounding, between the outputs of a record alone and in a
# padded batch.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


@dataclass(frozen=True)
class PlainOutputs:
    """Outputs of the plain model, whose layers are unchanged, for synthetic records.

    vector   the trainable weights that were used, `[P]` for P trainable numbers
    inputs   the records, padded as in a run
    outputs  the logits of each record, computed alone and without padding
    """

    vector: Tensor
    inputs: dict[str, Tensor]
    outputs: list[Tensor]


def plain_outputs(
    model: nn.Module,
    space: Space,
    theta: Tensor,
    inputs: Batch,
    prepare: Prepare,
) -> PlainOutputs:
    """Return the outputs of the plain model for the synthetic records `inputs`.

    Call this before the classes of the model's layers are replaced.

    theta    the initial trainable weights, `[P]` for P trainable numbers
    prepare  turns records into the model's arguments
    """
    generator = torch.Generator().manual_seed(0)
    change = SPREAD * torch.randn(len(theta), generator=generator)
    vector = theta + change.to(theta.device)
    weights = space.unflatten(vector)
    records = len(next(iter(inputs.values())))
    model.eval()
    outputs = []
    for j in range(records):
        one = unpadded({name: x[j : j + 1] for name, x in inputs.items()}, prepare)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                outputs.append(call(model, dict(weights), one)[0])
        except DpfedError:
            raise
        except Exception as error:
            raise DpfedError(
                f"{type(model).__name__} cannot compute a single record without padding "
                f"({reason(error)}): choose another model"
            ) from error
    return PlainOutputs(vector, dict(inputs), outputs)


def unpadded(one: dict[str, Tensor], prepare: Prepare) -> dict[str, Tensor]:
    """Return the plain model's arguments for one record.

    For a text these are only its tokens, without padding, mask and positions.
    """
    if "attention_mask" not in one:
        return prepare(one)
    real = int(one["attention_mask"].sum())
    tokens = {name: x[:, :real].long() for name, x in one.items() if name != "attention_mask"}
    accepted = prepare(one)
    return {name: x for name, x in tokens.items() if name in accepted}


def faithful_model(
    built: Built,
    model: nn.Module,
    space: Space,
    plain: PlainOutputs,
) -> tuple[PerSample, Prepare]:
    """Return the model that computes per-sample gradients, and the function that prepares inputs.

    The classes of the model's layers are replaced for this. Raise DpfedError if the outputs for
    synthetic records then differ from the outputs of the plain model.

    plain  outputs of the plain model
    """
    task = built.task
    forms = built.forms or (built.prepare,)
    chosen = forms[0]

    def forward(model: nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
        prepared = cast(chosen(dict(inputs)), ready.dtype)
        return scores_of(task, model, weights, prepared, inputs)

    ready = PerSample(model, space, forward, task, built.rows)
    chosen = faithful_form(ready, plain, forms)
    return ready, chosen


def faithful_form(model: PerSample, plain: PlainOutputs, forms: Sequence[Prepare]) -> Prepare:
    """Return the first function in `forms` whose prepared inputs lead to the plain model's outputs.

    Each function turns records into the model's arguments in a different form, for example with
    another attention mask. Raise DpfedError if no function leads to these outputs.
    """
    best = math.inf
    failure = ""
    for form in forms:
        try:
            difference = largest_difference(model, plain, form)
        except Exception as error:
            # Catch all errors, because models raise errors of many classes for inputs that they
            # cannot read.
            failure = failure or reason(error)
            continue
        if difference <= TOLERANCE[model.dtype]:
            return form
        best = min(best, difference)
    name = type(model.model).__name__
    if best == math.inf:
        raise DpfedError(f"{name} cannot compute a batch ({failure}): choose another model")
    raise DpfedError(
        f"{name} computes a record differently in a padded batch than alone and unpadded "
        f"(outputs are {best:.1%} off), so its gradients would be wrong: choose another model"
    )


def largest_difference(model: PerSample, plain: PlainOutputs, form: Prepare) -> float:
    """Return the largest relative difference, over records, from the plain model's outputs.

    The result is infinity if an output is NaN. In half precision the median over records is
    returned instead, because rounding may change which expert of a model computes a token.
    """
    weights = {n: w.to(model.dtype) for n, w in model.space.unflatten(plain.vector).items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        # A language model's outputs are [tokens, vocabulary]. Compute them as its loss does.
        logits_of = causal_logits if plain.outputs[0].dim() == 2 else call
        together = logits_of(model.model, weights, cast(form(dict(plain.inputs)), model.dtype))
    differences = []
    for got, want in zip(together, plain.outputs, strict=True):
        # Cut off the outputs for padding tokens, which the outputs of the plain model do not have.
        real = got[: len(want)] if got.dim() == 2 else got
        size = max(float(want.norm()), torch.finfo(torch.float32).tiny)
        difference = float((real.float() - want).norm()) / size
        differences.append(math.inf if math.isnan(difference) else difference)
    differences.sort()
    return differences[-1] if model.dtype == torch.float32 else differences[len(differences) // 2]
