"""A run with canaries is the job's training, and shows the canaries apart from other records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dpfed.config import build, load
from dpfed.data.partition import shards_of
from dpfed.data.sources.in_memory import source_of
from dpfed.privacy.plan import Plan
from dpfed.privacy.sampling import DrawnBatch
from dpfed.registry import registry
from dpfed.training.auditing import canary_run
from dpfed.training.auditing.canary_run import (
    Observations,
    observe,
    shards_of_clients,
    without_canaries,
)
from dpfed.training.auditing.measurement import Measurement, Step, signs_of
from dpfed.training.auditing.setting import AuditSetting, AuditSize, setting_of
from dpfed.training.job.job import Job, prepare
from dpfed.training.round_loop import aggregate

torch.set_num_threads(1)

SMALL = ["model.name=linear", "model.train=full", "run.rounds=3", "run.local_steps=2"]
SIZE = AuditSize(canaries=20, runs=1)


def job(*more: str) -> Job:
    return prepare(load("digits", [*SMALL, "data.clients=4", *more], registry()))


def observed(audited: Job, size: AuditSize = SIZE) -> Observations:
    setting = setting_of(audited)
    return observe(audited, np.arange(setting.plan.clients), setting, size)


def without_noise(audited: Job) -> tuple[Observations, list[Step]]:
    """Return observations of a run without noise, and its steps."""
    steps: list[Step] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "noise_std", lambda plan, i: 0.0)
        patch.setattr(Measurement, "add", lambda self, step: steps.append(step))
        return observed(audited), steps


VARIANTS = {
    "default": [],
    "fixed size": ["privacy.sampling=fixed_wor"],
    "two releases": ["algorithm.name=dp-fedsam"],
    "two batches": ["algorithm.name=dp-fedsam", "algorithm.sam_batches=independent"],
    "quantile": ["privacy.clip_mode=quantile"],
    "automatic": ["privacy.clip_mode=automatic"],
    "exact": ["privacy.isolation=exact"],
    "fixed passes": ["run.slots=16"],
    "small passes": ["run.max_slots=8", "run.fleet_size=3"],
    "augmented": ["data.augment=flip", "data.views=2"],
    "client memory": ["algorithm.name=dp-scaffold"],
    "capped": ["run.participation=0.5", "run.cohort_choice=balanced"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_without_noise_only_drawn_canaries_are_left(name: str) -> None:
    """After the known part is subtracted, each drawn canary moves the sum by C, and no other."""
    audited = job(*VARIANTS[name])
    found, steps = without_noise(audited)
    setting = found.setting
    assert len(steps) >= setting.steps * setting.plan.batches
    signs = signs_of(setting, found.coins)
    drawn = []
    for step in steps:
        assert step.noise == pytest.approx(0.0, abs=2e-3)
        number = step.summed
        assert number == pytest.approx(number.round(), abs=2e-3)
        drawn.append(number.sum())
        assert step.spread == pytest.approx(np.square(signs[step.clients]).sum(1))
    rates = setting.plan.rates[:, None] * np.square(signs)
    expected = rates.sum() * setting.steps * setting.plan.batches
    assert np.sum(drawn) == pytest.approx(expected, abs=5 * np.sqrt(expected))


def test_the_records_of_the_others_are_in_the_released_sum() -> None:
    # Scores of Poisson batches leave the known records out, and those of fixed batches do not.
    _, steps = without_noise(job("privacy.sampling=fixed_wor"))
    real = [np.abs(step.along - step.along.round()).max() for step in steps]
    assert min(real) > 0.01


def test_the_grid_changes_nothing_but_the_last_bits() -> None:
    plain = observed(job("privacy.sigma=2.0"))
    grid = observed(job("privacy.sigma=2.0", "privacy.grid=true"))
    assert grid.gradients.shifts.total == pytest.approx(plain.gradients.shifts.total, rel=1e-2)
    assert grid.gradients.shifts.noise_squares == pytest.approx(
        plain.gradients.shifts.noise_squares, rel=1e-3
    )
    assert not any(law.broken for law in grid.draws.laws())


def test_units_with_several_records_are_whole_canaries() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(240, 30)).astype("float32")
    table = {
        "features": features,
        "label": (features[:, 0] > 0).astype(int),
        "person": np.arange(240) // 3,
    }
    tables: dict[str, Any] = {
        "data": {"clients": 2, "partition": "iid", "unit_column": "person"},
        "model": {"name": "linear", "train": "full"},
        "privacy": {"batch": 10, "sigma": 1.0, "delta": 1e-3},
        "run": {"rounds": 2, "local_steps": 2, "participation": 1.0, "device": "cpu"},
    }
    audited = prepare(build(tables, registry()), source_of(table, dict(table)))
    assert audited.plan.sizes.sum() < 240
    found, steps = without_noise(audited)
    assert found.coins.shape == (2, 20)
    for step in steps:
        assert step.summed == pytest.approx(step.summed.round(), abs=1e-3)
        assert step.noise == pytest.approx(0.0, abs=1e-3)
    assert sum(step.summed.sum() for step in steps) > 0


def test_the_job_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canaries' clients learn from their other records, in all rounds."""
    states = []

    def remembered(*given: Any) -> Any:
        states.append(aggregate(*given))
        return states[-1]

    monkeypatch.setattr(canary_run, "aggregate", remembered)
    audited = prepare(load("digits", ["run.rounds=12", "privacy.target_epsilon=8"], registry()))
    observed(audited, AuditSize(canaries=30, runs=1))
    assert len(states) == 12
    scores = audited.model.scores(states[-1].theta, audited.public.test.inputs)
    accuracy = (scores.argmax(1) == audited.public.test.labels).float().mean()
    # The start has 0.1.
    assert accuracy > 0.5


