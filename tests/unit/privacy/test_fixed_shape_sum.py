"""Passes of a fixed shape give the sums of passes of any size, and unused slots add nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dpfed import accel
from dpfed.accel import gradient_matrices as matrices_module
from dpfed.accel.gradient_matrices import sum_of_parts, three_parts, weighted_sums
from dpfed.config import load
from dpfed.model.per_sample import row_layout as layout_module
from dpfed.model.per_sample.batched_layers import BatchedConv2d
from dpfed.model.per_sample.compiled import repeated_layers
from dpfed.privacy.clipping import Clipping, UnitRows, clip_and_sum, row_norms
from dpfed.privacy.fixed_shape_sum import FixedSum, PassShape, passes_of, slots_for
from dpfed.registry import registry
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job.job import Job, prepare
from dpfed.training.job.model import worth_compiling
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import aggregate, choose

torch.set_num_threads(1)
SMALL = [
    "model.name=linear",
    "run.rounds=2",
    "run.participation=0.5",
    "run.device=cpu",
    "algorithm.lr=0.1",
]


def job_of(*overrides: str) -> Job:
    return prepare(load("digits", [*SMALL, *overrides], registry()))


# --- how many slots ---


def work(slots: int, mean: float) -> float:
    """M·E[⌈X/M⌉], at least one pass, summed term by term."""
    total, chance = 0.0, math.exp(-mean)
    for k in range(int(mean + 12 * math.sqrt(mean) + 20)):
        total += chance * slots * max(1, math.ceil(k / slots))
        chance *= mean / (k + 1)
    return total


@pytest.mark.parametrize(("mean", "wanted"), [(80, 96), (16, 24)])
def test_slots_are_those_of_the_least_work(mean: int, wanted: int) -> None:
    choices = [m for m in range(8, 400, 8) if m >= mean]
    assert slots_for(mean) == min(choices, key=lambda m: work(m, mean))
    assert abs(slots_for(mean) - wanted) <= 8


@given(st.floats(0.1, 3000))
@settings(max_examples=60, deadline=None)
def test_slots_hold_the_mean_and_not_much_more(mean: float) -> None:
    slots = slots_for(mean)
    assert slots % 8 == 0
    assert mean <= slots <= mean + 4 * math.sqrt(mean) + 16


# --- one pass ---


def both(
    sizes: Sequence[int],
    records: int,
    slots: int,
    clip: float,
    rule: Clipping,
    bad: int | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(through slots, through clip_and_sum), for the same gradients of clients 0..2."""
    g = torch.Generator().manual_seed(1)
    grads = [torch.randn(slots, n, generator=g) for n in sizes]
    client = torch.randint(0, 3, (slots,), generator=g)
    if bad is not None and bad < slots:
        grads[0][bad, 0] = float("nan")
    valid = (torch.arange(slots) < records).long()
    found = clip_and_sum(grads, UnitRows(client, valid, 3), torch.tensor(clip), rule)
    mine = [x[:records] for x in grads]
    units = UnitRows(client[:records], torch.ones(records), 3)
    return found, clip_and_sum(mine, units, clip, rule)


@pytest.mark.parametrize("mode", ["flat", "automatic", "quantile"])
@pytest.mark.parametrize("records", [0, 1, 2, 5, 16])
@pytest.mark.parametrize("bad", [None, 0, 15])
def test_slots_equal_the_reference(mode: str, records: int, bad: int | None) -> None:
    """A record that is not finite adds nothing, and neither does one in a slot that is not used."""
    (total, count), (wanted, counted) = both((3, 4), records, 16, 1.5, Clipping(mode), bad)  # type: ignore[arg-type]
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(count, counted)
    assert total.isfinite().all()


DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no triton")
WAYS = ["plain", pytest.param("kernels", marks=with_triton)]


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "plain":
        monkeypatch.setattr(matrices_module, "kernels_for", lambda name, rows: None)
    else:
        monkeypatch.setattr(accel, "interpreted", DEVICE.type == "cpu")
        assert accel.kernels_for("rows", torch.zeros(1, 1, device=DEVICE)) is not None


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["flat", "automatic", "quantile"])
def test_what_is_no_number_or_not_used_adds_exactly_nothing(
    mode: str, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record for record: each has a client of its own, and one of them all others."""
    take(way, monkeypatch)
    g = torch.Generator().manual_seed(2)
    grads = [
        torch.randn(12, n, generator=g).to(dtype) for n in (5, 4500)
    ]  # neither fills whole lines of memory
    grads[0][1, 0], grads[1][2, 4499], grads[1][3, 7] = math.nan, math.inf, -math.inf
    grads[1][4] = 1e30  # a number, its square is none in float32
    grads[1][5, ::600] = 1.2e19  # eight squares that are numbers, and their sum is none
    grads[0][6], grads[1][6] = 0.0, 0.0
    grads[0][8], grads[1][9, 3], grads[1][10] = math.nan, math.inf, 1e30
    grads = [x.to(DEVICE) for x in grads]
    valid, client = torch.tensor([1] * 8 + [0] * 4, device=DEVICE), torch.arange(12, device=DEVICE)
    rule, clip = Clipping(mode), torch.linspace(0.5, 3.0, 12, device=DEVICE)  # type: ignore[arg-type]
    total, count = clip_and_sum([x.clone() for x in grads], UnitRows(client, valid, 12), clip, rule)
    every = torch.cat(grads, dim=1).double()
    for slot in range(12):
        if slot in (0, 7):
            wanted = every[slot] * min(1.0, float(clip[slot]) / float(every[slot].norm()))
            if mode == "automatic":
                wanted = every[slot] * (
                    float(clip[slot]) / (float(every[slot].norm()) + rule.stability)
                )
            torch.testing.assert_close(total[slot].double(), wanted, rtol=2e-6, atol=0)
            assert float(total[slot].double().norm()) <= float(clip[slot]) * (1 + 1e-6)
            assert count[slot].item() == -0.5
        else:
            assert total[slot].eq(0).all(), slot
            assert count[slot].item() == (
                0.5 if slot == 6 else 0.0
            )  # a gradient of zeros is one below C
    one_client = UnitRows(torch.zeros_like(client), valid, 1)
    together, counted = clip_and_sum(grads, one_client, clip, rule)
    torch.testing.assert_close(together[0], total.sum(0))
    assert counted.item() == count.sum().item() == -0.5


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["flat", "automatic", "quantile"])
def test_large_tensors_alone_give_what_all_give_together(
    mode: str, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm, and the check that it is finite, cover the whole vector."""
    take(way, monkeypatch)
    g = torch.Generator().manual_seed(4)
    sizes = (5, 640, 70, 4160, 64, 300)
    grads = [torch.randn(8, n, generator=g).to(DEVICE, dtype) for n in sizes]
    grads[1][1, 3], grads[3][2, 4159], grads[5][3, 0] = (
        math.nan,
        math.inf,
        -math.inf,
    )  # alone, alone, together
    grads[1][4, ::80], grads[3][4, ::520] = 8e18, 8e18  # squares that are no number only together
    grads[4] = (
        torch.randn(64, 8, generator=g).to(DEVICE, dtype).t()
    )  # large, but rows do not lie one after another
    valid = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0], device=DEVICE)
    client, clip = torch.arange(8, device=DEVICE), torch.linspace(0.5, 300.0, 8, device=DEVICE)
    found = []
    for large, groups in ((10**9, [[0, 1, 2, 3, 4, 5]]), (64, [[1], [3], [0, 2, 4, 5]])):
        monkeypatch.setattr(matrices_module, "LARGE", large)
        assert matrices_module.grouped(grads) == groups
        given_ = [x.clone() if x.is_contiguous() else x for x in grads]
        found.append(clip_and_sum(given_, UnitRows(client, valid, 8), clip, Clipping(mode)))  # type: ignore[arg-type]
    (one, counted), (other, counted_alone) = found
    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    assert torch.equal(counted, counted_alone)
    norms = other.double().norm(dim=1)
    assert (norms <= clip * (1 + 1e-6)).all()
    assert [bool(n) for n in norms] == [slot in (0, 5, 6) for slot in range(8)]


