"""Softmax regression, a baseline for the other models."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import Tensor, nn

from dpfed.config import ModelSection
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built, fresh_head
from dpfed.model.zoo.pretrained import load_tensors, on_meta


class SoftmaxRegression(nn.Module):
    model_type = "linear"

    def __init__(self, name: str, width: int, classes: int) -> None:
        super().__init__()
        self.name = name
        self.classifier = fresh_head(width, classes)

    def forward(self, **inputs: Tensor) -> Tensor:
        logits: Tensor = self.classifier(inputs[self.name].flatten(1))
        return logits


@dataclass(frozen=True)
class Linear(ModelSection):
    name: str = "linear"
    train: Literal["full", "head"] = "full"

    def usual_spec(self) -> InputSpec:
        return InputSpec("image", "pixel_values", (1, 8, 8), 10)

    def build(self, spec: InputSpec) -> Built:
        model = SoftmaxRegression(spec.name, prod(spec.shape), spec.classes)
        if self.weights not in (None, "random") and not on_meta():
            load_tensors(model, str(self.weights), self.name)

        def prepare(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            x = inputs[spec.name].float()
            return {spec.name: x / spec.white if spec.kind == "image" else x}

        return Built(model, "classifier", prepare)
