"""The audit: production's oracle passes, and every deliberately broken build is caught (SPEC A10), at 99.9 % confidence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from dpfed.cli.main import app
from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.privacy import oracle as oracle_module
from dpfed.privacy import sampling as sampling_module
from dpfed.privacy.audit import (
    Law,
    Report,
    disproofs,
)
from dpfed.privacy.clipping import Clipping, Units
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.noise import Streams
from dpfed.privacy.oracle import FleetOracle
from dpfed.privacy.plan import Plan
from dpfed.registry import registry
from dpfed.training.audit import (
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
from dpfed.training.job.job import Job, prepare

torch.set_num_threads(1)

CONFIDENCE = 0.999
DELTA = 1e-5
CLIP = 0.1
BATCH = 12


# --- production's oracle, whole and broken --------------------------------------------------------------------------


def plan_of(
    clients: int,
    units: int = 16,
    batch: int = BATCH,
    sigma: float = 2.5,
    sampling: str = "poisson",
    **more: Any,
) -> Plan:
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
    quieter = replace(
        audited, plan=plan_of(240, sigma=4.0)
    )  # a smaller claim: one run certifies less than many
    return Findings(
        one_run(quieter, 480, CONFIDENCE), many_draws(audited, 3000, CONFIDENCE), *laws(longer)
    )


Clip = Callable[[Sequence[Tensor], Tensor, int, float], Tensor]
TRUE_CLIP = oracle_module.clip_and_sum
TRUE_DRAW = sampling_module.draw


def clipped(x: Tensor, clip: float) -> Tensor:
    return x * (clip / x.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp(max=1.0)


def batch_means(grads: Sequence[Tensor], owner: Tensor, clients: int) -> list[Tensor]:
    counts = torch.bincount(owner, minlength=clients).clamp_min(1).unsqueeze(1)
    return [g.new_zeros(clients, g.shape[1]).index_add_(0, owner, g) / counts for g in grads]


def batch_mean(grads: Sequence[Tensor], owner: Tensor, clients: int, clip: float) -> Tensor:
    return BATCH * clipped(torch.cat(batch_means(grads, owner, clients), 1), clip)


def batch_tensor(grads: Sequence[Tensor], owner: Tensor, clients: int, clip: float) -> Tensor:
    """The released code of the paper (SPEC 0.1)."""
    return BATCH * torch.cat([clipped(g, clip) for g in batch_means(grads, owner, clients)], 1)


def per_tensor(grads: Sequence[Tensor], owner: Tensor, clients: int, clip: float) -> Tensor:
    return torch.cat(
        [g.new_zeros(clients, g.shape[1]).index_add_(0, owner, clipped(g, clip)) for g in grads], 1
    )


def no_clip(grads: Sequence[Tensor], owner: Tensor, clients: int, clip: float) -> Tensor:
    units = Units(owner, torch.ones_like(owner), clients)
    return TRUE_CLIP(grads, units, math.inf, Clipping())[0]


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
        _, queue = self._queues.setdefault(
            id(rng), (rng, [])
        )  # holding rng keeps its id from being used again
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


def patch_clip(clip: Clip) -> Break:
    def broken(
        grads: Sequence[Tensor], units: Units, norm: float, *_: object
    ) -> tuple[Tensor, Tensor]:
        return clip(grads, units.client, units.clients, norm), torch.zeros(units.clients, 1)

    def apply(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setattr(oracle_module, "clip_and_sum", broken)
        return {}

    return apply


def patch_draw(value: Any) -> Break:
    def apply(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setattr(sampling_module, "draw", value)
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
    "batch-mean clipping": (patch_clip(batch_mean), BOUNDS),
    "batch-mean clipping per tensor": (patch_clip(batch_tensor), BOUNDS),
    "per-tensor clipping": (patch_clip(per_tensor), {"many draws"}),
    "no clipping": (patch_clip(no_clip), BOUNDS),
    "noise σC²": (
        patch_noise(lambda plan, i: float(plan.multipliers[i]) * plan.clip**2),
        BOUNDS | {"noise"},
    ),
    "no noise": (patch_noise(lambda plan, i: 0.0), BOUNDS | {"noise"}),
    "noise divided by B twice": (use(TwiceDivided), BOUNDS | {"noise"}),
    "noise not divided by B": (use(NotDivided), {"noise"}),
    "shuffled": (patch_draw(Shuffle()), {"batches"}),
    "fixed size": (patch_draw(fixed_size), {"batches"}),
    "the same batch at every step of a round": (patch_draw(same_every_step), {"batches"}),
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
    "more",
    [{"sampling": "fixed_wor"}, {"batches": 2, "releases": 2}],
    ids=["fixed size", "releases"],
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
    louder = replace(
        audited, plan=plan_of(30, sigma=20.0, **more)
    )  # a small claim, so that few draws suffice
    assert many_draws(louder, 1000, CONFIDENCE).disproved


# --- a whole job and the command -------------------------------------------------------------------------------------

SMALL = [
    "model.name=linear",
    "model.train=full",
    "run.rounds=2",
    "run.local_steps=4",
    "data.clients=4",
]


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


def test_canaries_pass_through_views_as_records_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """And views that were clipped one by one and then added, each with its own C, would be seen."""
    prepared = job("algorithm.name=dp-fedavg", "data.augment=flip", "data.views=4")
    audited = shorter(audited_job(prepared), 8)
    true = server_view(prepared, audited, 400, CONFIDENCE)
    assert true.lower <= true.claimed
    right = oracle_module.clip_and_sum

    def each_its_own(*given: Any) -> tuple[Tensor, Tensor]:
        total, count = right(*given)
        return 4 * total, count

    monkeypatch.setattr(oracle_module, "clip_and_sum", each_its_own)
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
def test_what_cannot_be_audited_is_refused(
    more: list[str], canaries: int, confidence: float, sentence: str
) -> None:
    with pytest.raises(DpfedError, match=sentence):
        audit(job(*more), canaries, confidence)


def command(*more: str) -> tuple[int, str]:
    sets = [part for item in SMALL for part in ("--set", item)]
    result = CliRunner().invoke(
        app, ["audit", *sets, "--canaries", "400", "--confidence", "0.999", *more]
    )
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


def test_the_command_says_plainly_that_a_claim_is_disproved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Plan, "noise_std", lambda plan, i: 0.0)
    code, out = command("--set", "privacy.sigma=20.0")
    assert code == 4
    assert "DISPROVED: the privacy claim of this build does not hold" in out
    assert "epsilon is at least" in out
