"""Whether every way to compute a clipped sum gives the same numbers: one record at a time, in one pass, captured, compiled.

Models with random weights, adapters or all of their numbers trained, three clients with weights of their own, 24 records and
8 unused slots. In float32 each way is compared with ordinary autograd, one record after another; in bf16 with the same in bf16,
to the precision that bf16 has.
Run: python scripts/gpu_equality.py [--device cuda] [--no-compile] [--only MODEL ...]; exits with 1 where a way differs.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from dpfed.bench.cases import Case
from dpfed.model.per_sample.gradients import Batch, PerSample, call, cast, trainable
from dpfed.model.task import InputSpec
from dpfed.privacy.clipping import Clipping
from dpfed.privacy.fixed_shape_sum import FixedSum, Pass
from dpfed.training.job.job import device_of

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
FLOAT32, BF16 = 1e-4, 5e-2  # largest difference of a client's sum over its norm


class Setting:
    """One case on one device: a model, weights for each client, and the records of one pass."""

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
        return built.task.score(
            call(model, weights, cast(built.prepare(dict(inputs)), dtype)), inputs
        )

    def by_hand(self, dtype: torch.dtype) -> Tensor:
        """One record after another, by autograd through the model as peft made it."""
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
        ready = PerSample(
            self.model, self.space, self.forward, task.loss, task.correct, self.parts.built.rows
        )
        ready.to(dtype)
        if compiled:
            ready.compile()
        total = FixedSum(
            ready,
            self.records,
            Clipping(),
            None,
            self.case.clients,
            self.slots,
            self.space.size,
            capture=captured,
        )
        summed, _ = total(self.theta, self.filling, CLIP)
        return summed.double().clone()


def smooth(model: torch.nn.Module) -> None:
    """A ReLU's slope jumps at zero, and rounding decides on which side a number is: another function takes its place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.ReLU):
                setattr(module, name, torch.nn.SiLU())


def difference(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--only", nargs="+", choices=sorted({case.model for case in CASES}), metavar="MODEL"
    )
    args = parser.parse_args()
    device, worst = device_of(args.device), 0
    for case in CASES:
        if args.only and case.model not in args.only:
            continue
        for dtype, bound in ((torch.float32, FLOAT32), (torch.bfloat16, BF16)):
            expected = Setting(case, device).by_hand(dtype)
            ways = [("one pass", False, False)]
            ways += [("captured", True, False)] if device.type == "cuda" else []
            ways += [] if args.no_compile else [("compiled", False, True)]
            ways += (
                [("compiled, captured", True, True)]
                if device.type == "cuda" and not args.no_compile
                else []
            )
            for name, captured, compiled in ways:
                torch._dynamo.reset()
                off = difference(Setting(case, device).by_pass(dtype, captured, compiled), expected)
                verdict = "equal" if off <= bound else "DIFFERENT"
                worst = max(worst, int(off > bound))
                print(
                    f"{case.model:13} {case.train:5} {str(dtype)[6:]:9} {name:20} {off:9.2e}  {verdict}",
                    flush=True,
                )
    sys.exit(worst)


if __name__ == "__main__":
    main()
