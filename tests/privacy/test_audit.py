"""The audit has power (SPEC A10): it passes the true build and catches every deliberately broken one, at 99.9 % confidence.

First the statistics by themselves, on mechanisms whose epsilon is known; then production's oracle, whole and broken.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from typer.testing import CliRunner

from dpfed.cli.main import app
from dpfed.config import load
from dpfed.engine.audit import (
    Audited,
    audit,
    audited_job,
    laws,
    many_draws,
    one_run,
    server_view,
    shorter,
    spread_clients,
)
from dpfed.engine.setup import Job, prepare
from dpfed.errors import DpfedError
from dpfed.privacy import oracle as oracle_module
from dpfed.privacy.audit import (
    Law,
    Report,
    batch_law,
    disproofs,
    many_draws_bound,
    noise_law,
    one_run_bound,
    one_run_epsilon,
    one_run_p_value,
)
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.noise import Streams
from dpfed.privacy.oracle import FleetOracle
from dpfed.privacy.plan import Plan
from dpfed.registry import registry

torch.set_num_threads(1)

CONFIDENCE = 0.999
DELTA = 1e-5
CLIP = 0.1
BATCH = 12


# --- the statistics ------------------------------------------------------------------------------------------------


def test_p_value_without_delta_is_the_binomial_tail() -> None:
    assert one_run_p_value(100, 100, 80, 1.0, 0.0) == pytest.approx(
        stats.binom.sf(79, 100, math.e / (1 + math.e)), rel=1e-12
    )
    # All of 20 right at epsilon 0: a coin 20 times; one right of one with delta: 1/2 + 2*m*delta*1/2.
    assert one_run_p_value(20, 20, 20, 0.0, 0.0) == pytest.approx(2.0**-20)
    assert one_run_p_value(10, 1, 1, 0.0, 1e-3) == pytest.approx(0.5 + 20 * 1e-3 * 0.5)
    assert one_run_p_value(10, 5, 0, 3.0, 1e-5) == 1.0


def test_p_value_of_delta_by_hand() -> None:
    """alpha = max_i P[v > W >= v-i]/i with r = 3, v = 2, accuracy 1/2: W = 1 has 3/8, W = 0 has 1/8."""
    expected = 4 / 8 + 2 * 7 * 1e-3 * max(3 / 8, (3 / 8 + 1 / 8) / 2)
    assert one_run_p_value(7, 3, 2, 0.0, 1e-3) == pytest.approx(expected)


def test_p_value_falls_with_correct_guesses_and_the_bound_grows() -> None:
    values = [one_run_p_value(200, 100, v, 1.0, 1e-5) for v in range(101)]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(values))
    bounds = [one_run_epsilon(200, 100, v, 1e-5, 0.95) for v in range(101)]
    assert bounds == sorted(bounds)
    assert bounds[50] == 0.0
    assert one_run_p_value(200, 100, 95, bounds[95], 1e-5) < 0.05 <= one_run_p_value(200, 100, 95, bounds[95] + 2e-4, 1e-5)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be"):
        one_run_p_value(10, 5, 6, 1.0, 0.0)


def gaussian(epsilon: float, delta: float) -> float:
    """The standard deviation at which N(0) against N(1) is exactly (epsilon, delta)-DP (Balle and Wang 2018)."""
    low, high = 1e-2, 1e3
    for _ in range(100):
        s = math.sqrt(low * high)
        spent = stats.norm.cdf(0.5 / s - epsilon * s) - math.exp(epsilon) * stats.norm.cdf(-0.5 / s - epsilon * s)
        low, high = (s, high) if spent > delta else (low, s)
    return high


def randomized_response(epsilon: float, coins: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    honest = rng.random(coins.shape) < math.exp(epsilon) / (1 + math.exp(epsilon))
    return np.where(honest, coins, ~coins) * 2.0 - 1.0


Bound = Callable[[np.ndarray, np.ndarray, float, float], float]


@pytest.mark.parametrize("bound", [one_run_bound, many_draws_bound])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_bounds_hold_for_randomized_response(bound: Bound, epsilon: float) -> None:
    """The tightest pure-DP mechanism: at 90 % confidence at most 10 % of the bounds may exceed epsilon."""
    rng = np.random.default_rng(int(epsilon))
    found = []
    for _ in range(150):
        coins = rng.random(400) < 0.5
        found.append(bound(randomized_response(epsilon, coins, rng), coins, 0.0, 0.9))
    wrong = sum(b > epsilon for b in found)
    assert stats.binomtest(wrong, 150, 0.1, alternative="greater").pvalue > 1e-3
    assert epsilon == 0 or np.median(found) > 0.5 * epsilon  # and they have power


@pytest.mark.parametrize("bound", [one_run_bound, many_draws_bound])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 6.0])
def test_bounds_hold_for_the_gaussian(bound: Bound, epsilon: float) -> None:
    delta = 1e-3
    s = gaussian(epsilon, delta)
    rng = np.random.default_rng(int(10 * epsilon))
    found = []
    for _ in range(100):
        coins = rng.random(400) < 0.5
        scores = (coins + s * rng.standard_normal(400) - 0.5) / s**2  # the log-likelihood ratio
        found.append(bound(scores, coins, delta, 0.9))
    wrong = sum(b > epsilon for b in found)
    assert stats.binomtest(wrong, 100, 0.1, alternative="greater").pvalue > 1e-3
    assert epsilon < 6 or np.median(found) > 0.2 * epsilon  # at a small epsilon 400 canaries show nothing


def test_delta_is_paid_for() -> None:
    """A mechanism that shows everything with probability delta and nothing otherwise is (0, delta)-DP."""
    rng = np.random.default_rng(5)
    delta, wrong = 2e-3, 0
    for _ in range(150):
        coins = rng.random(1000) < 0.5
        scores = np.where(rng.random(1000) < delta, 100.0, 1e-3) * np.where(coins, 1, -1)
        noise = rng.random(1000) < 0.5
        scores = np.where(np.abs(scores) < 1, np.where(noise, 1e-3, -1e-3), scores)
        wrong += max(one_run_bound(scores, coins, delta, 0.95), many_draws_bound(scores, coins, delta, 0.95)) > 0
    assert wrong / 150 < 0.12


def test_an_open_book_is_found_out() -> None:
    coins = np.random.default_rng(0).random(2000) < 0.5
    scores = np.where(coins, 1.0, 0.0)
    assert many_draws_bound(scores, coins, DELTA, CONFIDENCE) > 4
    assert one_run_bound(scores, coins, 0.0, CONFIDENCE) > 4
    assert one_run_bound(scores, coins, DELTA, CONFIDENCE) > 2
    assert many_draws_bound(scores, np.ones(2000, bool), DELTA, CONFIDENCE) == 0.0  # no "out": nothing is shown


# --- the laws ------------------------------------------------------------------------------------------------------


def poisson(rng: np.random.Generator, q: float, shape: tuple[int, int, int]) -> np.ndarray:
    return rng.random(shape) < q


def fixed(rng: np.random.Generator, b: int, shape: tuple[int, int, int]) -> np.ndarray:
    return np.argsort(np.argsort(rng.random(shape), axis=2), axis=2) < b


@pytest.mark.parametrize("q", [0.02, 0.25, 1.0])
def test_true_batches_pass(q: float) -> None:
    shape = (8, 40, 64)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        assert batch_law(Mechanism("poisson", q, 1.0), poisson(rng, q, shape)).p_value > 1e-4
        b = max(1, round(q * 64))
        assert batch_law(Mechanism("fixed_wor", b / 64, 1.0), fixed(rng, b, shape)).p_value > 1e-4


def test_wrong_batches_fail() -> None:
    rng = np.random.default_rng(1)
    shape = (8, 40, 64)
    law = Mechanism("poisson", 0.25, 1.0)
    assert batch_law(law, fixed(rng, 16, shape)).broken
    assert batch_law(law, poisson(rng, 0.28, shape)).broken
    assert batch_law(law, np.repeat(poisson(rng, 0.25, (8, 20, 64)), 2, axis=1)).broken
    assert batch_law(law, np.repeat(poisson(rng, 0.25, (4, 40, 64)), 2, axis=0)).broken
    assert batch_law(Mechanism("fixed_wor", 0.25, 1.0), poisson(rng, 0.25, shape)).broken
    assert batch_law(Mechanism("fixed_wor", 0.25, 1.0), np.repeat(fixed(rng, 16, (8, 1, 64)), 40, axis=1)).broken


def test_noise_law() -> None:
    rng = np.random.default_rng(2)
    assert min(noise_law(rng.standard_normal((8, 20, 16))).p_value for _ in range(100)) > 1e-4
    noise = rng.standard_normal((8, 20, 16))
    assert noise_law(noise * 1.2).broken
    assert noise_law(noise * 0.8).broken
    assert noise_law(noise + 0.2).broken
    assert noise_law(np.repeat(noise[:, ::2], 2, axis=1)).broken
    assert noise_law(np.repeat(noise[::2], 2, axis=0)).broken


# --- production's oracle, whole and broken --------------------------------------------------------------------------


def plan_of(clients: int, units: int = 16, batch: int = BATCH, sigma: float = 2.5, sampling: str = "poisson", **more: Any) -> Plan:
    def all_of(value: float) -> np.ndarray:
        return np.full(clients, float(value))

    return Plan(
        sampling=sampling,  # type: ignore[arg-type]
        clip=CLIP,
        sizes=np.full(clients, units),
        rates=all_of(batch / units),
        expected=all_of(batch),
        multipliers=all_of(sigma),
        **more,
    )


def setting(seed: int = 0, clients: int = 30, **more: Any) -> Audited:
    return Audited(plan_of(clients, **more), DELTA, rounds=3, local_steps=1, streams=Streams(seed))


@dataclass(frozen=True)
class Findings:
    single: Report
    many: Report
    batches: Law
    noise: Law

    @property
    def caught_by(self) -> set[str]:
        found = {
            "one run": self.single.disproved,
            "many draws": self.many.disproved,
            "batches": self.batches.broken,
            "noise": self.noise.broken,
        }
        return {name for name, is_caught in found.items() if is_caught}


def findings(audited: Audited) -> Findings:
    longer = replace(audited, plan=plan_of(1, units=64, batch=16), rounds=2, local_steps=16)
    quieter = replace(audited, plan=plan_of(240, sigma=4.0))  # a smaller claim: one run certifies less than many
    return Findings(one_run(quieter, 480, CONFIDENCE), many_draws(audited, 3000, CONFIDENCE), *laws(longer))


Clip = Callable[[Sequence[Tensor], Tensor, Tensor, int, float], Tensor]
TRUE_CLIP: Clip = oracle_module.clip_and_sum
TRUE_DRAW = oracle_module.draw


def clipped(x: Tensor, clip: float) -> Tensor:
    return x * (clip / x.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp(max=1.0)


def batch_means(grads: Sequence[Tensor], owner: Tensor, clients: int) -> list[Tensor]:
    counts = torch.bincount(owner, minlength=clients).clamp_min(1).unsqueeze(1)
    return [g.new_zeros(clients, g.shape[1]).index_add_(0, owner, g) / counts for g in grads]


def batch_mean(grads: Sequence[Tensor], unit: Tensor, owner: Tensor, clients: int, clip: float) -> Tensor:
    return BATCH * clipped(torch.cat(batch_means(grads, owner, clients), 1), clip)


def batch_tensor(grads: Sequence[Tensor], unit: Tensor, owner: Tensor, clients: int, clip: float) -> Tensor:
    """The released code of the paper (SPEC 0.1)."""
    return BATCH * torch.cat([clipped(g, clip) for g in batch_means(grads, owner, clients)], 1)


def per_tensor(grads: Sequence[Tensor], unit: Tensor, owner: Tensor, clients: int, clip: float) -> Tensor:
    return torch.cat([g.new_zeros(clients, g.shape[1]).index_add_(0, owner, clipped(g, clip)) for g in grads], 1)


def no_clip(grads: Sequence[Tensor], unit: Tensor, owner: Tensor, clients: int, clip: float) -> Tensor:
    return TRUE_CLIP(grads, unit, owner, clients, math.inf)


class TwiceDivided(FleetOracle):
    """Noise σC/B added to the sum, which is then divided by B."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._std = self._std / self._expected


