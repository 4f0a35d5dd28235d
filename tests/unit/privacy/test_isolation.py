"""Isolation of records: at no theta does one record change the gradients of others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfed.config import build
from dpfed.data.partition import shards_of
from dpfed.errors import DpfedError
from dpfed.model.augment import flip
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.task import Task
from dpfed.privacy.clipping import clip_and_sum
from dpfed.privacy.isolation.exact_sum import UnitMeans
from dpfed.privacy.isolation.turns import turns_of
from dpfed.privacy.noise import Streams
from dpfed.privacy.oracle import FleetOracle, Isolation, PassLimits, RoundTerms
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import Augmentations, PrivateData, Records
from dpfed.privacy.sampling import DrawnBatch
from dpfed.registry import registry
from dpfed.training.callbacks.base import Callback
from dpfed.training.job.job import Job, prepare

COUNT = 48
CLIP = 0.5
SLACK = 1 + 1e-6
# A busy machine needs this long; the search ends when it has found enough.
SECONDS = 60.0
EXACT_SECONDS = 5.0
LARGEST = 800.0
PLACES = 8


def job_of(**sections: dict[str, Any]) -> Job:
    raw: dict[str, dict[str, Any]] = {
        "data": {"name": "digits", "clients": 3},
        "model": {"name": "glyph-vit", "train": "lora"},
        "algorithm": {"name": "dp-fedavg", "lr": 0.1},
        "privacy": {"sigma": 1.0, "clip": CLIP, "batch": 16},
        "run": {"rounds": 1, "local_steps": 1, "participation": 1.0, "device": "cpu"},
    }
    tables = {name: {**table, **sections.get(name, {})} for name, table in raw.items()}
    return prepare(build(tables, registry()))


@pytest.fixture(scope="module")
def digits() -> tuple[PerSample, Tensor, Records]:
    job = job_of()
    rows = torch.arange(COUNT)
    inputs, labels = job.private.records.take(rows)
    return job.model, job.theta, Records(inputs, labels)


@dataclass
class Seen:
    """A model that notes the gradients it gives, in the order of the records."""

    model: PerSample
    rows: list[Tensor] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)

    @property
    def space(self) -> Any:
        return self.model.space

    @property
    def has_dropout(self) -> bool:
        return self.model.has_dropout

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        found = self.model.grads(theta, client, inputs, labels, keys)
        self.rows.append(torch.cat(found, dim=1))
        self.passes.append(len(labels))
        return found


def rows_of_records(seen: Seen, drawn: DrawnBatch, places: int | None, views: int) -> Tensor:
    """Return the gradients in the order of the batch, without those of empty places."""
    if places is None:
        return torch.cat(seen.rows)
    rows: list[Tensor] = [torch.zeros(0)] * len(drawn.row)
    for turn, grads in zip(turns_of(drawn, places), seen.rows, strict=True):
        by_place = grads.view(places, views, -1)
        for place in np.flatnonzero(turn.used):
            rows[turn.record[place]] = by_place[place]
    return torch.cat(rows)


@dataclass(frozen=True)
class Sum:
    """One clipped sum `[P]` in float64, and the records' gradients `[M, P]` that it is made of."""

    total: Tensor
    grads: Tensor
    passes: list[int]


