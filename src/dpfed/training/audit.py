"""Audit a job: test with canary records if its releases reveal more than the claimed epsilon.

A canary is a record that is present or absent by a coin toss. The audit runs the job's own oracle
and fleet, with its plan, rates, noise and steps. It replaces only model and data.

The model is a sum of bias-free linear layers, and its loss is its output. So the gradient of a
record is the record itself, repeated in every layer. The gradient of canary j has norm 1e3·B·C and
direction j, spread over all layers. Clipping must reduce its norm to C. Other records are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfed.algorithms.base import Context
from dpfed.data.partition import Shards
from dpfed.errors import DpfedError
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.task import Task
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
from dpfed.privacy.noise import Streams
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms
from dpfed.privacy.plan import Plan, Schedule
from dpfed.privacy.published import show_setting
from dpfed.privacy.record_batch import Augmentations, PrivateData, Records
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job.job import Job
from dpfed.training.local_steps import LocalResult
from dpfed.training.round_context import first_state, learning_rate
from dpfed.training.round_loop import aggregate

CPU = torch.device("cpu")
# Number of layers of the canary model. If a bug clips each of 16 layers separately to C, a
# canary has norm 4 C, which the audit detects.
LAYERS = 16
# Number of clients that the audit computes side by side.
FLEET = 32
# Largest product of clients and steps in an audit, which then takes 5 s on one CPU core.
MAX_CLIENT_STEPS = 30_000
# Largest number of cells in the table [clients, steps, records] of the audited batches.
MAX_LAW_CELLS = 4_000_000


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

    @property
    def steps(self) -> int:
        return self.rounds * self.local_steps

    def epsilons(self) -> np.ndarray:
        """Return the epsilon claimed for each client after the audited steps, `[clients]`."""
        kinds, which = self.plan.kinds()
        each = np.array([epsilon([(kind, self.steps)], self.delta).value for kind in kinds])
        return np.asarray(each[which])

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
        self, model: Any, records: Records, shards: Shards
    ) -> Iterator[tuple[int, np.ndarray, Tensor]]:
        """Run all steps. After each step, yield its number, the clients and the released sums.

        The sums `[S, P]` are noised and divided by C. Several releases of a batch are averaged.
        """
        plan = self.plan
        for first in range(0, plan.clients, FLEET):
            clients = np.arange(first, min(first + FLEET, plan.clients))
            theta = torch.zeros(len(clients), model.space.size, device=self.device)
            unit = torch.from_numpy(plan.expected[clients] / plan.clip).float().to(self.device)
            step = 0
            for t in range(1, self.rounds + 1):
                oracle = self.oracle(
                    PrivateData(model, records, shards),
                    RoundTerms(plan, self.streams, t, clients.tolist(), self.local_steps),
                    PassLimits(self.max_slots),
                )
                for _ in range(self.local_steps * plan.batches):
                    sums = [oracle(theta)[0]]
                    sums += [oracle.again(theta)[0] for _ in range(plan.releases - 1)]
                    yield step, clients, torch.stack(sums).mean(0) * unit.unsqueeze(1)
                    step += 1


# ------------------------------------------------------------------ canaries


class LinearSum(nn.Module):
    """Model whose output is the sum of LAYERS linear layers without bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def canary_model(width: int, device: torch.device) -> PerSample:
    model = LinearSum(width).to(device)
    space = space_of(trainable(model)).to(device)
    return PerSample(model, space, call, Task(lambda scores, labels: scores[:, 0]))


def canary_data(setting: AuditSetting, coins: np.ndarray) -> tuple[Records, Shards]:
    """Return records and shards in which the first records of each client are its canaries.

    coins  `[clients, canaries]`, True for a present canary

    With add/remove adjacency an absent canary is a zero record. With replace-one adjacency it is
    the canary with the opposite sign.
    """
    plan = setting.plan
    width = coins.shape[1]
    size = 1e3 * float(plan.expected.max()) * plan.clip / sqrt(LAYERS)
    absent_size = 0.0 if plan.mechanism(0).adjacency == "add/remove one" else -size
    directions = torch.eye(width, device=setting.device)
    x = torch.cat([size * directions, absent_size * directions, 0 * directions[:1]])
    rows = []
    for coin, units in zip(coins, plan.sizes, strict=True):
        row = np.full(int(units), 2 * width)
        row[:width] = np.where(coin, np.arange(width), width + np.arange(width))
        rows.append(row)
    starts = np.concatenate([[0], np.cumsum(plan.sizes)]).astype(np.int64)
    records = Records({"x": x}, torch.zeros(len(x), dtype=torch.int64, device=setting.device))
    return records, Shards(starts, np.arange(starts[-1] + 1), np.concatenate(rows))


def fair_coins(setting: AuditSetting, per_client: int, stream: int) -> np.ndarray:
    """Draw fair coins `[clients, per_client]`, independent for different `stream` numbers."""
    rng = setting.streams.generator("check", stream)
    return rng.random((setting.plan.clients, per_client)) < 0.5


def canary_components(sums: Tensor, width: int) -> np.ndarray:
    """Return the inner product of each client's sum with each canary direction, `[S, width]`."""
    parts = sums.reshape(len(sums), LAYERS, width).sum(1) / sqrt(LAYERS)
    return np.asarray(parts.double().cpu().numpy())


def oracle_scores(setting: AuditSetting, coins: np.ndarray) -> np.ndarray:
    """Return a score per canary, `[clients, canaries]`. A present canary has a high score."""
    width = coins.shape[1]
    model = canary_model(width, setting.device)
    scores = np.zeros(coins.shape)
    kinds, which = setting.plan.kinds()
    for _, clients, sums in setting.releases(model, *canary_data(setting, coins)):
        shift = canary_components(sums, width)
        kind = which[clients]
        for k in np.unique(kind):
            scores[clients[kind == k]] += log_ratio(shift[kind == k], kinds[k])
    return scores


