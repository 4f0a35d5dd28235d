"""Setting of an audit: the clients, steps and oracle of a job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.data.partition import Shards
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.auditing.guesses import Least, accounted
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.noise import Streams
from dpfed.privacy.oracle import FleetOracle, Isolation, PassLimits, RoundTerms
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import PrivateData, Records
from dpfed.training.job.job import Job

CPU = torch.device("cpu")
# Number of clients that the audit computes side by side.
FLEET = 32


@dataclass(frozen=True)
class AuditSetting:
    """The clients, steps and oracle that an audit runs; tests set a faulty class as `oracle`."""

    plan: Plan
    delta: float
    rounds: int
    local_steps: int
    streams: Streams
    device: torch.device = CPU
    max_slots: int = 512
    oracle: type[FleetOracle] = FleetOracle
    isolation: Isolation = "fast"

    @property
    def steps(self) -> int:
        return self.rounds * self.local_steps

    @property
    def sum_multipliers(self) -> np.ndarray:
        """The noise multiplier of each client's sum, averaged over the releases of a batch.

        With quantile clipping the oracle also releases a count. The charged multiplier covers sum
        and count, so the multiplier of the sum alone is larger.
        """
        alone = self.plan.clipping.sum_multiplier(self.plan.multipliers)
        return np.asarray(alone / np.sqrt(self.plan.releases))

    def epsilons(self) -> np.ndarray:
        """Return the epsilon claimed for each client after the audited steps, `[clients]`."""
        kinds, which = self.plan.kinds()
        each = np.array([epsilon([(kind, self.steps)], self.delta) for kind in kinds])
        return np.asarray(each[which])

    def epsilon_at(self, ratio: float) -> float:
        """Return the largest epsilon of a client if noise were `ratio` times smaller."""
        return max(epsilon(h, self.delta) for h in self._histories(ratio))

    def curve_at(self, ratio: float) -> Least:
        """Return the trade-off curve of the worst client if noise were `ratio` times smaller."""
        return accounted(self._histories(ratio))

    def _histories(self, ratio: float) -> list[tuple[tuple[Mechanism, int], ...]]:
        kinds, _ = self.plan.kinds()
        scaled = [replace(kind, noise_multiplier=kind.noise_multiplier / ratio) for kind in kinds]
        return [((kind, self.steps),) for kind in scaled]

    def only(self, clients: np.ndarray) -> AuditSetting:
        """Return this setting for these clients; a client listed twice gives independent copies."""
        plan = replace(
            self.plan,
            sizes=self.plan.sizes[clients],
            rates=self.plan.rates[clients],
            expected=self.plan.expected[clients],
            multipliers=self.plan.multipliers[clients],
        )
        return replace(self, plan=plan)

    def shortened(self, steps: int) -> AuditSetting:
        """Return this setting cut to about `steps` steps, which also lowers the claimed epsilon."""
        local = min(self.local_steps, max(1, steps))
        rounds = min(self.rounds, max(1, steps // local))
        return replace(self, local_steps=local, rounds=rounds)

    def releases(
        self,
        model: Any,
        records: Records,
        shards: Shards,
        vector: Tensor | None = None,
        places: int | None = None,
    ) -> Iterator[tuple[int, np.ndarray, Tensor]]:
        """Run all steps. After each step, yield its number, the clients and the released sums.

        The sums `[S, P]` are noised and divided by C. Several releases of a batch are averaged.

        vector  the trainable vector `[P]` of all steps; None for zeros
        places  records in a pass of exact isolation; None for as many as in other passes
        """
        plan = self.plan
        if vector is None:
            vector = torch.zeros(model.space.size, device=self.device)
        for first in range(0, plan.clients, FLEET):
            clients = np.arange(first, min(first + FLEET, plan.clients))
            theta = vector.expand(len(clients), -1).contiguous()
            unit = torch.from_numpy(plan.expected[clients] / plan.clip).float().to(self.device)
            step = 0
            for t in range(1, self.rounds + 1):
                oracle = self.oracle(
                    PrivateData(model, records, shards),
                    self._terms(t, clients),
                    PassLimits(self.max_slots, places=places or self.max_slots),
                )
                for _ in range(self.local_steps * plan.batches):
                    sums = [oracle(theta)[0]]
                    sums += [oracle.again(theta)[0] for _ in range(plan.releases - 1)]
                    yield step, clients, torch.stack(sums).mean(0) * unit.unsqueeze(1)
                    step += 1

    def _terms(self, t: int, clients: np.ndarray) -> RoundTerms:
        return RoundTerms(
            self.plan,
            self.streams,
            t,
            clients.tolist(),
            self.local_steps,
            isolation=self.isolation,
        )


def setting_of(job: Job) -> AuditSetting:
    """Return the setting that audits a job. Its random streams repeat no noise of the run.

    With a cap on rounds, no client takes part in more rounds, and the claim counts no more.
    """
    streams = Streams(job.streams.number("check", 1), secret=job.streams.secret)
    run = job.config.run
    delta = job.config.privacy.delta
    return AuditSetting(
        job.plan,
        delta,
        job.schedule.most_rounds,
        run.local_steps,
        streams,
        job.device,
        run.max_slots,
        isolation=job.config.privacy.isolation,
    )


def chosen_clients(epsilons: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` clients, evenly spaced by rank of epsilon, from the largest epsilon."""
    order = np.argsort(-epsilons, kind="stable")
    chosen = np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int)
    return np.sort(order[np.unique(chosen)])


def fair_coins(setting: AuditSetting, per_client: int, stream: int) -> np.ndarray:
    """Draw fair coins `[clients, per_client]`, independent for different `stream` numbers."""
    rng = setting.streams.generator("check", stream)
    return rng.random((setting.plan.clients, per_client)) < 0.5


def canaries_per_client(plan: Plan, canaries: int) -> int:
    """Return the number of canaries per client, at most the size of the smallest client."""
    return min(max(1, round(canaries / plan.clients)), int(plan.sizes.min()))
