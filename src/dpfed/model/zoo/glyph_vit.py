"""A small Vision Transformer for 8x8 grey images, pretrained by `experiments/pretrain_glyphs.py` on drawn glyphs.

Its weights come with the package (`weights/glyph-vit`); the glyphs are public by construction, drawn from fonts and
strokes, so the pretraining has no privacy cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpfed.config import ModelSection
from dpfed.errors import DpfedError
from dpfed.model.export_files import ImageInput, image_companions
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built, normalise
from dpfed.model.zoo.pretrained import config_of, model_of, public_constants

WEIGHTS = Path(__file__).parent / "weights" / "glyph-vit"


@dataclass(frozen=True)
class GlyphViT(ModelSection):
    name: str = "glyph-vit"

    def usual_spec(self) -> InputSpec:
        return InputSpec("image", "pixel_values", (1, 8, 8), 10, white=16.0)

    def chosen(self) -> str:
        """Return the folder or hub name of the weights."""
        return self.weights or str(WEIGHTS)

    def build(self, spec: InputSpec) -> Built:
        from transformers import AutoModelForImageClassification

        if spec.kind != "image" or spec.shape != (1, 8, 8):
            raise DpfedError(
                f"glyph-vit reads grey images of 8x8 pixels, this data has {spec.kind} of shape {spec.shape}"
            )
        weights = self.chosen()
        model, heads, notes = model_of(
            AutoModelForImageClassification, config_of(weights), weights, spec.classes
        )
        mean, std = public_constants(weights) or ((0.5,), (0.5,))
        enter = normalise(spec.name, spec.white, mean, std)
        entry = ImageInput(spec, None, 1, mean, std)
        return Built(model, heads, enter, notes=notes, companions=image_companions(entry))
