"""Clipping rules: the bound on one unit, the noise of sum and count, and the path of C."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm as gauss
from torch import Tensor

from dpfed.config import build
from dpfed.data.partition import shards_of
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError
from dpfed.privacy.accounting.pld import delta_at
from dpfed.privacy.clipping import CLIPS, ClipMode, Clipping, UnitRows, clip_and_sum, unit_means
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.noise import Streams
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import PrivateData, Records
from dpfed.registry import registry
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job.job import Job, prepare
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import aggregate, choose
from dpfed.training.run import run

torch.set_num_threads(1)

PER_UNIT: list[ClipMode] = ["flat", "automatic", "quantile"]
QUANTILE = Clipping("quantile")


# --- helpers ---


def added(
    grads: Tensor,
    rule: Clipping,
    clip: float = 1.0,
    unit: list[int] | None = None,
    owner: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Clip and sum gradients `[M, P]` as two tensors; by default each is a unit of client 0."""
    unit = list(range(len(grads))) if unit is None else unit
    owner = [0] * (max(unit) + 1) if owner is None else owner
    parts = list(grads.split([1, grads.shape[1] - 1], dim=1))
    means, finite = unit_means(parts, torch.tensor(unit), len(owner))
    return clip_and_sum(means, UnitRows(torch.tensor(owner), finite, max(owner) + 1), clip, rule)


class Given:
    """A model in which the input of a record is its gradient, times theta[0] on request."""

    has_dropout = False

    def __init__(self, *widths: int, by_theta: bool = False) -> None:
        self.space = SimpleNamespace(shapes=[torch.Size([n]) for n in widths])
        self._widths, self._by_theta = list(widths), by_theta

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        g = inputs["g"] * theta[client, :1] if self._by_theta else inputs["g"]
        return list(g.split(self._widths, dim=1))


def plan_of(
    sizes: list[int], batch: float, sigma: float, rule: Clipping, clip: float = 1.0, **more: Any
) -> Plan:
    expected = np.full(len(sizes), float(batch))
    rates, multipliers = expected / np.array(sizes), np.full(len(sizes), float(sigma))
    keys = {"sampling": "poisson", "clipping": rule, **more}
    return Plan(
        clip=clip,
        sizes=np.array(sizes),
        rates=rates,
        expected=expected,
        multipliers=multipliers,
        **keys,
    )


def oracle_of(
    model: Given, grads: Tensor, plan: Plan, steps: int = 1, seed: int = 0, max_slots: int = 512
) -> FleetOracle:
    owner = np.repeat(np.arange(plan.clients), plan.sizes)
    records = Records({"g": grads}, torch.arange(len(grads)))
    clients = range(plan.clients)
    return FleetOracle(
        PrivateData(model, records, shards_of(owner, plan.clients)),
        RoundTerms(plan, Streams(seed), 1, clients, steps),
        PassLimits(max_slots),
    )


def random_gradients(count: int, width: int = 5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 1, count).unsqueeze(1)
    return (
        torch.randn(count, width, generator=generator)
        * sizes[torch.randperm(count, generator=generator)]
    )


def features(records: int = 120) -> Source:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(records + 40, 4)).astype(np.float32)
    y = (x @ rng.normal(size=(4, 3))).argmax(1)
    train = Table({"features": x[:records]}, y[:records])
    return Source(train, Table({"features": x[records:]}, y[records:]), ("a", "b", "c"), "features")


def config_of(**sections: dict[str, Any]) -> Any:
    raw: dict[str, dict[str, Any]] = {
        "data": {"clients": 4, "partition": "iid"},
        "model": {"name": "linear", "liveness": False},
        "algorithm": {"name": "dp-fedavg"},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 10},
        "run": {
            "rounds": 3,
            "local_steps": 2,
            "participation": 0.5,
            "eval_every": 3,
            "device": "cpu",
        },
    }
    return build(
        {name: {**table, **sections.get(name, {})} for name, table in raw.items()}, registry()
    )


