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
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

Layout = Literal["separate", "3HD", "H3D"]
_LORA = re.compile(r"^(?P<path>.*)\.lora_(?P<factor>[AB])\.[^.]+\.weight$")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = ("head_dim", "attention_head_size")


@dataclass(frozen=True)
class Architecture:
    """attention: name of a projection -> how heads lie in its output rows.
    heads: the attribute that counts query heads, of the attention module or of its configuration."""

    attention: Mapping[str, Layout]
    heads: str = "num_attention_heads"


def _separate(*names: str) -> dict[str, Layout]:
    return dict.fromkeys(names, "separate")


_QKV = _separate("q_proj", "k_proj", "v_proj", "query", "key", "value")
_ENCODER = Architecture(_QKV)
_DECODER = Architecture(_separate("q_proj", "k_proj", "v_proj"))
_DECODERS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2",
)  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {
    **dict.fromkeys(("vit", "deit", "swin", "bert", "roberta", "xlm-roberta"), _ENCODER),
    **dict.fromkeys(_DECODERS, _DECODER),
    "phi3": Architecture({"qkv_proj": "3HD"}),
    "distilbert": Architecture(_separate("q_lin", "k_lin", "v_lin"), heads="n_heads"),
    "gpt2": Architecture({"c_attn": "3HD"}, heads="num_heads"),
    "gpt_neox": Architecture({"query_key_value": "H3D"}),
    "gn-resnet": Architecture({}),
    "resnet": Architecture({}),
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
            labels = _labels(name, shape, modules, architecture)
            columns = len(labels) > 1 and _transposed(name, shape, modules)
        rows = torch.tensor(
            [ids.setdefault(label, len(ids)) for label in labels], device="cpu"
        )  # also under "meta"
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
) -> list[str]:
    """One label for the whole tensor, or one for each of its output rows."""
    plain = name.replace(".modules_to_save.default", "").replace(".base_layer", "")
    lora = _LORA.match(plain)
    path = lora["path"] if lora else plain.rpartition(".")[0]
    layout = architecture.attention.get(path.rpartition(".")[2])
    if lora and lora["factor"] == "A":
        return [f"{path}.lora_A"]
    stem = f"{path}.lora_B" if lora else path
    if layout is not None:
        outputs = shape[-1] if _transposed(name, shape, modules) else shape[0]
        counts = head_counts(path, layout, outputs, modules, architecture)
        return [f"{stem}.{head}" for head in head_rows(layout, outputs, *counts)]
    if lora:
        return [stem]
    owner = modules[name.rpartition(".")[0]]
    return [plain if any(True for _ in owner.children()) else path]


def head_counts(
    path: str,
    layout: Layout,
    rows: int,
    modules: Mapping[str, nn.Module],
    architecture: Architecture,
) -> tuple[int, int]:
    """Return the heads of queries and of keys in the projection at `path`, which has so many rows.

    A separate projection has one number of heads. With grouped-query attention its rows tell which.
    """
    names = (*filter(None, (architecture.heads,)), *_HEADS)
    heads = _said(path, names, modules)
    if heads is None:
        looked = ", ".join(names)
        raise ValueError(f"nothing says how many heads {path} has: it was looked for as {looked}")
    kv_heads = _said(path, _KV_HEADS, modules) or heads
    if layout != "separate" or kv_heads == heads:
        return heads, kv_heads
    width = _said(path, _WIDTHS, modules)
    if width is None:
        width = (_said(path, ("hidden_size",), modules) or 0) // heads
    for count in (heads, kv_heads):
        if rows == count * width:
            return count, count
    raise ValueError(
        f"the {rows} output rows of {path} are neither {heads} query heads nor "
        f"{kv_heads} key or value heads of {width} rows: leave it out of model.attention"
    )


def _said(path: str, names: Iterable[str], modules: Mapping[str, nn.Module]) -> int | None:
    """Return the first such number of the attention module, its configuration or the model's."""
    owner = modules[path.rpartition(".")[0]]
    for holder in (owner, getattr(owner, "config", None), getattr(modules[""], "config", None)):
        for name in names:
            count = getattr(holder, name, None)
            if isinstance(count, int):
                return count
    return None


def head_rows(layout: Layout, rows: int, heads: int, kv_heads: int | None = None) -> list[str]:
    """Return the head that each output row belongs to.

    separate  (head, width)
    3HD       (query heads | key heads | value heads, width)
    H3D       (key head, (its query heads | key | value), width)
    """
    if layout == "separate":
        _divides(rows, heads)
        return [f"head{row // (rows // heads)}" for row in range(rows)]
    keys = heads if kv_heads is None else kv_heads
    _divides(rows, heads + 2 * keys)
    _divides(heads, keys)
    parts: list[str] = []
    if layout == "3HD":
        for part, count in (("q", heads), ("k", keys), ("v", keys)):
            parts += [f"{part}.head{h}" for h in range(count)]
    else:
        group = heads // keys
        for h in range(keys):
            parts += [f"q.head{h * group + i}" for i in range(group)]
            parts += [f"k.head{h}", f"v.head{h}"]
    width = rows // len(parts)
    return [part for part in parts for _ in range(width)]


def _divides(rows: int, heads: int) -> None:
    if rows % heads:
        raise ValueError(f"{rows} output rows cannot be divided among {heads} heads")
