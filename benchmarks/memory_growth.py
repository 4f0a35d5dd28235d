"""Compute the memory of one step of a Llama from the shapes of its tensors, without a GPU.

    python benchmarks/memory_growth.py [--case llama-8b] [--out memory.json]

Tensors on the meta device have a size but no numbers. Every operator of the step runs on such
tensors, and the memory of all that are alive together is counted. Weights are counted apart. The
figures are for bf16 without compilation and with fused attention. They leave out the working memory
inside operators, the CUDA context and fragmentation, so a GPU needs somewhat more.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.bench.cases import Case, logits_of
from dpfed.bench.llama import LLAMAS, text_of
from dpfed.bench.peak_memory import peak_bytes
from dpfed.model.causal_loss import scores_of
from dpfed.model.fast_paths.checkpointing import checkpoint_layers
from dpfed.model.frozen.quantised import set_dtype
from dpfed.model.per_sample.gradients import Batch, PerSample, cast, trainable
from dpfed.privacy.clipping import Clipping, UnitRows, clip_and_sum

META = torch.device("meta")
BF16 = torch.bfloat16
GIB = 2**30
# Bytes of a number in a quantised linear layer: NF4 has a scale of one byte for 64 numbers.
BYTES = {"bf16": 2.0, "int8": 1.0, "4bit": 0.5 + 1 / 64}


@dataclass(frozen=True)
class Row:
    """Memory of one step in GiB, besides the frozen weights.

    private  clipped sums of all clients, with the copies and gradients of all records
    union    non-private gradients of the union batch
    """

    clients: int
    batch: int
    length: int
    rank: int
    checkpoint: bool
    private: float
    union: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="llama-8b", choices=LLAMAS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    base = Case(options.case, text_of(options.case, 512), clients=4, batch=4)
    weights = weights_of(base)
    rows = [row_of(case) for case in growth(base)]
    print(*lines(options.case, weights, rows), sep="\n")
    if options.out is not None:
        plain = {"case": options.case, "weights": weights, "rows": [asdict(row) for row in rows]}
        options.out.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def growth(base: Case) -> Iterator[Case]:
    """Yield the base case, then cases that differ in one size, then both with checkpoints."""
    for checkpoint in (False, True):
        case = replace(base, checkpoint=checkpoint)
        yield case
        for clients in (1, 16):
            yield replace(case, clients=clients)
        for length in (128, 2048):
            yield replace(case, spec=text_of(case.model, length))
        for rank in (4, 64):
            yield replace(case, rank=rank)


def row_of(case: Case) -> Row:
    # A model has cycles of references, so without this call the models of all rows stay in memory.
    gc.collect()
    with fused_attention():
        private, union = private_bytes(case) / GIB, union_bytes(case) / GIB
    length = case.spec.shape[0]
    return Row(case.clients, case.batch, length, case.rank, case.checkpoint, private, union)


def private_bytes(case: Case) -> int:
    """Return the peak of the clipped sums of S clients in one pass."""
    parts = _on_meta(case)
    task, prepare, space = parts.built.task, parts.built.prepare, parts.space
    model = parts.adapted.model

    def forward(model: torch.nn.Module, weights: dict[str, Tensor], inputs: Batch) -> Tensor:
        return scores_of(task, model, weights, cast(prepare(dict(inputs)), BF16), inputs)

    ready = PerSample(model, space, forward, task)
    ready.to(BF16)
    if case.checkpoint:
        ready.checkpoint()
    inputs, labels = _records(case)
    theta = torch.zeros(case.clients, space.size, device=META)
    client = torch.zeros(case.union, dtype=torch.int64, device=META)
    valid, clip = torch.ones_like(client), torch.ones(case.union, device=META)

    def step() -> Any:
        grads = ready.raw_grads(theta, client, inputs, labels)
        total, _ = clip_and_sum(grads, UnitRows(client, valid, case.clients), clip, Clipping())
        return ready.ordered(total)

    return peak_bytes(step)


def union_bytes(case: Case) -> int:
    """Return the peak of the gradients of one model on all S·B records."""
    parts = _on_meta(case)
    model = parts.adapted.model
    if case.checkpoint:
        checkpoint_layers(model)
    inputs, labels = _records(case)
    tensors = list(trainable(model).values())

    def step() -> Any:
        losses = parts.built.task.loss(logits_of(parts, model, inputs, BF16), labels)
        return torch.autograd.grad(losses.mean(), tensors)

    return peak_bytes(step)


def _on_meta(case: Case) -> Any:
    with META:
        parts = case.build(BF16, META)
    set_dtype(parts.adapted.model, BF16)
    return parts


def _records(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    length = case.spec.shape[0]
    ids = torch.zeros(case.union, length, dtype=torch.int32, device=META)
    mask = torch.zeros(case.union, length, dtype=torch.uint8, device=META)
    labels = torch.zeros(case.union, dtype=torch.int64, device=META)
    return {"input_ids": ids, "attention_mask": mask}, labels


def weights_of(case: Case) -> dict[str, float]:
    """Return the memory of the frozen weights in GiB, by the form of the linear layers."""
    model = _on_meta(replace(case, checkpoint=False)).built.model
    linear = sum(
        module.base_layer.weight.numel()
        for module in model.modules()
        if hasattr(module, "base_layer")
    )
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    return {
        name: (BYTES["bf16"] * (frozen - linear) + size * linear) / GIB
        for name, size in BYTES.items()
    }


@contextmanager
def fused_attention() -> Iterator[None]:
    """Let attention keep no scores, as fused kernels do; on meta tensors torch would keep them."""

    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> Tensor:
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=attn_mask, **options
        )[0]
        return out

    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = fused  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before  # type: ignore[assignment]


def lines(case: str, weights: dict[str, float], rows: list[Row]) -> list[str]:
    shown = [f"{case}: frozen weights"]
    shown += [f"  {name:5} {size:6.1f} GiB" for name, size in weights.items()]
    shown.append("step, GiB besides the weights: clients x records, tokens, rank: private, union")
    for row in rows:
        how = ", checkpointed" if row.checkpoint else ""
        shown.append(
            f"  {row.clients:2} x {row.batch}, {row.length:4}, {row.rank:2}{how}: "
            f"{row.private:6.1f} {row.union:6.1f}"
        )
    return shown


if __name__ == "__main__":
    main()
