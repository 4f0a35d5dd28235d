"""Every way to compute a clipped sum on a GPU gives the same numbers.

The ways: one record at a time by plain autograd, in one pass, captured in a CUDA graph, compiled.
Models have random weights; three clients have weights of their own, 24 records and 8 unused slots.
Float32 results are compared with float32 autograd, bf16 results with bf16 autograd.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpfed.bench.cases import Case
from dpfed.model.causal_loss import scores_of
from dpfed.model.per_sample.gradients import Batch, PerSample, cast, trainable
from dpfed.model.task import InputSpec
from dpfed.privacy.clipping import Clipping
from dpfed.privacy.fixed_shape_sum import FixedSum, Pass, PassShape
from dpfed.training.job.device import device_of

IMAGE, SMALL = (InputSpec("image", "pixel_values", (3, size, size), 10) for size in (224, 32))
CASES = (
    Case("vit-base", IMAGE, clients=3, batch=8, rank=4),
    Case("swin-tiny", IMAGE, clients=3, batch=8, rank=4),
    Case(
        "roberta-base",
        InputSpec("text", "input_ids", (32,), 2, vocabulary=50265),
        clients=3,
        batch=8,
        rank=4,
    ),
    Case("vit-6x192", SMALL, clients=3, batch=8, train="full"),
    Case("swin-tiny", IMAGE, clients=3, batch=8, train="full"),
    Case("gn-resnet18", SMALL, clients=3, batch=8, train="full"),
)
CLIP, UNUSED = 0.05, 8
# Largest difference of a client's sum over its norm.
FLOAT32, BF16 = 1e-4, 5e-2


class Setting:
    """A model, weights for each client, and the records of one pass, on one device."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.parts = case.build()
        smooth(self.parts.adapted.model)
        self.model, self.space = self.parts.adapted.model.to(device), self.parts.space.to(device)
        self.records = case.records(device)
        start = self.space.flatten(trainable(self.model)).detach()
        generator = torch.Generator().manual_seed(1)
        moved = 0.02 * torch.randn(case.clients, self.space.size, generator=generator)
        self.theta = start + moved.to(device)
        slots = case.union + UNUSED
        row = torch.arange(slots, device=device)
        self.client = (row // case.batch).clamp_max(case.clients - 1)
        none = torch.zeros_like(row)
        self.filling = Pass.of(row, self.client, (row < case.union).long(), none, none)
        self.slots = slots

    def forward(self, model: torch.nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
        built = self.parts.built
        dtype = next(model.parameters()).dtype
        prepared = cast(built.prepare(dict(inputs)), dtype)
        return scores_of(built.task, model, weights, prepared, inputs)

    def by_hand(self, dtype: torch.dtype) -> Tensor:
        """Return the clipped sums by plain autograd, one record after another."""
        model = self.model.to(dtype)
        total = torch.zeros_like(self.theta, dtype=torch.float64)
        for i in range(self.case.union):
            s = int(self.client[i])
            weights = {
                n: w.to(dtype).detach().requires_grad_(True)
                for n, w in self.space.unflatten(self.theta[s]).items()
            }
            inputs, labels = self.records.take(torch.tensor([i], device=self.device))
            loss = self.parts.built.task.loss(
                self.forward(model, dict(weights), inputs), labels
            ).sum()
            grads = torch.autograd.grad(loss, list(weights.values()))
            flat = torch.cat([g.reshape(-1).double() for g in grads])
            total[s] += flat * min(1.0, CLIP / float(flat.norm()))
        return total

    def by_pass(self, dtype: torch.dtype, captured: bool, compiled: bool) -> Tensor:
        task = self.parts.built.task
        ready = PerSample(self.model, self.space, self.forward, task, self.parts.built.rows)
        ready.to(dtype)
        if compiled:
            ready.compile()
        total = FixedSum(
            ready,
            self.records,
            Clipping(),
            None,
            PassShape(self.case.clients, self.slots, self.space.size),
            capture=captured,
        )
        summed, _ = total(self.theta, self.filling, CLIP)
        return summed.double().clone()


def smooth(model: torch.nn.Module) -> None:
    """Replace ReLU by SiLU: rounding decides the slope of a ReLU at zero."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.ReLU):
                setattr(module, name, torch.nn.SiLU())


def difference(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


WAYS = {"one pass": (False, False), "captured": (True, False), "compiled": (False, True)}
WAYS["compiled and captured"] = (True, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.train}")
def test_the_clipped_sum_is_that_of_plain_autograd(
    case: Case, way: str, dtype: torch.dtype
) -> None:
    device = device_of("cuda")
    captured, compiled = WAYS[way]
    expected = Setting(case, device).by_hand(dtype)
    found = Setting(case, device).by_pass(dtype, captured, compiled)
    bound = FLOAT32 if dtype == torch.float32 else BF16
    assert difference(found, expected) <= bound
