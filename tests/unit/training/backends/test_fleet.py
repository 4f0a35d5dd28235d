"""The fleet: its size does not change results, and every release is charged first."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from callback_case import Watcher
from torch import Tensor, nn

from dpfed.algorithms.base import Message, Releases
from dpfed.config import ModelSection, Registry, build
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError, StoppedError
from dpfed.model.per_sample.keyed_dropout import KeyedDropout
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.oracle import FleetOracle
from dpfed.registry import registry
from dpfed.training.backends import fleet as fleet_module
from dpfed.training.backends.fleet import Fleet
from dpfed.training.budget.spending import Spending, budget_of
from dpfed.training.callbacks.base import Callback
from dpfed.training.job.device import disable_tf32
from dpfed.training.job.job import Job, prepare
from dpfed.training.round_context import first_state, learning_rate
from dpfed.training.round_loop import RoundLoop, aggregate, choose
from dpfed.training.server_state import State

torch.set_num_threads(1)
ALGORITHMS = ["dp-fedadamw", "dp-fedavg", "dp-local-adamw"]


class DropNet(nn.Module):
    model_type = "dropnet"

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Dropout(0.2)
        self.body = nn.Linear(width, 12)
        self.second = nn.Dropout(0.5)
        self.classifier = nn.Linear(12, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.first(pixel_values.flatten(1))))
        out: Tensor = self.classifier(self.second(x))
        return out


@dataclass(frozen=True)
class DropSection(ModelSection):
    name: str = "dropnet"
    train: Literal["full", "head"] = "full"

    def build(self, spec: InputSpec) -> Built:
        model = DropNet(math.prod(spec.shape), spec.classes)
        return Built(
            model, "classifier", lambda inputs: {spec.name: inputs[spec.name].float() / spec.white}
        )


def accounts(job: Job, ledger: Ledger | None) -> Spending:
    budget = (
        budget_of(job.plan, job.schedule, job.config.privacy.delta) if job.plan.private else None
    )
    return Spending(job, budget, ledger)


def known() -> Registry:
    found = registry()
    return dataclasses.replace(found, model={**found.model, "dropnet": DropSection})


def job_of(source: Source | None = None, **sections: dict[str, Any]) -> Job:
    raw: dict[str, dict[str, Any]] = {
        "data": {"name": "digits", "clients": 8},
        "model": {"name": "linear"},
        "algorithm": {"name": "dp-fedadamw", "lr": 0.01},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 10},
        "run": {"rounds": 2, "local_steps": 3, "participation": 0.6, "device": "cpu"},
    }
    for name, keys in sections.items():
        raw[name] = {**raw[name], **keys}
    return prepare(build(raw, known()), source)


def tensors_of(server: Any) -> dict[str, Tensor]:
    return {
        f.name: getattr(server, f.name)
        for f in dataclasses.fields(server)
        if isinstance(getattr(server, f.name), Tensor)
    }


def after(job: Job, rounds: int = 1) -> dict[str, Tensor]:
    """Return the server's state after some rounds without a ledger or evaluation."""
    state = first_state(job)
    backend = Fleet(job)
    for t in range(1, rounds + 1):
        cohort = choose(job, t, np.arange(job.schedule.clients), np.zeros(job.schedule.clients))
        mean, answered = backend.run_cohort(t, state, cohort)
        state = aggregate(job, t, state, cohort, mean, answered)
    return tensors_of(state.server)


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).norm() / a[k].norm()) for k in a if float(a[k].norm()) > 0)


# --- fleet size ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("model", ["linear", "dropnet"])
def test_the_fleet_size_does_not_change_results(algorithm: str, model: str) -> None:
    common: dict[str, Any] = {"algorithm": {"name": algorithm}, "model": {"name": model}}
    states = {size: after(job_of(**common, run={"fleet_size": size})) for size in (1, 2, 5, "auto")}
    start = job_of(**common).theta
    # The run has trained.
    assert float((states[1]["theta"] - start).norm()) > 1e-3
    for size in (2, 5, "auto"):
        assert apart(states[1], states[size]) <= 1e-5, size
    moved = states[1]["theta"] - start
    assert float((moved - (states["auto"]["theta"] - start)).norm() / moved.norm()) <= 1e-4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, "auto"])