class NotDivided(FleetOracle):
    """Noise σC added to the mean: too much of it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._std = self._std * self._expected


class Shuffle:
    """Every record exactly once in an epoch of equal batches, a new order for each epoch."""

    def __init__(self) -> None:
        self._queues: dict[int, tuple[np.random.Generator, list[int]]] = {}

    def __call__(self, mechanism: Mechanism, units: int, rng: np.random.Generator) -> np.ndarray:
        _, queue = self._queues.setdefault(id(rng), (rng, []))  # holding rng keeps its id from being used again
        if not queue:
            queue.extend(rng.permutation(units).tolist())
        size = round(mechanism.rate * units)
        batch, queue[:] = queue[:size], queue[size:]
        return np.sort(np.array(batch))


def fixed_size(mechanism: Mechanism, units: int, rng: np.random.Generator) -> np.ndarray:
    return TRUE_DRAW(replace(mechanism, sampling="fixed_wor"), units, rng)


def same_every_step(mechanism: Mechanism, units: int, rng: np.random.Generator) -> np.ndarray:
    key = rng.bit_generator.state["state"]["key"]  # type: ignore[index]
    return TRUE_DRAW(mechanism, units, np.random.default_rng(key))


BOUNDS = {"one run", "many draws"}

Break = Callable[[pytest.MonkeyPatch], dict[str, Any]]


def patch(name: str, value: Any) -> Break:
    def apply(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setattr(oracle_module, name, value)
        return {}

    return apply


def patch_noise(std: Callable[[Plan, int], float]) -> Break:
    def apply(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setattr(Plan, "noise_std", std)
        return {}

    return apply


def use(oracle: type[FleetOracle]) -> Break:
    return lambda monkeypatch: {"oracle": oracle}


BROKEN: dict[str, tuple[Break, set[str]]] = {
    "batch-mean clipping": (patch("clip_and_sum", batch_mean), BOUNDS),
    "batch-mean clipping per tensor": (patch("clip_and_sum", batch_tensor), BOUNDS),
    "per-tensor clipping": (patch("clip_and_sum", per_tensor), {"many draws"}),
    "no clipping": (patch("clip_and_sum", no_clip), BOUNDS),
    "noise σC²": (patch_noise(lambda plan, i: float(plan.multipliers[i]) * plan.clip**2), BOUNDS | {"noise"}),
    "no noise": (patch_noise(lambda plan, i: 0.0), BOUNDS | {"noise"}),
    "noise divided by B twice": (use(TwiceDivided), BOUNDS | {"noise"}),
    "noise not divided by B": (use(NotDivided), {"noise"}),
    "shuffled": (patch("draw", Shuffle()), {"batches"}),
    "fixed size": (patch("draw", fixed_size), {"batches"}),
    "the same batch at every step of a round": (patch("draw", same_every_step), {"batches"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_build_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, catchers = BROKEN[name]
    found = findings(replace(setting(), **breaks(monkeypatch)))
    assert found.caught_by >= catchers
    sentences = list(disproofs([found.single, found.many], [found.batches, found.noise]))
    assert len(sentences) == len(found.caught_by)


@pytest.mark.parametrize("seed", range(4))
def test_the_true_build_passes(seed: int) -> None:
    found = findings(setting(seed))
    assert found.caught_by == set()
    assert found.many.claimed == pytest.approx(2.301, rel=0.01)
    assert found.many.lower > 0.05 * found.many.claimed  # it saw the canaries


@pytest.mark.parametrize(
    "more", [{"sampling": "fixed_wor"}, {"batches": 2, "releases": 2}], ids=["fixed size", "releases"]
)
def test_other_mechanisms_pass_and_their_broken_builds_do_not(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under replace-one the canary is exchanged for its opposite; several releases of one batch are scored together."""
    audited = replace(setting(**more), rounds=1)
    true = many_draws(audited, 1000, CONFIDENCE)
    assert 0 < true.lower <= true.claimed
    assert not any(law.broken for law in laws(audited))
    assert not one_run(audited, 480, CONFIDENCE).disproved
    monkeypatch.setattr(Plan, "noise_std", lambda plan, i: 0.0)
    louder = replace(audited, plan=plan_of(30, sigma=20.0, **more))  # a small claim, so that few draws suffice
    assert many_draws(louder, 1000, CONFIDENCE).disproved


