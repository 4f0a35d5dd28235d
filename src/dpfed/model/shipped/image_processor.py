"""Image processor that prepares images exactly as the training run did.

It needs torch, Pillow and transformers. `preprocessor_config.json` beside this file has its
settings. `AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)` loads both files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature


class RunImageProcessor(BaseImageProcessor):  # type: ignore[misc]
    """Crop, resize, sharpen and normalise images, each by itself.

    side         pixels of a side after resizing; None keeps the size
    channels     channels of the model's input
    image_mean   subtracted from each channel after the division by `white`
    image_std    divides each channel after the subtraction of `image_mean`
    white        pixel value of full intensity
    resize       "bilinear" or "bicubic"
    sharpen      strength of the unsharp mask after resizing; 0 for none
    crop         first resize the shorter side to this size and keep the middle; None for no crop
    grey         True if colours are turned into grey
    """

    model_input_names: ClassVar = ["pixel_values"]

    def __init__(
        self,
        side: int | None = None,
        channels: int = 3,
        image_mean: Sequence[float] = (0.5,),
        image_std: Sequence[float] = (0.5,),
        white: float = 255.0,
        resize: str = "bilinear",
        sharpen: float = 0.0,
        crop: int | None = None,
        grey: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.side = side
        self.channels = channels
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)
        self.white = white
        self.resize = resize
        self.sharpen = sharpen
        self.crop = crop
        self.grey = grey

    def preprocess(
        self,
        images: Any,
        return_tensors: str | None = None,
        **others: Any,
    ) -> BatchFeature:
        """Return `pixel_values`, the model's input for one image or a list of images.

        An image is a Pillow image, or a uint8 array `[H, W]` or `[H, W, C]`.
        """
        several = images if isinstance(images, list | tuple) else [images]
        pixels = torch.cat([self.prepare(self.read(image)) for image in several])
        return BatchFeature({"pixel_values": pixels}, tensor_type=return_tensors or "pt")

    def read(self, image: Any) -> Tensor:
        """Return the pixels of one image as float `[1, C, H, W]`."""
        if not isinstance(image, Image.Image):
            image = Image.fromarray(np.asarray(image, dtype=np.uint8))
        picture = ImageOps.exif_transpose(image).convert("L" if self.grey else "RGB")
        if self.crop is not None:
            picture = cropped(picture, self.crop)
        array = torch.from_numpy(np.array(picture))
        pixels = array[None] if array.ndim == 2 else array.permute(2, 0, 1)
        return pixels[None].float()

    def prepare(self, pixels: Tensor) -> Tensor:
        """Return the model's input for the pixels `[M, C, H, W]` of M images."""
        if self.side is not None and tuple(pixels.shape[-2:]) != (self.side, self.side):
            smaller = self.side < max(pixels.shape[-2:])
            pixels = F.interpolate(
                pixels,
                (self.side, self.side),
                mode=self.resize,
                align_corners=False,
                antialias=smaller,
            )
        if self.sharpen:
            pixels = pixels + self.sharpen * (pixels - blurred(pixels))
        if self.sharpen or self.resize == "bicubic":
            pixels = pixels.clamp(0, self.white)
        if pixels.shape[1] != self.channels:
            pixels = pixels.expand(-1, self.channels, -1, -1)
        mean = torch.tensor(self.image_mean).view(-1, 1, 1)
        std = torch.tensor(self.image_std).view(-1, 1, 1)
        return (pixels / self.white - mean) / std


def cropped(image: Image.Image, size: int) -> Image.Image:
    """Return the middle of the image, after resizing its shorter side to `size`."""
    width, height = image.size
    short = min(width, height)
    wide = max(size, round(width * size / short))
    high = max(size, round(height * size / short))
    if (wide, high) != (width, height):
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
    left = (wide - size) // 2
    top = (high - size) // 2
    return image.crop((left, top, left + size, top + size))


def blurred(pixels: Tensor) -> Tensor:
    """Return the images blurred by the kernel 1 4 6 4 1 along each side, mirrored at the border."""
    for side, border in ((2, (0, 0, 2, 2)), (3, (2, 2, 0, 0))):
        count = pixels.shape[side]
        padded = F.pad(pixels, border, mode="reflect")
        parts = [(w / 16) * padded.narrow(side, i, count) for i, w in enumerate((1, 4, 6, 4, 1))]
        pixels = sum(parts[1:], start=parts[0])
    return pixels
