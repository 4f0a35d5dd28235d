"""A small Vision Transformer for 8x8 grey images, pretrained by `scripts/pretrain_glyphs.py` on drawn glyphs.

Its weights come with the package (`weights/glyph-vit`); the glyphs are public by construction, drawn from fonts and
strokes, so the pretraining has no privacy cost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dpfed.config import ModelSection
from dpfed.errors import DpfedError
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built, fresh_head, normalise

WEIGHTS = Path(__file__).parent / "weights" / "glyph-vit"


@dataclass(frozen=True)
class GlyphViT(ModelSection):
    name: str = "glyph-vit"

    def build(self, spec: InputSpec) -> Built:
        from transformers.models.vit.modeling_vit import ViTForImageClassification

        if spec.kind != "image" or spec.shape != (1, 8, 8):
            raise DpfedError(
                f"glyph-vit reads grey images of 8x8 pixels, this data has {spec.kind} of shape {spec.shape}"
            )
        folder = Path(self.weights) if self.weights else WEIGHTS
        if not (folder / "config.json").is_file():
            raise DpfedError(f"model.weights = {str(folder)!r} is not a folder with config.json and model.safetensors")
        model = ViTForImageClassification.from_pretrained(folder, local_files_only=True, dtype="float32")
        model.classifier = fresh_head(model.config.hidden_size, spec.classes)
        public = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        mean, std = tuple(public["image_mean"]), tuple(public["image_std"])
        return Built(model, "classifier", normalise(spec.name, spec.white, mean, std))
