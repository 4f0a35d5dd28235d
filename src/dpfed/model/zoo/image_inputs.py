"""Prepare images for a model: resize, sharpen and normalise each image by itself.

All constants are public, so nothing is learnt from the data.
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
    """Return the function that prepares raw images, grey or coloured and of any size."""
    name = entry.spec.name
    resized = None if entry.size is None else resizing(entry.size, entry.resize)
    # A captured CUDA graph cannot copy numbers to the device, so they are kept there.
    constants: dict[torch.device, tuple[Tensor, ...]] = {}

    def prepare(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs[name].float()
        if resized is not None and x.shape[-2:] != (entry.size, entry.size):
            x = resized(x)
        if entry.sharpen:
            x = x + entry.sharpen * (x - blurred(x))
        # Sharpening and bicubic resizing overshoot at edges.
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
    """Return the function from images `[M, C, H, W]` to `[M, C, size, size]`, antialiased.

    For small images two matrix products are faster on a GPU than torch's own kernel. Compiled code
    gets torch's function, which the compiler fuses.
    """
    # A captured CUDA graph cannot copy numbers to the device, so they are kept there.
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
    """Return the matrix `[size, side]` that resizes a column of pixels."""
    each = torch.eye(side).view(1, 1, side, side)
    resized = F.interpolate(each, (size, side), mode=mode, align_corners=False, antialias=smaller)
    return resized.view(size, side)


def by_products(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Resize columns by one matrix and rows by the other; training turns TF32 off."""
    return down @ (x @ across.t())


def blurred(x: Tensor) -> Tensor:
    """Return images blurred by the kernel 1 4 6 4 1 along each side, mirrored at the border."""
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