def trained(job: Job, rounds: int = 3) -> tuple[Tensor, float]:
    """θ and C after some rounds, without ledger or evaluation."""
    state, fleet = first_state(job), Fleet(job)
    for t in range(1, rounds + 1):
        cohort = choose(job, t, np.arange(job.schedule.clients), np.zeros(job.schedule.clients))
        state = aggregate(job, t, state, cohort, *fleet.run_cohort(t, state, cohort))
    return state.theta, state.clip


# --- one unit's share of the sum: O2, O3 ---


def test_automatic_by_hand() -> None:
    rule = Clipping("automatic", stability=5.0)
    total, _ = added(torch.tensor([[3.0, 4.0, 0.0]]), rule, clip=2.0)
    assert total[0].tolist() == pytest.approx([0.6, 0.8, 0.0])  # 2/(5 + 5)
    total, _ = added(torch.tensor([[0.0, 0.0, 0.0], [3.0, 0.0, 4.0]]), rule, clip=2.0)
    assert total[0].tolist() == pytest.approx([0.6, 0.0, 0.8])  # a zero gradient adds zero


def test_automatic_does_not_blow_up_what_single_precision_takes_for_zero() -> None:
    """The squares of 2e-23 underflow, so the norm is 0; s = 1e-30 would add 2e10 C."""
    g = torch.full((1, 1_000_000), 2e-23)
    total, _ = added(g, Clipping("automatic", stability=1e-12), 0.1)
    assert float(total.double().norm()) < 0.1


@given(
    st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=4, max_size=4),
    st.sampled_from([1e-12, 0.1, 1e6]),
    st.sampled_from([1e-12, 1e-6, 0.01, 10.0]),
)
def test_automatic_gives_every_gradient_less_than_c(
    values: list[float], clip: float, stability: float
) -> None:
    g = torch.tensor([values])
    total, _ = added(g, Clipping("automatic", stability=stability), clip)
    size = float(g.double().norm())
    assert float(total.double().norm()) <= clip * (1 + 1e-6)
    assert float(total.double().norm()) == pytest.approx(
        clip * size / (size + stability), rel=1e-4, abs=1e-30
    )
    assert total.isfinite().all()


@pytest.mark.parametrize("mode", PER_UNIT)
def test_o3_removing_a_unit_moves_the_sum_by_at_most_c_and_the_count_by_half(
    mode: ClipMode,
) -> None:
    """Units of one to three records, one of them with a NaN: computed on the whole vector."""
    grads = random_gradients(12) * 3
    unit = [0, 0, 0, 1, 2, 2, 3, 4, 5, 5, 5, 6]
    grads[4, 2] = math.nan  # in unit 2
    rule = Clipping(mode)
    total, count = added(grads, rule, 1.0, unit)
    for gone in range(7):
        rows = [j for j, u in enumerate(unit) if u != gone]
        left = [u - (u > gone) for u in unit if u != gone]
        less, fewer = added(grads[rows], rule, 1.0, left)
        moved = float((total - less).double().norm())
        assert moved <= 1.0 + 1e-5
        if gone == 2:
            assert moved < 1e-6
            assert float((count - fewer).abs()) == 0.0  # the whole unit counts for nothing
        else:
            assert moved > 1e-4
            assert float((count - fewer).abs()) == 0.5


@pytest.mark.parametrize("mode", PER_UNIT)
def test_o2_making_one_record_a_million_times_larger_moves_the_sum_by_at_most_2c(
    mode: ClipMode,
) -> None:
    grads = random_gradients(8)
    before, _ = added(grads, Clipping(mode))
    for j in range(8):
        louder = grads.clone()
        louder[j] *= 1e6
        assert float((added(louder, Clipping(mode))[0] - before).norm()) <= 2.0 + 1e-5


@pytest.mark.parametrize("mode", ["flat", "quantile"])
@pytest.mark.parametrize("clip", [1e-3, 1.0, 50.0])
def test_a_gradient_just_above_c_is_cut_to_c_and_one_at_c_is_not_touched(
    mode: ClipMode, clip: float
) -> None:
    direction = torch.tensor([[0.6, 0.0, 0.8]])
    for factor in (1.0, 1.0001, 1.005, 1.02, 2.0):
        total, _ = added(direction * clip * factor, Clipping(mode), clip)
        assert float(total.norm()) == pytest.approx(clip, rel=2e-6)
    total, _ = added(direction * clip * 0.999, Clipping(mode), clip)
    assert float(total.norm()) == pytest.approx(0.999 * clip, rel=1e-6)


