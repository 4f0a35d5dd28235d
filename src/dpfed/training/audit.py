"""`dpfed audit`: canaries through the production oracle and the production fleet, scored and held against the claim.

The plan, its rates, noise and number of steps are the job's own; only the data are replaced. The model is a sum of
bias-free linear layers whose loss is its output, so that a record's gradient is the record itself, repeated in every
layer: canary j is 1e3·B·C in direction j, spread over all tensors, and clipping must make exactly C of it (SPEC A10).
Every other record is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfed.algorithms.base import Message
from dpfed.data.partition import Shards
from dpfed.errors import DpfedError
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.audit import (
    Law,
    Report,
    batch_law,
    log_ratio,
    many_draws_bound,
    noise_law,
    one_run_bound,
)
from dpfed.privacy.noise import Noise, Streams
from dpfed.privacy.oracle import FleetOracle
from dpfed.privacy.plan import Plan, Schedule
from dpfed.privacy.published import show_setting
from dpfed.privacy.record_batch import Augmentations, Records
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job.job import Job
from dpfed.training.round_context import first_state, learning_rate
from dpfed.training.round_loop import aggregate
from dpfed.training.server_state import State

CPU = torch.device("cpu")
TENSORS = 16  # tensors of the model: clipping each of them by itself would let a canary through at sqrt(16) times C
FLEET = 32  # clients side by side
WORK = 30_000  # client-steps of one audit: about 5 s on one core
LAW_CELLS = 4_000_000  # (client, step, record) looked at by the test of the batches


@dataclass(frozen=True)
class Audited:
    """What is audited: these clients, for these rounds, through this oracle."""

    plan: Plan
    delta: float
    rounds: int
    local_steps: int
    streams: Streams
    device: torch.device = CPU
    max_slots: int = 512
    oracle: type[FleetOracle] = FleetOracle

    @property
    def steps(self) -> int:
        return self.rounds * self.local_steps

    def epsilons(self) -> np.ndarray:
        """The claim of each client, for exactly the steps that are audited."""
        kinds, which = self.plan.kinds()
        each = np.array([epsilon([(kind, self.steps)], self.delta).value for kind in kinds])
        return np.asarray(each[which])

    def only(self, clients: Sequence[int] | np.ndarray) -> Audited:
        """The same for some of the clients; one may be repeated, and then each is an independent draw."""
        plan, at = self.plan, np.asarray(clients)
        return replace(
            self,
            plan=replace(
                plan,
                sizes=plan.sizes[at],
                rates=plan.rates[at],
                expected=plan.expected[at],
                multipliers=plan.multipliers[at],
            ),
        )

    def releases(
        self, model: Any, records: Records, shards: Shards, width: int
    ) -> Iterator[tuple[int, list[int], Tensor]]:
        """(step, clients, mean released sum `[S, P]` in units of C) of every batch that the plan declares."""
        for first in range(0, self.plan.clients, FLEET):
            clients = list(range(first, min(first + FLEET, self.plan.clients)))
            theta = torch.zeros(len(clients), TENSORS * width, device=self.device)
            unit = torch.tensor(
                self.plan.expected[clients] / self.plan.clip,
                dtype=torch.float32,
                device=self.device,
            )
            step = 0
            for t in range(1, self.rounds + 1):
                oracle = self.oracle(
                    model,
                    records,
                    shards,
                    self.plan,
                    self.streams,
                    t,
                    clients,
                    self.local_steps,
                    self.max_slots,
                )
                for _ in range(self.local_steps * self.plan.batches):
                    seen = [oracle(theta)[0]] + [
                        oracle.again(theta)[0] for _ in range(self.plan.releases - 1)
                    ]
                    yield step, clients, torch.stack(seen).mean(0) * unit.unsqueeze(1)
                    step += 1


# ------------------------------------------------------------------------------------------------- the canaries


class Layers(nn.Module):
    """The sum of TENSORS linear forms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(TENSORS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def canary_model(width: int, device: torch.device) -> PerSample:
    model = Layers(width).to(device)
    tensors = trainable(model)
    return PerSample(model, space_of(tensors).to(device), call, lambda scores, labels: scores[:, 0])


def canary_data(audited: Audited, coins: np.ndarray) -> tuple[Records, Shards]:
    """The first units of client i are its canaries, switched by `coins[i]`; all other records are zero.

    Off means that the record contributes nothing where adjacency is add/remove, and its opposite under replace-one.
    """
    plan, width = audited.plan, coins.shape[1]
    size = 1e3 * float(plan.expected.max()) * plan.clip / sqrt(TENSORS)
    off = 0.0 if plan.mechanism(0).adjacency == "add/remove one" else -size
    directions = torch.eye(width, device=audited.device)
    x = torch.cat(
        [size * directions, off * directions, torch.zeros(1, width, device=audited.device)]
    )
    rows = []
    for coin, units in zip(coins, plan.sizes, strict=True):
        row = np.full(int(units), 2 * width)
        row[:width] = np.where(coin, np.arange(width), width + np.arange(width))
        rows.append(row)
    starts = np.concatenate([[0], np.cumsum(plan.sizes)]).astype(np.int64)
    records = Records({"x": x}, torch.zeros(len(x), dtype=torch.int64, device=audited.device))
    return records, Shards(starts, np.arange(starts[-1] + 1), np.concatenate(rows))


def toss(audited: Audited, per_client: int, number: int) -> np.ndarray:
    """Fair coins `[clients, per_client]` from a stream of their own."""
    rng = audited.streams.generator("check", number)
    return rng.random((audited.plan.clients, per_client)) < 0.5


def along(sums: Tensor, width: int) -> np.ndarray:
    """<sum, canary direction> for every canary, `[S, width]`."""
    parts = sums.reshape(len(sums), TENSORS, width).sum(1) / sqrt(TENSORS)
    return np.asarray(parts.double().cpu().numpy())


def oracle_scores(audited: Audited, coins: np.ndarray) -> np.ndarray:
    """How much all released gradients together speak for each canary, `[clients, canaries]`."""
    width = coins.shape[1]
    records, shards = canary_data(audited, coins)
    scores = np.zeros(coins.shape)
    kinds, which = audited.plan.kinds()
    for _, clients, sums in audited.releases(
        canary_model(width, audited.device), records, shards, width
    ):
        shift, kind = along(sums, width), which[clients]
        for k in np.unique(kind):
            scores[np.asarray(clients)[kind == k]] += log_ratio(shift[kind == k], kinds[k])
    return scores


# --------------------------------------------------------------------------------------------------- the audits


def one_run(audited: Audited, canaries: int, confidence: float) -> Report:
    """Many canaries spread over the clients, all steps of one run, seen at the oracle."""
    coins = toss(audited, per_client(audited.plan, canaries), 1)
    lower = one_run_bound(oracle_scores(audited, coins), coins, audited.delta, confidence)
    return _report(audited, "one run", "oracle", lower, confidence, coins)


def many_draws(audited: Audited, draws: int, confidence: float) -> Report:
    """The worst client again and again with fresh randomness, one canary each, seen at the oracle."""
    worst = int(audited.epsilons().argmax())
    repeated = audited.only(np.full(draws, worst))
    coins = toss(repeated, 1, 2)
    lower = many_draws_bound(oracle_scores(repeated, coins), coins, audited.delta, confidence)
    return _report(repeated, "many draws", "oracle", lower, confidence, coins)


def server_view(job: Job, audited: Audited, canaries: int, confidence: float) -> Report:
    """Many canaries in one run of the job's algorithm, seen in the clients' messages by the server."""
    coins = toss(audited, per_client(audited.plan, canaries), 3)
    lower = one_run_bound(server_scores(job, audited, coins), coins, audited.delta, confidence)
    return _report(audited, "one run", "server", lower, confidence, coins)


def per_client(plan: Plan, canaries: int) -> int:
    """Canaries of each client, so that there are about as many in all; no client has more of them than records."""
    return min(max(1, round(canaries / plan.clients)), int(plan.sizes.min()))


def _report(
    audited: Audited, audit: Any, seen: Any, lower: float, confidence: float, coins: np.ndarray
) -> Report:
    claimed = float(audited.epsilons().max())
    return Report(
        audit,
        seen,
        lower,
        claimed,
        audited.delta,
        confidence,
        coins.size,
        audited.plan.clients,
        audited.steps,
    )


class Watched(Fleet):
    """The production fleet, with an eye on every client's message."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.deltas: list[Tensor] = []

    def messages(
        self, t: int, state: State, clients: Sequence[int], noise: Sequence[Noise] | None = None
    ) -> Message:
        message = super().messages(t, state, clients, noise)
        self.deltas.append(message["delta"])
        return message


def server_scores(job: Job, audited: Audited, coins: np.ndarray) -> np.ndarray:
    """-<Δ_i, canary>, each round's in units of its learning rate, summed over the rounds."""
    width, clients = coins.shape[1], audited.plan.clients
    model = canary_model(width, audited.device)
    records, shards = canary_data(audited, coins)
    run = replace(
        job.config.run, rounds=audited.rounds, local_steps=audited.local_steps, fleet_size="auto"
    )
    run = replace(run, allow_nan=True)  # a client that diverges scores zero
    stand_in = replace(
        job,
        config=replace(job.config, run=run),
        model=model,
        space=model.space,
        theta=torch.zeros(model.space.size, device=audited.device),
        plan=audited.plan,
        schedule=Schedule(clients, clients, audited.rounds, audited.local_steps),
        shards=shards,
        records=records,
        streams=audited.streams,
        # Canaries are no images: all views of one are itself, averaged as those of any record.
        view=job.view and Augmentations(lambda inputs, keys: dict(inputs), job.view.count),
    )
    everyone = list(range(clients))
    fleet = Watched(stand_in)
    state = first_state(stand_in)
    scores = np.zeros(coins.shape)
    for t in range(1, audited.rounds + 1):
        fleet.deltas.clear()
        mean, answered = fleet.run_cohort(t, state, everyone)
        scores -= along(torch.cat(fleet.deltas), width) / learning_rate(
            job.algorithm.lr, run.lr_schedule, t, run.rounds
        )
        state = aggregate(stand_in, t, state, everyone, mean, answered)
    return np.nan_to_num(scores)


# ----------------------------------------------------------------------------------------------------- the laws


class Noticed:
    """A model that notes which records it is asked for: what the oracle used, not what it says."""

    def __init__(self, model: PerSample, clients: int, steps: int, units: int) -> None:
        self._model = model
        self.included = np.zeros((clients, steps, units), dtype=bool)
        self.first, self.step = 0, 0

    @property
    def has_dropout(self) -> bool:
        return False

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        self.included[self.first + client.cpu().numpy(), self.step, labels.cpu().numpy()] = True
        return self._model.grads(theta, client, inputs, labels, keys)


def laws(audited: Audited) -> tuple[Law, Law]:
    """What the oracle drew and added for the worst client, side by side with the laws that were accounted for."""
    worst = int(audited.epsilons().argmax())
    units = int(audited.plan.sizes[worst])
    steps = audited.rounds * audited.local_steps * audited.plan.batches
    wanted = int(np.clip(LAW_CELLS // (units * steps), 2, 2 * FLEET))
    few = audited.only(np.full(wanted, worst))
    model = Noticed(canary_model(1, audited.device), wanted, steps, units)
    x = torch.zeros(units, 1, device=audited.device)
    records = Records({"x": x}, torch.arange(units, device=audited.device))
    starts = np.arange(wanted + 1) * units
    shards = Shards(starts, np.arange(wanted * units + 1), np.tile(np.arange(units), wanted))
    mechanism = few.plan.mechanism(0)
    noise = np.zeros((wanted, steps, TENSORS))
    for step, clients, sums in few.releases(model, records, shards, 1):
        level = few.plan.clipping.sum_multiplier(
            mechanism.noise_multiplier
        )  # more than is charged, if a count is beside
        noise[clients, step] = sums.cpu().numpy() * sqrt(mechanism.releases) / level
        # The next batch is drawn when the loop goes on: say beforehand where to note it.
        model.step = (step + 1) % steps
        model.first = clients[0] if step + 1 < steps else clients[0] + FLEET
    return batch_law(mechanism, model.included), noise_law(noise)


# ---------------------------------------------------------------------------------------------------- all of it


@dataclass(frozen=True)
class Audit:
    reports: list[Report]
    laws: list[Law]


def audit(job: Job, canaries: int = 1000, confidence: float = 0.95) -> Audit:
    """Every audit of a job. Where all steps of all clients would take too long, fewer clients or fewer rounds are run."""
    if not job.plan.private:
        raise DpfedError(
            "no privacy is claimed here (privacy.enabled is false or sigma is 0): nothing to audit"
        )
    if canaries < 8:
        raise DpfedError(f"--canaries {canaries} is too few to show anything: give at least 8")
    if not 0.5 <= confidence < 1:
        raise DpfedError(
            f"--confidence {show_setting(confidence)} is not allowed: it lies from 0.5 to below 1, such as 0.95"
        )
    whole = audited_job(job)
    some = whole.only(spread_clients(whole.epsilons(), max(1, WORK // whole.steps)))
    reports = [
        one_run(some, canaries, confidence),
        many_draws(shorter(some, WORK // canaries), canaries, confidence),
        server_view(job, some, canaries, confidence),
    ]
    return Audit(
        reports, list(laws(shorter(some, min(500, LAW_CELLS // (2 * int(some.plan.sizes.max()))))))
    )


def audited_job(job: Job) -> Audited:
    """The job's plan with a client in every round. Streams are the audit's own: it must not replay the run's noise."""
    streams = Streams(job.streams.number("check", 1), secret=job.streams.secret)
    run, delta = job.config.run, job.config.privacy.delta
    return Audited(job.plan, delta, run.rounds, run.local_steps, streams, job.device, run.max_slots)


def spread_clients(epsilons: np.ndarray, most: int) -> np.ndarray:
    """At most so many clients: the worst, and others evenly over the rest."""
    order = np.argsort(-epsilons, kind="stable")
    return np.sort(
        order[np.unique(np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int))]
    )


def shorter(audited: Audited, steps: int) -> Audited:
    """The first rounds only, about so many steps; the claim is then the one for these."""
    local = min(audited.local_steps, max(1, steps))
    return replace(audited, local_steps=local, rounds=min(audited.rounds, max(1, steps // local)))
