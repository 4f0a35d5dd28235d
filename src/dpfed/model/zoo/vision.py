"""Vision Transformers of the paper (ViT-Base/16, Swin-Tiny, Swin-Base) and any image classifier of `transformers`.

Images of another size are resized on the device, bilinearly, each by itself. The head is new and starts at zero.
ViT: Dosovitskiy et al. 2021; Swin and its stochastic depth: Liu et al. 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt

from dpfed.config import ModelSection
from dpfed.errors import DpfedError
from dpfed.model.export_files import ImageInput, image_companions
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import IMAGENET, Built, expect_images, images
from dpfed.model.zoo.pretrained import Head, config_of, model_of, public_constants, shape_suffices

USUAL = 224


def stages(image: int, patch: int, count: int) -> list[int]:
    """Patches along one side in each stage of a Swin; odd numbers are padded before they are halved."""
    out = [-(-image // patch)]
    for _ in range(count - 1):
        out.append(-(-out[-1] // 2))
    return out


def check_swin(name: str, image: int, patch: int, window: int, count: int, fixed: bool) -> None:
    """A stage smaller than the window fails deep inside attention. `fixed`: patch and window belong to the weights."""
    sides = stages(image, patch, count)
    if min(sides) >= window:
        return
    least = next(
        size for size in range(image, 100_000) if min(stages(size, patch, count)) >= window
    )
    ways = [f"model.image_size >= {least}"]
    if not fixed:
        fits = [(p, min(window, stages(image, p, count)[-1])) for p in (4, 2, 1) if p <= patch]
        ways += [f"model.patch_size = {p} with model.window = {w}" for p, w in fits if w >= 2]
    raise DpfedError(
        f"{name} at {image} pixels has stages of {', '.join(map(str, sides))} patches a side, less than its window of "
        f"{window}: set {' or '.join(ways)}"
    )


def refuse_other(name: str, found: Any, expected: Mapping[str, Any], other: str) -> None:
    """Weights of another shape under the paper's name would be a silent change of the experiment."""
    for key, value in expected.items():
        have = getattr(found, key, None)
        if have != value and have != list(value if isinstance(value, tuple) else ()):
            raise DpfedError(
                f"the weights for {name} have {key} = {have}, not {value}: use model.name = {other!r} for them"
            )


@dataclass(frozen=True)
class VisionSection(ModelSection):
    """What image classifiers of `transformers` share."""

    image_size: Annotated[
        int | None, Ge(1), "side that images are resized to; default: that of the weights, or 224"
    ] = None
    resize: Annotated[Literal["bilinear", "bicubic"], "how images are resized"] = "bilinear"
    sharpen: Annotated[
        float,
        Ge(0),
        "unsharp mask after resizing: so many times the detail that a blur takes away; 0: none",
    ] = 0.0
    head: Annotated[
        Head, "new: starts at zero; kept: that of the weights, which must be for these classes"
    ] = "new"

    def usual_spec(self) -> InputSpec:
        side = self.image_size or USUAL
        return InputSpec("image", "pixel_values", (3, side, side), 10)

    def chosen(self) -> str | None:
        """The weights, None for random ones; leaving it open is refused, as an untrained model only looks like one."""
        if self.weights is None:
            raise DpfedError(
                f"model.name = {self.name!r} needs model.weights: a folder or hub name with pretrained weights, or "
                '"random" to train from nothing'
            )
        return None if self.weights == "random" else self.weights

    def finish(self, config: Any, spec: InputSpec) -> Built:
        from transformers import AutoModelForImageClassification

        channels = int(getattr(config, "num_channels", 3))
        expect_images(self.name, spec, channels)
        weights = self.chosen()
        model, heads, notes = model_of(
            AutoModelForImageClassification, config, weights, spec.classes, self.head == "kept"
        )
        mean, std = public_constants(weights) or IMAGENET
        if len(mean) != channels:
            mean, std = (0.5,) * channels, (0.25,) * channels
        size = self.image_size or _side(config)
        if self.sharpen and size < 3:
            raise DpfedError(
                "model.sharpen needs images of at least 3 pixels a side: leave it at 0"
            )
        enter = images(spec, size, channels, mean, std, self.resize, self.sharpen)
        entry = ImageInput(spec, size, channels, mean, std, self.resize, self.sharpen)
        companions = image_companions(entry)
        return Built(model, heads, enter, rows=_rows(size), notes=notes, companions=companions)


