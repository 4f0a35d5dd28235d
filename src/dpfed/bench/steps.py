"""The competitors. Each function prepares one way to do the same local step and returns it, ready to be timed.

private        this project: S clients in one pass, clipped record by record, noised
union          one non-private step on all S·B records together, compiled: the price of no privacy and no clients
captured       a step of any way recorded once on a GPU and replayed, as the private step is
one_by_one     non-private LoRA, one client after another
opacus         Opacus, one client after another (GradSampleModule and DPOptimizer)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpfed.bench.cases import Case, logits_of
from dpfed.model.per_sample.gradients import Batch, PerSample, call, cast, trainable
from dpfed.privacy.clipping import Clipping
from dpfed.privacy.fixed_shape_sum import FixedSum, Pass, PassShape

Step = Callable[[], Any]
CLIP, SIGMA = 0.1, 1.0


def private(
    case: Case, device: torch.device, dtype: torch.dtype, compiled: bool, slots: int
) -> Step:
    """One pass over `slots`, of which S·B are used, noise for S clients, and DP-FedAdamW's arithmetic on `[S, P]`, but for the
    two bias corrections."""
    parts = case.build()
    model, built = parts.adapted.model.to(device), parts.built
    space = parts.space.to(device)
    theta = space.flatten(trainable(model)).expand(case.clients, -1).clone()

    def forward(model: torch.nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
        return built.task.score(
            call(model, weights, cast(built.prepare(dict(inputs)), ready.dtype)), inputs
        )

    ready = PerSample(model, space, forward, built.task.loss, built.task.correct, built.rows)
    ready.to(dtype)
    if compiled:
        ready.compile()
    shape = PassShape(case.clients, slots, space.size)
    total = FixedSum(ready, case.records(device), Clipping(), None, shape)
    index = torch.arange(slots, device=device)
    client = (index * case.clients // slots).clamp_max(case.clients - 1)
    none = torch.zeros_like(index)
    filling = Pass.of(index, client, (index < case.union).long(), none, none)
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    std = torch.full((case.clients, 1), SIGMA * CLIP, device=device)
    phi, direction = (std / case.batch).square(), torch.zeros_like(theta[0])

    def step() -> None:
        nonlocal m, v, theta
        summed, _ = total(theta, filling, CLIP)
        noise = torch.empty_like(theta)
        for row in noise:  # as in a run: each client has a stream of its own
            row.normal_()
        g = summed.addcmul(noise, std) / case.batch
        m = torch.lerp(m, g, 0.1)
        v = (0.999 * v).addcmul(g, g, value=0.001)
        step = m / (torch.maximum(v - phi, 0.5 * phi).sqrt() + 1e-8)
        theta = theta - 1e-4 * (step + 0.5 * direction + 0.01 * theta)

    return step


def _plain(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, list[Tensor]]:
    parts = case.build()
    model = parts.adapted.model.to(device).to(dtype)
    return parts, model, [p for p in model.parameters() if p.requires_grad]


def union(case: Case, device: torch.device, dtype: torch.dtype, compiled: bool) -> Step:
    parts, model, tensors = _plain(case, device, dtype)
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(tensors, lr=1e-4, fused=cuda, capturable=cuda)
    records, rows = case.records(device), torch.arange(case.union, device=device)

    def loss(inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        losses: Tensor = parts.built.task.loss(logits_of(parts, model, inputs, dtype), labels)
        return losses.mean()

    loss_of = torch.compile(loss, dynamic=False) if compiled else loss

    def step() -> None:
        torch.autograd.backward(loss_of(*records.take(rows)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def captured(step: Step, warm: int = 3) -> Step:
    """The same step without the time that the host takes to launch it."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def one_by_one(case: Case, device: torch.device, dtype: torch.dtype) -> Step:
    """Every client's own adapters are loaded, trained for a step and taken back, as simulators do."""
    parts, model, tensors = _plain(case, device, dtype)
    mine = [[t.detach().clone() for t in tensors] for _ in range(case.clients)]
    optimizer = torch.optim.AdamW(tensors, lr=1e-4, fused=device.type == "cuda")
    records = case.records(device)

    def step() -> None:
        for client, own in enumerate(mine):
            with torch.no_grad():
                torch._foreach_copy_(tensors, own)
            rows = torch.arange(client * case.batch, (client + 1) * case.batch, device=device)
            inputs, labels = records.take(rows)
            parts.built.task.loss(logits_of(parts, model, inputs, dtype), labels).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            with torch.no_grad():
                torch._foreach_copy_(own, tensors)

    return step


def opacus(case: Case, device: torch.device, dtype: torch.dtype) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    parts, model, tensors = _plain(case, device, dtype)
    model.train()
    wrapped = GradSampleModule(model, loss_reduction="mean")
    mine = [[t.detach().clone() for t in tensors] for _ in range(case.clients)]
    optimizer = DPOptimizer(
        torch.optim.AdamW(tensors, lr=1e-4),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=case.batch,
    )
    records = case.records(device)

    def step() -> None:
        for client, own in enumerate(mine):
            with torch.no_grad():
                torch._foreach_copy_(tensors, own)
            rows = torch.arange(client * case.batch, (client + 1) * case.batch, device=device)
            inputs, labels = records.take(rows)
            out = wrapped(**cast(parts.built.prepare(dict(inputs)), dtype))
            parts.built.task.loss(
                parts.built.task.score(out.logits, inputs), labels
            ).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                torch._foreach_copy_(own, tensors)

    return step
