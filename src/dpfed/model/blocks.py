"""Blocks of coordinates that share one second moment (SPEC 5). Built from the architecture, never from data.

Rules, first match wins:
1. weights and biases of Q, K, V: one block per head; LoRA's B follows the output rows, so it is split the same way;
2. LoRA's A and B: separate blocks (B starts at zero, so their second moments differ);
3. every other module: one block for its weight and bias together; a parameter that hangs on a larger module
   (class token, position table): one block each.
Which modules are Q, K and V is said per architecture below. An unknown architecture gets one block per tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Layout = Literal["separate", "3HD", "H3D"]
_LORA = re.compile(r"^(?P<path>.*)\.lora_(?P<factor>[AB])\.[^.]+\.weight$")


@dataclass(frozen=True)
class Architecture:
    """attention: name of a projection -> how heads lie in its output rows; heads: attribute that counts them."""

    attention: Mapping[str, Layout]
    heads: str = "num_attention_heads"


_QKV: dict[str, Layout] = dict.fromkeys(("q_proj", "k_proj", "v_proj", "query", "key", "value"), "separate")
ARCHITECTURES: dict[str, Architecture] = {
    "vit": Architecture(_QKV),
    "swin": Architecture(_QKV),
    "bert": Architecture(_QKV),
    "roberta": Architecture(_QKV),
    "linear": Architecture({}),
}


def architecture_of(model: nn.Module) -> Architecture | None:
    """By the model's declared type, never guessed from names."""
    return ARCHITECTURES.get(getattr(getattr(model, "config", model), "model_type", ""))


def block_index(
    model: nn.Module,
    shapes: Mapping[str, torch.Size],
    architecture: Architecture | None,
    granularity: Literal["block", "tensor"] = "block",
    lora_merge_ab: bool = False,
) -> tuple[list[str], Tensor]:
    """(block names, block of each coordinate) for trainable tensors given by name and shape, in order."""
    modules = dict(model.named_modules())
    ids: dict[str, int] = {}
    parts = []
    for name, shape in shapes.items():
        if architecture is None or granularity == "tensor":
            labels = [name]
        else:
            labels = _labels(name, shape, modules, architecture, lora_merge_ab)
        rows = torch.tensor([ids.setdefault(label, len(ids)) for label in labels])
        parts.append(rows.repeat_interleave(shape.numel() // len(rows)))
    return list(ids), torch.cat(parts)


def _labels(
    name: str, shape: torch.Size, modules: Mapping[str, nn.Module], architecture: Architecture, merge: bool
) -> list[str]:
    """One label for the whole tensor, or one for each of its output rows."""
    plain = name.replace(".modules_to_save.default", "").replace(".base_layer", "")
    lora = _LORA.match(plain)
    path = lora["path"] if lora else plain.rpartition(".")[0]
    layout = architecture.attention.get(path.rpartition(".")[2])
    if lora and lora["factor"] == "A":
        return [path if merge and layout is None else f"{path}.lora_A"]
    stem = f"{path}.lora_B" if lora else path
    if layout is not None:
        count = getattr(modules[path.rpartition(".")[0]], architecture.heads)
        return [f"{stem}.{head}" for head in head_rows(layout, shape[0], count)]
    if lora:
        return [path if merge else stem]
    owner = modules[name.rpartition(".")[0]]
    return [plain if any(True for _ in owner.children()) else path]


def head_rows(layout: Layout, rows: int, heads: int) -> Iterable[str]:
    """The head that each output row belongs to. Fused layouts: 3HD is (q|k|v, head, d), H3D is (head, q|k|v, d)."""
    index = torch.arange(rows)
    if layout == "separate":
        _divides(rows, heads)
        return [f"head{h}" for h in (index // (rows // heads)).tolist()]
    _divides(rows, 3 * heads)
    width = rows // (3 * heads)
    if layout == "3HD":
        part, head = index // (heads * width), (index // width) % heads
    else:
        head, part = index // (3 * width), (index // width) % 3
    return [f"{'qkv'[p]}.head{h}" for p, h in zip(part.tolist(), head.tolist(), strict=True)]


def _divides(rows: int, heads: int) -> None:
    if rows % heads:
        raise ValueError(f"{rows} output rows cannot be divided among {heads} heads")
