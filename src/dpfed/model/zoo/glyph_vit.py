"""A small Vision Transformer for 8x8 grey images, whose weights come with the package.

`experiments/pretrain_glyphs.py` pretrained the weights on images of glyphs that a program draws.
These images are public, so the pretraining has no privacy cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpfed.config import ModelSection
from dpfed.errors import DpfedError
from dpfed.model.export_files import ImageInput, image_companions
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built
from dpfed.model.zoo.image_inputs import images
from dpfed.model.zoo.pretrained import config_of, model_of, public_constants

WEIGHTS = Path(__file__).parent / "weights" / "glyph-vit"


@dataclass(frozen=True)
class GlyphViT(ModelSection):
    name: str = "glyph-vit"

    def usual_spec(self) -> InputSpec:
        return InputSpec("image", "pixel_values", (1, 8, 8), 10, white=16.0)

    def chosen(self) -> str:
        """Return the folder or hub name of the weights; by default the package's own weights."""
        return self.weights or str(WEIGHTS)

    def build(self, spec: InputSpec) -> Built:
        from transformers import AutoModelForImageClassification

        if spec.kind != "image" or spec.shape != (1, 8, 8):
            raise DpfedError(
                f"glyph-vit reads grey images of 8x8 pixels, this data has {spec.kind} of shape "
                f"{spec.shape}"
            )
        weights = self.chosen()
        model, heads, notes = model_of(
            AutoModelForImageClassification, config_of(weights), weights, spec.classes
        )
        mean, std = public_constants(weights) or ((0.5,), (0.5,))
        entry = ImageInput(spec, None, 1, mean, std)
        return Built(model, heads, images(entry), notes=notes, companions=image_companions(entry))