# --- a whole job and the command -------------------------------------------------------------------------------------

SMALL = ["model.name=linear", "model.train=full", "run.rounds=2", "run.local_steps=4", "data.clients=4"]


def job(*more: str) -> Job:
    return prepare(load("digits", [*SMALL, *more], registry()))


@pytest.mark.parametrize("algorithm", ["dp-fedavg", "dp-fedadamw"])
def test_the_server_sees_no_more_than_claimed(algorithm: str) -> None:
    """Δ_i of the true build stays below the claim; without noise the same score gives the canaries away."""
    prepared = job(f"algorithm.name={algorithm}", "privacy.sigma=4.0")
    audited = audited_job(prepared)
    true = server_view(prepared, audited, 400, CONFIDENCE)
    assert not true.disproved
    assert (true.canaries, true.clients, true.steps) == (400, 4, 8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Plan, "noise_std", lambda plan, i: 0.0)
        assert server_view(prepared, audited, 400, CONFIDENCE).lower > true.lower


def test_the_claim_is_the_worst_clients_for_the_steps_audited() -> None:
    sizes = np.array([64, 32, 128])
    plan = Plan("poisson", CLIP, sizes, 8 / sizes, np.full(3, 8.0), np.full(3, 2.0))
    audited = Audited(plan, DELTA, 3, 5, Streams(0))
    each = audited.epsilons()
    assert each.argmax() == 1
    assert one_run(audited, 60, 0.95).claimed == each.max()
    assert many_draws(audited, 64, 0.95).claimed == each.max()
    fewer = shorter(audited, 7)
    assert (fewer.rounds, fewer.local_steps) == (1, 5)
    assert fewer.epsilons().max() < each.max()
    assert list(spread_clients(each, 1)) == [1]
    assert 1 in spread_clients(each, 2)


