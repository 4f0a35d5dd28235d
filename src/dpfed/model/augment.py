"""Random augmentations of images. Each use of a record in training draws a new augmentation.

An augmentation depends only on a random key, which is drawn for each use of the record. It does not
depend on the other records that are computed at the same time, or on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.accel.operators.dropout import mix

Augment = Literal["none", "flip", "crop_flip"]
# A function of images `[M, c, h, w]` and of one random key per image, `[M]`. It returns images of
# the same shape and dtype.
Augmentation = Callable[[Tensor, Tensor], Tensor]

# `crop_flip` moves an image by at most 1/8 of its side, for example by 4 of 32 pixels.
_CROP_SHARE = 8


def augmentation_of(kind: Augment) -> Augmentation | None:
    """Return the function that augments images, for a value of `data.augment`; None for "none"."""
    return {"none": None, "flip": flip, "crop_flip": crop_flip}[kind]


def flip(images: Tensor, keys: Tensor) -> Tensor:
    """Return the images, each mirrored left to right with probability one half."""
    mirrored = _draw(keys, 1, 2).bool().view(-1, 1, 1, 1)
    return torch.where(mirrored, images.flip(-1), images)


def crop_flip(images: Tensor, keys: Tensor) -> Tensor:
    """Return the images, each moved at random and then mirrored with probability one half.

    An image moves by at most 1/8 of its side in both directions. Pixels that no part of the image
    covers any more are black.
    """
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
