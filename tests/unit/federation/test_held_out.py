"""Noised counts on held-out units: the split, one unit's contribution, charges and scores."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation_case import (
    client_of,
    job_of,
    names_of,
    reply_of,
    rows_of,
    server_of,
    source_of,
)
from served_case import KilledError, Net, config_of, serve

from dpfed.data.partition import shards_of
from dpfed.data.tables import Table
from dpfed.errors import DpfedError
from dpfed.federation.client_config import build
from dpfed.federation.held_out import HeldOut, mechanism_of, noised_counts, score_of, split
from dpfed.federation.messages import (
    Receipt,
    Reply,
    ScoringRequest,
    digest,
    pack,
    unpack_request,
)
from dpfed.federation.policy import RefusedError
from dpfed.federation.server.server import Federation
from dpfed.model.task import Task
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.isolation.turns import order_at_places
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.noise import OsNoise
from dpfed.privacy.record_batch import Records
from dpfed.registry import registry
from dpfed.training.budget.recorded_spending import served_spending
from dpfed.training.job.job import Job
from dpfed.training.round_context import first_state

HELD: dict[str, Any] = {"evaluate": True, "held_out": 80, "held_out_share": 0.25, "records": 300}


class ConstantNoise:
    """Noise of one value: 0 shows the count itself."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def normal64(self, size: int) -> torch.Tensor:
        return torch.full((size,), self.value, dtype=torch.float64)


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of(algorithm={"name": "dp-fedavg", "lr": 0.1}, privacy={"batch": None, "rate": 0.02})


def config(**client: Any) -> Any:
    raw: dict[str, Any] = {
        "client": {"name": "a", "state": "s", "servers": ["hub"], **client},
        "policy": {"records": 1, "max_epsilon": 1.0},
        "data": {"name": "digits"},
        "model": {"name": "linear"},
    }
    return build(raw, registry())


