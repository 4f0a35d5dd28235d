"""Models by name. A model is a `[model]` section with a `build(spec)`; it is listed here."""

from __future__ import annotations

from dpfed.config import ModelSection
from dpfed.model.zoo.glyph_vit import GlyphViT
from dpfed.model.zoo.linear import Linear

REGISTRY: dict[str, type[ModelSection]] = {cls.name: cls for cls in (GlyphViT, Linear)}