@pytest.mark.parametrize("grid", [False, True])
def test_float64_rows_and_rows_on_the_grid_keep_the_bound_to_float64_precision(grid: bool) -> None:
    clip = 0.1
    grads = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    units = UnitRows(torch.arange(40), torch.ones(40), 40)
    if grid:
        step = 2.0**-50
        steps = torch.full((40,), step, dtype=torch.float64)
        total, _ = clip_and_sum([grads], units, clip, Clipping(), steps)
        assert total.dtype == torch.int64
        total = total.double() * step
    else:
        total, _ = clip_and_sum([grads.double()], units, clip, Clipping())
        assert total.dtype == torch.float64
    norms = total.norm(dim=1)
    assert float(norms.max()) <= clip * (1 + 1e-12)
    assert float(norms.min()) >= clip * (1 - 1e-12)


# --- the count ---


def test_the_count_by_hand() -> None:
    norms = torch.tensor([0.5, 1.0, 2.0, 0.0, 3.0])
    grads = norms.unsqueeze(1) * torch.tensor([0.6, 0.8])
    _, count = added(grads, QUANTILE, 1.0, owner=[0, 0, 0, 1, 1])
    assert count.tolist() == [[0.5], [0.0]]  # 2 below, 1 above; 1 below (zero), 1 above
    grads[0] = math.inf
    _, count = added(grads, QUANTILE, 1.0, owner=[0, 0, 0, 1, 1])
    assert count.tolist() == [[0.0], [0.0]]  # no longer counted, neither below nor above


def test_a_unit_is_counted_once_by_the_norm_of_its_mean() -> None:
    grads = torch.tensor([[3.0, 0.0], [-1.0, 0.0], [2.0, 0.0]])
    _, count = added(grads, QUANTILE, 1.0, unit=[0, 0, 1])
    assert count.tolist() == [[0.0]]  # mean 1 is below, 2 is above
    _, count = added(grads, QUANTILE, 0.9, unit=[0, 0, 1])
    assert count.tolist() == [[-1.0]]


def test_the_share_is_unbiased_whatever_was_drawn_and_divides_by_the_expected_batch() -> None:
    """R=20, of which 12 are below: mean over 5000 draws, and |J| = 0, 5, 20 by hand."""
    grads = torch.tensor([[0.5, 0.0]] * 12 + [[2.0, 0.0]] * 8)
    plan = plan_of([20] * 200, 8, 0.0, QUANTILE)
    oracle = oracle_of(Given(1, 1), grads.repeat(200, 1), plan, steps=25)
    for _ in range(25):
        oracle(torch.zeros(200, 2))
    assert float(oracle.below.mean()) == pytest.approx(0.6, abs=0.01)
    plan, theta = plan_of([20], 8, 0.0, QUANTILE), torch.zeros(1, 2)
    for positions, share in (([], 0.5), (range(5), 0.5 + 2.5 / 8), (range(20), 0.5 + 2.0 / 8)):
        one = oracle_of(Given(1, 1), grads, plan)
        one._batches = [iter([np.array(list(positions), dtype=np.int64)])]
        one(theta)
        assert float(one.below) == pytest.approx(share)


def test_the_count_does_not_depend_on_chunks() -> None:
    plan = plan_of([6, 9], 4, 0.0, QUANTILE)
    shares = []
    for slots in (1, 2, 512):
        oracle = oracle_of(Given(2, 3), random_gradients(15), plan, steps=3, max_slots=slots)
        for _ in range(3):
            oracle(torch.zeros(2, 5))
        shares.append(oracle.below)
    assert torch.equal(shares[0], shares[1])
    assert torch.equal(shares[0], shares[2])


# --- noise of the pair ---


@given(st.floats(0.01, 100), st.floats(1.001, 1000))
def test_sum_and_count_together_are_one_release(sigma: float, ratio: float) -> None:
    rule = Clipping("quantile", count_noise=ratio)
    own = rule.sum_multiplier(sigma)
    assert own > sigma
    assert own**-2 + (ratio * sigma) ** -2 == pytest.approx(sigma**-2, rel=1e-9)
    assert rule.count_std(sigma) == pytest.approx(0.5 * ratio * sigma)
    assert Clipping("flat").sum_multiplier(sigma) == sigma


