"""Canaries in the messages that the server receives: the job's own algorithm trains on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Context
from dpfed.privacy.plan import Schedule
from dpfed.training.auditing.canaries import canary_components, canary_data, canary_model
from dpfed.training.auditing.setting import AuditSetting
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job.job import Job, PrivateRecords
from dpfed.training.local_steps import LocalResult
from dpfed.training.round_context import first_state, learning_rate
from dpfed.training.round_loop import aggregate


def server_scores(job: Job, setting: AuditSetting, coins: np.ndarray) -> np.ndarray:
    """Return a score of each canary from the clients' messages, `[clients, canaries]`.

    The score is -<Δ_i, canary direction> / learning rate, summed over the rounds, for message Δ_i.
    A present canary has a high score, because training moves against the gradient.
    """
    canary_job = _canary_job(job, setting, coins)
    run = canary_job.config.run
    everyone = list(range(setting.plan.clients))
    deltas: list[Tensor] = []

    def record(ctx: Context, clients: Sequence[int], result: LocalResult) -> None:
        deltas.append(result.message["delta"])

    fleet = Fleet(canary_job, watch=record)
    state = first_state(canary_job)
    scores = np.zeros(coins.shape)
    for t in range(1, setting.rounds + 1):
        deltas.clear()
        mean, answered = fleet.run_cohort(t, state, everyone)
        rate = learning_rate(job.algorithm.base_lr, run.lr_schedule, t, run.rounds)
        scores -= canary_components(torch.cat(deltas), coins.shape[1])[0] / rate
        state = aggregate(canary_job, t, state, everyone, mean, answered)
    # Replace NaN by the score zero, because a client may diverge.
    return np.nan_to_num(scores)


def _canary_job(job: Job, setting: AuditSetting, coins: np.ndarray) -> Job:
    """Return the job with canaries as its data, and with all clients in every round."""
    clients = setting.plan.clients
    model = canary_model(coins.shape[1], setting.device)
    records, shards = canary_data(setting, coins)
    run = replace(
        job.config.run,
        rounds=setting.rounds,
        local_steps=setting.local_steps,
        fleet_size="auto",
        allow_nan=True,
    )
    augmentations = job.private.augmentations
    if augmentations is not None:
        # A canary is not an image, so each augmented copy is the canary itself.
        augmentations = replace(augmentations, augment=lambda inputs, keys: dict(inputs))
    return replace(
        job,
        config=replace(job.config, run=run),
        model=model,
        theta=torch.zeros(model.space.size, device=setting.device),
        plan=setting.plan,
        schedule=Schedule(clients, clients, setting.rounds, setting.local_steps),
        private=PrivateRecords(records, shards, augmentations),
        streams=setting.streams,
    )