def table(count: int = 400) -> Table:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 16, (count, 1, 8, 8), dtype=np.uint8)
    columns = {"patient": np.arange(count) // 4, "last": np.arange(count) % 5 == 0}
    return Table({"pixel_values": pixels}, rng.integers(0, 10, count), columns)


def test_a_unit_is_held_out_by_itself_alone(tmp_path: Path) -> None:
    settings, whole = config(held_out_share=0.25), table()
    train, held = split(settings, whole, tmp_path)
    assert sorted([*train, *held]) == list(range(400))
    assert 60 < len(held) < 140
    _, again = split(settings, whole, tmp_path)
    assert np.array_equal(again, held)
    # One record less moves no other record.
    keep = np.arange(400) != held[3]
    less = Table({"pixel_values": whole.inputs["pixel_values"][keep]}, whole.labels[keep])
    assert np.array_equal(
        np.flatnonzero(keep)[split(settings, less, tmp_path)[1]], np.delete(held, 3)
    )
    # Another client has another key.
    _, other = split(settings, whole, tmp_path / "other")
    assert not np.array_equal(other, held)


def test_whole_units_are_held_out(tmp_path: Path) -> None:
    settings = config(held_out_share=0.3)
    settings = dataclasses.replace(
        settings, data=dataclasses.replace(settings.data, unit_column="patient")
    )
    train, held = split(settings, table(), tmp_path)
    assert not set(table().columns["patient"][train]) & set(table().columns["patient"][held])
    assert len(held) % 4 == 0
    marked = dataclasses.replace(
        settings,
        client=dataclasses.replace(settings.client, held_out_share=0.0, held_out_column="last"),
    )
    with pytest.raises(DpfedError, match="a patient has records"):
        split(marked, table(), tmp_path)
    with pytest.raises(DpfedError, match="true and false"):
        split(config(held_out_column="patient"), table(), tmp_path)
    assert len(split(config(held_out_column="last"), table(), tmp_path)[1]) == 80
    assert len(split(config(), table(), tmp_path)[1]) == 0


@pytest.mark.parametrize("isolation", ["exact", "fast"])
def test_a_unit_adds_its_share_of_right_answers_and_one_at_most(isolation: str) -> None:
    # Values outside 0 to 1 are clamped, NaN counts as 0.
    correct = torch.tensor([1.0, 0.0, 1.0, 1.0, float("nan"), 7.0])
    units = np.array(["p", "p", "q", "r", "r", "s"])
    model: Any = SimpleNamespace(
        rows=4,
        places=4,
        scores=lambda theta, inputs: inputs["x"],
        task=Task(lambda scores, labels: scores, lambda scores, labels: correct[scores]),
    )
    records = Records({"x": torch.arange(6)}, torch.zeros(6, dtype=torch.int64))
    shards = shards_of(np.zeros(6, dtype=np.int64), 1, units)
    held_out = HeldOut(records, shards)

    draws = np.random.default_rng(0) if isolation == "exact" else None

    def count(noise: Any) -> list[float]:
        counts = noised_counts(model, torch.zeros(1), held_out, 5.0, noise, draws)
        found: list[float] = counts.tolist()
        return found

    assert count(ConstantNoise()) == [0.5 + 1 + 0.5 + 1, 0.5 + 0 + 0.5 + 0]
    assert count(ConstantNoise(2.0)) == [3.0 + 10.0, 1.0 + 10.0]
    # The grid hides the last bits of count and noise.
    assert [x * 2**20 % 1 for x in count(ConstantNoise(1 / 3))] == [0, 0]
    found = torch.tensor([count(OsNoise(torch.device("cpu"))) for _ in range(2000)])
    assert found.std(0).tolist() == pytest.approx([5.0, 5.0], rel=0.08)
    assert found.mean(0).tolist() == pytest.approx([3.0, 1.0], abs=0.6)
    assert abs(float(torch.corrcoef(found.T)[0, 1])) < 0.12


class Places:
    """Draws the places that it is given."""

    def __init__(self, places: np.ndarray) -> None:
        self.places = places

    def integers(self, most: int, size: int) -> np.ndarray:
        assert size == len(self.places)
        assert (self.places < most).all()
        return self.places


def scores_of_held_out(job: Job, theta: torch.Tensor, rows: Any, places: Any) -> torch.Tensor:
    """Return the scores by which held-out records are judged, in the order of the records."""
    passes: list[torch.Tensor] = []

    def noted(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        passes.append(scores)
        return labels

    model: Any = SimpleNamespace(
        rows=1024,
        places=8,
        scores=job.model.scores,
        task=Task(lambda scores, labels: scores, noted),
    )
    inputs, labels = job.private.records.take(torch.as_tensor(rows))
    held_out = HeldOut(Records(inputs, labels), shards_of(np.zeros(len(rows), dtype=np.int64), 1))
    draws: Any = None if places is None else Places(places)
    noised_counts(model, theta, held_out, 5.0, ConstantNoise(), draws)
    if places is None:
        return torch.cat(passes)
    found = torch.zeros(len(rows), passes[0].shape[1])
    for scores, record in zip(passes, order_at_places(places, 8), strict=True):
        found[record[record >= 0]] = scores[record >= 0]
    return found


def test_the_answer_for_a_held_out_record_depends_on_no_other_record() -> None:
    """Without drawn places, the same record has other scores beside fewer records."""
    job = job_of(model={"name": "glyph-vit", "train": "lora"})
    generator = torch.Generator().manual_seed(0)
    places = np.random.default_rng(0).integers(8, size=21)
    fast_differs = False
    for scale in (0.0, 1.0, 10.0, 100.0):
        noise = torch.randn(len(job.theta), generator=generator)
        theta = job.theta + scale * noise
        whole = scores_of_held_out(job, theta, range(21), places)
        less = scores_of_held_out(job, theta, range(1, 21), places[1:])
        assert torch.equal(whole[1:], less)
        for count in (1, 2, 3):
            rest = range(21 - count, 21)
            fast = scores_of_held_out(job, theta, rest, None)
            fast_differs |= not torch.equal(fast, whole[rest.start :])
    if not fast_differs:
        pytest.skip("the kernels of this machine round alike for all batch sizes")


def test_what_is_charged_is_a_gaussian_of_this_noise(job: Job, tmp_path: Path) -> None:
    client = client_of(job, 0, tmp_path, **HELD)
    server = scoring_server(job, evaluate_sigma=6.0)
    for t in (1, 2):
        request = pack(server.scoring_request(t, first_state(job), 0))
        counts = reply_of(client.answer(request)).fields["counts"]
        assert abs(float(counts.sum()) - 119) < 39 + 60
    with Ledger.open(
        tmp_path / "clinic-0" / "ledger.db", client="clinic-0", readonly=True
    ) as ledger:
        assert ledger.history("clinic-0") == [(mechanism_of(6.0), 2)]
        row = next(iter(ledger.rows()))
        assert (row.charge.part, row.charge.steps, row.charge.noise, row.charge.void) == (
            "evaluate",
            1,
            "os",
            False,
        )


def scoring_server(job: Job, **section: Any) -> Federation:
    return server_of(job, {}, held_out={"clinic-0": 80}, **section)


def test_what_is_scored_is_the_average_where_one_is_kept(job: Job) -> None:
    state = first_state(job).averaging().after(first_state(job).server, 1.0, 0.5)
    moved = dataclasses.replace(state.server, theta=state.theta + 1)
    server = scoring_server(job)
    state = state.after(moved, 1.0, 0.5)
    sent = server.scoring_request(2, state, 0).fields["theta"]
    torch.testing.assert_close(sent, job.theta + 2 / 3)
    # Training continues from the last iterate.
    trained = server.training_requests(2, state, [0])[0].fields["theta"]
    assert torch.equal(trained, job.theta + 1)


def test_the_same_question_gets_the_stored_count_and_another_one_is_refused(
    job: Job, tmp_path: Path
) -> None:
    client = client_of(job, 0, tmp_path, **HELD)
    server = scoring_server(job)
    data = pack(server.scoring_request(2, first_state(job), 0))
    first = client.answer(data)
    assert client_of(job, 0, tmp_path, **HELD).answer(data) == first
    request = unpack_request(data, 1 << 24)
    assert isinstance(request, ScoringRequest)
    for changed in ({"sigma": 7.0}, {"round": 1}):
        with pytest.raises(RefusedError, match="not after round 2"):
            client.answer(
                pack(ScoringRequest(dataclasses.replace(request.terms, **changed), request.fields))
            )
    # Another model in the same round.
    with pytest.raises(RefusedError, match="not after round 2"):
        client.answer(pack(ScoringRequest(request.terms, {"theta": request.fields["theta"] + 1})))
    client.answer(pack(training(job, 2)))
    assert [row.charge.part for row in rows_of(tmp_path)] == ["evaluate", "train"]


def training(job: Job, t: int) -> Any:
    request = server_of(job, {}).training_requests(t, first_state(job), [0])[0]
    terms = dataclasses.replace(request.terms, expected=request.terms.rate * 300)
    return dataclasses.replace(request, terms=terms)


def test_counts_are_paid_from_the_same_epsilon(job: Job, tmp_path: Path) -> None:
    step = job.plan.mechanism(0)
    both = epsilon([(step, 2), (mechanism_of(5.0), 1)], 1e-5)
    assert both > epsilon([(mechanism_of(5.0), 1)], 1e-5)
    client = client_of(job, 0, tmp_path, **HELD, max_epsilon=both * 1.001)
    server = scoring_server(job)
    client.answer(pack(training(job, 1)))
    client.answer(pack(server.scoring_request(1, first_state(job), 0)))
    with pytest.raises(RefusedError, match="max_epsilon"):
        client.answer(pack(server.scoring_request(2, first_state(job), 0)))
    with pytest.raises(RefusedError, match="max_epsilon"):
        client.answer(pack(training(job, 2)))


def test_held_out_records_are_never_trained_on(job: Job, tmp_path: Path) -> None:
    client = client_of(job, 0, tmp_path, **HELD)
    trained = {x.numpy().tobytes() for x in client._records.inputs["pixel_values"]}
    held = {x.numpy().tobytes() for x in client._held_out.records.inputs["pixel_values"]}
    whole = source_of(job, 0).train
    assert not trained & held
    assert len(client._records.labels) + len(client._held_out.records.labels) == len(whole)
    with pytest.raises(DpfedError, match="holds no records to train on"):
        client_of(job, 0, tmp_path / "all", **{**HELD, "held_out_share": 1 - 1e-12})


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"evaluate": True}, "held_out_share"),
        ({"evaluate": True, "held_out": 3}, "held_out_share"),
        ({"evaluate": True, "held_out_share": 0.1}, r"policy\.held_out"),
        ({"held_out_share": 0.1, "held_out_column": "x"}, "not both"),
        ({"held_out_share": 1.0}, "held_out_share"),
    ],
)
def test_mistakes_in_client_toml(job: Job, tmp_path: Path, keys: dict[str, Any], what: str) -> None:
    with pytest.raises(DpfedError, match=what):
        client_of(job, 0, tmp_path, **keys)


