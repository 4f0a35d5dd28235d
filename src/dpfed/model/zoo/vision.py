"""Vision models: ViT-Base/16, Swin-Tiny, Swin-Base, and image classifiers of `transformers`.

If images do not have the model's size, they are resized on the device. A new head starts at zero.
ViT: Dosovitskiy et al. 2021. Swin and its stochastic depth: Liu et al. 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt

from dpfed.errors import DpfedError
from dpfed.model.export_files import ImageInput, image_companions
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built
from dpfed.model.zoo.image_inputs import IMAGENET, expect_images, images
from dpfed.model.zoo.pooling import with_model_code
from dpfed.model.zoo.pretrained import (
    Head,
    PretrainedSection,
    config_of,
    model_of,
    public_constants,
    refuse_other,
    shape_suffices,
)

USUAL_SIDE = 224
USUAL_PATCH = 4
USUAL_WINDOW = 7
# Windows with at most this many positions use plain attention. Fused attention is slower for them,
# because it always computes at least 64 positions.
SMALL_WINDOW = 32


def stages(image: int, patch: int, count: int) -> list[int]:
    """Return the number of patches per side in each of the `count` stages of a Swin.

    From one stage to the next the number is halved and rounded up.

    image  side of an image in pixels
    patch  side of a patch in pixels
    """
    out = [-(-image // patch)]
    for _ in range(count - 1):
        out.append(-(-out[-1] // 2))
    return out


def check_swin(name: str, image: int, patch: int, window: int, count: int, fixed: bool) -> None:
    """Raise DpfedError if a stage of a Swin has fewer patches per side than the attention window.

    Attention would fail in such a stage. The message recommends sizes that fit.

    image   side of an image in pixels
    patch   side of a patch in pixels
    window  side of a window in patches
    count   number of stages
    fixed   True if the weights determine patch and window, so that only the image size can change
    """
    sides = stages(image, patch, count)
    if min(sides) >= window:
        return
    sizes = range(image, 100_000)
    smallest = next(size for size in sizes if min(stages(size, patch, count)) >= window)
    remedies = [f"model.image_size >= {smallest}"]
    if not fixed:
        fits = [(p, min(window, stages(image, p, count)[-1])) for p in (4, 2, 1) if p <= patch]
        remedies += [f"model.patch_size = {p} with model.window = {w}" for p, w in fits if w >= 2]
    raise DpfedError(
        f"{name} at {image} pixels has stages of {', '.join(map(str, sides))} patches a side, "
        f"less than its window of {window}: set {' or '.join(remedies)}"
    )


@dataclass(frozen=True)
class VisionSection(PretrainedSection):
    """Configuration keys and methods that all image classifiers of `transformers` share."""

    image_size: Annotated[
        int | None, Ge(1), "side that images are resized to; default: that of the weights, or 224"
    ] = None
    resize: Annotated[Literal["bilinear", "bicubic"], "how images are resized"] = "bilinear"
    sharpen: Annotated[
        float,
        Ge(0),
        "strength of an unsharp mask after resizing, in units of the detail that a blur removes",
    ] = 0.0
    head: Annotated[
        Head, "new: starts at zero; kept: that of the weights, which must be for these classes"
    ] = "new"

    def usual_spec(self) -> InputSpec:
        side = self.image_size or USUAL_SIDE
        return InputSpec("image", "pixel_values", (3, side, side), 10)

    def finish(self, config: Any, spec: InputSpec) -> Built:
        from transformers import AutoModelForImageClassification

        channels = int(getattr(body_of(config), "num_channels", 3))
        expect_images(self.name, spec, channels)
        weights = self.chosen()
        model, heads, notes = model_of(
            AutoModelForImageClassification,
            config,
            weights,
            spec.classes,
            self.head == "kept",
            self.quantize,
        )
        mean, std = public_constants(weights) or IMAGENET
        if len(mean) != channels:
            mean = (0.5,) * channels
            std = (0.25,) * channels
        size = self.image_size or _side(body_of(config))
        if self.sharpen and size < 3:
            raise DpfedError(
                "model.sharpen needs images of at least 3 pixels a side: leave it at 0"
            )
        entry = ImageInput(spec, size, channels, mean, std, self.resize, self.sharpen)
        return Built(
            model,
            heads,
            images(entry),
            rows=max(16, 1024 * 32 * 32 // (size * size)),
            notes=notes,
            companions=lambda reading: with_model_code(model, image_companions(entry)(reading)),
        )


def body_of(config: Any) -> Any:
    """Return the encoder's configuration if `config` describes a classifier on all its layers.

    For any other model return `config`.
    """
    return getattr(config, "body_config", config)


def _side(config: Any) -> int:
    """Return the side in pixels of the images that a model of this configuration reads."""
    size = _image_size(config) or USUAL_SIDE
    return int(size if isinstance(size, int) else size[0])


def _image_size(config: Any) -> Any:
    """Return the image size in a configuration, or None if it has none.

    Models of both images and texts state the image size in their `vision_config`.
    """
    own = getattr(config, "image_size", None)
    return own or getattr(getattr(config, "vision_config", None), "image_size", None)


@dataclass(frozen=True)
class ViTBase(VisionSection):
    summary: ClassVar[str] = "ViT-Base/16: 12 layers of width 768, for images"

    name: str = "vit-base"

    shape: ClassVar[dict[str, Any]] = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "patch_size": 16,
    }

    def build(self, spec: InputSpec) -> Built:
        from transformers import ViTConfig

        weights = self.chosen()
        config: Any = ViTConfig(**self.shape, image_size=self.image_size or USUAL_SIDE)
        if not shape_suffices(weights):
            config = config_of(str(weights))
        refuse_other(self.name, config, {"model_type": "vit", **self.shape}, "auto-image")
        if self.image_size and self.image_size != _side(config):
            raise DpfedError(
                f"the weights for {self.name} have a position for each patch of {_side(config)} "
                "pixels: leave model.image_size unset, images are resized to that"
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
            image, patch, window = self._sizes()
            check_swin(self.name, image, patch, window, count, fixed=False)

    def _sizes(self) -> tuple[int, int, int]:
        """Return the side of an image in pixels, of a patch in pixels, and of a window in patches.

        These sizes are for random weights; pretrained weights determine the sizes themselves.
        """
        return (
            self.image_size or USUAL_SIDE,
            self.patch_size or USUAL_PATCH,
            self.window or USUAL_WINDOW,
        )

    def build(self, spec: InputSpec) -> Built:
        from transformers import SwinConfig

        weights = self.chosen()
        if shape_suffices(weights):
            image, patch, window = self._sizes()
            shape = {k: list(v) if isinstance(v, tuple) else v for k, v in self.shape.items()}
            config: Any = SwinConfig(
                **shape, image_size=image, patch_size=patch, window_size=window
            )
        else:
            config = config_of(str(weights))
            chosen = {"patch_size": self.patch_size, "window_size": self.window}
            expected = {"model_type": "swin", **self.shape}
            expected |= {key: value for key, value in chosen.items() if value is not None}
            refuse_other(self.name, config, expected, "auto-image")
        config.drop_path_rate = self.drop_path
        return self.finish(sized(config, self.name, self.image_size, weights is not None), spec)


def sized(config: Any, name: str, image_size: int | None, pretrained: bool) -> Any:
    """Return the configuration of a Swin, changed to `image_size`.

    Raise DpfedError if the attention windows do not fit this size. With `use_absolute_embeddings`
    the Swin has a table of absolute positions, so `config.image_size` does not change.

    name        name of the model, for error messages
    pretrained  True if the weights determine the sizes of patches and windows
    """
    if image_size is not None and not getattr(config, "use_absolute_embeddings", False):
        config.image_size = image_size
    side = image_size or _side(config)
    count = len(config.depths)
    check_swin(name, side, config.patch_size, config.window_size, count, pretrained)
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
        float | None, Ge(0), Lt(1), "stochastic depth; default: that of the weights"
    ] = None

    def build(self, spec: InputSpec) -> Built:
        config = config_of(self.pretrained())
        body = body_of(config)
        if self.drop_path is not None:
            if not hasattr(body, "drop_path_rate"):
                raise DpfedError(
                    f"model.drop_path: {body.model_type} has no stochastic depth, leave it out"
                )
            body.drop_path_rate = self.drop_path
        if body.model_type == "swin":
            sized(body, self.name, self.image_size, pretrained=True)
        elif self.image_size and _image_size(body) and self.image_size != _side(body):
            raise DpfedError(
                f"model.image_size = {self.image_size}: these weights are for {_side(body)} "
                "pixels; leave it unset, images are resized to that"
            )
        return self.finish(config, spec)