def test_runs_have_their_own_canaries_and_noise() -> None:
    audited = job("privacy.sigma=1.0")
    found = observed(audited, AuditSize(canaries=20, runs=2))
    assert found.coins.shape == (8, 20)
    assert not np.array_equal(found.coins[:4], found.coins[4:])
    scores = found.gradients.scores
    assert np.corrcoef(scores[:4].reshape(-1), scores[4:].reshape(-1))[0, 1] < 0.5
    assert not any(law.broken for law in found.draws.laws())
    again = observed(audited, AuditSize(canaries=20, runs=2))
    assert np.array_equal(again.gradients.scores, scores)


def test_canaries_are_taken_out_of_a_batch() -> None:
    batch = DrawnBatch(
        row=np.array([4, 0, 1, 7]),
        client=np.array([0, 1, 1, 2]),
        unit=np.array([0, 1, 1, 2]),
        owner=np.array([0, 1, 2]),
        key=np.array([10, 11, 12, 13]),
        place=np.array([5, 6, 7]),
    )
    codes = np.zeros(8, dtype=np.int64)
    codes[4] = -1
    less = without_canaries(batch, codes)
    assert less.row.tolist() == [0, 1, 7]
    assert less.client.tolist() == [1, 1, 2]
    assert less.unit.tolist() == [0, 0, 1]
    assert less.owner.tolist() == [1, 2]
    assert less.key.tolist() == [11, 12, 13]
    assert less.place.tolist() == [6, 7]


def test_some_clients_of_many() -> None:
    owner = np.array([0, 1, 1, 2, 2, 2])
    whole = shards_of(owner, 3, np.array(["a", "b", "c", "d", "d", "e"]))
    some = shards_of_clients(whole, np.array([0, 2]))
    assert some.sizes.tolist() == [1, 2]
    assert some.of(0).tolist() == [0]
    assert some.slots(1, np.array([0, 1]))[0].tolist() == [3, 4, 5]
    assert some.slots(1, np.array([1]))[0].tolist() == [5]


def test_an_audit_of_some_clients_trains_these() -> None:
    audited = job()
    whole = setting_of(audited)
    clients = np.array([1, 3])
    setting: AuditSetting = whole.only(clients)
    found = observe(audited, clients, setting, SIZE)
    assert found.coins.shape == (2, 20)
    assert np.abs(found.gradients.scores).min() > 0
    assert np.abs(found.messages).min() > 0
