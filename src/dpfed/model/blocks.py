"""Blocks: groups of trainable parameters that share one second moment in Adam-like optimizers.

Blocks depend on the architecture and never on data; docs/algorithms.md explains their use. The
first of these rules that matches a parameter chooses its block:
1. The weights and biases of the layers Q, K and V have one block per attention head. LoRA's B in
   these layers also has one block per head, because the rows of B are the layer's output rows.
2. LoRA's A is one block. In all other layers B is one block too. A and B are separate because
   their second moments differ: B starts at zero.
3. Any other module has one block for its weight and bias. A parameter that belongs directly to a
   module with children, such as a class token, has its own block.
ARCHITECTURES names the Q, K and V layers. In an unknown architecture each tensor is one block.
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
    """The attention layers in one type of model: their names, and the order of their heads.

    attention  name of a Q, K or V layer -> how the heads are ordered in its output rows
    heads      name of the attribute with the number of query heads, in the attention module or
               in its configuration
    """

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
    """Return the configuration of the Transformer inside `model`, a model or a configuration.

    A model with several parts, such as images and text, keeps it under `text_config`. A classifier
    that reads the outputs of all layers keeps it under `body_config`. Without such an entry, return
    the whole configuration.
    """
    config = getattr(model, "config", model)
    return getattr(config, "body_config", getattr(config, "text_config", config))


def architecture_of(
    model: nn.Module, qkv_layout: Layout | Literal["auto"] = "auto", attention: tuple[str, ...] = ()
) -> Architecture | None:
    """Return the attention layers of the model by its `model_type`; None for an unknown type.

    The layers are never guessed from the names of modules. The user's settings take precedence.

    qkv_layout  order of the heads in the output rows; "auto" for the known order
    attention   names of the Q, K and V layers; () for the known names
    """
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
    """Return the names of the blocks, and for each trainable number the index of its block.

    A block is a group of numbers that share one second moment. The indices are int64 `[P]`, for a
    model with P trainable numbers.

    shapes        shapes of the trainable tensors, in the order of the flat vector
    architecture  the model's attention layers; None makes each tensor one block
    granularity   "tensor" makes each tensor one block even if the architecture is known
    """
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
        # Create the tensor on the CPU. If the default device is PyTorch's meta device, tensors
        # there would have no values.
        rows = torch.tensor([ids.setdefault(label, len(ids)) for label in labels], device="cpu")
        each = shape.numel() // len(rows)
        parts.append(rows.repeat(each) if columns else rows.repeat_interleave(each))
    return list(ids), torch.cat(parts)


def _transposed(name: str, shape: torch.Size, modules: Mapping[str, nn.Module]) -> bool:
    """Return True if a layer stores its weight as `[in, out]`, as GPT-2's Conv1D does.

    An attention head then is a group of columns of the weight, not of rows.
    """
    owner = name.rpartition(".")[0]
    return len(shape) == 2 and type(modules[owner]).__name__.endswith("Conv1D")


def _labels(
    name: str,
    shape: torch.Size,
    modules: Mapping[str, nn.Module],
    architecture: Architecture,
) -> list[str]:
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
    """Return the numbers of query heads and of key heads for the attention layer at `path`.

    For a layer that is only Q, K or V, both numbers are the layer's number of heads. With
    grouped-query attention there are fewer key heads than query heads. The number of output rows
    (`rows`) then shows which heads the layer has.
    """
    names = [*filter(None, (architecture.heads,)), *_HEADS]
    heads = _declared(path, names, modules)
    if heads is None:
        raise ValueError(
            f"nothing says how many heads {path} has: it was looked for as {', '.join(names)}"
        )
    kv_heads = _declared(path, _KV_HEADS, modules) or heads
    if layout != "separate" or kv_heads == heads:
        return heads, kv_heads
    width = _declared(path, _WIDTHS, modules)
    if width is None:
        width = (_declared(path, ("hidden_size",), modules) or 0) // heads
    for count in (heads, kv_heads):
        if rows == count * width:
            return count, count
    raise ValueError(
        f"the {rows} output rows of {path} are neither {heads} query heads nor "
        f"{kv_heads} key or value heads of {width} rows: leave it out of model.attention"
    )


def _declared(path: str, names: Iterable[str], modules: Mapping[str, nn.Module]) -> int | None:
    owner = modules[path.rpartition(".")[0]]
    holders = (owner, getattr(owner, "config", None), getattr(modules[""], "config", None))
    counts = (getattr(holder, name, None) for holder in holders for name in names)
    return next((count for count in counts if isinstance(count, int)), None)


def head_rows(layout: Layout, rows: int, heads: int, kv_heads: int | None = None) -> list[str]:
    """Return the name of the attention head of each output row of a Q, K or V layer.

    `rows` is the number of output rows. Each head has the same number of adjacent rows. The layout
    says how the heads are ordered:

    separate  all heads of a layer that is only Q, K or V
    3HD       all query heads, then all key heads, then all value heads
    H3D       for each key head: its query heads, the key head, its value head
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
