"""Freeze trainable tensors that a forward pass never uses, such as the mask token of pretraining.

Such tensors have no gradient. They are found by a forward pass on PyTorch's meta device, where
tensors have shapes but no values.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.model.per_sample.gradients import call, trainable
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built

# A note to the user lists at most this many names of tensors, and counts the others.
NAMED = 3


def freeze_unused(model: nn.Module, built: Built, spec: InputSpec) -> tuple[str, ...]:
    """Freeze the trainable tensors on which the outputs do not depend.

    Return notes for the user that name these tensors, or `()` if there are none.
    """
    tensors = trainable(model)
    used = set(tensors) - _unread_by_architecture(model, tensors)
    used_by_outputs = _used_by_outputs(model, built, spec)
    if used_by_outputs is not None:
        used &= used_by_outputs
    unused = [name for name in tensors if name not in used]
    if not unused or not used:
        return ()
    for name in unused:
        tensors[name].requires_grad_(False)
    named = ", ".join(unused[:NAMED])
    more = f" and {len(unused) - NAMED} more" if len(unused) > NAMED else ""
    return (f"not used by {type(model).__name__}, so not trained: {named}{more}",)


def _used_by_outputs(model: nn.Module, built: Built, spec: InputSpec) -> set[str] | None:
    """Return the names of the tensors on which the outputs depend.

    Return None if the model cannot run on PyTorch's meta device, where tensors have no values.
    """
    with torch.device("cpu"):
        records = (built.spec or spec).synthetic(2, torch.Generator().manual_seed(0))
    inputs = {name: x.to("meta") for name, x in records.items()}
    for prepare in (*(built.forms or (built.prepare,)), _open_mask, _no_mask):
        try:
            return _reached_tensors(_on_meta(model), prepare(dict(inputs)))
        except Exception:
            # Catch all errors. The meta device has no values, so a model with an `if` on values
            # raises errors of many classes. Then try the next form of the inputs.
            continue
    return None


def _open_mask(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs with an attention mask of four axes that hides no token.

    With a mask of two axes, models test its values by an `if`, which fails on the meta device.
    """
    ids = inputs["input_ids"].long()
    mask = torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1], device=ids.device)
    return {"input_ids": ids, "attention_mask": mask}


def _no_mask(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs without an attention mask, for models that accept no mask of four axes."""
    return {"input_ids": inputs["input_ids"].long()}


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of the model on PyTorch's meta device, so that the original cannot change."""
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for p in model.parameters():
        empty = torch.empty_like(p, device="meta")
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)


def _reached_tensors(model: nn.Module, arguments: dict[str, Tensor]) -> set[str]:
    leaves: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    with torch.enable_grad(), torch.device("meta"):
        logits = call(model, {}, arguments)
    found: set[str] = set()
    seen: set[object] = set()
    nodes = [logits.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf in leaves:
            found.add(leaves[leaf])
        nodes += [below for below, _ in node.next_functions]
    return found


def _unread_by_architecture(model: nn.Module, names: dict[str, nn.Parameter]) -> set[str]:
    """Return names of tensors that the model reads but that have no effect on the output.

    Longformer's classifier reads only the first token, which uses global attention. The local
    query, key and value layers of the last layer therefore have no effect.
    """
    config = getattr(model, "config", None)
    if getattr(config, "model_type", "") != "longformer":
        return set()
    last = int(config.num_hidden_layers) - 1  # type: ignore[union-attr]
    local = re.compile(rf"encoder\.layer\.{last}\.attention\.self\.(query|key|value)\.")
    return {name for name in names if local.search(name)}
