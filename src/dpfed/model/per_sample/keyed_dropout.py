"""Dropout whose mask depends on the record's key alone.

A record's mask is a hash of (key of the slot, number of the layer, position in the activation). So it is the same
whatever fleet, chunk or GPU the record is computed in, a resumed run repeats it, and a compiled step needs no generator
state. Without keys (evaluation) the layer is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpfed.accel import usable

KEY = "slot_key"
RULE = "drop_rule"
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


Maker = Callable[[type[nn.Module]], type[nn.Module]]


def once(make: Maker) -> Maker:
    """One twin for each class, whatever number of layers: to a compiler two classes are two programs."""
    made: dict[type[nn.Module], type[nn.Module]] = {}

    def twin(cls: type[nn.Module]) -> type[nn.Module]:
        if cls not in made:
            made[cls] = make(cls)
        return made[cls]

    return twin


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on int64; shifts are made logical by the masks."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def rule_of(salt: int, drop: float) -> Tensor:
    """Where a layer's stream starts, and how many of 2^24 draws it drops. A tensor, so that layers which differ in nothing
    else are one compilation."""
    start = (
        salt * _GOLDEN + 2**63
    ) % 2**64 - 2**63  # wrapped by hand: a Python number must fit int64
    return torch.tensor([start, math.ceil(drop * 2**24)])


def keep_mask(key: Tensor, rule: Tensor, width: int) -> Tensor:
    """`[M]` keys -> `[M, width]` booleans that are true with probability 1 - drop."""
    start, dropped = rule
    stream = mix(key + start).unsqueeze(1)
    bits = mix(
        stream ^ torch.arange(width, device=key.device)
    )  # not a product: compilers fold it into huge constants
    kept: Tensor = ((bits >> 40) & 0xFFFFFF) >= dropped
    return kept


class TwinDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return _drop(x, getattr(self, KEY, None), getattr(self, RULE, None), whole=False)


@once
def drop_path_twin(cls: type[nn.Module]) -> type[nn.Module]:
    """Stochastic depth: one decision per record."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return _drop(x, getattr(self, KEY, None), getattr(self, RULE, None), whole=True)

    return type(
        f"Keyed{cls.__name__}", (cls,), {"forward": forward, "_keyed": True, "__module__": __name__}
    )


def _drop(x: Tensor, key: Tensor | None, rule: Tensor | None, whole: bool) -> Tensor:
    if key is None or rule is None or key.numel() == 0:
        return x
    samples = key.shape[0]
    if x.shape[0] % samples:
        raise ValueError(
            f"dropout got a leading axis of {x.shape[0]} for {samples} records, which is no multiple"
        )
    if not whole and not torch.compiler.is_compiling() and _fits(x, key, rule):
        y: Tensor = KeyedDropout.apply(x, key, rule)  # type: ignore[no-untyped-call]
        return y
    keep = keep_mask(key, rule, 1 if whole else x.numel() // samples)
    scale = 1 / (1 - rule[1].float() * 2.0**-24)
    mask = torch.where(keep, scale, 0.0).to(
        x.dtype
    )  # a product would be no number where all are dropped
    if whole:
        return x * mask.repeat_interleave(x.shape[0] // samples, 0).view(-1, *([1] * (x.dim() - 1)))
    return x * mask.view(x.shape)


class KeyedDropout(torch.autograd.Function):
    """In one pass over memory, where there is a kernel for it; a compiler makes one by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, rule: Tensor) -> Tensor:
        from dpfed.accel import dropout

        ctx.save_for_backward(key, rule)
        return dropout.drop(x, key, rule)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return KeyedDropout.apply(grad.contiguous(), *ctx.saved_tensors), None, None  # type: ignore[no-untyped-call]


def _fits(x: Tensor, key: Tensor, rule: Tensor) -> bool:
    if not usable(x):
        return False
    from dpfed.accel import dropout

    return dropout.fits(x, key, rule)


def install_keyed_dropout(model: nn.Module) -> list[str]:
    """Exchanges every dropout and stochastic-depth layer; returns the names of their key buffers."""
    keys = []
    for salt, (name, module) in enumerate(model.named_modules(), start=1):
        if type(module) is nn.Dropout:
            module.__class__ = TwinDropout
        elif type(module).__name__.endswith("DropPath"):
            if not hasattr(module, "_keyed"):
                module.__class__ = drop_path_twin(type(module))
        elif not isinstance(module, TwinDropout):
            continue
        rate = module.p if isinstance(module, TwinDropout) else module.drop_prob
        if rate:
            module.register_buffer(KEY, torch.empty(0, dtype=torch.int64), persistent=False)
            module.register_buffer(
                RULE, rule_of(salt, float(rate)).to(_device(model)), persistent=False
            )
            keys.append(f"{name}.{KEY}")
    return keys


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