def test_gradients_by_themselves_are_not_copied() -> None:
    large, small = torch.ones(3, matrices_module.LARGE), torch.ones(3, 5)
    assert matrices_module.matrix_of([large]) is large
    assert matrices_module.matrix_of([small]).shape == (3, 64)
    assert matrices_module.grouped([large[:, :-1], small, large]) == [[2], [0, 1]]


@with_triton
@pytest.mark.parametrize("state", ["wrong", "failing"])
def test_kernels_that_are_not_right_are_not_used(
    state: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dpfed.accel import rows as row_kernels

    def right(device: torch.device, dtype: torch.dtype) -> bool:
        if state == "failing":
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")
        return False

    monkeypatch.setattr(accel, "interpreted", True)
    monkeypatch.setattr(row_kernels, "right", right)
    accel._checked_kernels.cache_clear()
    rows = torch.tensor([[3.0, 4.0], [math.nan, 1.0]])
    assert row_norms([rows])[0].item() == 5.0
    joined = matrices_module.GradientMatrices([rows], [[0]], [2])
    joined.clear(torch.tensor([True, False]))
    accel._checked_kernels.cache_clear()
    assert rows.tolist() == [[3.0, 4.0], [0.0, 1.0]]
    assert len(caplog.records) == 1
    assert "\n" not in caplog.text.strip()
    assert {"wrong": "rows of gradients are not used", "failing": "C compiler"}[
        state
    ] in caplog.text


def test_without_a_gpu_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "_checked_kernels", MagicMock(side_effect=AssertionError))
    assert accel.kernels_for("rows", torch.zeros(1, 1)) is None


def test_half_precision_gradients_are_clipped_in_full_precision() -> None:
    g = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)).bfloat16() * 50
    units = UnitRows(torch.arange(8), torch.ones(8), 8)
    total, _ = clip_and_sum([g], units, torch.tensor(0.1), Clipping())
    assert total.dtype == torch.float32
    assert float(total.double().norm(dim=1).max()) <= 0.1 * (1 + 1e-6)
    torch.testing.assert_close(
        total, g.float() * (0.1 / g.float().norm(dim=1, keepdim=True)), rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 255, 257, 10_000, 300_007])
def test_long_gradients_are_clipped_as_exactly_as_short_ones(size: int, dtype: torch.dtype) -> None:
    """A few large numbers, or many equal ones, are the worst case of adding squares in order."""
    g = torch.full((3, size), 0.3)
    g[1] = 1e-3
    g[1, :8] = 30.0
    g[2] = torch.randn(size, generator=torch.Generator().manual_seed(0))
    g = g.to(dtype)
    units = UnitRows(torch.arange(3), torch.ones(3), 3)
    total, _ = clip_and_sum([g], units, torch.tensor(1e-3), Clipping())
    norm = total.double().norm(dim=1)
    assert float(norm.max()) <= 1e-3 * (1 + 1e-6)
    assert float(norm.min()) >= 1e-3 * (1 - 1e-6)


