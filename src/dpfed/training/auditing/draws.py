"""Test the batches and the noise that the job's oracle draws during an audit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpfed.privacy.auditing.laws import Law, batch_law, noise_law
from dpfed.training.auditing.setting import AuditSetting

# Largest number of cells in the table [clients, steps, units] of the tested batches.
MAX_LAW_CELLS = 4_000_000
# Most steps of a client that are tested.
MOST_STEPS = 500


class Draws:
    """The batches and the noise of the first clients whose mechanism is that of the worst client.

    setting  the audited clients
    values   values of pure noise of a client and step
    """

    def __init__(self, setting: AuditSetting, values: int) -> None:
        plan = setting.plan
        _, kinds = plan.kinds()
        worst = int(setting.epsilons().argmax())
        units = int(plan.sizes[worst])
        steps = min(MOST_STEPS, setting.steps * plan.batches, max(1, MAX_LAW_CELLS // (2 * units)))
        alike = np.flatnonzero((kinds == kinds[worst]) & (plan.sizes == units))
        alike = alike[: max(2, MAX_LAW_CELLS // (units * steps))]
        self._mechanism = plan.mechanism(worst)
        self._multiplier = float(setting.sum_multipliers[worst])
        self._rows = {int(client): row for row, client in enumerate(alike)}
        self._included = np.zeros((len(alike), steps, units), dtype=bool)
        self._noise = np.zeros((len(alike), steps, values))

    def add(
        self,
        step: int,
        clients: np.ndarray,
        drawn: Sequence[np.ndarray],
        noise: np.ndarray,
    ) -> None:
        """Store the batches and the noise of one step.

        drawn  for each client the units in its batch
        noise  `[clients, values]`, in units of C
        """
        if step >= self._included.shape[1]:
            return
        for client, units, values in zip(clients, drawn, noise, strict=True):
            row = self._rows.get(int(client))
            if row is not None:
                self._included[row, step, units] = True
                self._noise[row, step] = values / self._multiplier

    def laws(self) -> tuple[Law, Law]:
        """Test if batches and noise have the distributions that the accountant assumes."""
        return batch_law(self._mechanism, self._included), noise_law(self._noise)