def test_the_released_noise_has_the_claimed_variance() -> None:
    """Clients draw nobody, so the release is noise: 1e5 numbers of the sum and 4e4 counts."""
    clients, width, sigma, clip, batch, steps = 4000, 3, 2.0, 0.5, 4.0, 10
    rule = Clipping("quantile", count_noise=3.0)
    plan = plan_of([100] * clients, batch, sigma, rule, clip)
    oracle = oracle_of(Given(1, 2), torch.zeros(100 * clients, width), plan, steps)
    oracle._batches = [iter([np.zeros(0, dtype=np.int64)] * steps) for _ in range(clients)]
    theta, sums, counts, before = torch.zeros(clients, width), [], [], torch.zeros(clients, 1)
    for k in range(1, steps + 1):
        g, phi = oracle(theta)
        sums.append(g * batch)
        counts.append((oracle.below * k - before - 0.5) * batch)
        before = oracle.below * k
    found, count = torch.stack(sums).double(), torch.stack(counts).double()
    own = sigma / math.sqrt(1 - 1 / 9)
    assert float(found.var()) == pytest.approx((own * clip) ** 2, rel=0.02)
    assert float(count.var()) == pytest.approx((0.5 * 3.0 * sigma) ** 2, rel=0.02)
    assert float(phi[0]) == pytest.approx((own * clip / batch) ** 2)
    together = torch.corrcoef(torch.stack([found[..., 0].flatten(), count.flatten()]))
    assert abs(float(together[0, 1])) < 0.02
    assert abs(float(found.mean())) < 0.02
    assert abs(float(count.mean())) < 0.05


def shift_of_a_canary(sampling: str, rule: Clipping, sigma: float, clip: float) -> np.ndarray:
    """Return how far a neighbouring change moves sum and count, in standard deviations."""
    plan = plan_of([10], 5, sigma, rule, clip, sampling=sampling)
    canary, others = torch.tensor([[3.0, 4.0]]), random_gradients(4, 2)
    with_it, counted = added(torch.cat([others, canary * 10]), rule, clip)
    if sampling == "poisson":
        without, fewer = added(others, rule, clip)
    else:  # exchanged for its opposite, just short enough to count as below
        without, fewer = added(torch.cat([others, -canary * clip / 5]), rule, clip)
    moved = float((with_it - without).double().norm()) / plan.noise_std(0)
    return np.array([moved, float((counted - fewer).abs()) / plan.count_std(0)])


def delta_of_mixture(shift: np.ndarray, rate: float, epsilon: float) -> float:
    """Return δ(ε) between (1−q)N(0,I) + qN(shift,I) and N(0,I), by summing over a grid."""
    axes = [np.linspace(-8, 8 + s, 500 if len(shift) == 2 else 100_000) for s in shift]
    grid = np.meshgrid(*axes, indexing="ij")
    cell = math.prod(float(a[1] - a[0]) for a in axes)
    zero = math.prod(1.0 for _ in axes) * np.prod([gauss.pdf(x) for x in grid], axis=0)
    moved = np.prod([gauss.pdf(x - s) for x, s in zip(grid, shift, strict=True)], axis=0)
    mixed = (1 - rate) * zero + rate * moved
    ways = ((mixed, zero), (zero, mixed))
    return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * cell) for p, q in ways)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_wor"])
