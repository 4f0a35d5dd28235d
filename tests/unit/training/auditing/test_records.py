"""Audits of the job's own model: canary records, here sequences of a small causal language model.

The true build passes. Builds that clip each token or each batch by itself are caught.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from language_case import chat_model
from torch import Tensor

from dpfed.config import build, load
from dpfed.data.sources.in_memory import source_of
from dpfed.errors import DpfedError
from dpfed.privacy import oracle as oracle_module
from dpfed.privacy.auditing.report import Report
from dpfed.privacy.clipping import UnitRows
from dpfed.registry import registry
from dpfed.training.auditing import records as records_module
from dpfed.training.auditing.audit import audit, audit_model
from dpfed.training.auditing.records import WeightedModel, canary_rows, directions_of
from dpfed.training.job.job import Job, prepare

torch.set_num_threads(1)

CONFIDENCE = 0.999
CLIENTS = 30
# Every record of a client is a canary.
RECORDS = 16
BATCH = 4.0


@pytest.fixture(scope="module")
def causal_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a job of a small random Llama whose records are random sequences."""
    rng = np.random.default_rng(0)
    return job_of(
        chat_model(tmp_path_factory.mktemp("llama")),
        [" ".join(rng.choice(list("abcdefgh"), 10)) for _ in range(CLIENTS * RECORDS)],
        CLIENTS,
    )


def job_of(folder: str, texts: Sequence[str], clients: int, **privacy: Any) -> Job:
    tables = {
        "data": {"clients": clients, "partition": "iid"},
        "model": {"name": "auto-text", "weights": folder, "max_length": 12, "train": "full"},
        "privacy": {"batch": BATCH, "sigma": 1.0, **privacy},
        "run": {"rounds": 2, "local_steps": 4, "participation": 1.0, "device": "cpu"},
    }
    records = [{"text": text} for text in texts]
    return prepare(build(tables, registry()), source_of(records, records[:2]))


def audited(job: Job) -> dict[str, Report]:
    reports = audit_model(job, np.arange(CLIENTS), CLIENTS * RECORDS, CONFIDENCE)
    assert reports[0].canaries == CLIENTS * RECORDS
    assert {report.seen for report in reports} == {"model"}
    return {report.assumes: report for report in reports}


class TokenClipped(WeightedModel):
    """Clips the gradient of each target token to C, and adds the tokens of a record."""

    clip: float

    def grads(
        self,
        theta: Tensor,
        client: Tensor,
        inputs: Mapping[str, Tensor],
        labels: Tensor,
        keys: Tensor | None = None,
    ) -> list[Tensor]:
        mask = inputs["attention_mask"]
        total: list[Tensor] = []
        for position in range(1, mask.shape[1]):
            only = torch.zeros_like(mask)
            only[:, position] = mask[:, position]
            token = super().grads(theta, client, {**inputs, "target_mask": only}, labels, keys)
            norm = torch.cat(token, 1).norm(dim=1, keepdim=True).clamp_min(1e-30)
            clipped = [g * (self.clip / norm).clamp(max=1.0) for g in token]
            total = [a + b for a, b in zip(total, clipped, strict=True)] if total else clipped
        return total


def summed(
    grads: Sequence[Tensor], units: UnitRows, norm: float, *_: object
) -> tuple[Tensor, Tensor]:
    """Add the gradients of all records without clipping."""
    rows = torch.cat(list(grads), 1)
    total = rows.new_zeros(units.clients, rows.shape[1]).index_add_(0, units.client, rows)
    return total, torch.zeros(units.clients, 1)


def batch_clipped(
    grads: Sequence[Tensor], units: UnitRows, norm: float, *_: object
) -> tuple[Tensor, Tensor]:
    """Clip the mean of a batch instead of its records."""
    total, counts = summed(grads, units, norm)
    drawn = torch.bincount(units.client, minlength=units.clients).clamp_min(1).unsqueeze(1)
    mean = total / drawn
    factor = (norm / mean.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp(max=1.0)
    return BATCH * mean * factor, counts


def test_the_true_build_passes(causal_job: Job) -> None:
    found = audited(causal_job)
    assert list(found) == ["nothing", "the accounted curve", "Gaussian noise"]
    assert not any(report.disproved for report in found.values())
    assert found["Gaussian noise"].lower > 0.2 * found["Gaussian noise"].claimed


def test_clipping_each_token_is_caught(causal_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenClipped, "clip", causal_job.plan.clip, raising=False)
    monkeypatch.setattr(records_module, "WeightedModel", TokenClipped)
    monkeypatch.setattr(oracle_module, "clip_and_sum", summed)
    assert audited(causal_job)["Gaussian noise"].disproved
    # The same build without the fault passes: only the clipping of tokens is found.
    monkeypatch.setattr(TokenClipped, "clip", causal_job.plan.clip / 12)
    assert not audited(causal_job)["Gaussian noise"].disproved


def test_clipping_each_batch_is_caught(causal_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle_module, "clip_and_sum", batch_clipped)
    assert audited(causal_job)["Gaussian noise"].disproved


def test_each_canary_has_a_direction_that_no_other_moves(causal_job: Job) -> None:
    rows = canary_rows(causal_job, 3, RECORDS)
    found = directions_of(causal_job, rows)
    assert np.linalg.norm(found.canaries, axis=1) == pytest.approx(1.0)
    inputs, labels = causal_job.private.records.take(torch.from_numpy(rows))
    owner = torch.zeros(RECORDS, dtype=torch.int64)
    grads = causal_job.model.grads(causal_job.theta.unsqueeze(0), owner, inputs, labels)
    gradients = torch.cat(grads, 1).double().numpy()
    moved = gradients @ found.canaries.T / np.linalg.norm(gradients, axis=1)[:, None]
    assert moved == pytest.approx(np.diag(np.diag(moved)), abs=1e-6)
    # All gradients are longer than C, so clipping leaves C times the cosine.
    assert found.sizes == pytest.approx(np.diag(moved))
    assert found.noise @ gradients.T == pytest.approx(0.0, abs=1e-6)
    assert found.noise @ found.noise.T == pytest.approx(np.eye(RECORDS), abs=1e-9)


def test_equal_records_cannot_be_canaries(tmp_path: Path) -> None:
    job = job_of(chat_model(tmp_path), ["a b c", "a b c", "d e"] * 4, 1, batch=2.0)
    with pytest.raises(DpfedError, match="nearly dependent"):
        audit_model(job, np.arange(1), 12, CONFIDENCE)


def test_a_record_without_a_target_cannot_be_a_canary(tmp_path: Path) -> None:
    job = job_of(chat_model(tmp_path), ["a", "b c", "d e", "f g"], 1, batch=2.0)
    with pytest.raises(DpfedError, match="has no gradient"):
        audit_model(job, np.arange(1), 4, CONFIDENCE)


def test_the_own_model_is_audited_beside_the_others() -> None:
    changes = ["run.rounds=2", "run.local_steps=4", "data.clients=4", "run.features=false"]
    found = audit(prepare(load("digits", changes, registry())), 64, CONFIDENCE, own_model=True)
    assert [report.seen for report in found.reports].count("model") == 3
    assert len(found.reports) == 8
    assert all(report.confidence == pytest.approx(1 - 0.001 / 8) for report in found.reports)
    assert not any(report.disproved for report in found.reports)
