"""The audit passes the true build and catches every broken one, at 99.9 % confidence."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from broken_builds import BROKEN, audited_with, digits_job
from torch import Tensor
from typer.testing import CliRunner

from dpfed.cli.main import app
from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.privacy import oracle as oracle_module
from dpfed.privacy.auditing.report import Report, disproofs
from dpfed.privacy.auditing.shifts import MAX_RATIO
from dpfed.privacy.isolation import exact_sum as exact_sum_module
from dpfed.privacy.noise import Streams
from dpfed.privacy.plan import Plan
from dpfed.registry import registry
from dpfed.training.auditing.audit import Audit, audit
from dpfed.training.auditing.setting import AuditSetting, chosen_clients, setting_of, size_for
from dpfed.training.job.job import Job, prepare

torch.set_num_threads(1)

CONFIDENCE = 0.999
CANARIES = 240
# Half of the canaries with which the bound of Steinke, Nasr and Jagielski (2023) catches a broken
# build of the digits model (tests/helpers/audit_power.py). It never catches clipping per tensor.
FEW_CANARIES = 60


def audited(job: Job, canaries: int = CANARIES) -> Audit:
    return audit(job, canaries, CONFIDENCE)


def caught_by(found: Audit) -> set[str]:
    bounds = {f"{r.seen}: {r.assumes}" for r in found.reports if r.disproved}
    return bounds | {law.what for law in found.laws if law.broken}


def bound(found: Audit, seen: str, assumes: str) -> Report:
    return next(r for r in found.reports if (r.seen, r.assumes) == (seen, assumes))


# --- broken builds of the digits model ---

SHIFTS = "oracle: Gaussian noise"
GUESSES = {"oracle: nothing", "oracle: the accounted curve"}
CATCHERS = {
    "clips the mean of a batch": GUESSES | {SHIFTS},
    "clips the mean of a batch, per tensor": GUESSES | {SHIFTS},
    "does not clip": GUESSES | {SHIFTS},
    "clips each tensor": {SHIFTS},
    "noise multiplied by C once too often": GUESSES | {SHIFTS, "noise"},
    "noise divided by the batch twice": GUESSES | {SHIFTS, "noise"},
    "no noise": GUESSES | {SHIFTS, "noise"},
    "half of the noise": {"noise"},
    "noise multiplied by the batch": {"noise"},
    "shuffled batches": {"batches"},
    "batches of a fixed size": {"batches"},
    "one batch for all steps of a round": {"batches"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_build_is_caught(name: str) -> None:
    found = audited_with(name, audited)
    assert (found.reports[0].canaries, found.reports[0].clients) == (CANARIES, 10)
    assert caught_by(found) >= CATCHERS[name]
    assert len(list(disproofs(found.reports, found.laws))) == len(caught_by(found))


@pytest.mark.parametrize("name", [name for name in BROKEN if SHIFTS in CATCHERS[name]])
def test_broken_clipping_and_noise_are_caught_by_few_canaries(name: str) -> None:
    canaries = CANARIES if name == "clips each tensor" else FEW_CANARIES
    found = audited_with(name, lambda job: audited(job, canaries))
    assert bound(found, "oracle", "Gaussian noise").disproved


@pytest.mark.parametrize("seed", range(5))
def test_audits_of_real_training_reach_half_of_the_claim(seed: int) -> None:
    """The digits model, trained with canaries; three runs of 30 steps."""
    found = audited(digits_job(seed, "privacy.target_epsilon=4", "run.rounds=10"), 2100)
    assert caught_by(found) == set()
    best = bound(found, "oracle", "Gaussian noise")
    assert (best.canaries, best.runs, best.steps) == (2100, 3, 30)
    assert best.claimed == pytest.approx(4.0, abs=0.01)
    assert 0.5 * best.claimed <= best.lower <= best.claimed


# --- other mechanisms ---

SMALL = [
    "model.name=linear",
    "model.train=full",
    "run.rounds=2",
    "run.local_steps=4",
    "data.clients=4",
    "privacy.batch=64",
]


def job(*more: str) -> Job:
    return prepare(load("digits", [*SMALL, *more], registry()))


@pytest.mark.parametrize(
    "more",
    [
        ["privacy.sampling=fixed_wor"],
        ["algorithm.name=dp-fedsam", "algorithm.sam_batches=shared"],
        ["privacy.clip_mode=quantile"],
        ["privacy.isolation=exact"],
        ["privacy.grid=true"],
    ],
    ids=["fixed size", "two releases", "quantile", "exact", "grid"],
)
def test_other_mechanisms_pass_and_without_noise_they_do_not(more: list[str]) -> None:
    """Replace-one exchanges the canary for its opposite; releases of a batch are averaged."""
    true = audited(job("privacy.sigma=2.0", *more), 2000)
    assert caught_by(true) == set()
    best = bound(true, "oracle", "Gaussian noise")
    assert best.lower > 0.1 * best.claimed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "noise_std", lambda plan, i: 1e-3 * plan.clip)
        broken = audited(job("privacy.sigma=2.0", *more), 600)
    assert caught_by(broken) >= {SHIFTS, "noise"}


def test_a_count_that_is_charged_with_the_sum_lowers_the_bound() -> None:
    """With quantile clipping the sum alone has more noise, here 2.4 times the charged one."""
    quantile = job("privacy.clip_mode=quantile", "privacy.quantile_noise=1.1", "privacy.sigma=4.0")
    setting = setting_of(quantile)
    assert setting.sum_multipliers[0] == pytest.approx(4.0 * 2.4, rel=0.01)
    # Without noise the bound reports the largest ratio, which is that of the sum.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "noise_std", lambda plan, i: 0.0)
        report = bound(audited(quantile, 60), "oracle", "Gaussian noise")
    assert report.lower == pytest.approx(setting.epsilon_at(MAX_RATIO / 2.4), rel=0.01)


# --- the clients' messages ---


@pytest.mark.parametrize("algorithm", ["dp-fedavg", "dp-fedadamw"])
def test_the_server_sees_no_more_than_claimed(algorithm: str) -> None:
    """Without noise the same score reveals the canaries."""
    prepared = digits_job(0, f"algorithm.name={algorithm}")
    true = bound(audited(prepared), "server", "the accounted curve")
    assert not true.disproved
    assert (true.canaries, true.clients, true.runs, true.steps) == (CANARIES, 10, 1, 15)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Plan, "noise_std", lambda plan, i: 0.0)
        assert bound(audited(prepared), "server", "the accounted curve").disproved


def test_canaries_pass_through_augmentations_as_records_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Augmentations that are clipped one by one and then added must be noticed."""
    prepared = job("data.augment=flip", "data.views=4", "privacy.sigma=2.0")
    assert caught_by(audited(prepared, 400)) == set()
    right = oracle_module.clip_and_sum

    def each_its_own(*given: Any) -> tuple[Tensor, Tensor]:
        total, count = right(*given)
        return 4 * total, count

    monkeypatch.setattr(oracle_module, "clip_and_sum", each_its_own)
    assert SHIFTS in caught_by(audited(prepared, 400))


