"""A client at a theta that the server chose: passes of a fixed shape, and within a distance."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_case import client_of, job_of, rows_of, server_of
from torch import Tensor

from dpfed.federation.client.budget_left import spending_line
from dpfed.federation.client.client import Client
from dpfed.federation.messages import Request, ScoringRequest, pack
from dpfed.federation.policy import PublicError, RefusedError
from dpfed.federation.server.server import Federation
from dpfed.model.per_sample.gradients import PerSample
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.accounting.rdp import rdp_epsilon
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_loss
from dpfed.training.job.job import Job
from dpfed.training.round_context import first_state

HELD: dict[str, Any] = {"evaluate": True, "held_out": 80, "held_out_share": 0.25}


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the numbers of records in all passes, forward or backward."""
    found: list[int] = []
    grads, scores = PerSample.raw_grads, PerSample.scores

    def noted_grads(self: PerSample, theta: Tensor, client: Tensor, *rest: Any) -> list[Tensor]:
        found.append(len(client))
        return grads(self, theta, client, *rest)

    def noted_scores(self: PerSample, vector: Tensor, inputs: Any) -> Tensor:
        found.append(len(next(iter(inputs.values()))))
        return scores(self, vector, inputs)

    monkeypatch.setattr(PerSample, "raw_grads", noted_grads)
    monkeypatch.setattr(PerSample, "scores", noted_scores)
    return found


def scoring_server(job: Job) -> Federation:
    return server_of(job, {}, held_out={"clinic-0": 80})


def training(job: Job, **fields: Tensor) -> bytes:
    request = scoring_server(job).training_requests(1, first_state(job), [0])[0]
    return pack(Request(request.terms, {**request.fields, **fields}))


def scoring(job: Job, theta: Tensor) -> bytes:
    request = scoring_server(job).scoring_request(1, first_state(job), 0)
    return pack(ScoringRequest(request.terms, {"theta": theta}))


def charged(folder: Path) -> list[str]:
    return [row.charge.part for row in rows_of(folder)]


@pytest.mark.parametrize(("keys", "exact"), [({}, True), ({"isolation": "fast"}, False)])
def test_passes_have_one_shape_unless_the_operator_says_otherwise(
    job: Job, tmp_path: Path, passes: list[int], keys: dict[str, Any], exact: bool
) -> None:
    records = int(job.plan.sizes[0])
    client = client_of(job, 0, tmp_path, records=records, **HELD, **keys)
    terms = scoring_server(job).training_requests(1, first_state(job), [0])[0].terms
    places = client._models.build(terms, job.algorithm).model.places
    assert (places > 1) is exact
    for asked in (training(job), scoring(job, job.theta)):
        passes.clear()
        client.answer(asked)
        assert len(passes) > 1 or not exact
        assert (set(passes) == {places}) is exact


def test_a_theta_beyond_the_policy_is_refused_before_anything_is_charged(
    job: Job, tmp_path: Path
) -> None:
    client = client_of(job, 0, tmp_path, **HELD, max_distance=3.0)
    near = torch.zeros_like(job.theta)
    near[5] = 2.9
    far = torch.zeros_like(job.theta)
    far[5] = 3.1
    terms = scoring_server(job).training_requests(1, first_state(job), [0])[0].terms
    start = client._models.build(terms, job.algorithm).start
    for asked in (training(job, theta=start + far), scoring(job, start + far)):
        with pytest.raises(RefusedError, match=r"theta is 3\.1 away .* policy\.max_distance = 3"):
            client.answer(asked)
    assert charged(tmp_path) == []
    client.answer(scoring(job, start + near))
    client.answer(training(job, theta=start + near))
    assert charged(tmp_path) == ["evaluate", "train"]


def test_an_iterate_beyond_the_policy_stops_the_round_which_stays_charged(
    job: Job, tmp_path: Path, passes: list[int]
) -> None:
    """The server also chooses the global direction, which moves theta between two local steps."""
    client = client_of(job, 0, tmp_path)
    terms = scoring_server(job).training_requests(1, first_state(job), [0])[0].terms
    client._models.build(terms, job.algorithm)
    away = training(job, dg=torch.full_like(job.theta, 1e9))
    seen: list[float] = []
    grads = PerSample.raw_grads

    def noted(self: PerSample, theta: Tensor, *rest: Any) -> list[Tensor]:
        seen.append(float(theta.abs().max()))
        return grads(self, theta, *rest)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(PerSample, "raw_grads", noted)
        with pytest.raises(PublicError, match=r"stays charged: .* policy\.max_distance = 10000"):
            client.answer(away)
    assert seen
    assert max(seen) < 100
    assert charged(tmp_path) == ["train"]
    with pytest.raises(RefusedError, match="not after round 1"):
        client.answer(away)


