"""Models whose frozen linear layers are stored in 8 or 4 bits, to save memory.

int8   torchao, weights only: one scale for each output row
4bit   bitsandbytes: NF4 with quantised scales (Dettmers et al., QLoRA, NeurIPS 2023)

The two libraries only store the weights. For each matrix product, forward or backward, the layers
here convert their weights back to floating point and compute like plain layers. The libraries' own
products are not used. The product of one library keeps floating-point weights for the backward
pass. The product of the other has no gradients on a CPU in eval mode, and there it rounds
differently than in training.

Other forms of quantisation are refused by name. The 8-bit form of bitsandbytes, for example, looks
for outliers among all tokens of a batch, so one record changes the results of others.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfed.errors import DpfedError
from dpfed.model.per_sample.derived_class import derived, once_per_class

Quantize = Literal["none", "int8", "4bit"]
LIBRARY = {"int8": "torchao", "4bit": "bitsandbytes"}
WEIGHT_ONLY = "Int8WeightOnlyConfig"


def quantisation(how: Quantize, config: Any, skip: Sequence[str]) -> Any:
    """Return the argument `quantization_config` of `from_pretrained`; None for a plain model.

    how     value of `model.quantize`
    config  the model's configuration; it says if the weights are quantised already
    skip    names of the modules that are not quantised, such as the output layer
    """
    stated = _stated(config)
    if stated is None and how == "none":
        return None
    if stated is None:
        _require(LIBRARY[how], f"model.quantize = {how!r} needs")
        return _int8(skip) if how == "int8" else _four_bits(skip)
    if how != "none":
        raise DpfedError(
            f"model.quantize = {how!r}: the weights are quantised already, so leave it out"
        )
    _require(_library_of(stated), "these weights are quantised, which needs")
    return None


def _stated(config: Any) -> dict[str, Any] | None:
    """Return the quantisation that a model's configuration declares; None for plain weights."""
    stated = getattr(config, "quantization_config", None)
    if stated is None or isinstance(stated, dict):
        return stated
    return dict(stated.to_dict())


def _library_of(stated: dict[str, Any]) -> str:
    """Return the name of the library that reads weights with the declared quantisation `stated`.

    Raise DpfedError for a form of quantisation that cannot be used here.
    """
    method = str(stated.get("quant_method", "unknown"))
    known = ""
    if method == "bitsandbytes":
        if stated.get("load_in_4bit"):
            return "bitsandbytes"
        known = " in 8 bits, which mixes the records of a pass"
    if method == "torchao":
        if f"'_type': '{WEIGHT_ONLY}'" in str(stated.get("quant_type")):
            return "torchao"
        known = " in another form than 8-bit weights"
    raise DpfedError(
        f"the weights are quantised by {method}{known}: give weights of 4 bits by bitsandbytes, "
        'of 8 bits by torchao, or plain ones with model.quantize = "int8" or "4bit"'
    )


def _require(library: str, needs: str) -> None:
    try:
        with _without_warnings():
            importlib.import_module(library)
    except ImportError:
        raise DpfedError(f"{needs} {library}: pip install 'dpfed[quant]'") from None


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide the warnings about missing GPU code that torchao and bitsandbytes log on import."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _int8(skip: Sequence[str]) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2), modules_to_not_convert=list(skip))


def _four_bits(skip: Sequence[str]) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=list(skip),
    )


def is_quantised(value: Tensor) -> bool:
    """Return True for a weight that torchao or bitsandbytes stores in 8 or 4 bits."""
    return hasattr(value, "quant_state") or is_int8(value)


def is_int8(value: Tensor) -> bool:
    """Return True for a weight that torchao stores in 8 bits."""
    return hasattr(value, "__tensor_flatten__") and hasattr(value, "qdata")


def has_quantised(model: nn.Module) -> bool:
    return any(is_quantised(p) for p in model.parameters())


def number_of_weights(model: nn.Module) -> int:
    """Return the number of parameters of a model.

    A quantised weight counts with the number of its original values, not of its packed bytes.
    """
    return sum(_size(p) for p in model.parameters())


def _size(value: Tensor) -> int:
    state = getattr(value, "quant_state", None)
    return value.numel() if state is None else int(torch.Size(state.shape).numel())


def stored_tensors(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return the tensors that store the weight `value`, by name.

    A plain weight is stored as itself, a quantised weight as packed numbers and scales.
    """
    state = getattr(value, "quant_state", None)
    if state is not None:
        parts = {f"{name}.{key}": x for key, x in state.as_dict(packed=True).items()}
        return {name: value, **parts}
    if is_int8(value):
        names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
        return {f"{name}.{part}": getattr(value, part) for part in names}
    return {name: value}


def compute_with_numbers(model: nn.Module) -> None:
    """Make linear layers convert their quantised weights to floating point for each product.

    The classes of these layers are replaced in place.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_quantised(module.weight):
            module.__class__ = _plain_product(type(module))  # type: ignore[assignment]


@once_per_class
def _plain_product(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        y: Tensor = _FrozenProduct.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    return derived(cls, "Frozen", forward=forward)


def numbers(weight: Any, dtype: torch.dtype) -> Tensor:
    """Return a quantised weight converted to floating point, `[out, in]`, in the given dtype."""
    if is_int8(weight):
        plain: Tensor = weight.dequantize(dtype)
        return plain
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(weight.quant_state)
    state.dtype = dtype
    plain = dequantize_4bit(weight.data, state)
    return plain


class _FrozenProduct(torch.autograd.Function):
    """The product x Wᵀ with a quantised W, which saves memory.

    The floating-point form of W is not stored: the backward pass computes it again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        return F.linear(x, numbers(weight, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.matmul(grad, numbers(ctx.weight, grad.dtype)), None


def set_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert all floating-point tensors of the model to `dtype`, except quantised weights.

    A product converts its quantised weight to the dtype of the activations.
    """
    # The model's own `to` refuses to convert a quantised model.
    nn.Module.to(model, dtype)
