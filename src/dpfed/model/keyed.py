"""Dropout whose mask depends on the record's key alone.

A record's mask is a hash of (key of the slot, number of the layer, position in the activation). So it is the same
whatever fleet, chunk or GPU the record is computed in, a resumed run repeats it, and a compiled step needs no generator
state. Without keys (evaluation) the layer is the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

KEY = "slot_key"
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on int64; shifts are made logical by the masks."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def keep_mask(key: Tensor, salt: int, width: int, drop: float) -> Tensor:
    """`[M]` keys -> `[M, width]` booleans that are true with probability 1 - drop."""
    start = (salt * _GOLDEN + 2**63) % 2**64 - 2**63  # wrapped by hand: a Python number must fit int64
    stream = mix(key + start).unsqueeze(1)
    bits = mix(stream ^ torch.arange(width, device=key.device))  # not a product: compilers fold it into huge constants
    return ((bits >> 40) & 0xFFFFFF).float() >= drop * float(1 << 24)


class TwinDropout(nn.Dropout):
    _salt: int = 0

    def forward(self, x: Tensor) -> Tensor:
        return _drop(x, getattr(self, KEY, None), self._salt, self.p, whole=False)


def drop_path_twin(cls: type[nn.Module]) -> type[nn.Module]:
    """Stochastic depth: one decision per record."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return _drop(x, getattr(self, KEY, None), self._salt, float(self.drop_prob or 0.0), whole=True)  # type: ignore[arg-type]

    return type(f"Keyed{cls.__name__}", (cls,), {"forward": forward, "_salt": 0, "__module__": __name__})


def _drop(x: Tensor, key: Tensor | None, salt: int, drop: float, whole: bool) -> Tensor:
    if key is None or key.numel() == 0 or drop == 0:
        return x
    samples = key.shape[0]
    if x.shape[0] % samples:
        raise ValueError(f"dropout got a leading axis of {x.shape[0]} for {samples} records, which is no multiple")
    keep = keep_mask(key, salt, 1 if whole else x.numel() // samples, drop)
    mask = keep.to(x.dtype) / (1 - drop)
    if whole:
        return x * mask.repeat_interleave(x.shape[0] // samples, 0).view(-1, *([1] * (x.dim() - 1)))
    return x * mask.view(x.shape)


def install_keyed_dropout(model: nn.Module) -> list[str]:
    """Exchanges every dropout and stochastic-depth layer; returns the names of their key buffers."""
    keys = []
    for salt, (name, module) in enumerate(model.named_modules(), start=1):
        if type(module) is nn.Dropout:
            module.__class__ = TwinDropout
        elif type(module).__name__.endswith("DropPath"):
            if not hasattr(module, "_salt"):
                module.__class__ = drop_path_twin(type(module))
        elif not isinstance(module, TwinDropout):
            continue
        module._salt = salt
        rate = module.p if isinstance(module, TwinDropout) else module.drop_prob
        if rate:
            module.register_buffer(KEY, torch.empty(0, dtype=torch.int64), persistent=False)
            keys.append(f"{name}.{KEY}")
    return keys