@pytest.mark.parametrize(("sigma", "ratio"), [(1.0, 10.0), (0.7, 1.5)])
def test_the_pair_loses_as_much_as_one_gaussian_of_the_charged_multiplier(
    sampling: Any, sigma: float, ratio: float
) -> None:
    shift = shift_of_a_canary(sampling, Clipping("quantile", count_noise=ratio), sigma, 0.5)
    charged = Mechanism(sampling, 0.5, sigma).effective_multiplier
    assert float(np.linalg.norm(shift)) == pytest.approx(1 / charged, rel=1e-5)
    for epsilon in (0.3, 1.0):
        pair = delta_of_mixture(shift, 0.5, epsilon)
        assert pair == pytest.approx(
            delta_of_mixture(np.array([1 / charged]), 0.5, epsilon), rel=2e-3
        )
        if sampling == "poisson":
            assert delta_at([(Mechanism("poisson", 0.5, sigma), 1)], epsilon) == pytest.approx(
                pair, rel=5e-3
            )
    careless = shift_of_a_canary(sampling, Clipping("quantile", count_noise=ratio), sigma, 0.5)
    careless[0] *= (
        Clipping("quantile", count_noise=ratio).sum_multiplier(sigma) / sigma
    )  # a sum noised with σ alone
    assert float(np.linalg.norm(careless)) > 1.004 / charged


# --- where C goes ---


def test_next_clip_by_hand() -> None:
    rule = Clipping("quantile", quantile=0.5, rate=0.2)
    assert rule.next_clip(2.0, 0.5) == 2.0
    assert rule.next_clip(2.0, 1.0) == pytest.approx(2.0 * math.exp(-0.1))
    assert rule.next_clip(2.0, 0.0) == pytest.approx(2.0 * math.exp(0.1))
    assert rule.next_clip(2.0, 1e9) == pytest.approx(
        2.0 * math.exp(-0.2)
    )  # noise moves it by e^rate at most
    assert rule.next_clip(2.0, -1e9) == pytest.approx(2.0 * math.exp(0.2))
    fast = Clipping("quantile", rate=1e6)
    assert (fast.next_clip(1.0, 0.0), fast.next_clip(1.0, 1.0)) == (CLIPS[1], CLIPS[0])


@given(
    st.floats(0.05, 0.95),
    st.floats(0.01, 1e5),
    st.floats(*CLIPS),
    st.floats(-50, 50),
    st.floats(0, 10),
)
def test_next_clip_is_monotone_and_bounded(
    q: float, rate: float, clip: float, below: float, more: float
) -> None:
    rule = Clipping("quantile", quantile=q, rate=rate)
    one, two = rule.next_clip(clip, below), rule.next_clip(clip, below + more)
    assert CLIPS[0] <= two <= one <= CLIPS[1]