def clipped_sum(
    model: PerSample,
    records: Records,
    theta: Tensor,
    isolation: Isolation,
    *,
    slots: DrawnBatch | None = None,
    units: np.ndarray | None = None,
    view: Augmentations | None = None,
    grid: bool = True,
    places: int = PLACES,
    rule: Callable[[DrawnBatch], DrawnBatch] = lambda batch: batch,
) -> tuple[Sum, DrawnBatch]:
    """Compute the sum of a whole data set (q = 1) as the oracle does, before noise is added."""
    shards = shards_of(np.zeros(len(records.labels), dtype=np.int64), 1, units)
    size = int(shards.sizes[0])
    plan = Plan("poisson", CLIP, np.array([size]), np.ones(1), np.array([float(size)]), np.ones(1))
    seen = Seen(model)
    oracle = FleetOracle(
        PrivateData(seen, records, shards, view),
        RoundTerms(plan, Streams(0, secret=True), 1, [0], 1, grid=grid, isolation=isolation),
        PassLimits(places=places),
    )
    if view is not None:
        oracle._gradients.augment_seeds = np.zeros(1, dtype=np.int64)
    if model.has_dropout:
        oracle._gradients.dropout_seeds = np.zeros(1, dtype=np.int64)
    drawn = rule(oracle._draw() if slots is None else slots)
    total, _ = oracle._clipped_sum(theta.unsqueeze(0), drawn)
    steps = oracle._grid[0].step if oracle._grid is not None else 1.0
    views = 1 if view is None else view.count
    rows = rows_of_records(seen, drawn, places if isolation == "exact" else None, views)
    return Sum(total[0].double() * steps, rows, seen.passes), drawn


@dataclass(frozen=True)
class Moved:
    """Effect of deleting the first unit on the sum, in units of C, and on other gradients."""

    by: float
    others_equal: bool


def moved(
    model: PerSample, records: Records, theta: Tensor, isolation: Isolation, **how: Any
) -> Moved:
    """Delete the first unit from the data set, keep all other random draws, and compare."""
    units = how.pop("units", None)
    rule = how.pop("rule", lambda batch: batch)
    whole, drawn = clipped_sum(model, records, theta, isolation, units=units, rule=rule, **how)
    gone = int((drawn.unit == 0).sum())
    kept = torch.arange(gone, len(records.labels))
    inputs, labels = records.take(kept)
    # The coupling: every remaining record keeps its keys and the place in its pass, while its
    # position in the data set moves.
    slots = DrawnBatch(
        drawn.row[gone:] - gone,
        drawn.client[gone:],
        drawn.unit[gone:] - 1,
        drawn.owner[1:],
        drawn.key[gone:],
        drawn.place[1:],
    )
    rest = None if units is None else units[gone:]
    less, _ = clipped_sum(
        model, Records(inputs, labels), theta, isolation, slots=slots, units=rest, rule=rule, **how
    )
    views = how["view"].count if how.get("view") is not None else 1
    by = float((whole.total - less.total).norm()) / CLIP
    return Moved(by, torch.equal(whole.grads[gone * views :], less.grads))


def search(model: PerSample, records: Records, size: int, more_than: float) -> tuple[Tensor, Moved]:
    """Search for a theta at which deleting a record moves the sum of the fast computation most.

    Random vectors first, then small changes of the best one, until `SECONDS` are over.
    """
    generator = torch.Generator().manual_seed(0)
    end = time.monotonic() + SECONDS
    best: tuple[Tensor, Moved] | None = None
    while time.monotonic() < end:
        noise = torch.randn(size, generator=generator)
        draws = torch.rand(2, generator=generator).tolist()
        if best is None or draws[0] < 0.5:
            theta = noise * 10 ** (0.7 + 1.3 * draws[1])
        else:
            chosen = torch.rand(size, generator=generator) < 10 ** (-2 * draws[1])
            theta = torch.where(chosen, best[0] + noise * float(best[0].std()), best[0])
        theta = theta.clamp(-LARGEST, LARGEST)
        found = moved(model, records, theta, "fast")
        if best is None or found.by > best[1].by:
            best = theta, found
        if best[1].by > more_than:
            break
    assert best is not None
    return best


@pytest.fixture(scope="module")
def adversarial(digits: tuple[PerSample, Tensor, Records]) -> tuple[Tensor, Moved]:
    model, start, records = digits
    return search(model, records, len(start), 2.5)


def test_without_the_rule_a_server_finds_a_theta_that_breaks_the_bound(
    adversarial: tuple[Tensor, Moved],
) -> None:
    theta, found = adversarial
    assert float(theta.abs().max()) <= LARGEST
    if found.others_equal and found.by <= SLACK:
        pytest.skip("the kernels of this machine round alike for all batch sizes")
    assert not found.others_equal
    assert found.by > 2


