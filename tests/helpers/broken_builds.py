"""Builds of the oracle that break the guarantee, as patches, and the audited digits job."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfed.config import load
from dpfed.privacy import oracle as oracle_module
from dpfed.privacy import sampling as sampling_module
from dpfed.privacy.clipping import Clipping, UnitRows
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan
from dpfed.registry import registry
from dpfed.training.job.job import Job, prepare

# Expected batch size of the digits job.
BATCH = 16
ROUNDS = 5

Clip = Callable[[Sequence[Tensor], Tensor, int, float], Tensor]
Break = Callable[[pytest.MonkeyPatch], None]
TRUE_CLIP = oracle_module.clip_and_sum
TRUE_DRAW = sampling_module.draw


def digits_job(seed: int = 0, *changes: str) -> Job:
    """Return the digits job: 10 clients, epsilon 1, and 15 local steps instead of 90."""
    short = ["privacy.target_epsilon=1", f"run.rounds={ROUNDS}", f"run.seed={seed}"]
    return prepare(load("digits", [*short, *changes], registry()))


def clipped(x: Tensor, clip: float) -> Tensor:
    return x * (clip / x.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp(max=1.0)


def batch_means(grads: Sequence[Tensor], owner: Tensor, clients: int) -> list[Tensor]:
    counts = torch.bincount(owner, minlength=clients).clamp_min(1).unsqueeze(1)
    return [g.new_zeros(clients, g.shape[1]).index_add_(0, owner, g) / counts for g in grads]


def batch_mean(grads: Sequence[Tensor], owner: Tensor, clients: int, clip: float) -> Tensor:
    return BATCH * clipped(torch.cat(batch_means(grads, owner, clients), 1), clip)


def batch_tensor(grads: Sequence[Tensor], owner: Tensor, clients: int, clip: float) -> Tensor:
    """Clip as the released code of the paper does."""
    return BATCH * torch.cat([clipped(g, clip) for g in batch_means(grads, owner, clients)], 1)


def per_tensor(grads: Sequence[Tensor], owner: Tensor, clients: int, clip: float) -> Tensor:
    return torch.cat(
        [g.new_zeros(clients, g.shape[1]).index_add_(0, owner, clipped(g, clip)) for g in grads], 1
    )


def no_clip(grads: Sequence[Tensor], owner: Tensor, clients: int, clip: float) -> Tensor:
    units = UnitRows(owner, torch.ones_like(owner), clients)
    return TRUE_CLIP(grads, units, math.inf, Clipping())[0]


class Shuffle:
    """Every record exactly once in an epoch of equal batches, in a new order each epoch."""

    def __init__(self) -> None:
        self._queues: dict[int, tuple[np.random.Generator, list[int]]] = {}

    def __call__(self, mechanism: Mechanism, units: int, rng: np.random.Generator) -> np.ndarray:
        # The stored rng keeps its id from being used again.
        _, queue = self._queues.setdefault(id(rng), (rng, []))
        if not queue:
            queue.extend(rng.permutation(units).tolist())
        size = round(mechanism.rate * units)
        batch, queue[:] = queue[:size], queue[size:]
        return np.sort(np.array(batch))


def fixed_size(mechanism: Mechanism, units: int, rng: np.random.Generator) -> np.ndarray:
    return TRUE_DRAW(replace(mechanism, sampling="fixed_wor"), units, rng)


def same_every_step(mechanism: Mechanism, units: int, rng: np.random.Generator) -> np.ndarray:
    key = rng.bit_generator.state["state"]["key"]  # type: ignore[index]
    return TRUE_DRAW(mechanism, units, np.random.default_rng(key))


def patch_clip(clip: Clip) -> Break:
    def broken(
        grads: Sequence[Tensor], units: UnitRows, norm: float, *_: object
    ) -> tuple[Tensor, Tensor]:
        return clip(grads, units.client, units.clients, norm), torch.zeros(units.clients, 1)

    return lambda patch: patch.setattr(oracle_module, "clip_and_sum", broken)


def patch_draw(value: Callable[..., np.ndarray]) -> Break:
    return lambda patch: patch.setattr(sampling_module, "draw", value)


def patch_noise(factor: Callable[[Plan, int], float]) -> Break:
    """Return a patch that multiplies the noise of each client by a factor."""

    def std(plan: Plan, client: int) -> float:
        return float(plan.multipliers[client]) * plan.clip * factor(plan, client)

    return lambda patch: patch.setattr(Plan, "noise_std", std)


BROKEN: dict[str, Break] = {
    "clips the mean of a batch": patch_clip(batch_mean),
    "clips the mean of a batch, per tensor": patch_clip(batch_tensor),
    "does not clip": patch_clip(no_clip),
    "clips each tensor": patch_clip(per_tensor),
    "noise multiplied by C once too often": patch_noise(lambda plan, i: plan.clip),
    "noise divided by the batch twice": patch_noise(lambda plan, i: 1 / float(plan.expected[i])),
    "no noise": patch_noise(lambda plan, i: 0.0),
    "half of the noise": patch_noise(lambda plan, i: 0.5),
    "noise multiplied by the batch": patch_noise(lambda plan, i: float(plan.expected[i])),
    "shuffled batches": patch_draw(Shuffle()),
    "batches of a fixed size": patch_draw(fixed_size),
    "one batch for all steps of a round": patch_draw(same_every_step),
}


def changes_for(name: str) -> tuple[str, ...]:
    """Return the settings that a broken build needs: with C = 1 a power of C changes nothing."""
    return ("privacy.clip=0.1",) if "multiplied by C" in name else ()


def audited_with(name: str, audit: Callable[[Job], Any], seed: int = 0) -> Any:
    """Return `audit` of the digits job with this broken build."""
    with pytest.MonkeyPatch.context() as patch:
        job = digits_job(seed, *changes_for(name))
        BROKEN[name](patch)
        return audit(job)
