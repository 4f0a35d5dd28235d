"""Compare per-sample gradients of small models with a loop over single records."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertForSequenceClassification
from transformers.models.roberta.configuration_roberta import RobertaConfig
from transformers.models.roberta.modeling_roberta import RobertaForSequenceClassification
from transformers.models.swin.configuration_swin import SwinConfig
from transformers.models.swin.modeling_swin import SwinForImageClassification
from transformers.models.vit.configuration_vit import ViTConfig
from transformers.models.vit.modeling_vit import ViTForImageClassification

from dpfed.config import LoraSection, ModelSection
from dpfed.model.lora import adapt
from dpfed.model.parameter_vector import Space, space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.task import CLASSIFY

TOLERANCE = 1e-5


CLASSES = 3


Inputs = dict[str, Tensor]


def loop(
    model: nn.Module, space: Space, theta: Tensor, client: Tensor, inputs: Inputs, labels: Tensor
) -> Tensor:
    """Return each record's gradient `[N, P]`, with one backward pass per record."""
    parameters = dict(model.named_parameters())
    out = torch.zeros(len(client), space.size)
    for j in range(len(client)):
        model.zero_grad(set_to_none=True)
        start = 0
        for name in space.names:
            p = parameters[name]
            p.data.copy_(theta[client[j], start : start + p.numel()].view(p.shape))
            start += p.numel()
        scores = model(**{name: x[j : j + 1] for name, x in inputs.items()})
        scores = getattr(scores, "logits", scores)
        (-F.log_softmax(scores, -1)[0, labels[j]]).backward()
        grads = [
            parameters[n].grad
            if parameters[n].grad is not None
            else torch.zeros_like(parameters[n])
            for n in space.names
        ]
        out[j] = torch.cat([g.flatten() for g in grads])
    return out


class Case:
    """A model prepared for per-sample gradients, and a plain copy of it."""

    def __init__(self, model: nn.Module) -> None:
        tensors = trainable(model)
        self.plain = copy.deepcopy(model).eval()
        self.space = space_of(tensors)
        self.theta = self.space.flatten(tensors)
        self.ready = PerSample(model.eval(), self.space, call, CLASSIFY)

    def rows(self, clients: int, seed: int = 0) -> Tensor:
        """Return different weights for each client; LoRA's B is not zero."""
        noise = torch.randn(clients, self.space.size, generator=torch.Generator().manual_seed(seed))
        return self.theta + 0.1 * noise

    def check(
        self, inputs: Inputs, labels: Tensor, clients: int, nan: int | None = None, seed: int = 0
    ) -> Tensor:
        """Compare each record's gradient; only that of record `nan` may be non-finite."""
        client = torch.arange(len(labels)).flip(0) % clients
        theta = self.rows(clients, seed)
        grads = self.ready.grads(theta, client, inputs, labels)
        assert [g.shape for g in grads] == [
            (len(labels), shape.numel()) for shape in self.space.shapes
        ]
        got = torch.cat(grads, 1)
        want = loop(self.plain, self.space, theta, client, inputs, labels)
        good = torch.ones(len(labels), dtype=torch.bool)
        if nan is not None:
            good[nan] = False
            assert not got[nan].isfinite().all()
            assert not want[nan].isfinite().all()
        assert got[good].isfinite().all()
        close(got[good], want[good], self.space)
        return got


def close(got: Tensor, want: Tensor, space: Space) -> None:
    for mine, reference in zip(got, want, strict=True):
        # Sums that nearly cancel are less exact.
        assert (mine - reference).norm() <= 3 * TOLERANCE * reference.norm()
    # Tensors with tiny gradients contain rounding errors only: the exact gradient of a key's bias
    # is zero.
    for name, part in zip(space.names, space.slices(), strict=True):
        error, size = (got[:, part] - want[:, part]).norm(), want[:, part].norm()
        assert error <= TOLERANCE * size + 2e-5 * want.norm(), f"{name}: {error / size:.1e}"


def spread(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw all weights from the seed, so that biases, norms and embeddings affect the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            around_one = "norm" in name.lower() and name.endswith("weight")
            p.copy_(0.25 * torch.randn(p.shape, generator=generator) + around_one)
    return model.eval()


def swin(**other: object) -> nn.Module:
    """Return a Swin of two stages with two layers each, which shifts and merges windows."""
    config: dict[str, object] = {
        "image_size": 16, "patch_size": 2, "num_channels": 1, "embed_dim": 8, "depths": [2, 2],
        "num_heads": [2, 4], "window_size": 2, "num_labels": CLASSES, "drop_path_rate": 0.0,
        "mlp_ratio": 2.0,
    }  # fmt: skip
    return spread(SwinForImageClassification(SwinConfig(**{**config, **other})))


def vit(**other: object) -> nn.Module:
    config: dict[str, object] = {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 12, "image_size": 8, "patch_size": 4, "num_channels": 1,
        "num_labels": CLASSES,
    }  # fmt: skip
    return spread(ViTForImageClassification(ViTConfig(**{**config, **other})))


def _text(**other: object) -> dict[str, object]:
    return {
        "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 12, "max_position_embeddings": 12, "num_labels": CLASSES,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **other,
    }  # fmt: skip


def bert(**other: object) -> nn.Module:
    return spread(BertForSequenceClassification(BertConfig(**_text(**other))))


def roberta(**other: object) -> nn.Module:
    return spread(RobertaForSequenceClassification(RobertaConfig(**_text(**other))))


def images(side: int) -> Callable[[int], Inputs]:
    return lambda count: {
        "pixel_values": torch.randn(
            count, 1, side, side, generator=torch.Generator().manual_seed(3)
        )
    }


def texts(pad: int) -> Callable[[int], Inputs]:
    def make(count: int) -> Inputs:
        """Return padded records of different lengths with their attention mask."""
        ids = torch.randint(2, 20, (count, 7), generator=torch.Generator().manual_seed(4))
        mask = (torch.arange(7) < torch.tensor([4, 7, 2, 6, 3][:count]).reshape(-1, 1)).long()
        return {"input_ids": torch.where(mask > 0, ids, pad), "attention_mask": mask}

    return make


MODELS = {
    "swin": (swin, images(16)),
    "vit": (vit, images(8)),
    "bert": (bert, texts(0)),
    "roberta": (roberta, texts(1)),
}


TRAIN = ("full", "lora", "head")


def adapted(model: nn.Module, train: str, **lora: object) -> nn.Module:
    section = ModelSection(train=train, lora=LoraSection(**{"r": 2, "alpha": 4.0, **lora}))  # type: ignore[arg-type]
    return adapt(model, section, "classifier", seed=1).model


def labels_of(count: int) -> Tensor:
    return torch.arange(count) % CLASSES