@pytest.mark.parametrize("grid", [True, False])
def test_with_exact_isolation_the_same_theta_moves_the_sum_by_one_record(
    digits: tuple[PerSample, Tensor, Records], adversarial: tuple[Tensor, Moved], grid: bool
) -> None:
    model, _, records = digits
    found = moved(model, records, adversarial[0], "exact", grid=grid)
    assert found.others_equal
    assert found.by <= SLACK


def test_no_search_finds_a_theta_that_breaks_exact_isolation(
    digits: tuple[PerSample, Tensor, Records], adversarial: tuple[Tensor, Moved]
) -> None:
    """Search like `search`, but against exact isolation, with new places for every theta."""
    model, start, records = digits
    generator = torch.Generator().manual_seed(1)
    end = time.monotonic() + EXACT_SECONDS
    tried = 0
    while time.monotonic() < end or tried < 5:
        scale = 10 ** (3 * float(torch.rand(1, generator=generator)) - 1)
        theta = start + scale * torch.randn(len(start), generator=generator)
        if tried % 4 == 3:
            theta = adversarial[0] + 0.1 * torch.randn(len(start), generator=generator)
        found = moved(model, records, theta, "exact", grid=bool(tried % 2))
        assert found.others_equal
        assert found.by <= SLACK
        tried += 1


def test_places_that_follow_from_the_order_of_records_are_not_isolated(
    digits: tuple[PerSample, Tensor, Records], adversarial: tuple[Tensor, Moved]
) -> None:
    """A broken build: deleting a record shifts the places of all later ones."""
    model, _, records = digits

    def in_order(units: DrawnBatch) -> DrawnBatch:
        return replace(units, place=np.arange(len(units.owner)) % PLACES)

    found = moved(model, records, adversarial[0], "exact", rule=in_order)
    if adversarial[1].others_equal:
        pytest.skip("the kernels of this machine round alike at all places")
    assert not found.others_equal


