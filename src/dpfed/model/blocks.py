"""Blocks of coordinates that share one second moment (SPEC 5). Built from the architecture, never from data.

Rules, first match wins:
1. weights and biases of Q, K, V: one block per head; LoRA's B follows the output rows, so it is split the same way;
2. LoRA's A and B: separate blocks (B starts at zero, so their second moments differ);
3. every other module: one block for its weight and bias together; a parameter that hangs on a larger module
   (class token, position table): one block each.
With `cnn_blocks = "residual"` the convolutions of a residual block are one block; norms keep their own.
Which modules are Q, K and V is said per architecture below. An unknown architecture gets one block per tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

Layout = Literal["separate", "3HD", "H3D"]
CnnBlocks = Literal["module", "residual"]
_LORA = re.compile(r"^(?P<path>.*)\.lora_(?P<factor>[AB])\.[^.]+\.weight$")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class Architecture:
    """attention: name of a projection -> how heads lie in its output rows.
    heads, kv_heads: the attribute that counts them, of the attention module or of its configuration; projections in
    `grouped` have the second number (grouped-query attention).
    residual: class names of residual blocks."""

    attention: Mapping[str, Layout]
    heads: str = "num_attention_heads"
    grouped: tuple[str, ...] = ()
    kv_heads: str = "num_key_value_heads"
    residual: tuple[str, ...] = ()


def _separate(*names: str) -> dict[str, Layout]:
    return dict.fromkeys(names, "separate")


_QKV = _separate("q_proj", "k_proj", "v_proj", "query", "key", "value")
_ENCODER = Architecture(_QKV)
_GROUPED = Architecture(_separate("q_proj", "k_proj", "v_proj"), grouped=("k_proj", "v_proj"))
ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(("vit", "deit", "swin", "bert", "roberta", "xlm-roberta"), _ENCODER),
    **dict.fromkeys(("llama", "mistral", "qwen2"), _GROUPED),
    "distilbert": Architecture(_separate("q_lin", "k_lin", "v_lin"), heads="n_heads"),
    "gpt2": Architecture({"c_attn": "3HD"}, heads="num_heads"),
    "gpt_neox": Architecture({"query_key_value": "H3D"}),
    "gn-resnet": Architecture({}, residual=("ResidualBlock",)),
    "resnet": Architecture({}, residual=("ResNetBasicLayer", "ResNetBottleNeckLayer")),
    "linear": Architecture({}),
}


def inner_config(model: Any) -> Any:
    """Return the configuration of a model's Transformer, from a model or its own configuration."""
    config = getattr(model, "config", model)
    return getattr(config, "text_config", config)


def architecture_of(
    model: nn.Module, qkv_layout: Layout | Literal["auto"] = "auto", attention: tuple[str, ...] = ()
) -> Architecture | None:
    """By the model's declared type, never guessed from names; `attention` and `qkv_layout` are the user's own word."""
    known = ARCHITECTURES.get(getattr(inner_config(model), "model_type", ""))
    layout = None if qkv_layout == "auto" else qkv_layout
    if attention:
        base = known or Architecture({}, heads="")
        return replace(base, attention=dict.fromkeys(attention, layout or "separate"))
    if known is not None and layout is not None:
        return replace(known, attention=dict.fromkeys(known.attention, layout))
    return known


def block_index(
    model: nn.Module,
    shapes: Mapping[str, torch.Size],
    architecture: Architecture | None,
    granularity: Literal["block", "tensor"] = "block",
    lora_merge_ab: bool = False,
    cnn_blocks: CnnBlocks = "module",
) -> tuple[list[str], Tensor]:
    """(block names, block of each coordinate) for trainable tensors given by name and shape, in order."""
    modules = dict(model.named_modules())
    ids: dict[str, int] = {}
    parts = []
    for name, shape in shapes.items():
        columns = False
        if architecture is None or granularity == "tensor":
            labels = [name]
        else:
            labels = _labels(name, shape, modules, architecture, lora_merge_ab, cnn_blocks)
            columns = len(labels) > 1 and _transposed(name, shape, modules)
        rows = torch.tensor([ids.setdefault(label, len(ids)) for label in labels], device="cpu")  # also under "meta"
        each = shape.numel() // len(rows)
        parts.append(rows.repeat(each) if columns else rows.repeat_interleave(each))
    return list(ids), torch.cat(parts)


def _transposed(name: str, shape: torch.Size, modules: Mapping[str, nn.Module]) -> bool:
    """GPT-2's Conv1D keeps its weight as [in, out], so that heads are columns. (LoRA's factors are ordinary.)"""
    owner = name.rpartition(".")[0]
    return len(shape) == 2 and type(modules[owner]).__name__.endswith("Conv1D")


def _labels(
    name: str,
    shape: torch.Size,
    modules: Mapping[str, nn.Module],
    architecture: Architecture,
    merge: bool,
    cnn: CnnBlocks,
) -> list[str]:
    """One label for the whole tensor, or one for each of its output rows."""
    plain = name.replace(".modules_to_save.default", "").replace(".base_layer", "")
    lora = _LORA.match(plain)
    path = lora["path"] if lora else plain.rpartition(".")[0]
    layout = architecture.attention.get(path.rpartition(".")[2])
    if cnn == "residual" and len(shape) == 4:
        path = _residual(path, modules, architecture)
    if lora and lora["factor"] == "A":
        return [path if merge and layout is None else f"{path}.lora_A"]
    stem = f"{path}.lora_B" if lora else path
    if layout is not None:
        outputs = shape[-1] if _transposed(name, shape, modules) else shape[0]
        return [f"{stem}.{head}" for head in head_rows(layout, outputs, head_count(path, modules, architecture))]
    if lora:
        return [path if merge else stem]
    owner = modules[name.rpartition(".")[0]]
    return [plain if any(True for _ in owner.children()) else path]


def _residual(path: str, modules: Mapping[str, nn.Module], architecture: Architecture) -> str:
    """The residual block that a convolution is in, or the convolution itself."""
    above = path
    while above:
        if type(modules[above]).__name__ in architecture.residual:
            return above
        above = above.rpartition(".")[0]
    return path


def head_count(path: str, modules: Mapping[str, nn.Module], architecture: Architecture) -> int:
    """How many heads the projection at `path` has: as its attention module says, or the configuration of that."""
    owner = modules[path.rpartition(".")[0]]
    grouped = path.rpartition(".")[2] in architecture.grouped
    names = (architecture.kv_heads,) if grouped else (architecture.heads, *_HEADS)
    for holder in (owner, getattr(owner, "config", None), getattr(modules[""], "config", None)):
        for name in filter(None, names):
            count = getattr(holder, name, None)
            if isinstance(count, int):
                return count
    raise ValueError(f"nothing says how many heads {path} has: it was looked for as {', '.join(filter(None, names))}")


def head_rows(layout: Layout, rows: int, heads: int) -> Iterable[str]:
    """The head that each output row belongs to. Fused layouts: 3HD is (q|k|v, head, d), H3D is (head, q|k|v, d)."""
    index = torch.arange(rows, device="cpu")
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