def test_the_servers_figure_comes_with_its_noise() -> None:
    score = score_of(4, [(30.0, 10.0), (50.0, 10.0)], 5.0, 2, 1e-5)
    assert score is not None
    assert score.accuracy == pytest.approx(0.8)
    rng = np.random.default_rng(0)
    right, wrong = (count + rng.normal(0, 5, (20000, 2)).sum(1) for count in (80, 20))
    assert score.noise == pytest.approx((right / (right + wrong)).std(), rel=0.05)
    assert score_of(4, [(-3.0, 1.0)], 5.0, 2, 1e-5) is None
    assert score_of(4, [], 5.0, 2, 1e-5) is None
    assert (score.units, score.clients) == (100, 2)
    assert score.epsilon == pytest.approx(epsilon([(mechanism_of(5.0), 2)], 1e-5))


def test_a_count_that_cannot_be_is_named_and_left_out(job: Job) -> None:
    def says(right: float, wrong: float = 10.0) -> Any:
        def answer(data: bytes) -> bytes:
            terms = unpack_request(data, 1 << 24).terms
            receipt = Receipt(terms.run, terms.client, terms.round, digest(data), 1, "ab")
            return pack(Reply(receipt, {"counts": torch.tensor([right, wrong])}))

        return answer

    log: list[str] = []
    clients = {"clinic-0": says(30.0), "clinic-1": says(1e6), "clinic-2": says(float("nan"))}
    held = dict.fromkeys(names_of(job), 40)
    federation = server_of(job, clients, log.append, held_out=held, evaluate_every=2)
    federation.after(1, first_state(job))
    assert federation.scores == []
    federation.after(2, first_state(job))
    (score,) = federation.scores
    assert (score.accuracy, score.clients) == (0.75, 1)
    assert "client 'clinic-1' is not scored: 1e+06 right and 10 wrong" in log[0]
    assert "client 'clinic-2' is not scored" in log[1]
    assert "accuracy 0.750 on about 40 held-out units of 1 clients, noise ±0.099" in log[2]
    for wrong in ({}, {"nobody": 3}):
        with pytest.raises(DpfedError, match=r"federation\.held_out"):
            server_of(job, {}, held_out=wrong, evaluate_every=1)