def test_augmentations_and_units_of_several_records_are_isolated(
    digits: tuple[PerSample, Tensor, Records], adversarial: tuple[Tensor, Moved]
) -> None:
    model, _, records = digits
    view = Augmentations(
        lambda inputs, keys: {name: flip(x, keys) for name, x in inputs.items()}, 3
    )
    units = np.repeat(np.arange(COUNT), [1, 2, 3, 2] * (COUNT // 4))[:COUNT]
    inputs, labels = records.take(torch.arange(12))
    few = Records(inputs, labels)
    for how in ({"view": view}, {"units": units[:12]}, {"view": view, "units": units[:12]}):
        found = moved(model, few, adversarial[0], "exact", **how)
        assert found.others_equal
        assert found.by <= SLACK


def test_every_pass_has_all_its_places_and_a_record_its_augmentations(
    digits: tuple[PerSample, Tensor, Records],
) -> None:
    model, start, records = digits
    exact, drawn = clipped_sum(model, records, start, "exact")
    assert exact.passes == [PLACES] * int(np.bincount(drawn.place).max())
    assert len(exact.passes) < COUNT
    exact, _ = clipped_sum(model, records, start, "exact", places=1)
    assert exact.passes == [1] * COUNT
    view = Augmentations(
        lambda inputs, keys: {name: flip(x, keys) for name, x in inputs.items()}, 2
    )
    units = np.arange(COUNT) // 4
    exact, drawn = clipped_sum(model, records, start, "exact", view=view, units=units)
    assert exact.passes == [2 * PLACES] * (4 * int(np.bincount(drawn.place).max()))
    fast, _ = clipped_sum(model, records, start, "fast")
    assert fast.passes == [COUNT]
    torch.testing.assert_close(
        clipped_sum(model, records, start, "exact")[0].total, fast.total, rtol=1e-4, atol=1e-6
    )


def bert() -> tuple[PerSample, Tensor, Records]:
    """A small text classifier with dropout, and padded records of different lengths."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        num_labels=3,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = BertForSequenceClassification(config)
    tensors = trainable(model)
    space = space_of(tensors)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, 20, (12, 9), generator=generator)
    mask = (torch.arange(9) < torch.randint(2, 10, (12, 1), generator=generator)).long()
    labels = torch.randint(0, 3, (12,), generator=generator)
    records = Records({"input_ids": ids * mask, "attention_mask": mask}, labels)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    return PerSample(model, space, call, Task(loss)), space.flatten(tensors).detach(), records


def cnn() -> tuple[PerSample, Tensor, Records]:
    job = job_of(model={"name": "gn-resnet18", "train": "full", "width": 4, "groups": 2})
    inputs, labels = job.private.records.take(torch.arange(8))
    return job.model, job.theta, Records(inputs, labels)


@pytest.mark.parametrize("made", [bert, cnn])
def test_other_models_are_isolated_at_any_theta(made: Any) -> None:
    model, start, records = made()
    generator = torch.Generator().manual_seed(0)
    for scale in (0.0, 1.0, 30.0):
        theta = start + scale * torch.randn(len(start), generator=generator)
        found = moved(model, records, theta, "exact", places=4)
        assert found.others_equal
        assert found.by <= SLACK


class Given:
    """A stand-in model: the input of a record is its gradient."""

    has_dropout = False

    @property
    def space(self) -> Any:
        return SimpleNamespace(shapes=(torch.Size([3]),))

    def grads(
        self, theta: Tensor, client: Tensor, inputs: Mapping[str, Tensor], *_: Any
    ) -> list[Tensor]:
        return [inputs["g"]]


@pytest.mark.parametrize("grid", [True, False])
def test_the_sum_of_many_records_does_not_round(grid: bool) -> None:
    """In float32 a sum of 3,000 records rounds by more than 1e-4 C."""
    generator = torch.Generator().manual_seed(0)
    g = 1 + torch.rand(3000, 3, generator=generator)
    records = Records({"g": g}, torch.zeros(3000, dtype=torch.int64))
    model: Any = Given()
    for isolation, exact in (("exact", True), ("fast", grid)):
        how: Any = {"grid": grid}
        found = moved(model, records, torch.zeros(3), isolation, **how)
        assert (abs(found.by - 1) < 1e-6) is exact


def test_a_unit_of_many_records_takes_the_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a round fails only when the unit is drawn, and the server sees it."""
    held: list[int] = []

    def noted(grads: Any, *rest: Any) -> Any:
        held.append(max(len(g) for g in grads))
        return clip_and_sum(grads, *rest)

    monkeypatch.setattr("dpfed.privacy.isolation.exact_sum.clip_and_sum", noted)
    g = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 4.0]])
    records = Records({"g": g}, torch.zeros(3, dtype=torch.int64))
    model: Any = Given()
    units = np.zeros(3, dtype=np.int64)
    found, _ = clipped_sum(model, records, torch.zeros(3), "exact", units=units, grid=False)
    assert held == [PLACES] * 3
    mean = torch.tensor([1.0, 1, 4]).double() / 3
    torch.testing.assert_close(found.total, CLIP * mean / mean.norm())


