"""Decode image files to uint8 arrays with Pillow in several threads, and resize the images."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from dpfed.errors import DpfedError, reason

Colour = Literal["rgb", "grey"]
# Largest accepted number of pixels of an image. A larger image is a mistake or an attack that fills
# the memory.
MOST_PIXELS = 1 << 27
# Accepted image formats. Pillow decodes them without starting other programs.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
IMAGES_PER_TASK = 64
# Pillow's modes with more than 8 bits per value. Such images are refused, because Pillow's
# conversion to 8 bits replaces every value above 255 by 255.
DEEP_MODES = ("I", "F")


def decode(data: bytes, label: str, colour: Colour = "rgb", size: int | None = None) -> np.ndarray:
    """Return an image file as uint8 [channels, height, width], converted to RGB or to grey.

    data    content of the image file
    label   name of the image in errors
    size    make the image a square of this many pixels by `fit`; None keeps its size
    """
    try:
        return pixels(Image.open(io.BytesIO(data), formats=FORMATS), label, colour, size)
    except DpfedError:
        raise
    except Exception as error:
        # Catch all errors, because Pillow raises many classes for damaged images.
        text = reason(error)
        if "cannot identify" in text:
            text = "it is of no known format"
        raise DpfedError(f"{label} cannot be read as an image: {text}") from None


def pixels(image: Image.Image, label: str, colour: Colour, size: int | None) -> np.ndarray:
    width, height = image.size
    if width * height > MOST_PIXELS or not width or not height:
        raise DpfedError(f"{label} is {width}x{height} pixels: the most is {MOST_PIXELS:,}")
    if image.mode.split(";")[0] in DEEP_MODES:
        raise DpfedError(
            f"{label} has pixels of mode {image.mode}, not of 8 bits: convert it first"
        )
    image = ImageOps.exif_transpose(image).convert("RGB" if colour == "rgb" else "L")
    if size is not None:
        image = fit(image, size)
    array = np.asarray(image, dtype=np.uint8)
    return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))


def fit(image: Image.Image, size: int) -> Image.Image:
    """Return the image as a square with sides of `size` pixels.

    The image is resized (bilinear) so that its shorter side has `size` pixels. Then both ends of
    the longer side are cut off equally.
    """
    width, height = image.size
    short = min(width, height)
    wide = max(size, round(width * size / short))
    high = max(size, round(height * size / short))
    if wide * high > MOST_PIXELS:
        raise ValueError(f"{width}x{height} pixels are too narrow for size {size}")
    if (wide, high) != (width, height):
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
    left = (wide - size) // 2
    top = (high - size) // 2
    return image.crop((left, top, left + size, top + size))


def decode_all(
    read: Callable[[int], bytes],
    labels: Sequence[str],
    hint: str,
    colour: Colour = "rgb",
    size: int | None = None,
) -> np.ndarray:
    """Decode image files in threads and return one array, uint8 [n, channels, height, width].

    read    returns the content of the i-th image file
    labels  name of each image in error messages
    hint    remedy in the error for images that differ in size or do not fit in memory
    """

    def image_of(i: int) -> np.ndarray:
        return decode(read(i), labels[i], colour, size)

    with warnings.catch_warnings():
        # Ignore Pillow's warnings about unusual metadata: they do not affect the pixels.
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
            for i in range(start, min(start + IMAGES_PER_TASK, len(labels))):
                image = image_of(i)
                if image.shape != first.shape:
                    one, other = (f"{x.shape[2]}x{x.shape[1]} pixels" for x in (image, first))
                    raise DpfedError(f"{labels[i]} is {one}, {labels[0]} {other}: {hint}")
                out[i] = image

        # Threads can decode in parallel, because Pillow releases Python's interpreter lock (GIL).
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            list(pool.map(work, range(0, len(labels), IMAGES_PER_TASK)))
        return out
