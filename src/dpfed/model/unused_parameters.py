"""Freeze trainable tensors that a forward pass never uses, such as a pretraining mask token.

They have no gradient. The pass that finds them runs on the meta device, without numbers.
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

# How many tensors a note names; it counts the others.
NAMED = 3


def freeze_unused(model: nn.Module, built: Built, spec: InputSpec) -> tuple[str, ...]:
    """Freeze trainable tensors that the outputs do not depend on; return notes that name them."""
    tensors = trainable(model)
    used = set(tensors) - _unread_by_architecture(model, tensors)
    reached = _reached(model, built, spec)
    if reached is not None:
        used &= reached
    unused = [name for name in tensors if name not in used]
    if not unused or not used:
        return ()
    for name in unused:
        tensors[name].requires_grad_(False)
    named = ", ".join(unused[:NAMED])
    more = f" and {len(unused) - NAMED} more" if len(unused) > NAMED else ""
    return (f"not used by {type(model).__name__}, so not trained: {named}{more}",)


def _reached(model: nn.Module, built: Built, spec: InputSpec) -> set[str] | None:
    """Return the tensors that the outputs depend on; None if a pass without numbers fails."""
    with torch.device("cpu"):
        records = (built.spec or spec).synthetic(2, torch.Generator().manual_seed(0))
    inputs = {name: x.to("meta") for name, x in records.items()}
    for enter in (*(built.forms or (built.prepare,)), _open_mask, _no_mask):
        try:
            return _reached_by(_on_meta(model), enter(dict(inputs)))
        except Exception:
            # Models that branch on numbers fail anywhere without them.
            continue
    return None


def _open_mask(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tokens with a 4-D mask: models branch on the numbers of a 2-D mask."""
    ids = inputs["input_ids"].long()
    mask = torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1], device=ids.device)
    return {"input_ids": ids, "attention_mask": mask}


def _no_mask(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tokens alone, for a model that takes only 2-D masks."""
    return {"input_ids": inputs["input_ids"].long()}


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy without numbers, so that a pass stores nothing in the model itself."""
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for p in model.parameters():
        empty = torch.empty_like(p, device="meta")
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)


def _reached_by(model: nn.Module, entered: dict[str, Tensor]) -> set[str]:
    leaves: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    with torch.enable_grad(), torch.device("meta"):
        logits = call(model, {}, entered)
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
    """Return tensors that a pass uses although the output does not depend on them.

    Longformer's classifier reads the first token alone, which has global attention. So the local
    projections of the last layer have no effect.
    """
    config = getattr(model, "config", None)
    if getattr(config, "model_type", "") != "longformer":
        return set()
    last = int(config.num_hidden_layers) - 1  # type: ignore[union-attr]
    local = re.compile(rf"encoder\.layer\.{last}\.attention\.self\.(query|key|value)\.")
    return {name for name in names if local.search(name)}
