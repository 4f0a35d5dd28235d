"""Next-token loss of causal language models, in chunks of tokens.

All logits of a batch would need more memory than the rest of the model. The model's body (all
layers before the output layer) therefore computes hidden states once. The output layer then reads
one chunk of tokens at a time. The backward pass computes the logits of a chunk again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpfed.model.blocks import inner_config
from dpfed.model.per_sample.derived_class import derived, once_per_class
from dpfed.model.per_sample.gradients import Batch, call
from dpfed.model.task import Task

# Largest number of logits in one chunk, over all records: 256 MiB in float32.
CHUNK_LOGITS = 2**26
# Label of tokens that need no prediction: `cross_entropy` gives them loss zero and gradient zero.
NO_TARGET = -100

Weights = dict[str, Tensor]


def scores_of(
    task: Task, model: nn.Module, weights: Weights, prepared: Batch, inputs: Batch
) -> Tensor:
    """Call the model and return its scores for the task, one row per record.

    prepared  the model's arguments
    inputs    the raw inputs from which they were prepared
    """
    if task.causal:
        return causal_scores(model, weights, prepared, inputs)
    return call(model, weights, prepared)


def causal_scores(model: nn.Module, weights: Weights, prepared: Batch, inputs: Batch) -> Tensor:
    """Return three scores per record, `[M, 3]`: loss, accuracy and number of target tokens.

    Loss and accuracy are means over the record's targets, the tokens that the loss covers. A record
    without targets has loss zero and gradient zero.

    prepared  the model's arguments for M records of L tokens
    inputs    `input_ids` and `target_mask`, `[M, L]`. The mask is 1 where the model must predict
              the token from the tokens before it. Without `target_mask`, `attention_mask` is used.
    """
    head = _split(model, weights, prepared)
    if head is None:
        return scores_of_logits(call(model, weights, prepared), inputs)
    targets = _targets(inputs)
    total: Tensor | None = None
    for tokens in head.chunks(targets.shape[1]):
        arguments = head, head.hidden[:, tokens], targets[:, tokens]
        if torch.is_grad_enabled():
            # The keys of records decide dropout masks, so torch's random state does not matter.
            sums = checkpoint(
                _sums_of_chunk, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            sums = _sums_of_chunk(*arguments)
        total = sums if total is None else total + sums
    assert total is not None
    return _scores(total, targets)


def scores_of_logits(logits: Tensor, inputs: Batch) -> Tensor:
    """Return the scores of `causal_scores`, computed from all logits of a model.

    logits  `[M, L, V]` for M records of L tokens and a vocabulary of V tokens
    """
    targets = _targets(inputs)
    return _scores(_sums_of(logits[:, :-1], targets), targets)


def causal_logits(model: nn.Module, weights: Weights, prepared: Batch) -> Tensor:
    """Return all logits, computed in the same chunks as the loss; for checks only.

    Their shape is `[M, L, V]` for M records of L tokens and a vocabulary of V tokens.
    """
    head = _split(model, weights, prepared)
    if head is None:
        return call(model, weights, prepared)
    chunks = head.chunks(head.hidden.shape[1])
    return torch.cat([head.logits(head.hidden[:, tokens]) for tokens in chunks], 1)


@dataclass(frozen=True)
class _Head:
    """The part of a model after its body: the output layer, and any function applied to logits.

    hidden   hidden states that the body has computed, `[M, L, D]` for M records of L tokens
    module   the model with a stub in place of its body, which returns given hidden states
    weights  weights of the output layer by their names in `module`
    """

    hidden: Tensor
    module: nn.Module
    weights: Weights

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits `[M, T, V]` of hidden states `[M, T, D]`, for a chunk of T tokens."""
        # Remove gaps between records: with gaps a linear layer computes one product per record.
        inputs = {"inputs_embeds": hidden.contiguous()}
        out = torch.func.functional_call(self.module, dict(self.weights), (), inputs)
        logits: Tensor = out.logits
        return logits

    def chunks(self, length: int) -> Iterator[slice]:
        """Yield slices that divide `length` tokens into chunks of at most CHUNK_LOGITS logits.

        The size of a chunk depends on tensor shapes only, never on private values.
        """
        vocabulary = int(inner_config(self.module).vocab_size)
        step = max(1, CHUNK_LOGITS // (len(self.hidden) * vocabulary))
        for first in range(0, max(length, 1), step):
            yield slice(first, min(first + step, length))


class _BodyStub(nn.Module):
    """A stub in place of a model's body, which returns given hidden states as the body's output.

    output  class of the output of the real body
    """

    def __init__(self, output: type) -> None:
        super().__init__()
        self.output = output

    @property
    def decoder(self) -> _BodyStub:
        """The stub itself; some models, such as OPT, call the decoder inside their body."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self.output(last_hidden_state=inputs_embeds)


def _split(model: nn.Module, weights: Weights, prepared: Batch) -> _Head | None:
    """Call the model's body and return a `_Head`, which computes logits from the body's output.

    Return None if the model has no separate body that returns hidden states.
    """
    name = str(getattr(model, "base_model_prefix", ""))
    if not isinstance(getattr(model, name, None), nn.Module):
        return None
    # This shallow copy has the same modules, so `functional_call` handles tied weights as usual.
    body = copy.copy(model)
    body.__class__ = _body_only(type(model))
    out = torch.func.functional_call(body, weights, (), dict(prepared))
    if not isinstance(getattr(out, "last_hidden_state", None), Tensor):
        return None
    head = copy.copy(model)
    head.__dict__["_modules"] = {**model._modules, name: _BodyStub(type(out))}
    return _Head(out.last_hidden_state, head, _weights_of_head(head, model, weights, name))


@once_per_class
def _body_only(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a causal language model whose forward pass calls only the body."""

    def forward(self: Any, **inputs: Any) -> Any:
        return getattr(self, self.base_model_prefix)(**inputs)

    return derived(cls, "", forward=forward)


def _weights_of_head(head: nn.Module, model: nn.Module, weights: Weights, body: str) -> Weights:
    """Return the weights that the output layer uses, including those tied to the body's weights."""
    inside = f"{body}."
    own = {name: w for name, w in weights.items() if not name.startswith(inside)}
    tied = {id(p): name for name, p in head.named_parameters() if name not in own}
    for name, weight in weights.items():
        if name.startswith(inside):
            owner, _, attribute = name.rpartition(".")
            alias = tied.get(id(getattr(model.get_submodule(owner), attribute)))
            if alias is not None:
                own[alias] = weight
    return own


def _sums_of_chunk(head: _Head, hidden: Tensor, targets: Tensor) -> Tensor:
    return _sums_of(head.logits(hidden), targets)


def _sums_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return for each record the sum of its losses and its number of correct tokens, `[M, 2]`.

    logits   `[M, T, V]` for M records, T tokens and a vocabulary of V tokens
    targets  `[M, T]` ids of the tokens to predict, or `NO_TARGET`
    """
    rows = logits.flatten(0, 1)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    losses = F.cross_entropy(rows, targets.flatten(), ignore_index=NO_TARGET, reduction="none")
    right = (rows.detach().argmax(-1) == targets.flatten()).to(losses.dtype)
    return torch.stack([losses.view_as(targets).sum(1), right.view_as(targets).sum(1)], 1)


def _targets(inputs: Batch) -> Tensor:
    """Return for each token, except the last, the token that follows it, `[M, L-1]`.

    Tokens that the model must not predict are replaced by `NO_TARGET`.
    """
    is_target = inputs.get("target_mask", inputs["attention_mask"])[:, 1:].bool()
    return inputs["input_ids"][:, 1:].long().masked_fill(~is_target, NO_TARGET)


def _scores(sums: Tensor, targets: Tensor) -> Tensor:
    count = (targets != NO_TARGET).sum(1, keepdim=True).to(sums.dtype)
    # Divide by 1 where nothing is predicted, so that the loss of such a record is zero.
    return torch.cat([sums / count.clamp_min(1), count], 1)