def _rows(size: int) -> int:
    return max(16, 1024 * 32 * 32 // (size * size))


def _side(config: Any) -> int:
    """Return the side of the images that the weights are for."""
    size = _image_size(config) or USUAL
    return int(size) if isinstance(size, int) else int(size[0])


def _image_size(config: Any) -> Any:
    """Return the configured size; a model of images and texts has it in its part for images."""
    own = getattr(config, "image_size", None)
    return own or getattr(getattr(config, "vision_config", None), "image_size", None)


@dataclass(frozen=True)
class ViTBase(VisionSection):
    summary: ClassVar[str] = "ViT-Base/16: 12 layers of width 768, for images"

    name: str = "vit-base"

    shape: ClassVar[dict[str, Any]] = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "patch_size": 16,
    }  # fmt: skip

    def build(self, spec: InputSpec) -> Built:
        from transformers import ViTConfig

        weights = self.chosen()
        if shape_suffices(weights):
            config: Any = ViTConfig(**self.shape, image_size=self.image_size or USUAL)
        else:
            config = config_of(str(weights))
        refuse_other(self.name, config, {"model_type": "vit", **self.shape}, "auto-image")
        if self.image_size and self.image_size != _side(config):
            raise DpfedError(
                f"the weights for {self.name} have a position for each patch of {_side(config)} pixels: leave "
                "model.image_size unset, images are resized to that"
            )
        if _side(config) % 16:
            raise DpfedError(
                f"model.image_size = {_side(config)} must be a multiple of the patch of 16 pixels"
            )
        return self.finish(config, spec)


@dataclass(frozen=True)
class SwinSection(VisionSection):
    drop_path: Annotated[
        float, Ge(0), Lt(1), "stochastic depth of the last layer; less below, none at the first"
    ] = 0.1
    patch_size: Annotated[int | None, Ge(1), "side of a patch; default: 4"] = None
    window: Annotated[int | None, Ge(2), "side of an attention window in patches; default: 7"] = (
        None
    )

    shape: ClassVar[dict[str, Any]] = {}

    def __post_init__(self) -> None:
        if self.weights in (None, "random"):
            count = len(self.shape.get("depths", (2, 2, 2, 2)))
            check_swin(
                self.name,
                self.image_size or USUAL,
                self.patch_size or 4,
                self.window or 7,
                count,
                fixed=False,
            )

    def build(self, spec: InputSpec) -> Built:
        from transformers import SwinConfig

        weights = self.chosen()
        if shape_suffices(weights):
            config: Any = SwinConfig(
                **{k: list(v) if isinstance(v, tuple) else v for k, v in self.shape.items()},
                image_size=self.image_size or USUAL,
                patch_size=self.patch_size or 4,
                window_size=self.window or 7,
            )
        else:
            config = config_of(str(weights))
            refuse_other(self.name, config, {"model_type": "swin", **self.shape}, "auto-image")
            own = {"patch_size": self.patch_size, "window_size": self.window}
            refuse_other(
                self.name, config, {k: v for k, v in own.items() if v is not None}, "auto-image"
            )
        config.drop_path_rate = self.drop_path
        return self.finish(sized(config, self.name, self.image_size, weights is not None), spec)


SMALL_WINDOW = 32  # positions; fused attention computes 64 at least, so that smaller windows are faster as plain products


def sized(config: Any, name: str, image_size: int | None, pretrained: bool) -> Any:
    """A Swin for another image size: it has no table of absolute positions, so any size its windows fit will do."""
    if image_size is not None and not getattr(config, "use_absolute_embeddings", False):
        config.image_size = image_size
    check_swin(
        name,
        image_size or _side(config),
        config.patch_size,
        config.window_size,
        len(config.depths),
        pretrained,
    )
    if config.window_size**2 <= SMALL_WINDOW:
        config._attn_implementation = "eager"
    return config


@dataclass(frozen=True)
class SwinTiny(SwinSection):
    summary: ClassVar[str] = "Swin-Tiny: stages of 2, 2, 6, 2 layers, for images"

    name: str = "swin-tiny"

    shape: ClassVar[dict[str, Any]] = {
        "embed_dim": 96,
        "depths": (2, 2, 6, 2),
        "num_heads": (3, 6, 12, 24),
    }


@dataclass(frozen=True)
class SwinBase(SwinSection):
    summary: ClassVar[str] = "Swin-Base: stages of 2, 2, 18, 2 layers, for images"

    name: str = "swin-base"

    shape: ClassVar[dict[str, Any]] = {
        "embed_dim": 128,
        "depths": (2, 2, 18, 2),
        "num_heads": (4, 8, 16, 32),
    }


@dataclass(frozen=True)
class AutoImage(VisionSection):
    """Any `AutoModelForImageClassification`, from a folder or the hub."""

    summary: ClassVar[str] = "any image classifier of transformers, from a folder or the hub"

    name: str = "auto-image"
    drop_path: Annotated[
        float | None, Ge(0), Lt(1), "stochastic depth; default: as the weights' configuration says"
    ] = None

    def build(self, spec: InputSpec) -> Built:
        weights = self.chosen()
        if weights is None:
            raise DpfedError(
                'model.name = "auto-image" takes its shape from model.weights: give a folder or hub name'
            )
        config = config_of(weights)
        if self.drop_path is not None:
            if not hasattr(config, "drop_path_rate"):
                raise DpfedError(
                    f"model.drop_path: {config.model_type} has no stochastic depth, leave it out"
                )
            config.drop_path_rate = self.drop_path
        if config.model_type == "swin":
            config = sized(config, self.name, self.image_size, pretrained=True)
        elif self.image_size and _image_size(config) and self.image_size != _side(config):
            raise DpfedError(
                f"model.image_size = {self.image_size}: these weights are for {_side(config)} pixels; leave it unset, "
                "images are resized to that"
            )
        return self.finish(config, spec)