@pytest.mark.parametrize("wanted", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("noise", [0.02, 0.5])
def test_c_settles_at_the_quantile_also_under_noise(wanted: float, noise: float) -> None:
    """With heavy noise the share is often outside 0..1; limiting it to 0..1 would move C away."""
    rng = np.random.default_rng(1)
    rule = Clipping("quantile", quantile=wanted, rate=0.1)
    clip, path = 30.0, []
    for _ in range(6000):
        below = float(np.mean(rng.lognormal(0.0, 1.0, 64) <= clip)) + noise * rng.normal()
        clip = rule.next_clip(clip, below)
        path.append(math.log(clip))
    assert gauss.cdf(np.mean(path[1000:])) == pytest.approx(wanted, abs=0.02)


def test_c_follows_the_norms_of_a_real_run() -> None:
    """From far above and far below to the same place; the flat run's C never moves."""
    keys = {"clip_mode": "quantile", "quantile_lr": 1.0, "sigma": 0.3, "batch": 20}
    run_keys = {"participation": 1.0, "local_steps": 3, "rounds": 25}
    ends = [
        trained(prepare(config_of(privacy={**keys, "clip": clip}, run=run_keys), features()), 25)[1]
        for clip in (0.05, 20.0)
    ]
    assert ends[0] == pytest.approx(ends[1], rel=0.25)
    assert 0.3 < ends[0] < 3.0
    assert trained(prepare(config_of(), features()))[1] == 0.5


# --- through a whole run ---


def test_a_quantile_run_is_charged_sigma_and_costs_what_a_flat_run_costs(tmp_path: Path) -> None:
    flat = run(config_of(), tmp_path / "flat", source=features())
    moving = run(
        config_of(privacy={"clip_mode": "quantile"}), tmp_path / "moving", source=features()
    )
    assert moving["epsilon"] == flat["epsilon"]
    assert moving["sigma"] == flat["sigma"] == 1.0
    assert moving["guarantee"] == flat["guarantee"]
    with Ledger.open(tmp_path / "moving" / "ledger.sqlite", readonly=True) as ledger:
        assert {row.charge.mechanism.noise_multiplier for row in ledger.rows()} == {1.0}
        assert ledger.meta["clip_mode"] == "quantile"
    plan = prepare(config_of(privacy={"clip_mode": "quantile"}), features()).plan
    assert plan.noise_std(0) == pytest.approx(0.5 / math.sqrt(0.99))
    assert plan.at(2.0).noise_std(0) == pytest.approx(2.0 / math.sqrt(0.99))
    assert plan.at(2.0).mechanism(0) == plan.mechanism(0)


def test_two_releases_of_a_batch_are_two_counts() -> None:
    """θ = 1 at the first, 3 at the second: norms 0.5 and 1.5 around C = 1."""
    plan = plan_of([4], 4, 0.0, QUANTILE, releases=2)
    oracle = oracle_of(Given(1, 1, by_theta=True), torch.tensor([[0.3, 0.4]] * 4), plan)
    oracle(torch.ones(1, 2))
    assert float(oracle.below) == 1.0
    oracle.again(torch.full((1, 2), 3.0))
    assert float(oracle.below) == 0.5


def test_fedsam_counts_both_of_its_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FleetOracle] = []
    init = FleetOracle.__init__

    def noted(self: FleetOracle, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(FleetOracle, "__init__", noted)
    for batches_, counts in (("shared", 4), ("independent", 4)):
        algorithm = {"name": "dp-fedsam", "sam_batches": batches_}
        job = prepare(config_of(algorithm=algorithm, privacy={"clip_mode": "quantile"}), features())
        made.clear()
        mean, _ = Fleet(job).run_cohort(1, first_state(job), [0, 1])
        assert [oracle._counted for oracle in made] == [counts]
        assert mean["below"].shape == (1,)


KEYS: list[dict[str, Any]] = [
    {"clip_mode": "automatic"},
    {"clip_mode": "automatic", "clip_stability": 1.0},
    {"clip_mode": "quantile"},
    {"clip_mode": "quantile", "quantile": 0.9},
    {"clip_mode": "quantile", "quantile_lr": 1.0},
    {"clip_mode": "quantile", "quantile_noise": 2.0},
    {"sampling": "fixed_wor", "sigma": 2.0},
    {"clip": 0.3},
]


def test_every_key_changes_the_run() -> None:
    paths = [trained(prepare(config_of(privacy=keys), features()))[0] for keys in [{}, *KEYS]]
    for i, one in enumerate(paths):
        for two in paths[:i]:
            assert float((one - two).norm() / one.norm()) > 1e-4, KEYS[i - 1]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"clip_stability": 1.0}, "no effect"),
        ({"quantile": 0.5, "clip_mode": "automatic"}, "no effect"),
        ({"quantile_lr": 0.5}, "no effect"),
        ({"quantile_noise": 2.0}, "no effect"),
        ({"clip_mode": "quantile", "quantile_noise": 1.0}, "> 1"),
        ({"clip_mode": "quantile", "quantile_noise": 1.1e6}, "<= 1"),
        ({"clip_mode": "quantile", "quantile_noise": math.inf}, "<= 1"),
        ({"clip_mode": "quantile", "quantile_lr": math.inf}, "finite"),
        ({"clip_mode": "automatic", "clip_stability": math.inf}, "finite"),
        ({"clip_mode": "automatic", "clip_stability": 1e-13}, ">= 1e-12"),
        ({"clip_mode": "quantile", "clip": math.inf, "sigma": 0.0}, "no meaning"),
        ({"clip_mode": "batch_tensor"}, "protects nothing, so use flat"),
        ({"sampling": "shuffle"}, "no accounting, so use poisson"),
        ({"sampling": "fixed_wor", "batch": 7.5}, "whole number"),
        ({"accounting": "none"}, "set privacy.enabled = false"),
        ({"noise_scale": "literal_c2"}, "privacy.sigma times privacy.clip"),
    ],
    ids=str,
)
def test_keys_that_cannot_go_together_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(DpfedError, match=words):
        config_of(privacy=keys)
