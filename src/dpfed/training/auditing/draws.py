"""Test the batches and the noise that the job's oracle draws."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from dpfed.model.per_sample.gradients import PerSample
from dpfed.privacy.auditing.laws import Law, batch_law, noise_law
from dpfed.privacy.record_batch import Records
from dpfed.training.auditing.canaries import LAYERS, canary_model, one_record_units
from dpfed.training.auditing.setting import FLEET, AuditSetting

# Largest number of cells in the table [clients, steps, records] of the audited batches.
MAX_LAW_CELLS = 4_000_000


class RecordingModel:
    """Model that marks each drawn record in `included`; the label of a record is its number."""

    def __init__(self, model: PerSample, clients: int, steps: int, units: int) -> None:
        self._model = model
        self.space = model.space
        self.has_dropout = False
        self.included = np.zeros((clients, steps, units), dtype=bool)
        self.first_client = 0
        self.step = 0

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        clients = self.first_client + client.cpu().numpy()
        self.included[clients, self.step, labels.cpu().numpy()] = True
        return self._model.grads(theta, client, inputs, labels, keys)


def audit_laws(setting: AuditSetting) -> tuple[Law, Law]:
    """Test if the oracle's batches and noise have the distributions that the accountant assumes."""
    worst = int(setting.epsilons().argmax())
    units = int(setting.plan.sizes[worst])
    steps = setting.steps * setting.plan.batches
    count = int(np.clip(MAX_LAW_CELLS // (units * steps), 2, 2 * FLEET))
    copies = setting.only(np.full(count, worst))
    model = RecordingModel(canary_model(1, setting.device), count, steps, units)
    zeros = torch.zeros(units, 1, device=setting.device)
    records = Records({"x": zeros}, torch.arange(units, device=setting.device))
    shards = one_record_units(np.full(count, units), np.tile(np.arange(units), count))
    mechanism = copies.plan.mechanism(0)
    multiplier = float(copies.sum_multipliers[0])
    noise = np.zeros((count, steps, LAYERS))
    for step, clients, sums in copies.releases(model, records, shards):
        noise[clients, step] = sums.cpu().numpy() / multiplier
        # Set the next step now, because `releases` draws the next batch before it yields again.
        model.step = (step + 1) % steps
        if model.step == 0:
            model.first_client = clients[0] + FLEET
    return batch_law(mechanism, model.included), noise_law(noise)