def test_a_client_that_holds_nothing_out_answers_with_noise(job: Job, tmp_path: Path) -> None:
    client = client_of(job, 0, tmp_path, **{**HELD, "held_out_share": 1e-9})
    assert len(client._held_out.records.labels) == 0
    client.answer(scoring(job, job.theta))
    assert charged(tmp_path) == ["evaluate"]


def test_neither_answer_nor_refusal_depends_on_the_declared_numbers_being_true(
    job: Job, tmp_path: Path
) -> None:
    """The server cannot see if a declared number is one too high or too low."""
    real = int(job.plan.sizes[0])
    held = len(client_of(job, 0, tmp_path / "count", **HELD)._held_out.shards.units) - 1
    for declared in (real - held, real - held - 1, real - held + 1, 10 * real):
        for out in (held, held + 1, max(1, held // 3), 10 * held):
            folder = tmp_path / f"{declared}-{out}"
            client = client_of(job, 0, folder, **{**HELD, "records": declared, "held_out": out})
            request = scoring_server(job).training_requests(1, first_state(job), [0])[0]
            terms = dataclasses.replace(request.terms, expected=request.terms.rate * declared)
            client.answer(pack(Request(terms, request.fields)))
            score = scoring_server(job).scoring_request(1, first_state(job), 0)
            terms_ = dataclasses.replace(score.terms, held_out=out)
            client.answer(pack(ScoringRequest(terms_, score.fields)))
            assert charged(folder) == ["train", "evaluate"]


def test_the_log_says_what_is_spent_of_the_budget(job: Job, tmp_path: Path) -> None:
    log: list[str] = []
    made = client_of(job, 0, tmp_path, **HELD, max_epsilon=8.0)
    client = Client(made.config, made._source, insecure=True, log=log.append)
    first, count = training(job), scoring(job, job.theta)
    client.answer(first)
    client.answer(count)
    client.answer(count)
    train = (job.plan.mechanism(0), 2)
    one = epsilon([train], 1e-5)
    two = epsilon([train, (Mechanism("poisson", 1.0, 5.0), 1)], 1e-5)
    assert log[0].startswith(f"round 1 answered, epsilon {show_loss(one, 2)} of 8.0 spent, ")
    assert log[1].startswith(f"round 1 scored, epsilon {show_loss(two, 2)} of 8.0 spent, ")
    assert log[2] == "round 1 scored again with the stored message, nothing spent"
    fields = log[0].fields  # type: ignore[attr-defined]
    assert (fields["round"], fields["epsilon"], fields["max_epsilon"]) == (1, one, 8.0)
    more = fields["rounds_left"]
    assert f"{math.floor((8 - one) * 100) / 100:.2f} left: at least {more:,} rounds like" in log[0]
    spent = [(*train[:1], 2 * (1 + more))]
    assert epsilon(spent, 1e-5) <= 8.0, "the rounds that are left can be afforded"
    assert rdp_epsilon([(train[0], 2 * math.ceil(2 + 1.1 * more))], 1e-5) > 8.0
    assert float(show_loss(one, 2)) >= one
    assert show_loss(2.0410001, 2) == "2.05"
    many = [(Mechanism("poisson", 0.01 + 0.001 * i, 1.0), 1) for i in range(20)]
    charge = Charge("clinic-0", 3, 2, many[0][0], noise="os")
    line = spending_line("round 3 answered", made.config.policy, charge, many)
    assert "(Rényi bound)" in line
    assert "at most" in line
    over = [(many[0][0], 10**7)]
    assert "0.00 left: at least 0 rounds" in spending_line("x", made.config.policy, charge, over)


def test_the_log_says_that_repeatable_noise_protects_nothing(job: Job, tmp_path: Path) -> None:
    log: list[str] = []
    made = client_of(job, 0, tmp_path, allow_seeded=True)
    client = Client(made.config, made._source, insecure=True, log=log.append)
    request = scoring_server(job).training_requests(1, first_state(job), [0])[0]
    terms = dataclasses.replace(request.terms, seeded=True)
    client.answer(pack(Request(terms, request.fields)))
    assert log == ["round 1 answered in test mode, with repeatable noise that protects nothing"]
