"""Random views of images, one for each inclusion of a record, made inside the oracle (SPEC 1.4c).

What happens to a record depends on its key alone, as for dropout (`keyed.py`): not on the fleet, the chunk or the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.model.per_sample.keyed_dropout import mix

Augment = Literal["none", "flip", "crop_flip"]
View = Callable[[Tensor, Tensor], Tensor]
"""(images `[M, c, h, w]`, keys `[M]`) -> images of the same shape and type."""

_PADDING = 8  # a crop may move by an eighth of the side, as 4 of 32 pixels


def augmentation_of(kind: Augment) -> View | None:
    return {"none": None, "flip": flip, "crop_flip": crop_flip}[kind]


def flip(images: Tensor, keys: Tensor) -> Tensor:
    """Mirrored left to right with probability one half."""
    mirrored = _draw(keys, 1, 2).bool().view(-1, 1, 1, 1)
    return torch.where(mirrored, images.flip(-1), images)


def crop_flip(images: Tensor, keys: Tensor) -> Tensor:
    """Moved by up to an eighth of the side in both directions, black where nothing was, then perhaps mirrored."""
    pads = [side // _PADDING for side in images.shape[-2:]]
    padded = F.pad(images, (pads[1], pads[1], pads[0], pads[0]))
    rows = _draw(keys, 2, 2 * pads[0] + 1).unsqueeze(1) + torch.arange(
        images.shape[-2], device=keys.device
    )
    columns = _draw(keys, 3, 2 * pads[1] + 1).unsqueeze(1) + torch.arange(
        images.shape[-1], device=keys.device
    )
    record = torch.arange(len(images), device=keys.device).view(-1, 1, 1, 1)
    channel = torch.arange(images.shape[1], device=keys.device).view(1, -1, 1, 1)
    return flip(padded[record, channel, rows[:, None, :, None], columns[:, None, None, :]], keys)


def _draw(keys: Tensor, salt: int, count: int) -> Tensor:
    """A number from 0 to count - 1 for each key, another for each salt."""
    return ((mix(mix(keys) + salt) >> 33) & 0x7FFFFFFF) % count
