"""The oracle draws, clips, sums, noises and divides as docs/algorithms.md says (O1 to O11)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpfed.data.partition import Shards, shards_of
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.task import Task
from dpfed.privacy import oracle as oracle_module
from dpfed.privacy.clipping import Clipping, UnitRows, clip_and_sum
from dpfed.privacy.noise import OsNoise, Streams
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import Augmentations, PrivateData, Records
from dpfed.privacy.sampling import DrawnBatch

torch.set_num_threads(1)

C = 0.1
FEATURES, CLASSES, HIDDEN = 6, 3, 5


# --- helpers ---


class Net(nn.Module):
    """Trainable Linear + LayerNorm + Linear on top of a frozen Linear."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.body = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.body(self.frozen(x)))))


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="none")


def net(
    dropout: float = 0.0, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
) -> tuple[PerSample, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Net(dropout)
    tensors = trainable(model)
    space = space_of(tensors)
    theta = space.flatten(tensors)
    return PerSample(model, space, call, Task(loss)), theta


def net_records(count: int) -> Records:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(count, FEATURES, generator=g) * 3
    return Records({"x": x}, torch.randint(0, CLASSES, (count,), generator=g))


@dataclass
class Stub:
    """A model in which the input of a record is its gradient, cut into these widths."""

    widths: tuple[int, ...] = (3, 4)
    calls: int = 0
    rows: list[int] | None = None
    has_dropout: bool = False

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        self.calls += 1
        if self.rows is not None:
            self.rows.extend(labels.tolist())
        return list(inputs["g"].split(self.widths, dim=1))


class GridStub(Stub):
    """With the shapes that a grid is made for."""

    space = SimpleNamespace(shapes=[torch.Size([3]), torch.Size([4])])


def stub_records(grads: Tensor) -> Records:
    """The label of a record is its number, so that `Stub.rows` tells which records were read."""
    return Records({"g": grads}, torch.arange(len(grads)))


def plan_of(
    sizes: list[int],
    expected: list[float] | float,
    sigma: float = 0.0,
    clip: float = C,
    **more: Any,
) -> Plan:
    n = len(sizes)
    wanted = (
        np.full(n, float(expected)) if isinstance(expected, int | float) else np.array(expected)
    )
    return Plan(
        **{"sampling": "poisson", "clip": clip, "sizes": np.array(sizes), "expected": wanted,
           "rates": wanted / np.array(sizes), "multipliers": np.full(n, float(sigma)), **more}
    )  # fmt: skip


def one_each(sizes: list[int]) -> Shards:
    return shards_of(np.repeat(np.arange(len(sizes)), sizes), len(sizes))


def make(
    gradients: Any, records: Records, shards: Shards, plan: Plan, *, seed: int = 0, round: int = 1,
    clients: list[int] | None = None, steps: int = 1, max_slots: int = 512,
) -> FleetOracle:  # fmt: skip
    chosen = list(range(plan.clients)) if clients is None else clients
    return FleetOracle(
        PrivateData(gradients, records, shards),
        RoundTerms(plan, Streams(seed), round, chosen, steps),
        PassLimits(max_slots),
    )


def slots_of(
    rows: list[int], client: list[int] | None = None, unit: list[int] | None = None
) -> DrawnBatch:
    """A batch made by hand: these records, each its own unit of client 0 unless said otherwise."""
    c = np.array(client if client is not None else [0] * len(rows), dtype=np.int64)
    u = np.array(unit if unit is not None else range(len(rows)), dtype=np.int64)
    owner = (
        np.array([c[u == i][0] for i in range(u.max() + 1)], dtype=np.int64)
        if len(rows)
        else np.zeros(0, np.int64)
    )
    return DrawnBatch(
        np.array(rows, dtype=np.int64),
        c,
        u,
        owner,
        np.zeros(len(rows), dtype=np.int64),
        np.zeros(len(owner), dtype=np.int64),
    )


def summed(
    gradients: Any, records: Records, theta: Tensor, rows: list[int], clip: float = C, **slots: Any
) -> Tensor:
    """Σ of clipped gradients over a hand-made batch of one client, `[P]`."""
    shards = one_each([len(records.labels)])
    oracle = make(gradients, records, shards, plan_of([len(records.labels)], 1, clip=clip))
    return oracle._clipped_sum(theta.unsqueeze(0), slots_of(rows, **slots))[0][0]


def loop_gradients(model: PerSample, theta: Tensor, records: Records) -> Tensor:
    """The reference: one backward for each record, alone, of the unbatched model."""
    out = []
    for j in range(len(records.labels)):
        vector = theta.clone().requires_grad_(True)
        weights = model.space.unflatten(vector)
        scores = torch.func.functional_call(
            model.model, weights, (), {"x": records.inputs["x"][j : j + 1]}
        )
        loss = model.task.loss(scores, records.labels[j : j + 1]).sum()
        (grad,) = torch.autograd.grad(loss, vector)
        out.append(grad)
    return torch.stack(out)


def reference_sum(grads: Tensor, clip: float) -> Tensor:
    """Return the sum in float64: ḡ_j = g_j · min(1, C/‖g_j‖), summed."""
    g = grads.double()
    norms = g.norm(dim=1, keepdim=True)
    return (g * torch.where(norms > clip, clip / norms, torch.ones_like(norms))).sum(0)


def per_tensor_clip(
    grads: list[Tensor], units: UnitRows, clip: float, rule: Clipping, grid_steps: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Clip every tensor by its own norm: a broken build that tests must catch."""
    each = [clip_and_sum([g], units, clip, rule, grid_steps) for g in grads]
    return torch.cat([total for total, _ in each], dim=1), each[0][1]


def gradients_of_size(count: int, width: int = 7, size: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * size


# --- O1, O2, O3: the gradient, its clip, its sensitivity ---


def test_o1_without_noise_clip_and_sampling_it_is_the_full_batch_mean_gradient() -> None:
    model, theta = net()
    records = net_records(12)
    plan = plan_of([12], 12, sigma=0, clip=math.inf)
    g, phi = make(model, records, one_each([12]), plan)(theta.unsqueeze(0))
    expected = loop_gradients(model, theta, records).mean(0)
    torch.testing.assert_close(g[0], expected, rtol=1e-5, atol=1e-7)
    assert phi.tolist() == [[0.0]]  # exactly, also for C = inf


def test_clipped_sum_of_a_model_equals_the_loop_in_double_precision() -> None:
    model, theta = net()
    records = net_records(9)
    grads = loop_gradients(model, theta, records)
    clip = float(grads.norm(dim=1).median())  # some are clipped, some are not
    found = summed(model, records, theta, list(range(9)), clip)
    torch.testing.assert_close(found.double(), reference_sum(grads, clip), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clip", [1e-3, 0.1, 1.0, 1e3])
def test_o2_every_contribution_is_at_most_c(clip: float) -> None:
    model, theta = net()
    records = net_records(10)
    for j in range(10):
        assert summed(model, records, theta, [j], clip).double().norm() <= clip * (1 + 1e-6)


@given(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=7, max_size=7),
    st.sampled_from([1e-12, 1e-4, 0.1, 1.0, 1e6]),
)
@settings(max_examples=150, deadline=None)
def test_o2_holds_for_any_gradient(values: list[float], clip: float) -> None:
    found = summed(Stub(), stub_records(torch.tensor([values])), torch.zeros(7), [0], clip)
    assert found.isfinite().all()
    assert float(found.double().norm()) <= clip * (1 + 1e-6)


def test_o2_one_loss_times_a_million_moves_the_sum_by_at_most_2c() -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(scores, labels % CLASSES) * torch.where(labels >= CLASSES, 1e6, 1.0)

    model, theta = net(loss=loss)
    records = net_records(8)
    shouting = replace(records, labels=records.labels + CLASSES * (torch.arange(8) == 3))
    before = summed(model, records, theta, list(range(8)))
    after = summed(model, shouting, theta, list(range(8)))
    moved = float((after - before).norm())
    assert moved <= 2 * C * (1 + 1e-5)
    unclipped = summed(model, shouting, theta, list(range(8)), math.inf)
    assert float(unclipped.norm()) > 1e4  # the record does shout


@pytest.mark.parametrize("removed", range(6))
def test_o3_removing_a_record_moves_the_sum_by_at_most_c(removed: int) -> None:
    model, theta = net()
    records = net_records(6)
    everyone = summed(model, records, theta, list(range(6)))
    without = summed(model, records, theta, [j for j in range(6) if j != removed])
    assert float((everyone - without).double().norm()) <= C * (1 + 1e-5)


def test_o3_catches_clipping_tensor_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle_module, "clip_and_sum", per_tensor_clip)
    model, theta = net()
    records = net_records(6)
    everyone = summed(model, records, theta, list(range(6)))
    moved = [
        float((everyone - summed(model, records, theta, [j for j in range(6) if j != i])).norm())
        for i in range(6)
    ]
    assert max(moved) > 1.5 * C  # up to C·sqrt(6 tensors)


def test_clipping_is_per_record_not_of_the_batch_mean() -> None:
    grads = torch.tensor(
        [[10.0, 0, 0, 0, 0, 0, 0], [-10.0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0.01, 0, 0, 0]]
    )
    found = summed(Stub(), stub_records(grads), torch.zeros(7), [0, 1, 2])
    torch.testing.assert_close(
        found, torch.tensor([0, 0, 0, 0.01, 0, 0, 0])
    )  # the two cancel only after clipping
    one_sided = summed(Stub(), stub_records(grads), torch.zeros(7), [0, 2])
    torch.testing.assert_close(one_sided, torch.tensor([C, 0, 0, 0.01, 0, 0, 0]))


def test_small_and_zero_gradients_keep_factor_one() -> None:
    grads = torch.zeros(2, 7)
    grads[1, 2] = C / 2
    assert torch.equal(summed(Stub(), stub_records(grads), torch.zeros(7), [0, 1]), grads[1])
    exactly = torch.zeros(1, 7)
    exactly[0, 0] = C
    assert torch.equal(summed(Stub(), stub_records(exactly), torch.zeros(7), [0]), exactly[0])


def test_several_clients_keep_their_own_sums() -> None:
    grads = gradients_of_size(20)
    plan = plan_of([20, 1, 1], 1)
    oracle = make(Stub(), stub_records(grads), one_each([20, 1, 1]), plan)
    client = [0] * 6 + [1] * 9 + [2] * 5
    found = oracle._clipped_sum(torch.zeros(3, 7), slots_of(list(range(20)), client))[0]
    for s in range(3):
        own = grads[[j for j in range(20) if client[j] == s]]
        torch.testing.assert_close(found[s].double(), reference_sum(own, C), rtol=1e-5, atol=1e-7)


# --- O4, O5, O7: noise and divisor ---


def test_o4_an_empty_batch_is_pure_noise_of_std_sigma_c_over_b() -> None:
    width, sigma, expected = 200_000, 1.7, 1e-9
    stub = Stub(widths=(width,))
    plan = plan_of([5], expected, sigma=sigma)  # a rate of 2e-10: nobody is drawn
    oracle = make(stub, stub_records(torch.ones(5, width)), one_each([5]), plan)
    g, phi = oracle(torch.zeros(1, width))
    assert stub.calls == 0
    assert oracle.drawn == 1  # an empty batch is a step like any other
    std = sigma * C / expected
    assert float(g.std()) == pytest.approx(std, rel=0.01)
    assert float(g.mean()) == pytest.approx(0, abs=5 * std / math.sqrt(width))
    assert float(phi) == pytest.approx(std**2, rel=1e-6)


@pytest.mark.parametrize(
    ("clip", "sigma", "expected"), [(0.1, 1.0, 16.0), (2.0, 0.5, 3.0), (5.0, 3.0, 40.0)]
)
def test_o5_variance_is_phi_and_mean_is_the_clipped_mean(
    clip: float, sigma: float, expected: float
) -> None:
    width, draws = 1000, 200
    grads = gradients_of_size(40, width, size=0.1)
    plan = plan_of([40], expected, sigma=sigma, clip=clip)
    oracle = make(Stub(widths=(600, 400)), stub_records(grads), one_each([40]), plan, steps=1)
    slots = slots_of(list(range(0, 40, 2)))
    clean = reference_sum(grads[::2], clip) / expected
    total, square = torch.zeros(width).double(), torch.zeros(width).double()
    for _ in range(draws):
        g, phi = oracle._release(torch.zeros(1, width), slots)
        off = g[0].double() - clean
        total += off
        square += off**2
    phi_here = (sigma * clip / expected) ** 2
    assert float(phi) == pytest.approx(phi_here, rel=1e-6)
    assert float(square.sum() / (width * draws)) == pytest.approx(phi_here, rel=0.02)  # 2e5 numbers
    per_coordinate = total / draws
    assert float(per_coordinate.abs().max()) < 5.5 * math.sqrt(phi_here / draws)
    assert float(per_coordinate.mean().abs()) < 4 * math.sqrt(phi_here / draws / width)


def test_noise_is_each_clients_stream_times_its_own_level() -> None:
    """Two releases in sequence have the expected numbers, up to rounding."""
    grads = gradients_of_size(12, size=0.3)
    records, theta = stub_records(grads), torch.zeros(2, grads.shape[1])
    plan = plan_of([6, 6], [4.0, 3.0], sigma=1.5)
    noisy, silent = (
        make(Stub(), records, one_each([6, 6]), p, seed=5, steps=2)
        for p in (plan, plan_of([6, 6], [4.0, 3.0], sigma=0.0))
    )
    streams = [Streams(5).noise(1, i, torch.device("cpu")) for i in (0, 1)]
    for _ in range(2):
        z = torch.stack([noise.normal64(grads.shape[1]).float() for noise in streams])
        mean = silent(theta)[0]
        std = torch.tensor(
            [[plan.noise_std(i) / plan.expected[i]] for i in (0, 1)], dtype=torch.float32
        )
        torch.testing.assert_close(noisy(theta)[0], mean + std * z, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("drawn", [0, 5, 40])
def test_o7_the_divisor_is_the_expected_batch_whatever_was_drawn(drawn: int) -> None:
    grads = gradients_of_size(100)
    expected = 20.0
    oracle = make(Stub(), stub_records(grads), one_each([100]), plan_of([100], expected))
    slots = slots_of(list(range(drawn)))
    g, _ = oracle._release(torch.zeros(1, 7), slots)
    torch.testing.assert_close(
        g[0].double(), reference_sum(grads[:drawn], C) / expected, rtol=1e-5, atol=1e-9
    )


def test_o7_through_a_real_draw() -> None:
    """With equal gradients below C the result is |J|/B, which has the mean 1."""
    value = torch.zeros(60, 7)
    value[:, 0] = C / 2
    stub = Stub(rows=[])
    oracle = make(stub, stub_records(value), one_each([60]), plan_of([60], 12), steps=400)
    seen = []
    for _ in range(400):
        before = len(stub.rows or [])
        g, _ = oracle(torch.zeros(1, 7))
        size = len(stub.rows or []) - before
        assert float(g[0, 0]) == pytest.approx(size * C / 2 / 12, rel=1e-5)
        seen.append(size)
    assert len(set(seen)) > 8
    assert np.mean(seen) == pytest.approx(12, abs=5 * math.sqrt(60 * 0.2 * 0.8 / 400))


def test_each_client_has_its_own_noise_level_and_divisor() -> None:
    width = 50_000
    plan = plan_of([10, 10, 10], [1.0, 4.0, 10.0])
    plan = replace(plan, multipliers=np.array([1.0, 2.0, 0.5]))
    stub, records = Stub(widths=(width,)), stub_records(torch.zeros(30, width))
    g, phi = make(stub, records, one_each([10, 10, 10]), plan, clients=[2, 0, 1])(
        torch.zeros(3, width)
    )
    for row, client in enumerate([2, 0, 1]):
        std = plan.multipliers[client] * C / plan.expected[client]
        assert float(g[row].std()) == pytest.approx(std, rel=0.02)
        assert float(phi[row]) == pytest.approx(std**2, rel=1e-6)
        assert plan.noise_std(client) == plan.mechanism(client).noise_multiplier * C


# --- O6: micro-batches and chunks ---


@pytest.mark.parametrize("max_slots", [1, 3, 16])
def test_o6_micro_batches_do_not_change_the_sum(max_slots: int) -> None:
    model, theta = net()
    records = net_records(16)
    plan = plan_of([9, 7], [9.0, 7.0])
    oracles = [make(model, records, one_each([9, 7]), plan, max_slots=m) for m in (512, max_slots)]
    whole, cut = (oracle(theta.repeat(2, 1))[0] for oracle in oracles)
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-7)


def test_noise_is_added_once_not_for_every_micro_batch() -> None:
    width = 20_000
    records = stub_records(torch.zeros(16, width))
    plan = plan_of([16], 16, sigma=1.0)
    whole, _ = make(Stub((width,)), records, one_each([16]), plan, max_slots=512)(
        torch.zeros(1, width)
    )
    cut, _ = make(Stub((width,)), records, one_each([16]), plan, max_slots=1)(torch.zeros(1, width))
    assert torch.equal(whole, cut)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=25), st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_chunks_cover_everything_once_and_never_cut_a_unit(
    units: list[tuple[int, int]], limit: int
) -> None:
    units = sorted(units)  # as the oracle builds them: client after client
    owner = np.array([client for client, _ in units], dtype=np.int64)
    counts = np.array([count for _, count in units], dtype=np.int64)
    unit = np.repeat(np.arange(len(units)), counts)
    rows = np.random.default_rng(0).permutation(len(unit))
    slots = DrawnBatch(rows, owner[unit], unit, owner, rows * 3, owner + 5)
    chunks = slots.chunks(limit)
    first = 0
    for chunk in chunks:
        size = len(chunk.owner)
        assert size >= 1
        assert len(chunk.row) <= limit or size == 1  # only a single large unit may pass the limit
        assert np.array_equal(
            np.bincount(chunk.unit, minlength=size), counts[first : first + size]
        )  # whole units
        assert np.array_equal(chunk.owner[chunk.unit], chunk.client)
        first += size
    assert first == len(units)
    for name in ("row", "client", "key"):
        parts = [getattr(chunk, name) for chunk in chunks]
        assert np.array_equal(np.concatenate(parts) if parts else np.zeros(0), getattr(slots, name))


def test_no_record_is_dropped_when_more_are_drawn_than_fit() -> None:
    stub = Stub(rows=[])
    make(
        stub,
        stub_records(torch.zeros(50, 7)),
        one_each([30, 20]),
        plan_of([30, 20], [30.0, 20.0]),
        max_slots=4,
    )(torch.zeros(2, 7))
    assert sorted(stub.rows or []) == list(range(50))
    assert stub.calls > 1


# --- non-finite and huge gradients ---


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 5])
def test_a_non_finite_gradient_contributes_exactly_zero(bad: float, where: int) -> None:
    grads = gradients_of_size(6)
    spoilt = grads.clone()
    spoilt[2, where] = bad
    found = summed(Stub(), stub_records(spoilt), torch.zeros(7), list(range(6)))
    rest = summed(Stub(), stub_records(grads), torch.zeros(7), [0, 1, 3, 4, 5])
    torch.testing.assert_close(found, rest, rtol=1e-6, atol=1e-8)
    assert torch.equal(summed(Stub(), stub_records(spoilt), torch.zeros(7), [2]), torch.zeros(7))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_record_of_a_model_touches_nobody_else(bad: float) -> None:
    model, theta = net()
    records = net_records(7)
    x = records.inputs["x"].clone()
    x[4, 1] = bad
    spoilt = Records({"x": x}, records.labels)
    others = [0, 1, 2, 3, 5, 6]
    found = summed(model, spoilt, theta, list(range(7)))
    torch.testing.assert_close(found, summed(model, records, theta, others), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("clip", [C, math.inf])
def test_a_non_finite_record_inside_a_unit_silences_that_unit_only(clip: float) -> None:
    grads = gradients_of_size(6)
    grads[1, 3] = math.nan
    units = [0, 0, 1, 1, 1, 2]
    found = summed(Stub(), stub_records(grads), torch.zeros(7), list(range(6)), clip, unit=units)
    rest = summed(
        Stub(), stub_records(grads), torch.zeros(7), [2, 3, 4, 5], clip, unit=[0, 0, 0, 1]
    )
    torch.testing.assert_close(found, rest, rtol=1e-6, atol=1e-8)
    alone = summed(Stub(), stub_records(grads), torch.zeros(7), [0, 1], clip, unit=[0, 0])
    assert torch.equal(alone, torch.zeros(7))


@pytest.mark.parametrize("size", [1e15, 1e18, 1e19, 1e20, 1e30, 3e38])
@pytest.mark.parametrize("unit", [[0, 1, 2], [0, 0, 1], [0, 1, 1]])
def test_huge_finite_gradients_never_become_nan(size: float, unit: list[int]) -> None:
    grads = torch.zeros(3, 7)
    grads[0] = size
    grads[2, 0] = 0.01
    found = summed(Stub(), stub_records(grads), torch.zeros(7), [0, 1, 2], unit=unit)
    assert found.isfinite().all()
    quiet = summed(Stub(), stub_records(grads), torch.zeros(7), [2])
    assert float((found - quiet).norm()) <= C * (1 + 1e-5)


def test_non_finite_theta_of_one_client_does_not_reach_another() -> None:
    model, theta = net()
    records = net_records(10)
    plan = plan_of([5, 5], 5)
    rows = theta.repeat(2, 1)
    healthy, _ = make(model, records, one_each([5, 5]), plan)(rows)
    rows = rows.clone()
    rows[0] = math.nan
    found, _ = make(model, records, one_each([5, 5]), plan)(rows)
    torch.testing.assert_close(found[1], healthy[1], rtol=1e-6, atol=1e-9)
    assert torch.equal(found[0], torch.zeros_like(found[0]))


# --- units of several records ---


def test_a_unit_is_averaged_inside_and_clipped_once() -> None:
    grads = gradients_of_size(9, size=0.05)
    units = [0, 0, 0, 0, 1, 2, 2, 3, 3]
    found = summed(Stub(), stub_records(grads), torch.zeros(7), list(range(9)), unit=units)
    means = torch.stack([grads[[j for j in range(9) if units[j] == u]].mean(0) for u in range(4)])
    assert float(means.norm(dim=1).max()) > C > float(means.norm(dim=1).min())
    torch.testing.assert_close(found.double(), reference_sum(means, C), rtol=1e-5, atol=1e-7)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=8), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_o3_removing_a_whole_unit_moves_the_sum_by_at_most_c(counts: list[int], seed: int) -> None:
    grads = gradients_of_size(sum(counts), size=5.0, seed=seed)
    units = np.repeat(np.arange(len(counts)), counts)
    gone = seed % len(counts)
    left = [j for j in range(len(units)) if units[j] != gone]
    renumbered = [int(u) - int(u > gone) for u in units[left]]
    everyone = summed(
        Stub(), stub_records(grads), torch.zeros(7), list(range(len(units))), unit=units.tolist()
    )
    without = summed(Stub(), stub_records(grads), torch.zeros(7), left, unit=renumbered)
    assert float((everyone - without).norm()) <= C * (1 + 1e-5)


def test_units_are_drawn_whole_and_by_their_number_not_by_records() -> None:
    counts = np.array([1, 4, 2, 7, 1, 3, 2, 5])
    names = np.repeat(np.arange(8), counts)
    shards = shards_of(np.zeros(len(names), dtype=np.int64), 1, names)
    assert shards.sizes.tolist() == [8]
    stub = Stub(rows=[])
    records = stub_records(torch.zeros(len(names), 7))
    oracle = make(stub, records, shards, plan_of([8], 2.0), steps=2000, max_slots=3)
    times = np.zeros(8)
    for _ in range(2000):
        start = len(stub.rows or [])
        oracle(torch.zeros(1, 7))
        got = np.bincount(names[(stub.rows or [])[start:]], minlength=8)
        assert np.all((got == 0) | (got == counts))  # all of a unit or nothing
        times += got > 0
    assert np.abs(times / 2000 - 0.25).max() < 5 * math.sqrt(
        0.25 * 0.75 / 2000
    )  # large units no oftener


def test_a_unit_without_records_is_refused() -> None:
    """Else an empty unit and one of two records would count as two units of one record."""
    shards = Shards(np.array([0, 2]), np.array([0, 0, 2]), np.array([0, 1]))
    oracle = make(Stub(), stub_records(torch.ones(2, 7)), shards, plan_of([2], 2.0))
    with pytest.raises(ValueError, match="without records"):
        oracle(torch.zeros(1, 7))


# --- O10: frozen weights ---


def test_o10_frozen_weights_are_untouched_and_outside_the_norm() -> None:
    model, theta = net()
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    records = net_records(10)
    oracle = make(model, records, one_each([10]), plan_of([10], 10, sigma=1.0), steps=3)
    for _ in range(3):
        g, _ = oracle(theta.unsqueeze(0))
        assert g.shape == (1, theta.numel())
    assert not any("frozen" in name for name in model.space.names)
    for name, p in model.model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None
    clip = 1e-3  # smaller than every norm, so a clipped gradient has norm C over θ alone
    alone = summed(model, records, theta, [0], clip)
    assert float(alone.double().norm()) == pytest.approx(clip, rel=1e-5)


# --- O11: independent noise ---


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_o11_noise_differs_across_client_round_and_step() -> None:
    width = 20_000
    stub, records, shards = Stub((width,)), stub_records(torch.zeros(6, width)), one_each([3, 3])
    plan = plan_of([3, 3], 1, sigma=1.0)
    drawn: dict[tuple[int, int, int], Tensor] = {}
    for t in (1, 2):
        oracle = make(stub, records, shards, plan, round=t, steps=2)
        for k in (1, 2):
            g, _ = oracle(torch.zeros(2, width))
            drawn |= {(client, t, k): g[client] for client in (0, 1)}
    names = list(drawn)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert abs(correlation(drawn[a], drawn[b])) < 5 / math.sqrt(width), (a, b)


def test_the_second_release_has_fresh_noise() -> None:
    width = 20_000
    oracle = make(
        Stub((width,)),
        stub_records(torch.zeros(3, width)),
        one_each([3]),
        plan_of([3], 1, sigma=1.0, releases=2),
    )
    first, _ = oracle(torch.zeros(1, width))
    second, _ = oracle.again(torch.zeros(1, width))
    assert abs(correlation(first, second)) < 5 / math.sqrt(width)


def test_batches_and_noise_are_separate_streams() -> None:
    """More noise drawn, or none at all, leaves the batches as they were."""
    seen = []
    for sigma, width in ((0.0, 7), (1.0, 7), (1.0, 70)):
        stub = Stub(widths=(width,), rows=[])
        records = stub_records(torch.zeros(50, width))
        oracle = make(stub, records, one_each([50]), plan_of([50], 10, sigma=sigma), steps=5)
        for _ in range(5):
            oracle(torch.zeros(1, width))
        seen.append(stub.rows)
    assert seen[0] == seen[1] == seen[2]


def test_every_client_asks_for_one_batch_and_one_noise_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two generators of one key would give the noise away to whoever learns who was drawn."""
    asked: list[tuple[str, int, int]] = []
    keys: list[bytes] = []
    key = Streams.key

    def spied(self: Streams, purpose: Any, round: int = 0, client: int = 0) -> bytes:
        asked.append((purpose, round, client))
        keys.append(key(self, purpose, round, client))
        return keys[-1]

    monkeypatch.setattr(Streams, "key", spied)
    model, _ = net(dropout=0.5)
    make(
        model,
        net_records(30),
        one_each([10, 10, 10]),
        plan_of([10] * 3, 5, sigma=1.0),
        round=4,
        clients=[2, 0],
    )
    assert sorted(asked) == [
        (p, 4, client) for p in ("batch", "dropout", "noise") for client in (0, 2)
    ]
    assert len(set(keys)) == len(keys)


def test_secret_streams_use_the_cryptographic_noise() -> None:
    plan = plan_of([4], 4, sigma=1.0)
    records = stub_records(torch.zeros(4, 7))
    made = [
        FleetOracle(
            PrivateData(Stub(), records, one_each([4])),
            RoundTerms(plan, Streams(0, secret=True), 1, [0], steps=1),
        )
        for _ in range(2)
    ]
    assert all(isinstance(noise, OsNoise) for oracle in made for noise in oracle._noise)
    assert not torch.equal(made[0](torch.zeros(1, 7))[0], made[1](torch.zeros(1, 7))[0])


# --- the oracle keeps to what was charged ---


def test_again_is_refused_unless_declared() -> None:
    oracle = make(
        Stub(), stub_records(torch.zeros(4, 7)), one_each([4]), plan_of([4], 4, sigma=1.0)
    )
    with pytest.raises(RuntimeError, match="release"):
        oracle.again(torch.zeros(1, 7))
    oracle(torch.zeros(1, 7))
    with pytest.raises(RuntimeError, match="release"):
        oracle.again(torch.zeros(1, 7))


def test_again_is_the_same_batch_and_as_often_as_declared() -> None:
    stub = Stub(rows=[])
    plan = plan_of([40], 10, sigma=1.0, releases=2)
    oracle = make(stub, stub_records(gradients_of_size(40)), one_each([40]), plan, steps=2)
    for _ in range(2):
        start = len(stub.rows or [])
        oracle(torch.zeros(1, 7))
        middle = len(stub.rows or [])
        oracle.again(torch.zeros(1, 7))
        assert (stub.rows or [])[start:middle] == (stub.rows or [])[middle:]
        with pytest.raises(RuntimeError, match="release"):
            oracle.again(torch.zeros(1, 7))
    assert plan.mechanism(0).releases == 2


@pytest.mark.parametrize(
    ("steps", "batches", "releases"), [(1, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 3)]
)
def test_more_draws_than_charged_are_refused(steps: int, batches: int, releases: int) -> None:
    """Further releases of a batch are no further batches."""
    stub = Stub(rows=[])
    plan = plan_of([4], 4, sigma=1.0, batches=batches, releases=releases)
    oracle = make(stub, stub_records(torch.zeros(4, 7)), one_each([4]), plan, steps=steps)
    for _ in range(steps * batches):
        oracle(torch.zeros(1, 7))
    read = len(stub.rows or [])
    with pytest.raises(RuntimeError, match="charged"):
        oracle(torch.zeros(1, 7))
    assert oracle.drawn == steps * batches
    assert len(stub.rows or []) == read  # refused before any record is read


@pytest.mark.parametrize("grid", [False, True])
def test_no_noised_value_is_given_out_before_the_charge_is_on_the_disk(grid: bool) -> None:
    """Each release waits for its charge, and returns nothing if that cannot be written."""
    waited: list[int] = []

    def wait() -> None:
        waited.append(len(waited))
        if len(waited) == 3:
            raise OSError("no space left")

    plan = plan_of([4], 4, sigma=1.0, releases=2)
    model = GridStub() if grid else Stub()
    oracle = FleetOracle(
        PrivateData(model, stub_records(torch.zeros(4, 7)), one_each([4])),
        RoundTerms(plan, Streams(0), 1, [0], steps=2, grid=grid),
        wait_for_charge=wait,
    )
    oracle(torch.zeros(1, 7))
    oracle.again(torch.zeros(1, 7))
    assert waited == [0, 1]
    with pytest.raises(OSError, match="no space"):
        oracle(torch.zeros(1, 7))


# --- the fleet: rows do not depend on who else is there ---


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_clients_numbers_do_not_depend_on_the_fleet(dropout: float) -> None:
    model, theta = net(dropout)
    records = net_records(30)
    shards, plan = one_each([10, 10, 10]), plan_of([10, 10, 10], 6, sigma=0.5)
    together = make(model, records, shards, plan, steps=2)
    apart = {
        i: make(model, records, shards, plan, clients=[i], steps=2, max_slots=4) for i in range(3)
    }
    backwards = make(model, records, shards, plan, clients=[2, 1, 0], steps=2)
    for _ in range(2):
        g, _ = together(theta.repeat(3, 1))
        r, _ = backwards(theta.repeat(3, 1))
        for i in range(3):
            alone, _ = apart[i](theta.unsqueeze(0))
            torch.testing.assert_close(alone[0], g[i], rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(r[2 - i], g[i], rtol=1e-5, atol=1e-7)


def test_dropout_that_is_not_keyed_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, theta = net(0.5)
    monkeypatch.setattr(
        type(model.model.drop), "forward", lambda self, x: F.dropout(x, self.p, training=True)
    )
    records, shards, plan = net_records(30), one_each([10, 10, 10]), plan_of([10, 10, 10], 10)
    g, _ = make(model, records, shards, plan)(theta.repeat(3, 1))
    alone, _ = make(model, records, shards, plan, clients=[1])(theta.unsqueeze(0))
    assert float((alone[0] - g[1]).norm() / g[1].norm()) > 1e-2


def test_keys_differ_by_record_step_round_client_and_purpose() -> None:
    model, theta = net(0.5)
    shards, plan = one_each([50, 50]), plan_of([50, 50], 50)
    keys: list[np.ndarray] = []

    def note(given: Tensor | None) -> None:
        assert given is not None
        keys.append(given.numpy())

    def view(inputs: Mapping[str, Tensor], given: Tensor) -> dict[str, Tensor]:
        note(given)
        return dict(inputs)

    plain = model.grads

    def grads(
        theta: Tensor, client: Tensor, inputs: Any, labels: Tensor, given: Tensor | None = None
    ) -> list[Tensor]:
        note(given)
        return plain(theta, client, inputs, labels, given)

    model.grads = grads  # type: ignore[method-assign]
    for t in (1, 2):
        oracle = FleetOracle(
            PrivateData(model, net_records(100), shards, Augmentations(view)),
            RoundTerms(plan, Streams(0), t, [0, 1], steps=2),
        )
        for _ in range(2):
            oracle(theta.repeat(2, 1))
    everything = np.concatenate(keys)
    assert len(np.unique(everything)) == len(everything) == 800


def test_a_view_is_what_the_gradient_is_taken_of() -> None:
    model, theta = net()
    plan, shards = plan_of([12], 12, sigma=0, clip=math.inf), one_each([12])
    records = net_records(12)
    doubled = Records({"x": 2 * records.inputs["x"]}, records.labels)

    def view(inputs: Mapping[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        return {name: 2 * x for name, x in inputs.items()}

    oracle = FleetOracle(
        PrivateData(model, records, shards, Augmentations(view)),
        RoundTerms(plan, Streams(0), 1, [0], steps=1),
    )
    seen, _ = oracle(theta.unsqueeze(0))
    torch.testing.assert_close(
        seen[0], loop_gradients(model, theta, doubled).mean(0), rtol=1e-5, atol=1e-7
    )
