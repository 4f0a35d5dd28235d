"""Dropout layers whose masks depend only on each record's key.

A key is a random number that is drawn for each use of a record. A record's mask is a hash of its
key, the layer's number and the position in the activation. The mask does not depend on the other
records in the batch or on the GPU, and it is the same in a resumed run. A compiled step needs no
state of a random generator. Without keys, as in evaluation, the layers drop nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dpfed.accel.operators.dropout import drop, drop_records
from dpfed.model.per_sample.derived_class import derived, once_per_class

KEY = "slot_key"
RULE = "drop_rule"
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15


def rule_of(salt: int, rate: float) -> Tensor:
    """Return a layer's dropout rule: the start of its random stream, and its dropout rate.

    The rate is given as the number of 2^24 random draws that are dropped. Both numbers are in one
    tensor `[2]`, so that layers with different numbers are compiled only once.

    salt  the layer's number
    rate  the probability of dropout
    """
    # int64 holds the numbers from -2^63 to 2^63 - 1, so reduce the product to this range.
    start = (salt * _GOLDEN + 2**63) % 2**64 - 2**63
    return torch.tensor([start, math.ceil(rate * 2**24)])


def _key_and_rule(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the dropout keys `[M]` of M records, and the layer's rule from `rule_of`.

    Return None if nothing is dropped: the layer's rate is 0, or no keys are set, as in evaluation.
    """
    key, rule = getattr(layer, KEY, None), getattr(layer, RULE, None)
    if key is None or rule is None or key.numel() == 0:
        return None
    if x.shape[0] % len(key):
        raise ValueError(
            f"dropout got a leading axis of {x.shape[0]} for {len(key)} records, "
            "which is no multiple"
        )
    return key, rule


class KeyedDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        buffers = _key_and_rule(self, x)
        return x if buffers is None else drop(x, *buffers)


@once_per_class
def keyed_drop_path(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a version of a stochastic-depth class that drops whole records by their keys."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        buffers = _key_and_rule(self, x)
        return x if buffers is None else drop_records(x, *buffers)

    return derived(cls, "Keyed", forward=forward, _keyed=True)


def install_keyed_dropout(model: nn.Module) -> list[str]:
    """Make all dropout and stochastic-depth layers draw their masks from keys, in place.

    The classes of these layers are replaced. Return the names of the buffers in which the layers
    find the records' keys.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    keys = []
    for salt, (name, module) in enumerate(model.named_modules(), start=1):
        if type(module) is nn.Dropout:
            module.__class__ = KeyedDropout
        elif type(module).__name__.endswith("DropPath") and not hasattr(module, "_keyed"):
            module.__class__ = keyed_drop_path(type(module))
        if isinstance(module, KeyedDropout):
            rate = module.p
        elif hasattr(module, "_keyed"):
            rate = module.drop_prob
        else:
            continue
        if rate:
            no_keys = torch.empty(0, dtype=torch.int64)
            module.register_buffer(KEY, no_keys, persistent=False)
            module.register_buffer(RULE, rule_of(salt, float(rate)).to(device), persistent=False)
            keys.append(f"{name}.{KEY}")
    return keys
