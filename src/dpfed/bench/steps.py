"""Implementations of one local training step of S clients, to compare their time and memory.

Each function prepares an implementation and returns its step. Each client has B records.

private     this project: S clients in one pass, clipped record by record, with noise
union       a non-private step of one model on all S·B records together
captured    a step of another implementation, recorded once as a CUDA graph and then replayed
one_by_one  non-private LoRA, one client after another
opacus      Opacus, one client after another (GradSampleModule and DPOptimizer)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpfed.bench.cases import Case, logits_of
from dpfed.model.causal_loss import scores_of, scores_of_logits
from dpfed.model.fast_paths.checkpointing import checkpoint_layers
from dpfed.model.frozen.quantised import set_dtype
from dpfed.model.per_sample.gradients import Batch, PerSample, cast, trainable
from dpfed.privacy.clipping import Clipping
from dpfed.privacy.fixed_shape_sum import FixedSum, Pass, PassShape

Step = Callable[[], Any]
CLIP = 0.1
SIGMA = 1.0


def _private_model(
    case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[PerSample, Tensor]:
    """Return the model that computes per-sample gradients, and one row of weights per client.

    The weights are `[S, P]`: P trainable numbers for each of S clients.
    """
    parts = case.build(dtype, device)
    built = parts.built
    model = parts.adapted.model
    space = parts.space.to(device)
    theta = space.flatten(trainable(model)).float().to(device).expand(case.clients, -1).clone()
    # Convert the model before it moves to the device, whose memory may not hold the model in both
    # dtypes.
    set_dtype(model, dtype)
    model.to(device)

    def forward(model: torch.nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
        prepared = cast(built.prepare(dict(inputs)), ready.dtype)
        return scores_of(built.task, model, weights, prepared, inputs)

    ready = PerSample(model, space, forward, built.task, built.rows)
    ready.to(dtype)
    if case.checkpoint:
        ready.checkpoint()
    return ready, theta


def private(
    case: Case, device: torch.device, dtype: torch.dtype, compiled: bool, slots: int
) -> Step:
    """Return a private step of DP-FedAdamW for S clients, which does all clients' work in one pass.

    A pass (one forward and backward computation) has `slots` places for records. Each of the S
    clients has B records, so S·B places are used. The step draws noise for every client. It leaves
    out the two bias corrections of DP-FedAdamW.
    """
    ready, theta = _private_model(case, device, dtype)
    if compiled:
        ready.compile()
    shape = PassShape(case.clients, slots, theta.shape[1])
    total = FixedSum(ready, case.records(device), Clipping(), None, shape)
    index = torch.arange(slots, device=device)
    client = (index * case.clients // slots).clamp_max(case.clients - 1)
    none = torch.zeros_like(index)
    filling = Pass.of(index, client, (index < case.union).long(), none, none)
    m = torch.zeros_like(theta)
    v = torch.zeros_like(theta)
    std = torch.full((case.clients, 1), SIGMA * CLIP, device=device)
    phi = (std / case.batch).square()
    direction = torch.zeros_like(theta[0])

    def step() -> None:
        nonlocal m, v, theta
        summed, _ = total(theta, filling, CLIP)
        noise = torch.empty_like(theta)
        # Draw the noise of each client separately. A real run also does this, because every client
        # has its own random stream.
        for row in noise:
            row.normal_()
        g = summed.addcmul(noise, std) / case.batch
        m = torch.lerp(m, g, 0.1)
        v = (0.999 * v).addcmul(g, g, value=0.001)
        step = m / (torch.maximum(v - phi, 0.5 * phi).sqrt() + 1e-8)
        theta = theta - 1e-4 * (step + 0.5 * direction + 0.01 * theta)

    return step


def plain_model(
    case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[Any, Any, list[Tensor]]:
    parts = case.build(dtype, device)
    model = parts.adapted.model
    set_dtype(model, dtype)
    model.to(device)
    return parts, model, [p for p in model.parameters() if p.requires_grad]


def union(case: Case, device: torch.device, dtype: torch.dtype, compiled: bool) -> Step:
    parts, model, tensors = plain_model(case, device, dtype)
    if case.checkpoint:
        checkpoint_layers(model)
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(tensors, lr=1e-4, fused=cuda, capturable=cuda)
    records = case.records(device)
    rows = torch.arange(case.union, device=device)

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
    """Return a function that replays `step` as a CUDA graph, to save single kernel launches."""
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
    """Return a non-private step that trains each client's own weights, one client after another.

    Simulators of federated learning usually work in this way.
    """
    parts, model, tensors = plain_model(case, device, dtype)
    if case.checkpoint:
        checkpoint_layers(model)
    optimizer = torch.optim.AdamW(tensors, lr=1e-4, fused=device.type == "cuda")

    def train(inputs: dict[str, Tensor], labels: Tensor) -> None:
        parts.built.task.loss(logits_of(parts, model, inputs, dtype), labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return client_by_client(case, device, tensors, train)


def client_by_client(
    case: Case,
    device: torch.device,
    tensors: list[Tensor],
    train: Callable[[dict[str, Tensor], Tensor], None],
) -> Step:
    """Return a step that loads, trains and stores each client's weights, one client after another.

    tensors  the model's trainable tensors, into which the weights of a client are loaded
    train    trains the loaded weights on the inputs and labels of one client
    """
    of_clients = [[t.detach().clone() for t in tensors] for _ in range(case.clients)]
    records = case.records(device)

    def step() -> None:
        for client, own in enumerate(of_clients):
            with torch.no_grad():
                torch._foreach_copy_(tensors, own)
            rows = torch.arange(client * case.batch, (client + 1) * case.batch, device=device)
            train(*records.take(rows))
            with torch.no_grad():
                torch._foreach_copy_(own, tensors)

    return step


def opacus(case: Case, device: torch.device, dtype: torch.dtype) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    if case.checkpoint:
        raise ValueError("its hooks see each layer twice if layers are checkpointed")
    parts, model, tensors = plain_model(case, device, dtype)
    model.train()
    wrapped = GradSampleModule(model, loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.AdamW(tensors, lr=1e-4),
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        expected_batch_size=case.batch,
    )

    def train(inputs: dict[str, Tensor], labels: Tensor) -> None:
        out = wrapped(**cast(parts.built.prepare(dict(inputs)), dtype))
        task = parts.built.task
        scores = scores_of_logits(out.logits, inputs) if task.causal else out.logits
        task.loss(scores, labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return client_by_client(case, device, tensors, train)
