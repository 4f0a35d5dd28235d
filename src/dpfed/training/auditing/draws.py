"""Test if a job draws batches and noise as the accountant assumes, during an audit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpfed.privacy.auditing.laws import Law, batch_law, noise_law
from dpfed.training.auditing.setting import AuditSetting

# Largest size of the table `[clients, steps, units]`, which stores for each unit if it is in a
# batch.
MAX_LAW_CELLS = 4_000_000
# The tests use at most this many batches of each client.
MOST_STEPS = 500


class Draws:
    """Stores the drawn batches and the noise of some clients, to test their distributions.

    These are clients that have the same mechanism and as many units as the client with the largest
    epsilon. One test covers all of them, so their batches must have the same distribution.

    setting  the audited clients and steps
    values   number of measured noise values of a client in one step
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
        """Store the batches and the noise that these clients drew in one step.

        drawn  for each client the units in its batch
        noise  `[clients, values]` noise in units of the clip norm C
        """
        if step >= self._included.shape[1]:
            return
        for client, units, values in zip(clients, drawn, noise, strict=True):
            row = self._rows.get(int(client))
            if row is not None:
                self._included[row, step, units] = True
                self._noise[row, step] = values / self._multiplier

    def laws(self) -> tuple[Law, Law]:
        """Test if batches and noise have the assumed distributions; return both results."""
        return batch_law(self._mechanism, self._included), noise_law(self._noise)