def test_three_bfloat16_numbers_are_a_float32() -> None:
    """The three bfloat16 parts of a weight add up to the weight in all its digits."""
    weights = torch.rand(3, 64, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.randint(
        -8, 3, (3, 64)
    )
    parts = matrices_module.three_parts(weights)
    assert parts.dtype == torch.bfloat16
    joined = parts.double().view(3, 3, 64).sum(0)
    assert float(((joined - weights.double()).abs() / weights.double()).max()) < 2.0**-23
    rows = torch.randn(64, 5)
    torch.testing.assert_close(weighted_sums(weights, [rows])[0], weights @ rows)


@given(st.integers(0, 70), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_passes_hold_every_record_once(count: int, slots: int) -> None:
    arrays = {name: np.arange(1, count + 1) for name in ("row", "client", "dropout", "augment")}
    passes = passes_of(arrays, slots, torch.device("cpu"))
    assert len(passes) == max(1, math.ceil(count / slots))
    assert all(p.packed.shape == (5, slots) for p in passes)
    used = torch.cat([p.packed[2] for p in passes]).bool()
    for row in (0, 1, 3, 4):
        assert torch.cat([p.packed[row] for p in passes])[used].tolist() == list(
            range(1, count + 1)
        )


# --- through the oracle and the engine ---


def after(job: Job, rounds: int = 2) -> Tensor:
    state, fleet = first_state(job), Fleet(job)
    for t in range(1, rounds + 1):
        cohort = choose(job, t, np.arange(job.schedule.clients), np.zeros(job.schedule.clients))
        mean, answered = fleet.run_cohort(t, state, cohort)
        state = aggregate(job, t, state, cohort, mean, answered)
    return state.theta


VARIANTS = [
    [],
    ["algorithm.name=dp-fedsam", "algorithm.lr=0.1"],
    ["algorithm.name=dp-scaffold", "algorithm.lr=0.1"],
    ["privacy.clip_mode=quantile"],
    ["privacy.clip_mode=automatic"],
    ["data.augment=crop_flip"],
    ["data.augment=crop_flip", "data.views=3"],
    ["algorithm.name=dp-fedadamw", "algorithm.lr=0.01", "algorithm.bc_level=block"],
]


@pytest.mark.parametrize("slots", [8, 200])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_run_does_not_depend_on_the_slots(variant: list[str], slots: int) -> None:
    """8 slots for about 80 records: ten passes and more, none of them cut."""
    plain, fixed = job_of(*variant), job_of(*variant, f"run.slots={slots}")
    assert Fleet(plain)._fixed_sum([0, 1]) is None
    assert isinstance(Fleet(fixed)._fixed_sum([0, 1]), FixedSum)
    torch.testing.assert_close(after(fixed), after(plain), rtol=1e-5, atol=1e-6)


def test_dropout_is_the_same_in_any_slot() -> None:
    base = [
        "model.name=glyph-vit",
        "model.lora.r=2",
        "run.local_steps=3",
        "algorithm.name=dp-fedavg",
        "algorithm.lr=0.3",
    ]
    options = [*base, "model.lora.dropout=0.3"]
    plain = after(job_of(*options), 1)
    torch.testing.assert_close(
        after(job_of(*options, "run.slots=40"), 1), plain, rtol=1e-4, atol=1e-6
    )
    without = after(job_of(*base), 1)
    assert float((plain - without).norm()) > 1e-3  # and it is on


def test_units_of_several_records_take_the_other_way() -> None:
    """A unit is averaged before it is clipped, which slots of single records cannot do."""
    job = job_of("run.slots=24")
    shards = replace(
        job.private.shards,
        units=job.private.shards.units[::2],
        clients=job.private.shards.clients // 2,
    )
    sizes = np.diff(shards.clients)
    plan = replace(job.plan, sizes=sizes, expected=job.plan.rates * sizes)
    halved = replace(job, private=replace(job.private, shards=shards), plan=plan)
    plain = replace(halved, config=replace(job.config, run=replace(job.config.run, slots="auto")))
    assert torch.equal(after(halved), after(plain))


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
@pytest.mark.parametrize("way", WAYS)
def test_sums_of_a_convolutional_network_trained_in_full(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products and pieces give the gradients of each record alone, as plain convolutions."""
    options = ["model.name=gn-resnet18", "model.width=8", "model.groups=4", "run.slots=8"]
    job = job_of(*options)
    theta = job.theta + 0.05 * torch.randn(
        2, job.space.size, generator=torch.Generator().manual_seed(0)
    )
    rows, client = np.arange(5), np.array([0, 1, 1, 0, 1])
    monkeypatch.setattr(BatchedConv2d, "_product_is_faster", lambda self, x: False)
    inputs, labels = job.private.records.take(torch.from_numpy(rows))
    alone = [
        torch.cat(
            job.model.grads(
                theta[c : c + 1],
                torch.tensor([0]),
                {name: x[i : i + 1] for name, x in inputs.items()},
                labels[i : i + 1],
            ),
            dim=1,
        )[0]
        for i, c in enumerate(client)
    ]
    clip = 0.5 * float(alone[0].norm())
    wanted = torch.zeros_like(theta)
    for c, grad in zip(client, alone, strict=True):
        wanted[c] += grad * min(1.0, clip / float(grad.norm()))
    monkeypatch.setattr(BatchedConv2d, "_product_is_faster", lambda self, x: True)
    monkeypatch.setattr(layout_module, "LARGE", 100)
    monkeypatch.setattr(matrices_module, "LARGE", 1000)
    take(way, monkeypatch)
    again = job_of(*options)
    assert again.model._gradient_layout.by_pieces
    shape = PassShape(2, 8, again.space.size)
    pass_ = FixedSum(again.model, again.private.records, Clipping(), None, shape)
    arrays = {"row": rows, "client": client, "dropout": 0 * rows, "augment": 0 * rows}
    grouped, groups = matrices_module.grouped, []
    monkeypatch.setattr(
        matrices_module, "grouped", lambda grads: groups.append(grouped(grads)) or groups[-1]
    )
    total, _ = pass_.sums(theta, arrays, clip)
    torch.testing.assert_close(total, wanted, rtol=1e-3, atol=1e-5 * clip)
    assert [len(g) > 10 for g in groups] == [True]


# --- precision and compilation ---


def test_bfloat16_is_near_float32_and_keeps_its_state_in_float32() -> None:
    options = ["model.name=glyph-vit", "model.lora.r=2", "run.local_steps=2", "run.slots=64"]
    one, half = job_of(*options), job_of(*options, "run.precision=bf16")
    assert half.model.dtype == torch.bfloat16
    assert half.theta.dtype == torch.float32
    a, b = after(one, 1), after(half, 1)
    assert b.dtype == torch.float32
    moved = (a - one.theta).norm()
    assert 0 < float((a - b).norm() / moved) < 0.1
    assert not torch.equal(a, b)


def test_a_compiled_model_gives_the_same_gradients() -> None:
    options = ["model.name=glyph-vit", "model.lora.r=2", "run.slots=24"]
    plain, compiled = job_of(*options), job_of(*options)
    counted = CompileCounterWithBackend("aot_eager")
    compiled.model.compile(backend=counted)
    client, rows = torch.arange(24) % 3, torch.arange(24)
    theta = plain.theta + 0.02 * torch.randn(
        3, plain.space.size, generator=torch.Generator().manual_seed(0)
    )
    for _ in range(2):
        inputs, labels = plain.private.records.take(rows)
        for a, b in zip(
            plain.model.grads(theta, client, inputs, labels),
            compiled.model.grads(theta, client, inputs, labels),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    layers = len(repeated_layers(compiled.model.model))
    assert (
        1 <= counted.frame_count <= 2 < layers
    )  # layers of one kind are one program; the first has inputs without gradient


@pytest.mark.parametrize("model", ["linear", "glyph-vit"])
def test_a_model_that_does_not_compile_runs_without(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(function: object, **options: object) -> object:
        def fail(*arguments: object) -> object:
            raise RuntimeError("no such kernel")

        return fail

    options = (
        ["run.slots=24"]
        if model == "linear"
        else ["model.name=glyph-vit", "model.lora.r=2", "run.slots=24"]
    )
    plain = after(job_of(*options), 1)
    monkeypatch.setattr(torch, "compile", broken)
    assert torch.equal(after(job_of(*options, "run.compile=true"), 1), plain)
    hows = ["as a whole"] if model == "linear" else ["layer by layer", "as a whole"]
    for how in hows:
        assert (
            caplog.text.count(f"cannot be compiled {how} and runs without it: no such kernel") == 1
        )


def test_compilation_is_left_to_runs_that_repay_it() -> None:
    config = load("digits", [], registry())
    assert not worth_compiling(config, torch.device("cuda"))
    long = replace(config, run=replace(config.run, rounds=1000, local_steps=20))
    assert worth_compiling(long, torch.device("cuda"))
    assert not worth_compiling(long, torch.device("cpu"))


# --- capture ---


def test_a_pass_is_captured_on_the_device_of_its_tensors_and_whoever_else_is_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread may have another current device. A capture there would be empty, and every replay
    would return the sums of the first batch.
    """
    job = job_of("run.slots=16")
    shape = PassShape(1, 16, job.space.size)
    fixed = FixedSum(job.model, job.private.records, job.plan.clipping, None, shape)
    where: list[object] = ["another"]
    seen: list[tuple[str, object, object]] = []

    @contextmanager
    def on(device: object) -> Iterator[None]:
        where.append(device)
        yield
        where.pop()

    def told(name: str) -> Callable[..., object]:
        def call(*given: object, **named: object) -> object:
            seen.append((name, where[-1], named.get("capture_error_mode")))
            return MagicMock()

        return call

    monkeypatch.setattr(torch.cuda, "device", on)
    for name in ("Stream", "current_stream", "stream", "synchronize", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, told(name))
    fixed._capturing = True
    fixed.load(job.theta.unsqueeze(0), 1.0)
    fixed._capture()
    assert fixed._graph is not None
    assert {device for _, device, _ in seen} == {job.private.records.labels.device}
    assert ("graph", job.private.records.labels.device, "thread_local") in seen


def test_a_captured_pass_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture skips the guards of compilers; the fourth computation is the captured one."""
    job = job_of("run.slots=16")
    shape = PassShape(1, 16, job.space.size)
    fixed = FixedSum(job.model, job.private.records, job.plan.clipping, None, shape)
    for name in (
        "device",
        "Stream",
        "current_stream",
        "stream",
        "synchronize",
        "CUDAGraph",
        "graph",
    ):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    rows = np.arange(16)
    arrays = {
        name: rows if name == "row" else np.zeros_like(rows)
        for name in ("row", "client", "dropout", "augment")
    }
    theta = job.theta.unsqueeze(0)
    wanted, _ = fixed.sums(theta, arrays, 1.0)
    plain, computed = fixed._compute, [0]

    def compute() -> tuple[Tensor, Tensor]:
        computed[0] += 1
        total, count = plain()
        return (total * 1.5 if computed[0] == 4 else total), count

    monkeypatch.setattr(fixed, "_compute", compute)
    fixed._capturing = True
    found, _ = fixed.sums(theta, arrays, 1.0)
    torch.testing.assert_close(found, wanted)
    assert not fixed._capturing


def test_three_parts_of_each_clients_weights_come_together_again() -> None:
    """The sum of a client is made of its own three parts, as on the tensor cores of a GPU."""
    generator = torch.Generator().manual_seed(0)
    weights, rows = (
        torch.rand(3, 7, generator=generator),
        torch.randn(7, 5, generator=generator).bfloat16(),
    )
    parts = three_parts(weights)
    assert parts.dtype == torch.bfloat16
    torch.testing.assert_close(parts.float().view(3, 3, 7).sum(0), weights, rtol=2**-22, atol=0)
    torch.testing.assert_close(
        sum_of_parts(parts.float() @ rows.float()), weights @ rows.float(), rtol=1e-6, atol=1e-6
    )


def test_squares_of_many_tensors_are_added_in_double_precision() -> None:
    """In float32, 2^24 plus 64 times 1 stays 2^24, and the norm would be too small."""
    large, ones = torch.tensor([[4096.0]]), torch.tensor([[1.0]])
    assert float(row_norms([large, *[ones] * 64])) == pytest.approx((2**24 + 64) ** 0.5, rel=1e-7)
    assert float(row_norms([large, *[ones] * 64])) > 4096
    spread = torch.zeros(1, 65 * 256)
    spread[0, ::256] = 1.0
    spread[0, 0] = 4096.0
    assert float(row_norms([spread])) > 4096