def test_equal_fleet_sizes_give_bitwise_equal_results(algorithm: str, size: int | str) -> None:
    first, second = (
        after(
            job_of(
                algorithm={"name": algorithm}, model={"name": "dropnet"}, run={"fleet_size": size}
            ),
            rounds=2,
        )
        for _ in range(2)
    )
    assert all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("slots", [1, 7, 512])
def test_the_number_of_slots_does_not_change_results(slots: int) -> None:
    common: dict[str, Any] = {"model": {"name": "dropnet"}, "algorithm": {"name": "dp-fedavg"}}
    a = after(job_of(**common))
    assert apart(a, after(job_of(**common, run={"max_slots": slots}))) <= 1e-5


def test_another_seed_gives_other_results() -> None:
    assert apart(after(job_of()), after(job_of(run={"seed": 1}))) > 1e-2


def test_dropout_without_keys_would_depend_on_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant draws masks from one generator in the order of computation."""
    generator = torch.Generator()

    def forward(self: Any, x: Tensor) -> Tensor:
        return (
            x * torch.bernoulli(torch.full_like(x, 1 - self.p), generator=generator) / (1 - self.p)
        )

    common: dict[str, Any] = {
        "algorithm": {"name": "dp-fedavg"},
        "model": {"name": "dropnet", "liveness": False},
    }
    states = []
    for size in (1, 5):
        job = job_of(**common, run={"fleet_size": size})
        generator.manual_seed(0)
        with monkeypatch.context() as patch:
            patch.setattr(KeyedDropout, "forward", forward)
            states.append(after(job))
    assert apart(*states) > 1e-4


def test_dropout_changes_results() -> None:
    a = after(job_of(model={"name": "dropnet"}))
    job = job_of(model={"name": "dropnet"})
    for module in job.model.model.modules():
        if isinstance(module, KeyedDropout):
            del module.drop_rule
    assert apart(a, after(job)) > 1e-4


def test_the_mean_of_all_fleets_is_weighted() -> None:
    unequal: dict[str, Any] = {"partition": "dirichlet_classwise", "alpha": 1.0, "clients": 5}
    for weights in ("uniform", "size"):
        algorithm = {"name": "dp-fedavg", "agg_weights": weights, "lr": 0.1}
        jobs = [job_of(data=unequal, algorithm=algorithm, run={"fleet_size": n}) for n in (1, 2, 5)]
        states = [after(job) for job in jobs]
        assert apart(states[0], states[1]) <= 1e-5
        assert apart(states[0], states[2]) <= 1e-5
        cohort = [0, 2, 3]
        state = first_state(jobs[1])
        mean, _ = Fleet(jobs[1]).run_cohort(1, state, cohort)
        alone = [Fleet(jobs[1]).run_cohort(1, state, [i])[0]["delta"].double() for i in cohort]
        share = jobs[1].plan.sizes[cohort] if weights == "size" else np.ones(3)
        assert len(set(jobs[1].plan.sizes[cohort].tolist())) == 3
        by_hand = sum(float(w) * one for w, one in zip(share / share.sum(), alone, strict=True))
        torch.testing.assert_close(mean["delta"].double(), by_hand, rtol=1e-5, atol=1e-7)


def test_cosine_and_constant_learning_rates() -> None:
    assert learning_rate(0.1, "constant", 7, 10) == 0.1
    assert learning_rate(0.1, "cosine", 1, 10) == 0.1
    assert learning_rate(0.1, "cosine", 6, 10) == pytest.approx(0.05)
    assert learning_rate(0.1, "cosine", 10, 10) > 0


# --- cohorts ---


def test_cohorts_are_uniform_and_differ_between_rounds() -> None:
    job = job_of(data={"clients": 10}, run={"participation": 0.3, "rounds": 600})
    everyone = np.arange(10)
    cohorts = [choose(job, t, everyone, np.zeros(len(everyone))) for t in range(1, 601)]
    assert all(len(set(c)) == len(c) == 3 for c in cohorts)
    assert cohorts == [choose(job, t, everyone, np.zeros(len(everyone))) for t in range(1, 601)]
    share = np.bincount(np.concatenate(cohorts), minlength=10) / 600
    assert np.abs(share - 0.3).max() < 5 * math.sqrt(0.3 * 0.7 / 600)
    # There are 120 possible cohorts.
    assert len({tuple(c) for c in cohorts}) > 80
    assert set(choose(job, 1, np.array([2, 5, 7, 9]), np.zeros(10))) <= {2, 5, 7, 9}


# --- charges come before releases ---


@dataclass
class Spy:
    """The charges and releases of a run, in order."""

    events: list[tuple[str, int, tuple[int, ...]]]
    oracles: list[FleetOracle]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen = Spy([], [])
    charge, init = Ledger.charge, FleetOracle.__init__
    release = FleetOracle._release

    def spied_charge(self: Ledger, charges: Any, run: str | None = None) -> Any:
        # A slow disk: a step that does not wait for the charge would end first.
        time.sleep(0.02)
        rows = charge(self, charges, run)
        seen.events.append(("charged", charges[0].round, tuple(c.client for c in charges)))
        return rows

    def spied_init(self: FleetOracle, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        seen.oracles.append(self)
        self.spied_round = args[1].round  # type: ignore[attr-defined]

    def spied_release(self: FleetOracle, *args: Any) -> Any:
        released = release(self, *args)
        seen.events.append(("released", self.spied_round, tuple(self._clients)))  # type: ignore[attr-defined]
        return released

    monkeypatch.setattr(Ledger, "charge", spied_charge)
    monkeypatch.setattr(FleetOracle, "__init__", spied_init)
    monkeypatch.setattr(FleetOracle, "_release", spied_release)
    return seen


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [2, "auto"])
def test_every_release_is_charged_first_and_every_charge_is_used(
    spy: Spy, tmp_path: Path, algorithm: str, size: int | str
) -> None:
    job = job_of(algorithm={"name": algorithm}, run={"fleet_size": size})
    with Ledger.create(tmp_path / "ledger.db", run="r") as ledger:
        RoundLoop(job, Fleet(job), accounts(job, ledger), Callback()).run()
        rows = [row.charge for row in ledger.rows()]
    charged: dict[tuple[int, int], int] = {(c.client, c.round): c.steps for c in rows}
    assert all(c.mechanism == job.plan.mechanism(int(c.client)) for c in rows)
    released: dict[tuple[int, int], int] = {}
    wait_for_charge: set[tuple[int, int]] = set()
    for kind, t, clients in spy.events:
        for client in clients:
            if kind == "charged":
                wait_for_charge.add((client, t))
            else:
                assert (client, t) in wait_for_charge, (
                    f"client {client} released in round {t} before it was charged"
                )
                released[client, t] = released.get((client, t), 0) + 1
    assert released == charged
    assert all(oracle.drawn == job.schedule.local_steps for oracle in spy.oracles)


def test_the_spy_finds_a_charge_after_the_release(spy: Spy, tmp_path: Path) -> None:
    """The test above can fail: here the cohort is computed before the charge."""
    job = job_of()
    with Ledger.create(tmp_path / "ledger.db", run="r") as ledger:
        spending = accounts(job, ledger)
        state = first_state(job)
        Fleet(job).run_cohort(1, state, [0, 1])
        spending.charge(1, [0, 1])
    assert [kind for kind, _, _ in spy.events] == ["released"] * 3 + ["charged"]


class FullDiskError(Exception):
    pass


def test_nothing_is_released_when_the_charge_fails(
    spy: Spy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise FullDiskError

    job = job_of()
    with Ledger.create(tmp_path / "ledger.db", run="r") as ledger:
        monkeypatch.setattr(Ledger, "charge", full)
        with pytest.raises(FullDiskError):
            RoundLoop(job, Fleet(job), accounts(job, ledger), Callback()).run()
    assert spy.events == []


def test_an_algorithm_with_undeclared_releases_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_of(algorithm={"name": "dp-fedavg"})
    cls = type(job.algorithm)
    step = cls.step

    def greedy(self: Any, ctx: Any, local: Any, oracle: Any, k: Tensor) -> Any:
        oracle(local.theta)
        return step(self, ctx, local, oracle, k)

    monkeypatch.setattr(cls, "step", greedy)
    with pytest.raises(RuntimeError, match="charged"):
        after(job)

    def twice(self: Any, ctx: Any, local: Any, oracle: Any, k: Tensor) -> Any:
        local = step(self, ctx, local, oracle, k)
        oracle.again(local.theta)
        return local

    monkeypatch.setattr(cls, "step", twice)
    with pytest.raises(RuntimeError, match="declare"):
        after(job)
    monkeypatch.setattr(cls, "releases", property(lambda self: Releases(1, 2)))
    declared = job_of(algorithm={"name": "dp-fedavg"})
    # The declared releases are part of the plan and of each charge.
    after(declared)
    assert declared.plan.mechanism(0).releases == 2


def test_without_privacy_nothing_is_charged_or_noised() -> None:
    job = job_of(privacy={"enabled": False})
    spending = accounts(job, None)
    rounds: list[Any] = []
    RoundLoop(job, Fleet(job), spending, Watcher(on_round=rounds.append)).run()
    assert [r.epsilon for r in rounds] == [None] * 3
    assert set(spending.figures().values()) == {None}
    assert torch.equal(fleet_module.context(job, 1, [0, 1]).phi, torch.zeros(2, 1))


def test_a_state_that_is_not_finite_stops_the_run() -> None:
    class Broken(Fleet):
        def run_cohort(
            self, t: int, state: State, clients: Sequence[int], wait_for_charge: Any = None
        ) -> tuple[Message, int]:
            mean, answered = super().run_cohort(t, state, clients)
            return {k: v * (math.nan if t == 2 else 1) for k, v in mean.items()}, answered

    job = job_of(algorithm={"name": "dp-fedavg"})
    rounds: list[Any] = []
    with pytest.raises(StoppedError, match="round 2"):
        RoundLoop(job, Broken(job), accounts(job, None), Watcher(on_round=rounds.append)).run()
    assert [r.t for r in rounds] == [0, 1]


# --- preparation ---


def features(units: int = 0) -> Source:
    rng = np.random.default_rng(0)
    columns = {"patient": np.arange(80) % units, "hospital": np.arange(80) % 4} if units else {}
    train_ = Table(
        {"features": rng.normal(size=(80, 5)).astype(np.float32)}, rng.integers(0, 3, 80), columns
    )
    test = Table({"features": rng.normal(size=(20, 5)).astype(np.float32)}, rng.integers(0, 3, 20))
    return Source(train_, test, ("a", "b", "c"), "features")


def test_client_sizes_are_counted_in_units() -> None:
    job = job_of(
        features(units=40),
        data={"partition": "natural", "client_column": "hospital", "unit_column": "patient"},
        privacy={"batch": 5},
    )
    assert job.plan.sizes.tolist() == [10] * 4
    assert job.plan.unit == "patient"
    assert job.plan.mechanism(0).rate == 0.5
    small = after(dataclasses.replace(job, config=job.config), 1)
    assert all(bool(x.isfinite().all()) for x in small.values())


def test_min_clients_above_the_number_of_clients_is_refused() -> None:
    with pytest.raises(DpfedError, match=r"run\.min_clients = 99"):
        job_of(run={"min_clients": 99})


def test_unused_records_are_reported() -> None:
    job = job_of(features(), data={"clients": 3}, privacy={"batch": 5})
    assert any("2 of 80 training records are not used" in note for note in job.notes)
    assert not any(
        "not used" in note
        for note in job_of(features(), data={"clients": 4}, privacy={"batch": 5}).notes
    )


def test_a_batch_larger_than_a_client_is_refused() -> None:
    with pytest.raises(DpfedError, match=r"privacy\.batch"):
        job_of(features(), data={"clients": 40}, privacy={"batch": 5})


def test_the_test_set_contains_no_private_records() -> None:
    job = job_of()
    private = {bytes(x.numpy()) for x in job.private.records.inputs["pixel_values"]}
    assert len(job.private.records.labels) + len(job.public.test.labels) == 1797
    assert not private & {bytes(x.numpy()) for x in job.public.test.inputs["pixel_values"]}


def test_tf32_is_disabled_on_a_gpu() -> None:
    """TF32 is disabled for matrix products and, by a separate switch, for convolutions."""
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = True
        disable_tf32(torch.device("cpu"))
        assert [switch.allow_tf32 for switch in switches] == [True, True]
        disable_tf32(torch.device("cuda"))
        assert [switch.allow_tf32 for switch in switches] == [False, False]
    finally:
        for switch, was in zip(switches, before, strict=True):
            switch.allow_tf32 = was