@pytest.mark.parametrize("unit", ["record", "patient"])
def test_memory_for_units_follows_from_the_plan_and_not_from_the_batch(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one more unit of several records could exhaust the memory, and change all passes."""
    rows: list[int] = []
    plain = UnitMeans.__init__

    def noted(self: UnitMeans, sums: Tensor, sizes: np.ndarray) -> None:
        rows.append(len(sums))
        plain(self, sums, sizes)

    monkeypatch.setattr(UnitMeans, "__init__", noted)
    plan = Plan("poisson", CLIP, np.full(1, 3), np.ones(1), np.full(1, 3.0), np.ones(1), unit=unit)
    model: Any = Given()
    oracle = FleetOracle(
        PrivateData(model, Records({"g": torch.eye(3)}, torch.zeros(3)), shards_of(np.zeros(3), 1)),
        RoundTerms(plan, Streams(0), 1, [0], 1, isolation="exact"),
        PassLimits(places=PLACES),
    )
    oracle(torch.zeros(1, 3))
    assert rows == [PLACES if unit == "patient" else 0]


def test_a_row_of_theta_alone_gives_the_gradient_that_a_fleet_gives(
    digits: tuple[PerSample, Tensor, Records],
) -> None:
    """A simulated fleet and a network client compute the same bits."""
    model, start, records = digits
    plan = Plan("poisson", CLIP, np.array([24, 24]), np.ones(2), np.full(2, 24.0), np.ones(2))
    both = shards_of(np.repeat([0, 1], 24), 2)
    theta = torch.stack([start, start + 0.1])

    def total(clients: list[int], rows: Tensor) -> Tensor:
        oracle = FleetOracle(
            PrivateData(model, records, both),
            RoundTerms(plan, Streams(0), 1, clients, 1, grid=True, isolation="exact"),
            PassLimits(places=PLACES),
        )
        return oracle._clipped_sum(rows, oracle._draw())[0]

    fleet = total([0, 1], theta)
    assert torch.equal(fleet[1:], total([1], theta[1:]))
    assert torch.equal(fleet[:1], total([0], theta[:1]))


def test_a_record_of_one_client_never_changes_the_sum_of_another(
    digits: tuple[PerSample, Tensor, Records], adversarial: tuple[Tensor, Moved]
) -> None:
    """Clients of a fleet share passes. The removed record may also be NaN at all its places."""
    model, start, records = digits
    owner = np.repeat([0, 1], 24)
    plan = Plan("poisson", CLIP, np.array([24, 24]), np.ones(2), np.full(2, 24.0), np.ones(2))
    terms = RoundTerms(plan, Streams(0), 1, [0, 1], 1, grid=True, isolation="exact")
    oracle = FleetOracle(
        PrivateData(model, records, shards_of(owner, 2)), terms, PassLimits(places=PLACES)
    )
    drawn = oracle._draw()
    less = DrawnBatch(
        drawn.row[5:],
        drawn.client[5:],
        drawn.unit[5:] - 5,
        drawn.owner[5:],
        drawn.key[5:],
        drawn.place[5:],
    )
    for first in (start, adversarial[0], torch.full_like(start, float("nan"))):
        theta = torch.stack([first, adversarial[0]])
        whole = oracle._clipped_sum(theta, drawn)[0]
        rest = oracle._clipped_sum(theta, less)[0]
        assert torch.equal(whole[1], rest[1])
        assert whole[1].any()


def test_simulations_take_no_other_way_when_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpfed.training.backends.batched_runs import pack_key
    from dpfed.training.backends.fleet import Fleet
    from dpfed.training.budget.spending import Spending
    from dpfed.training.round_loop import RoundLoop

    passes: list[int] = []
    grads = PerSample.raw_grads

    def noted(self: PerSample, theta: Tensor, client: Tensor, *rest: Any) -> list[Tensor]:
        passes.append(len(client))
        return grads(self, theta, client, *rest)

    head = {"model": {"name": "glyph-vit", "train": "head"}}
    many = {"rounds": 90, "checkpoint_every": 0}
    assert job_of(**head, run=many).private.raw_inputs is not None
    assert pack_key(job_of(**head, run=many).config) is not None
    exact = job_of(**head, run=many, privacy={"isolation": "exact"})
    assert exact.private.raw_inputs is None  # features come from passes over many records
    assert pack_key(exact.config) is None
    exact = job_of(**head, run={"slots": 8}, privacy={"isolation": "exact"})
    monkeypatch.setattr(PerSample, "raw_grads", noted)
    RoundLoop(exact, Fleet(exact), Spending(exact, None, None), Callback()).run()
    assert set(passes) == {exact.model.places}
    assert exact.model.places > 1
    for keys, what in (({"features": True}, "features"), ({"compile": True}, "compile")):
        with pytest.raises(DpfedError, match=what):
            job_of(model=head["model"], privacy={"isolation": "exact"}, run=keys)