def test_exact_isolation_is_audited_as_the_job_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums that only exact isolation gets wrong must be noticed."""
    prepared = job("privacy.isolation=exact", "privacy.sigma=2.0")
    right = exact_sum_module.clip_and_sum

    def threefold(*given: Any) -> tuple[Tensor, Tensor]:
        total, count = right(*given)
        return 3 * total, count

    monkeypatch.setattr(exact_sum_module, "clip_and_sum", threefold)
    assert SHIFTS in caught_by(audited(prepared, 200))


# --- the setting ---


def setting_with(sizes: list[int], rounds: int = 3, local_steps: int = 5) -> AuditSetting:
    plan = Plan(
        "poisson",
        0.1,
        np.array(sizes),
        8 / np.array(sizes),
        np.full(len(sizes), 8.0),
        np.full(len(sizes), 2.0),
    )
    return AuditSetting(plan, 1e-5, rounds, local_steps, Streams(0))


@pytest.mark.parametrize(
    ("canaries", "most", "expected"),
    [
        (60, 100, (20, 1)),
        (48, 100, (16, 1)),
        (96, 100, (16, 2)),
        (100, 4, (4, 9)),
        (3, 100, (1, 1)),
    ],
)
def test_at_most_half_of_the_units_are_canaries(
    canaries: int, most: int, expected: tuple[int, int]
) -> None:
    sizes = [64, 40, 128] if canaries == 60 else [64, 32, 128]
    found = size_for(setting_with(sizes), canaries, most)
    assert (found.canaries, found.runs) == expected


def test_a_long_job_is_trained_once() -> None:
    long = setting_with([64, 32, 128], rounds=1000)
    assert size_for(long, 4000, 100).runs == 1


def test_the_claim_is_the_worst_clients_for_the_steps_audited() -> None:
    setting = setting_with([64, 32, 128])
    each = setting.epsilons()
    assert each.argmax() == 1
    assert setting.epsilon_at(1.0) == each.max()
    assert setting.epsilon_at(0.5) < each.max() < setting.epsilon_at(2.0)
    assert list(chosen_clients(each, 1)) == [1]
    assert 1 in chosen_clients(each, 2)


def test_the_claim_counts_the_rounds_of_a_capped_client() -> None:
    """Balanced cohorts of half the clients: each takes part in two of four rounds."""
    capped = job(
        "run.rounds=4",
        "run.participation=0.5",
        "run.cohort_choice=balanced",
        "privacy.target_epsilon=3",
    )
    setting = setting_of(capped)
    assert (setting.rounds, capped.config.run.rounds) == (2, 4)
    assert setting.epsilons().max() == pytest.approx(3.0, abs=0.01)


def test_the_audit_never_replays_the_runs_randomness() -> None:
    prepared = job()
    assert setting_of(prepared).streams.key("noise", 1, 0) != prepared.streams.key("noise", 1, 0)


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


def test_the_bounds_share_the_error_probability() -> None:
    found = audit(job("privacy.sigma=4.0"), 40, 0.9)
    assert len(found.reports) == 5
    assert all(report.confidence == pytest.approx(0.98) for report in found.reports)


# --- the command ---


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
    assert [(a["seen"], a["assumes"]) for a in found["audits"]] == [
        ("oracle", "nothing"),
        ("oracle", "the accounted curve"),
        ("oracle", "Gaussian noise"),
        ("server", "nothing"),
        ("server", "the accounted curve"),
    ]
    assert found["confidence"] == 0.999
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
