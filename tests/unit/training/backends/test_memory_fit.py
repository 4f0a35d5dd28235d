"""The fleet size that fits into memory, and a start-up without loops over clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dpfed.config import build
from dpfed.privacy.fixed_shape_sum import FixedSum
from dpfed.privacy.plan import Plan
from dpfed.registry import registry
from dpfed.training.backends import memory_fit
from dpfed.training.backends.memory_fit import (
    COPIES,
    blank_pass,
    fits,
    fleet_size,
    most_that_fit,
    slots_of,
)
from dpfed.training.job.job import Job, prepare
from dpfed.training.messages.message_size import local_bytes
from dpfed.training.round_context import context, first_state


def job_of(**sections: dict[str, Any]) -> Job:
    raw: dict[str, dict[str, Any]] = {
        "data": {"name": "digits", "clients": 10},
        "model": {"name": "linear", "liveness": False},
        "algorithm": {"name": "dp-fedavg", "lr": 0.1},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 8},
        "run": {"rounds": 1, "local_steps": 1, "participation": 0.5, "device": "cpu"},
    }
    return prepare(
        build(
            {name: {**table, **sections.get(name, {})} for name, table in raw.items()}, registry()
        )
    )


@pytest.mark.parametrize(
    ("cohort", "room", "found", "tried"),
    [
        (5, 5, 5, [5]),
        (5, 4, 3, [5, 3]),
        (50, 7, 7, [50, 25, 13, 7]),
        (5, 0, 1, [5, 3, 2]),
        (1, 0, 1, []),
    ],
)
def test_a_cohort_is_halved_until_it_fits(
    cohort: int, room: int, found: int, tried: list[int]
) -> None:
    asked: list[int] = []

    def fit(clients: int) -> bool:
        asked.append(clients)
        return clients <= room

    assert most_that_fit(cohort, fit) == found
    assert asked == tried


def test_on_a_cpu_the_fleet_is_the_cohort_or_has_the_configured_size() -> None:
    assert fleet_size(job_of()) == 5
    assert fleet_size(job_of(run={"fleet_size": 2})) == 2


def test_a_blank_pass_has_the_shape_of_the_run_and_reads_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, seen = job_of(), []

    def call(self: FixedSum, theta: torch.Tensor, filling: Any, clip: float) -> None:
        inputs, labels = self._records.take(filling.packed[0])
        seen.append((self.clients, self.slots, tuple(theta.shape)))
        assert all(not bool(x.any()) for x in inputs.values())
        assert not bool(labels.any())
        assert sorted(set(filling.packed[1].tolist())) == [0, 1, 2]

    # The first pass is real, the second one is only recorded.
    blank_pass(job, 3, 24)
    monkeypatch.setattr(FixedSum, "__call__", call)
    blank_pass(job, 3, 24)
    assert seen == [(3, 24, (3, job.space.size))]


def test_a_blank_pass_has_all_augmentations_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    job, seen = job_of(data={"augment": "crop_flip", "views": 4}), []
    right = type(job.model).raw_grads

    def noted(self: Any, theta: torch.Tensor, client: torch.Tensor, *rest: Any) -> Any:
        seen.append(len(client))
        return right(self, theta, client, *rest)

    monkeypatch.setattr(type(job.model), "raw_grads", noted)
    blank_pass(job, 3, 24)
    assert seen == [96]


@pytest.mark.parametrize("graphs", [False, "auto"])
def test_memory_holds_a_pass_and_the_states_of_the_clients(
    graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(run={"graphs": graphs})
    # A client of DP-FedAvg has one vector, θ.
    assert local_bytes(job.algorithm, job.space) == 4 * 650
    needed = 1000 * (1 if graphs is False else 2) + COPIES * 3 * 4 * 650
    for free, fit in ((needed, True), (needed - 1, False)):
        fake = {
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device: None,
            "memory_allocated": lambda device: 70,
            "max_memory_allocated": lambda device: 1070,
            "mem_get_info": lambda device, free=free: (free, 10**9),
        }
        for name, function in fake.items():
            monkeypatch.setattr(torch.cuda, name, function)
        assert fits(job, 3) is fit

    def full(*anything: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(memory_fit, "blank_pass", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**12, 10**12))
    assert fits(job, 3) is False


def test_slots_suffice_for_the_clients_of_a_fleet() -> None:
    assert slots_of(job_of(run={"slots": 40}), 3) == 40
    assert slots_of(job_of(), 5) >= 5 * 8


# --- growth with the number of clients ---


@pytest.mark.parametrize(
    "privacy",
    [{}, {"clip_mode": "quantile"}, {"sigma": 0.0}, {"enabled": False}],
    ids=["flat", "quantile", "no noise", "off"],
)
def test_the_noise_of_many_clients_equals_the_noise_of_each(privacy: dict[str, Any]) -> None:
    job = job_of(data={"partition": "dirichlet_classwise", "alpha": 5.0}, privacy=privacy)
    chosen = np.array([7, 0, 3, 3])
    one_by_one = [job.plan.phi(i) for i in chosen]
    assert job.plan.phis(chosen).tolist() == one_by_one
    assert len(set(one_by_one)) == (3 if job.plan.private else 1)
    assert (
        context(job, 1, chosen.tolist()).phi.tolist()
        == torch.tensor(one_by_one).unsqueeze(1).tolist()
    )


def test_the_first_state_has_no_loop_over_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(algorithm={"name": "dp-fedlada"})
    expected = job.plan.phi(0)

    def never(self: Plan, client: int) -> float:
        raise AssertionError("client by client")

    monkeypatch.setattr(Plan, "phi", never)
    assert float(first_state(job).server.v[0]) == pytest.approx(expected)
