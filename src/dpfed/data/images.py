"""Image files as arrays of bytes: decoded with Pillow in threads, brought to one size without any randomness."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from dpfed.data.files import reason
from dpfed.errors import DpfedError

Colour = Literal["rgb", "grey"]
MOST_PIXELS = 1 << 27  # of one image before it is resized; more is a mistake or an attack
FORMATS = (
    "JPEG",
    "PNG",
    "BMP",
    "GIF",
    "WEBP",
    "TIFF",
    "PPM",
)  # not those that Pillow hands to other programs
BLOCK = 64  # images that a thread takes at once
DEEP = ("I", "F")  # Pillow would cut such pixels off at 255 without a word


def decode(data: bytes, label: str, colour: Colour = "rgb", size: int | None = None) -> np.ndarray:
    """One image as uint8 [channels, height, width]; grey ones become RGB, or the other way round."""
    try:
        return pixels(Image.open(io.BytesIO(data), formats=FORMATS), label, colour, size)
    except DpfedError:
        raise
    except Exception as error:  # Pillow's decoders raise whatever a damaged field leads to
        raise DpfedError(f"{label} cannot be read as an image: {_short(error)}") from None


def _short(error: BaseException) -> str:
    text = reason(error)
    return "it is of no known format" if "cannot identify" in text else text


def pixels(image: Image.Image, label: str, colour: Colour, size: int | None) -> np.ndarray:
    width, height = image.size
    if width * height > MOST_PIXELS or not width or not height:
        raise DpfedError(f"{label} is {width}x{height} pixels: the most is {MOST_PIXELS:,}")
    if image.mode.split(";")[0] in DEEP:
        raise DpfedError(
            f"{label} has pixels of mode {image.mode}, not of 8 bits: convert it first"
        )
    image = ImageOps.exif_transpose(image).convert("RGB" if colour == "rgb" else "L")
    if size is not None:
        image = fit(image, size)
    array = np.asarray(image, dtype=np.uint8)
    return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def fit(image: Image.Image, size: int) -> Image.Image:
    """The shorter side resized to `size` (bilinear), the middle of the longer one kept: the same for every evaluation."""
    width, height = image.size
    short = min(width, height)
    wide, high = max(size, round(width * size / short)), max(size, round(height * size / short))
    if wide * high > MOST_PIXELS:
        raise ValueError(f"{width}x{height} pixels are too narrow for size {size}")
    if (wide, high) != (width, height):
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
    left, top = (wide - size) // 2, (high - size) // 2
    return image.crop((left, top, left + size, top + size))


def decode_all(
    read: Callable[[int], bytes],
    labels: Sequence[str],
    hint: str,
    colour: Colour = "rgb",
    size: int | None = None,
) -> np.ndarray:
    """All images, in one array [n, channels, height, width]; `read(i)` gives the i-th file's content.

    They must be of one shape; the first that differs is named, with `hint` on what to do.
    """
    return stack(lambda i: decode(read(i), labels[i], colour, size), labels, hint)


def stack(image_of: Callable[[int], np.ndarray], labels: Sequence[str], hint: str) -> np.ndarray:
    with warnings.catch_warnings():  # Pillow warns about odd metadata, for which nobody asked
        warnings.simplefilter("ignore")
        first = image_of(0)
        try:
            out = np.empty((len(labels), *first.shape), dtype=np.uint8)
        except (MemoryError, ValueError):
            shape = f"{first.shape[2]}x{first.shape[1]}"
            raise DpfedError(
                f"{len(labels):,} images of {shape} pixels do not fit in memory: {hint}"
            ) from None

        def work(start: int) -> None:
            for i in range(start, min(start + BLOCK, len(labels))):
                image = image_of(i)
                if image.shape != first.shape:
                    one, other = (f"{x.shape[2]}x{x.shape[1]} pixels" for x in (image, first))
                    raise DpfedError(f"{labels[i]} is {one}, {labels[0]} {other}: {hint}")
                out[i] = image

        # Pillow lets go of the interpreter while it decodes, so threads are enough
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            for _ in pool.map(work, range(0, len(labels), BLOCK)):
                pass
        return out
