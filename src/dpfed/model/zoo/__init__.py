"""The models that a configuration can choose by `model.name`.

Each is a class for the configuration section `[model]`. Its method `build(spec)` makes the model.
"""

from __future__ import annotations

from dpfed.config import ModelSection
from dpfed.model.zoo.glyph_vit import GlyphViT
from dpfed.model.zoo.linear import Linear
from dpfed.model.zoo.resnet import GNResNet18
from dpfed.model.zoo.text import AutoCausal, AutoText, MiniLM, RobertaBase
from dpfed.model.zoo.vision import AutoImage, SwinBase, SwinTiny, ViTBase

REGISTRY: dict[str, type[ModelSection]] = {
    cls.name: cls
    for cls in (
        GlyphViT,
        Linear,
        GNResNet18,
        ViTBase,
        SwinTiny,
        SwinBase,
        RobertaBase,
        MiniLM,
        AutoImage,
        AutoText,
        AutoCausal,
    )
}
