"""Compare a model prepared for a run with a loop of a plain copy over single records."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from gradient_case import close
from torch import Tensor, nn

from dpfed.config import LoraSection, ModelSection
from dpfed.model.build import assemble
from dpfed.model.per_sample.forward_check import faithful_model, plain_outputs
from dpfed.model.per_sample.gradients import trainable
from dpfed.model.per_sample.isolation_check import RECORDS, check_gradients, check_isolation
from dpfed.model.task import InputSpec

Inputs = dict[str, Tensor]
Alone = Callable[[nn.Module, Inputs, Tensor], Tensor]
"""Maps a plain model, the raw inputs of one record and its label to its loss."""


def lora(**keys: object) -> LoraSection:
    return LoraSection(**{"r": 2, "alpha": 4.0, **keys})  # type: ignore[arg-type]


class ZooCase:
    def __init__(self, section: ModelSection, spec: InputSpec) -> None:
        parts = assemble(section, spec, (1, 2))
        self.built, self.space, self.notes = parts.built, parts.space, parts.notes
        self.spec = parts.built.spec or spec
        model = parts.adapted.model
        self.theta = self.space.flatten(trainable(model))
        self.plain = copy.deepcopy(model).eval()
        records = self.spec.synthetic(RECORDS, torch.Generator().manual_seed(0))
        outputs = plain_outputs(model, self.space, self.theta, records, self.built.prepare)
        self.ready, self.form = faithful_model(self.built, model, self.space, outputs)

    def rows(self, clients: int) -> Tensor:
        """Return different weights for each client, so heads and LoRA's B are not zero."""
        return self.theta + 0.1 * torch.randn(
            clients, self.space.size, generator=torch.Generator().manual_seed(0)
        )

    def at(self, vector: Tensor) -> nn.Module:
        for name, value in self.space.unflatten(vector).items():
            self.plain.get_parameter(name).data.copy_(value)
        return self.plain

    def check(self, inputs: Inputs, labels: Tensor, alone: Alone, clients: int = 2) -> Tensor:
        """Compare per-sample gradients with those of each record alone in the plain model."""
        client = torch.arange(len(labels)).flip(0) % clients
        theta = self.rows(clients)
        got = torch.cat(self.ready.grads(theta, client, inputs, labels), 1)
        want = torch.zeros_like(got)
        for j in range(len(labels)):
            model = self.at(theta[client[j]])
            model.zero_grad(set_to_none=True)
            alone(model, {k: x[j : j + 1] for k, x in inputs.items()}, labels[j]).backward()
            wanted = (model.get_parameter(n) for n in self.space.names)
            want[j] = torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in wanted]
            )
        assert got.isfinite().all()
        close(got, want, self.space)
        return got

    def alive(self) -> None:
        """Make both checks that a run makes before it reads a record."""
        generator = torch.Generator().manual_seed(0)
        records = self.spec.synthetic(RECORDS, generator)
        for check in (check_gradients, check_isolation):
            check(self.ready, self.theta, records, self.spec.classes, generator)


def alone_image(case: ZooCase) -> Alone:
    def loss(model: nn.Module, one: Inputs, label: Tensor) -> Tensor:
        out = model(**case.built.prepare(one))
        return -torch.log_softmax(getattr(out, "logits", out), -1)[0, label]

    return loss


def unpadded(one: Inputs) -> Inputs:
    """Return the record without padding; the model makes its own masks and positions."""
    real = int(one["attention_mask"].sum())
    return {k: x[:, :real].long() for k, x in one.items() if k != "attention_mask"}


def alone_text(model: nn.Module, one: Inputs, label: Tensor) -> Tensor:
    return -torch.log_softmax(model(**unpadded(one)).logits, -1)[0, label]


def alone_causal(model: nn.Module, one: Inputs, label: Tensor) -> Tensor:
    inputs = unpadded(one)
    # The loss of transformers is the mean over next tokens.
    return model(**inputs, labels=inputs["input_ids"]).loss


def spread_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            norm = p.dim() == 1 and name.endswith("weight")
            p.copy_(0.2 * torch.randn(p.shape, generator=generator) + norm)
    return model


def save(model: nn.Module, folder: Path) -> str:
    spread_weights(model).save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def text_spec(length: int = 8, classes: int = 3) -> InputSpec:
    return InputSpec("text", "input_ids", (length,), classes)


def tokens_of(count: int, length: int, vocabulary: int, pad: int, low: int = 2) -> Inputs:
    """Return records of different lengths whose tokens are never the padding token."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(low, vocabulary, (count, length), generator=generator)
    lengths = torch.tensor([[5, length, 3, 6, 2][j % 5] for j in range(count)]).unsqueeze(1)
    mask = torch.arange(length) < lengths
    return {
        "input_ids": torch.where(mask, ids, pad).to(torch.int32),
        "attention_mask": mask.to(torch.uint8),
    }


def with_train(section: ModelSection, train: str, **keys: object) -> ModelSection:
    return replace(section, train=train, lora=lora(**keys))  # type: ignore[arg-type]
