"""A small Vision Transformer for 8x8 grey images, pretrained by `scripts/pretrain_glyphs.py` on drawn glyphs.

Its weights come with the package (`weights/glyph-vit`); the glyphs are public by construction, drawn from fonts and
strokes, so the pretraining has no privacy cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpfed.config import ModelSection
from dpfed.errors import DpfedError
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built, normalise
from dpfed.model.zoo.pretrained import config_of, model_of, public_constants

WEIGHTS = Path(__file__).parent / "weights" / "glyph-vit"


@dataclass(frozen=True)
class GlyphViT(ModelSection):
    name: str = "glyph-vit"

    def usual_spec(self) -> InputSpec:
        return InputSpec("image", "pixel_values", (1, 8, 8), 10, white=16.0)

    def build(self, spec: InputSpec) -> Built:
        from transformers import AutoModelForImageClassification

        if spec.kind != "image" or spec.shape != (1, 8, 8):
            raise DpfedError(
                f"glyph-vit reads grey images of 8x8 pixels, this data has {spec.kind} of shape {spec.shape}"
            )
        weights = self.weights or str(WEIGHTS)
        model, heads, notes = model_of(AutoModelForImageClassification, config_of(weights), weights, spec.classes)
        mean, std = public_constants(weights) or ((0.5,), (0.5,))
        return Built(model, heads, normalise(spec.name, spec.white, mean, std), notes=notes)