def test_a_whole_run_with_counts_goes_on_after_a_kill_without_paying_twice(
    job: Job, tmp_path: Path
) -> None:
    held = dict.fromkeys(names_of(job), 80)
    declared = dict.fromkeys(names_of(job), 300)
    section = {
        "held_out": held,
        "evaluate_every": 1,
        "evaluate_sigma": 5.0,
        "clients": declared,
        "test_set": True,
    }
    settings = config_of(
        job,
        federation=section,
        run={"rounds": 4, "local_steps": 20},
        algorithm={"name": "dp-fedavg", "lr": 1.0},
    )
    net = Net(job, tmp_path, seeded=False)
    net.clients = {
        f"clinic-{i}": client_of(job, i, tmp_path, **HELD, max_epsilon=1e3).answer for i in range(3)
    }
    # The clients have sent the counts of round 2.
    net.kill_within = 4
    with pytest.raises(KilledError):
        serve(settings, tmp_path / "out", net, seeded=False)
    result = serve(settings, tmp_path / "out", net, seeded=False, mode="resume")
    assert net.sent[4] == net.sent[2]
    assert net.sent[5] == net.sent[3]
    assert [score["round"] for score in result["held_out"]] == [1, 2, 3, 4]
    assert result["held_out"][-1]["accuracy"] == pytest.approx(result["test_accuracy"], abs=0.3)
    for name in names_of(job):
        with Ledger.open(tmp_path / name / "ledger.db", client=name, readonly=True) as ledger:
            assert [(row.charge.round, row.charge.part) for row in ledger.rows()] == [
                (t, part) for t in (1, 2, 3, 4) for part in ("train", "evaluate")
            ]
            spent = epsilon(ledger.history(name), settings.privacy.delta)
        # The server's figure includes the counts on held-out records.
        assert spent <= result["epsilon"]["server_worst"] * (1 + 1e-6)
        assert spent > 0.99 * result["epsilon"]["server_worst"]
    assert "counts of held-out records" in result["guarantee"]
    assert served_spending(tmp_path / "out", seeded=False).server_max == pytest.approx(
        result["epsilon"]["server_worst"], rel=1e-6
    )
