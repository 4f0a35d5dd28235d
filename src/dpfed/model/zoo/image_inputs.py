"""Prepare images for a model: resize, sharpen and normalise each image by itself.

All constants are public, so the preparation does not depend on private data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.errors import DpfedError
from dpfed.model.export_files import ImageInput
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Prepare

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def images(entry: ImageInput) -> Prepare:
    """Return the function that turns raw images, grey or coloured, into the model's input.

    entry  size, channels and constants of the model's input
    """
    name = entry.spec.name
    resized = None if entry.size is None else resizing(entry.size, entry.resize)
    # Keep mean and std on each device, because a captured CUDA graph cannot copy them there.
    constants: dict[torch.device, tuple[Tensor, ...]] = {}

    def prepare(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs[name].float()
        if resized is not None and x.shape[-2:] != (entry.size, entry.size):
            x = resized(x)
        if entry.sharpen:
            x = x + entry.sharpen * (x - blurred(x))
        # Sharpening and bicubic resizing can give values outside the range of pixels, so clamp.
        if entry.sharpen or entry.resize == "bicubic":
            x = x.clamp(0, entry.spec.white)
        if x.shape[1] != entry.channels:
            x = x.expand(-1, entry.channels, -1, -1)
        if x.device not in constants:
            constants[x.device] = tuple(
                torch.tensor(v, device=x.device).view(-1, 1, 1) for v in (entry.mean, entry.std)
            )
        mean, std = constants[x.device]
        return {name: (x / entry.spec.white - mean) / std}

    return prepare


def resizing(size: int, mode: str) -> Callable[[Tensor], Tensor]:
    """Return the function that resizes M images `[M, C, H, W]` to `[M, C, size, size]`.

    mode  "bilinear" or "bicubic"; images that become smaller are antialiased

    On a GPU it multiplies by two matrices, which is faster for small images than F.interpolate. On
    a CPU and in compiled code it calls F.interpolate.
    """
    # Keep the matrices on each device, because a captured CUDA graph cannot copy them there.
    matrices: dict[tuple[torch.device, int, bool], Tensor] = {}

    def resized(x: Tensor) -> Tensor:
        smaller = size < max(x.shape[-2:])
        if not takes_products(x):
            return F.interpolate(x, (size, size), mode=mode, align_corners=False, antialias=smaller)
        for side in x.shape[-2:]:
            key = (x.device, side, smaller)
            if key not in matrices:
                matrices[key] = resize_matrix(side, size, mode, smaller).to(x.device)
        down, across = (matrices[x.device, side, smaller] for side in x.shape[-2:])
        return by_products(x, down, across)

    return resized


def takes_products(x: Tensor) -> bool:
    return x.device.type == "cuda" and not torch.compiler.is_compiling()


def resize_matrix(side: int, size: int, mode: str, smaller: bool) -> Tensor:
    """Return the matrix `[size, side]` that resizes a column of `side` pixels to `size` pixels.

    mode     "bilinear" or "bicubic"
    smaller  True for antialiasing, which is needed if an image becomes smaller
    """
    each = torch.eye(side).view(1, 1, side, side)
    resized = F.interpolate(each, (size, side), mode=mode, align_corners=False, antialias=smaller)
    return resized.view(size, side)


def by_products(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Return the images `x`, with columns resized by the matrix `down` and rows by `across`.

    Training turns TF32 off, so the matrix products have full float32 precision.
    """
    return down @ (x @ across.t())


def blurred(x: Tensor) -> Tensor:
    """Return the images, blurred along both axes by the kernel (1, 4, 6, 4, 1) / 16.

    Images are mirrored at the border.
    """
    for side in (2, 3):
        count = x.shape[side]
        padded = F.pad(x, (2, 2, 0, 0) if side == 3 else (0, 0, 2, 2), mode="reflect")
        parts = [w / 16 * padded.narrow(side, i, count) for i, w in enumerate((1, 4, 6, 4, 1))]
        x = sum(parts)  # type: ignore[assignment]
    return x


def expect_images(name: str, spec: InputSpec, channels: int) -> None:
    if spec.kind != "image":
        raise DpfedError(
            f"model.name = {name!r} reads images, this data has {spec.kind}: "
            "choose another model or data"
        )
    if spec.shape[0] not in (1, channels):
        raise DpfedError(
            f"model.name = {name!r} reads images of {channels} channels (grey ones are repeated), "
            f"this data has {spec.shape[0]}"
        )
