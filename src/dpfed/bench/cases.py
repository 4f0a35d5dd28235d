"""The cases that `dpfed bench` measures: a model with LoRA, and clients with synthetic records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dpfed.bench.llama import LLAMAS, RandomLlama, text_of
from dpfed.config import LoraSection, ModelSection
from dpfed.errors import DpfedError
from dpfed.model.build import AssembledModel, assemble
from dpfed.model.causal_loss import scores_of
from dpfed.model.export_files import ImageInput
from dpfed.model.frozen.quantised import Quantize
from dpfed.model.per_sample.gradients import cast
from dpfed.model.task import InputSpec
from dpfed.model.zoo import REGISTRY
from dpfed.model.zoo.built import Built, fresh_head
from dpfed.model.zoo.image_inputs import images
from dpfed.privacy.record_batch import Records

# Smallest number of synthetic records of a case. A case also has at least twice as many records as
# one step uses.
MIN_RECORDS = 512
ON_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One case to measure: a model, its inputs, and the number and size of the clients.

    model       name of a model that `dpfed list models` shows, or a key of `SMALL` or `LLAMAS`
    spec        kind and shape of the inputs, and number of classes
    clients     number S of clients
    batch       number B of records of each client in one step
    rank        rank of LoRA
    train       trained part of the model: LoRA adapters or all weights
    checkpoint  True for gradient checkpointing, where layers store only their inputs
    quantize    number format of the frozen weights (`model.quantize`); only for a Llama
    """

    model: str
    spec: InputSpec
    clients: int = 5
    batch: int = 16
    rank: int = 16
    train: Literal["lora", "full"] = "lora"
    checkpoint: bool = False
    quantize: Quantize = "none"

    def __post_init__(self) -> None:
        if self.quantize != "none" and self.model not in LLAMAS:
            raise DpfedError(
                f"{self.model} is not measured with quantised weights: choose a case from "
                f"{', '.join(LLAMAS)}"
            )

    @property
    def union(self) -> int:
        """Number of records in one step, summed over all clients."""
        return self.clients * self.batch

    def build(
        self, dtype: torch.dtype = torch.float32, device: torch.device = ON_CPU
    ) -> AssembledModel:
        """Return the model of this case with its dropout set to 0.

        Dropout is off because some of the compared implementations cannot draw it record by record.

        dtype   dtype of the frozen weights of a Llama
        device  where a Llama's random weights are made, which takes minutes on a CPU
        """
        lora = LoraSection(r=self.rank, alpha=2.0 * self.rank)
        if self.model in LLAMAS:
            section: ModelSection = RandomLlama(
                case=self.model,
                quantize=self.quantize,
                dtype=dtype,
                device=device,
                train=self.train,
                lora=lora,
            )
        elif self.model in SMALL:
            section = _Small(train=self.train, lora=lora, case=self.model)
        else:
            weights = None if self.model == "glyph-vit" else "random"
            section = REGISTRY[self.model](weights=weights, train=self.train, lora=lora)
        parts = assemble(section, self.spec)
        for module in parts.adapted.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif type(module).__name__.endswith("DropPath"):
                module.drop_prob = 0.0  # type: ignore[assignment]
        return parts

    def records(self, device: torch.device) -> Records:
        """Return synthetic records for all clients. Texts have no padding."""
        count = max(MIN_RECORDS, 2 * self.union)
        inputs = self.spec.synthetic(count, torch.Generator().manual_seed(0))
        if self.model in LLAMAS:
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        labels = torch.arange(count) % max(self.spec.classes, 1)
        return Records({name: x.to(device) for name, x in inputs.items()}, labels.to(device))


def _vit(
    layers: int, width: int, heads: int, size: int, patch: int
) -> Callable[[InputSpec], nn.Module]:
    def build(spec: InputSpec) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            image_size=size,
            patch_size=patch,
            num_channels=spec.shape[0],
            num_labels=spec.classes,
        )
        model: nn.Module = ViTForImageClassification(config)
        model.classifier = fresh_head(width, spec.classes)
        return model

    return build


SMALL: dict[str, Callable[[InputSpec], nn.Module]] = {"vit-6x192": _vit(6, 192, 3, 32, 4)}


@dataclass(frozen=True)
class _Small(ModelSection):
    case: str = ""

    def build(self, spec: InputSpec) -> Built:
        inputs = images(ImageInput(spec, None, 3, (0.5,) * 3, (0.25,) * 3))
        return Built(SMALL[self.case](spec), "classifier", inputs)


GPU = (
    Case("vit-base", InputSpec("image", "pixel_values", (3, 224, 224), 100)),
    Case("swin-base", InputSpec("image", "pixel_values", (3, 224, 224), 100)),
    Case("roberta-base", InputSpec("text", "input_ids", (128,), 2, vocabulary=50265)),
    Case("llama-1b", text_of("llama-1b", 512), clients=4, batch=4),
    Case("llama-8b", text_of("llama-8b", 512), clients=4, batch=4),
)
CPU = (
    Case("vit-6x192", InputSpec("image", "pixel_values", (3, 32, 32), 10)),
    Case("glyph-vit", InputSpec("image", "pixel_values", (1, 8, 8), 10, white=16.0), rank=2),
    Case("llama-tiny", text_of("llama-tiny", 64), clients=4, batch=4),
)


def logits_of(
    parts: AssembledModel, model: nn.Module, inputs: dict[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """Return the task's scores, such as class logits, for raw inputs, with the model's own weights.

    dtype  the inputs are converted to this dtype
    """
    prepared = cast(parts.built.prepare(dict(inputs)), dtype)
    return scores_of(parts.built.task, model, {}, prepared, inputs)
