"""Random augmentations of images, one for each use of a record, applied inside the oracle.

A record's augmentation depends on its key alone, as dropout does: not on fleet, chunk or device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.accel.operators.dropout import mix

Augment = Literal["none", "flip", "crop_flip"]
# (images `[M, c, h, w]`, keys `[M]`) -> images of the same shape and type.
Augmentation = Callable[[Tensor, Tensor], Tensor]

# A crop moves by at most side / 8, as 4 of 32 pixels.
_CROP_SHARE = 8


def augmentation_of(kind: Augment) -> Augmentation | None:
    """Return the augmentation of a configuration's `data.augment`."""
    return {"none": None, "flip": flip, "crop_flip": crop_flip}[kind]


def flip(images: Tensor, keys: Tensor) -> Tensor:
    """Mirror each image left to right with probability one half."""
    mirrored = _draw(keys, 1, 2).bool().view(-1, 1, 1, 1)
    return torch.where(mirrored, images.flip(-1), images)


def crop_flip(images: Tensor, keys: Tensor) -> Tensor:
    """Move each image by up to an eighth of its side in both directions, fill with black, flip."""
    height, width = images.shape[-2:]
    down, across = height // _CROP_SHARE, width // _CROP_SHARE
    padded = F.pad(images, (across, across, down, down))
    device = keys.device
    rows = _draw(keys, 2, 2 * down + 1).unsqueeze(1) + torch.arange(height, device=device)
    columns = _draw(keys, 3, 2 * across + 1).unsqueeze(1) + torch.arange(width, device=device)
    record = torch.arange(len(images), device=device).view(-1, 1, 1, 1)
    channel = torch.arange(images.shape[1], device=device).view(1, -1, 1, 1)
    return flip(padded[record, channel, rows[:, None, :, None], columns[:, None, None, :]], keys)


def _draw(keys: Tensor, salt: int, count: int) -> Tensor:
    return ((mix(mix(keys) + salt) >> 33) & 0x7FFFFFFF) % count
