"""Time one step of Opake on a language model of `dpfed bench`, one client after another.

    python benchmarks/peers/opake_step.py --case llama-8b --device cuda [--checkpoint] [--out FILE]

Opake clips each record's gradient (`clipped_grad`) and adds noise (`gaussian_noise`), with its own
patches for transformers. They change transformers for the whole process, so nothing else is timed
here. It needs `pip install 'opake[transformers]>=0.16,<0.17'`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dpfed.bench.cases import CPU, GPU, Case
from dpfed.bench.llama import LLAMAS
from dpfed.bench.run import Measured, measure
from dpfed.bench.steps import CLIP, SIGMA, Step, client_by_client, plain_model
from dpfed.model.causal_loss import scores_of_logits
from dpfed.model.per_sample.gradients import cast
from dpfed.training.job.device import device_of


def opake(case: Case, device: torch.device, dtype: torch.dtype, sigma: float = SIGMA) -> Step:
    from opake.dpsgd.clipping import clipped_grad
    from opake.dpsgd.noise import gaussian_noise
    from opake.patches import apply_model_patches, apply_runtime_patches
    from opake.random import key

    apply_runtime_patches()
    parts, model, tensors = plain_model(case, device, dtype)
    if case.checkpoint:
        model.train().gradient_checkpointing_enable()
    apply_model_patches(model)
    task, prepare = parts.built.task, parts.built.prepare
    optimizer = torch.optim.AdamW(tensors, lr=1e-4, fused=device.type == "cuda")

    def loss(weights: tuple[Tensor, ...], inputs: dict[str, Tensor], label: Tensor) -> Tensor:
        one = {name: x.unsqueeze(0) for name, x in inputs.items()}
        named = dict(zip(parts.space.names, weights, strict=True))
        out = torch.func.functional_call(model, named, (), cast(prepare(dict(one)), dtype))
        return task.loss(scores_of_logits(out.logits, one), label.unsqueeze(0)).sum()

    gradients, clip_state = clipped_grad(
        loss, clipping_norm=CLIP, batch_argnums=(1, 2), normalize_by=case.batch
    )
    noise, noise_state = gaussian_noise(noise_multiplier=sigma, key=key(0))

    def train(inputs: dict[str, Tensor], labels: Tensor) -> None:
        nonlocal clip_state, noise_state
        weights = tuple(t.detach() for t in tensors)
        clipped, clip_state = gradients(weights, dict(inputs), labels, state=clip_state)
        noised, noise_state = noise(clipped, noise_state)
        for tensor, gradient in zip(tensors, noised.pytree, strict=True):
            tensor.grad = gradient.to(tensor.dtype)
        optimizer.step()
        optimizer.zero_grad()

    return client_by_client(case, device, tensors, train)


def main(arguments: Sequence[str] | None = None) -> Measured:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="llama-8b", choices=LLAMAS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device = device_of(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    (named,) = (case for case in (*GPU, *CPU) if case.model == options.case)
    case = replace(named, checkpoint=options.checkpoint)
    found = measure("opake", partial(opake, case, device, dtype), device, options.repeats, warm=2)
    plain = {"case": case.model, "checkpoint": case.checkpoint, **asdict(found)}
    if found.milliseconds is not None:
        plain["records_per_second"] = 1e3 * case.union / found.milliseconds
    print(json.dumps(plain))
    if options.out is not None:
        options.out.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