# ------------------------------------------------------------------ lower bounds on epsilon


def audit_one_run(setting: AuditSetting, canaries: int, confidence: float) -> Report:
    """Audit the oracle with one run that has many canaries, spread over its clients."""
    coins = fair_coins(setting, per_client(setting.plan, canaries), 1)
    lower = one_run_bound(oracle_scores(setting, coins), coins, setting.delta, confidence)
    return _report(setting, "one run", "oracle", lower, confidence, coins.size)


def audit_many_draws(setting: AuditSetting, draws: int, confidence: float) -> Report:
    """Audit the oracle with copies of the client with the largest epsilon, one canary per copy."""
    worst = int(setting.epsilons().argmax())
    copies = setting.only(np.full(draws, worst))
    coins = fair_coins(copies, 1, 2)
    lower = many_draws_bound(oracle_scores(copies, coins), coins, setting.delta, confidence)
    return _report(copies, "many draws", "oracle", lower, confidence, coins.size)


def audit_server(job: Job, setting: AuditSetting, canaries: int, confidence: float) -> Report:
    """Audit the messages that the server receives in one run of the job with canaries."""
    coins = fair_coins(setting, per_client(setting.plan, canaries), 3)
    lower = one_run_bound(server_scores(job, setting, coins), coins, setting.delta, confidence)
    return _report(setting, "one run", "server", lower, confidence, coins.size)


def per_client(plan: Plan, canaries: int) -> int:
    """Return the number of canaries per client, at most the size of the smallest client."""
    return min(max(1, round(canaries / plan.clients)), int(plan.sizes.min()))


def _report(
    setting: AuditSetting, audit: Any, seen: Any, lower: float, confidence: float, canaries: int
) -> Report:
    return Report(
        audit=audit,
        seen=seen,
        lower=lower,
        claimed=float(setting.epsilons().max()),
        delta=setting.delta,
        confidence=confidence,
        canaries=canaries,
        clients=setting.plan.clients,
        steps=setting.steps,
    )


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
        rate = learning_rate(job.algorithm.lr, run.lr_schedule, t, run.rounds)
        scores -= canary_components(torch.cat(deltas), coins.shape[1]) / rate
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
    return replace(
        job,
        config=replace(job.config, run=run),
        model=model,
        theta=torch.zeros(model.space.size, device=setting.device),
        plan=setting.plan,
        schedule=Schedule(clients, clients, setting.rounds, setting.local_steps),
        shards=shards,
        records=records,
        streams=setting.streams,
        # A canary is not an image, so each augmented copy is the canary itself.
        view=job.view and Augmentations(lambda inputs, keys: dict(inputs), job.view.count),
    )


# ------------------------------------------------------------------ batches and noise


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
    rows = np.tile(np.arange(units), count)
    shards = Shards(np.arange(count + 1) * units, np.arange(count * units + 1), rows)
    mechanism = copies.plan.mechanism(0)
    # With quantile clipping the oracle also releases a count. The charged multiplier covers sum
    # and count, so the multiplier of the sum alone is larger.
    multiplier = copies.plan.clipping.sum_multiplier(mechanism.noise_multiplier)
    noise = np.zeros((count, steps, LAYERS))
    for step, clients, sums in copies.releases(model, records, shards):
        noise[clients, step] = sums.cpu().numpy() * sqrt(mechanism.releases) / multiplier
        # Set the next step now, because `releases` draws the next batch before it yields again.
        model.step = (step + 1) % steps
        if model.step == 0:
            model.first_client = clients[0] + FLEET
    return batch_law(mechanism, model.included), noise_law(noise)


# ------------------------------------------------------------------ the whole audit


@dataclass(frozen=True)
class Audit:
    reports: list[Report]
    laws: list[Law]


def audit(job: Job, canaries: int = 1000, confidence: float = 0.95) -> Audit:
    """Run every audit of a job. If the job is long, audit fewer clients or fewer rounds."""
    if not job.plan.private:
        raise DpfedError(
            "no privacy is claimed here (privacy.enabled is false or sigma is 0): nothing to audit"
        )
    if canaries < 8:
        raise DpfedError(f"--canaries {canaries} is too few to show anything: give at least 8")
    if not 0.5 <= confidence < 1:
        raise DpfedError(
            f"--confidence {show_setting(confidence)} is not allowed: it lies from 0.5 to below 1, "
            "such as 0.95"
        )
    whole = setting_of(job)
    most = max(1, MAX_CLIENT_STEPS // whole.steps)
    setting = whole.only(chosen_clients(whole.epsilons(), most))
    law_steps = min(500, MAX_LAW_CELLS // (2 * int(setting.plan.sizes.max())))
    reports = [
        audit_one_run(setting, canaries, confidence),
        audit_many_draws(setting.shortened(MAX_CLIENT_STEPS // canaries), canaries, confidence),
        audit_server(job, setting, canaries, confidence),
    ]
    return Audit(reports, list(audit_laws(setting.shortened(law_steps))))


def setting_of(job: Job) -> AuditSetting:
    """Return the setting that audits a job. Its random streams repeat no noise of the run."""
    streams = Streams(job.streams.number("check", 1), secret=job.streams.secret)
    run = job.config.run
    delta = job.config.privacy.delta
    return AuditSetting(
        job.plan, delta, run.rounds, run.local_steps, streams, job.device, run.max_slots
    )


def chosen_clients(epsilons: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` clients, evenly spaced by rank of epsilon, from the largest epsilon."""
    order = np.argsort(-epsilons, kind="stable")
    chosen = np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int)
    return np.sort(order[np.unique(chosen)])