def test_the_audit_never_replays_the_runs_randomness() -> None:
    prepared = job()
    assert audited_job(prepared).streams.key("noise", 1, 0) != prepared.streams.key("noise", 1, 0)


@pytest.mark.parametrize(
    ("more", "canaries", "confidence", "sentence"),
    [
        (["privacy.enabled=false"], 1000, 0.95, "nothing to audit"),
        ([], 2, 0.95, "too few"),
        ([], 1000, 1.0, "not allowed"),
        ([], 1000, math.nan, "not allowed"),
    ],
)
def test_what_cannot_be_audited_is_refused(more: list[str], canaries: int, confidence: float, sentence: str) -> None:
    with pytest.raises(DpfedError, match=sentence):
        audit(job(*more), canaries, confidence)


def command(*more: str) -> tuple[int, str]:
    sets = [part for item in SMALL for part in ("--set", item)]
    result = CliRunner().invoke(app, ["audit", *sets, "--canaries", "400", "--confidence", "0.999", *more])
    return result.exit_code, result.stdout


def test_the_command_prints_bounds_beside_the_claim() -> None:
    code, out = command("--json")
    assert code == 0
    found = json.loads(out.splitlines()[-1])
    assert found["disproved"] is False
    assert [(a["audit"], a["seen"]) for a in found["audits"]] == [
        ("one run", "oracle"),
        ("many draws", "oracle"),
        ("one run", "server"),
    ]
    assert all(0 <= a["lower"] <= a["claimed"] for a in found["audits"])
    assert "nothing speaks against the claim" in out


def test_the_command_says_plainly_that_a_claim_is_disproved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "noise_std", lambda plan, i: 0.0)
    code, out = command("--set", "privacy.sigma=20.0")
    assert code == 4
    assert "DISPROVED: the privacy claim of this build does not hold" in out
    assert "epsilon is at least" in out
