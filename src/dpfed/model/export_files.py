"""Files that an export writes beside the weights: tokenizer, image processor, code, settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dpfed.model.task import InputSpec

PROCESSOR = "preprocessor_config.json"
CODE = Path(__file__).parent / "shipped" / "image_processor.py"
PLAIN_WHITE = 255.0
RESAMPLE = {"bilinear": 2, "bicubic": 3}


@dataclass(frozen=True)
class Reading:
    """How a run converts image files to inputs; the exported image processor does it in this way.

    crop  side of the square in pixels: the shorter side is resized to it, then both ends of the
          longer side are cut off; None if images keep their size
    grey  True if colours are turned into grey
    """

    crop: int | None = None
    grey: bool = False


@dataclass(frozen=True)
class Companions:
    """Everything that an export writes for a model besides its weights and its model card.

    files        file name -> text of the file
    config       entries to set in the model's configuration, such as auto_map
    saved        objects that write their files by `save_pretrained(folder)`, such as a tokenizer
    notes        sentences for the model card
    model_class  "module.Class" if `files` hold the model's code; None for a model of transformers
    """

    files: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    saved: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    model_class: str | None = None

    @property
    def has_code(self) -> bool:
        """True if the export contains code, so that users must set `trust_remote_code=True`."""
        return any(name.endswith(".py") for name in self.files)


# A function that makes the companion files of an export. Only the export calls it, because it may
# read files from disk.
MakeCompanions = Callable[[Reading], Companions]


class ImageInput(NamedTuple):
    """Settings with which `image_inputs.images` converts an image record to the model's input.

    spec       kind, shape and range of pixel values of the records
    size       pixels per side after resizing; None keeps the size
    channels   colour channels that the model reads
    mean, std  one number per channel; used to normalise pixel values between 0 and 1
    resize     "bilinear" or "bicubic"
    sharpen    strength of the unsharp mask, a filter that sharpens edges; 0 for none
    """

    spec: InputSpec
    size: int | None
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: str = "bilinear"
    sharpen: float = 0.0


def image_companions(entry: ImageInput) -> MakeCompanions:
    """Return a function that makes the image processor files of an export.

    The image processor turns an image into the model's input. If one of transformers can do this as
    the run does, the export uses it. Otherwise the export contains the code of the processor in
    `model/shipped`.
    """

    def make(reading: Reading) -> Companions:
        lacking = beyond_transformers(entry, reading)
        if not lacking:
            return Companions(files={PROCESSOR: _text(_plain_settings(entry))})
        note = (
            f"Image processors of transformers have no setting for {', '.join(lacking)}. "
            f"`{CODE.name}` in this folder does it: load with `trust_remote_code=True`."
        )
        settings = _text(_own_settings(entry, reading))
        code = CODE.read_text(encoding="utf-8")
        return Companions(files={PROCESSOR: settings, CODE.name: code}, notes=(note,))

    return make


def beyond_transformers(entry: ImageInput, reading: Reading) -> list[str]:
    """Return the steps of converting images that no image processor of transformers can repeat.

    Each step is described in words, for the model card.
    """
    enlarged = entry.size is not None and entry.size > max(entry.spec.shape[1:])
    lacking = []
    if entry.sharpen:
        lacking.append(f"sharpening (model.sharpen = {entry.sharpen:g})")
    if entry.resize == "bicubic" and enlarged:
        lacking.append("bicubic enlargement with the kernel of torch")
    if reading.crop is not None:
        lacking.append(f"resizing in two steps (data.size = {reading.crop})")
    if reading.grey:
        lacking.append('grey images from coloured ones (data.colour = "grey")')
    if entry.channels != 3:
        lacking.append(f"images of {entry.channels} channel{'s' if entry.channels > 1 else ''}")
    if entry.spec.white != PLAIN_WHITE:
        lacking.append(f"pixel values from 0 to {entry.spec.white:g}")
    return lacking


def _plain_settings(entry: ImageInput) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": entry.size is not None,
        "resample": RESAMPLE[entry.resize],
        "do_rescale": True,
        "rescale_factor": 1 / PLAIN_WHITE,
        "do_normalize": True,
        "image_mean": list(entry.mean),
        "image_std": list(entry.std),
    }
    if entry.size is not None:
        settings["size"] = {"height": entry.size, "width": entry.size}
    return settings


def _own_settings(entry: ImageInput, reading: Reading) -> dict[str, Any]:
    return {
        "image_processor_type": "RunImageProcessor",
        "auto_map": {"AutoImageProcessor": f"{CODE.stem}.RunImageProcessor"},
        "side": entry.size,
        "channels": entry.channels,
        "image_mean": list(entry.mean),
        "image_std": list(entry.std),
        "white": entry.spec.white,
        "resize": entry.resize,
        "sharpen": entry.sharpen,
        "crop": reading.crop,
        "grey": reading.grey or entry.spec.shape[0] == 1,
    }


def _text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"
