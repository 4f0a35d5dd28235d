"""Hostile values of every field of a request: refused with public words, without any charge."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_case import Loopback, client_of, job_of, rows_of, server_of
from safetensors.torch import save

from dpfed.errors import DpfedError
from dpfed.federation import policy as policy_module
from dpfed.federation.client.client import Client
from dpfed.federation.messages import FORMAT, MessageError, ScoringTerms, Terms
from dpfed.federation.policy import PublicError, RefusedError, public_text
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.oracle import FleetOracle
from dpfed.training.job.job import Job
from dpfed.training.round_context import first_state

NAN, INF, HUGE = float("nan"), float("inf"), 10**400
# Wrong for every number of things.
NUMBERS: list[Any] = [NAN, INF, -INF, -1, 0, HUGE, "1", None, True, [1], {}]
RATES: list[Any] = [NAN, INF, -1.0, 0.0, 1e300, 5e-324, "1", None, True, [1.0]]
TEXTS: list[Any] = ["", "x" * 201, "a\nb", "\x1b[2J", 3, None, ["a"], "\ud800"]
OFTEN: list[Any] = [*NUMBERS, 10**9 + 1, 2**63, 1.5]
FLAGS: list[Any] = [1, 0, "true", None, []]
GOOD_CLIPPING = {
    "mode": "flat",
    "stability": 0.01,
    "quantile": 0.5,
    "rate": 0.2,
    "count_noise": 10.0,
}


def clipping(**changed: Any) -> dict[str, Any]:
    return {**GOOD_CLIPPING, **changed}


def algorithm(**changed: Any) -> dict[str, Any]:
    return {"name": "dp-fedadamw", "lr": 0.01, **changed}


HOSTILE: dict[str, list[Any]] = {
    "run": TEXTS,
    "server": [*TEXTS, "evil", "hub ", "HUB"],
    "client": [*TEXTS, "clinic-1"],
    "index": [NAN, -1, 3, 10**10, HUGE, "0", None, True],
    "seed": [2**63, -(2**63), HUGE, 1.5, NAN, "1", None],
    "seeded": [*FLAGS, True],
    "round": [*OFTEN, 4, 10**9],
    "rounds": OFTEN,
    "local_steps": [*OFTEN, 101],
    "clients": OFTEN,
    "cohort": [*OFTEN, 4],
    "lr": [*RATES, 0.02, 101.0, 1e-13],
    "algorithm": [
        {}, 3, [1], None, {"name": "os.system"}, {"name": ["dp-fedavg"]}, algorithm(lr=-1.0),
        algorithm(lr=NAN), algorithm(lr=INF), algorithm(lr=1e300), algorithm(lr=101.0),
        algorithm(lr=1e-3), algorithm(weight_decay=1e30), algorithm(weight_decay=-1.0),
        algorithm(eps=INF), algorithm(gamma=2.0), algorithm(beta2=1.0), algorithm(bc_floor=-1e9),
        algorithm(bc_floor=HUGE), algorithm(agg="eval"), algorithm(__class__="x"),
        algorithm(lr=[0.01]), algorithm(bc_floor={"a": [1]}),
    ],
    "model": ["", "00", "x" * 65, 3, None, "\n"],
    "rate": [*RATES, 1e-13, 1.0000001, 0.11, 0.02],
    "expected": [*RATES, 9.999, 10.001, 1e13],
    "sigma": [*RATES, 0.49, 1e11, 1e13],
    "clip": [*RATES, 1e-13, 10.5, 1e13],
    "clipping": [
        None, 3, {}, {"mode": "flat"}, clipping(mode="batch_tensor"), clipping(mode="none"),
        clipping(stability=0.0), clipping(stability=INF), clipping(stability=1e7),
        clipping(quantile=0.0), clipping(quantile=1.0), clipping(rate=0.0), clipping(rate=INF),
        clipping(rate=101.0), clipping(count_noise=1.0), clipping(count_noise=1e7),
        clipping(count_noise=NAN), clipping(extra=1), clipping(mode=3),
    ],
    "grid": [*FLAGS, False],
    "equal_phi": FLAGS,
    "rows": [NAN, -1, 1, 2**63, HUGE, "0", None, True],
    "head": ["00", "x" * 65, "\n", 3, None],
    "used": [NAN, -1, 1, 10**9, 2**63, HUGE, "0", None, True],
    "max_rounds": [NAN, -1, 10**10, 2**63, HUGE, "0", None, True],
    "upload": [*TEXTS, "int4", "INT8", NAN, True],
    # The tensors of the request are in float32.
    "download": [*TEXTS, "int4", "bf16", "int8", NAN],
}  # fmt: skip


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of()


def table_of(job: Job) -> dict[str, Any]:
    terms = server_of(job, {}).training_requests(1, first_state(job), [0])[0].terms
    return {"format": FORMAT, "kind": "request", **dataclasses.asdict(terms)}


def packed(job: Job, table: dict[str, Any], **fields: torch.Tensor) -> bytes:
    """Return bytes that `pack` never makes, with NaN, Infinity or numbers of 400 digits."""
    server = first_state(job).server
    tensors = {name: getattr(server, name).detach().clone() for name in job.algorithm.broadcast}
    return save({**tensors, **fields}, metadata={"dpfed": json.dumps(table)})


class Spy:
    """A client whose data and ledger must stay untouched."""

    def __init__(
        self, job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any
    ) -> None:
        def touched(*_: object, **__: object) -> None:
            raise AssertionError("a record was touched, or something charged")

        monkeypatch.setattr(FleetOracle, "_draw", touched)
        monkeypatch.setattr("dpfed.federation.client.client.noised_counts", touched)
        monkeypatch.setattr(Ledger, "charge", touched)
        self.client = client_of(job, 0, folder, **keys)

    def refuses(self, data: bytes) -> str:
        with pytest.raises(DpfedError) as caught:
            self.client.answer(data)
        assert isinstance(caught.value, RefusedError | MessageError), (
            f"not a refusal: {caught.value!r}"
        )
        text = public_text(caught.value)
        assert text == str(caught.value)
        return text


def test_the_table_names_every_field() -> None:
    assert HOSTILE.keys() == {f.name for f in dataclasses.fields(Terms)}


@pytest.mark.parametrize("field", HOSTILE)
def test_no_hostile_value_of_any_field_is_charged_or_computed(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    spy, good = Spy(job, tmp_path, monkeypatch), table_of(job)
    for value in HOSTILE[field]:
        text = spy.refuses(packed(job, {**good, field: value}))
        assert len(text) < 3000
        assert str(tmp_path) not in text
    del good[field]
    assert field in spy.refuses(packed(job, good))
    # Without the changed value the request is accepted.
    with pytest.raises(AssertionError, match="charged"):
        spy.client.answer(packed(job, table_of(job)))


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1.1e4, -2e5, 1e11, 1e16, -3e38])
def test_a_broadcast_of_numbers_that_would_overflow_is_refused(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    theta = job.theta.clone()
    theta[7] = value
    assert "theta" in Spy(job, tmp_path, monkeypatch).refuses(
        packed(job, table_of(job), theta=theta)
    )


SCORING: dict[str, list[Any]] = {
    name: HOSTILE[name]
    for name in ("run", "server", "client", "seed", "seeded", "model", "rows", "head")
} | {
    "index": [NAN, -1, 10**10, HUGE, "0", None, True],
    "round": OFTEN,
    "algorithm": HOSTILE["algorithm"][:7],
    "held_out": [*OFTEN, 79, 81],
    "sigma": [*RATES, 4.99, 1e7, 1e13],
}


def scoring_of(job: Job) -> dict[str, Any]:
    server = server_of(job, {}, held_out={"clinic-0": 80})
    terms = server.scoring_request(1, first_state(job), 0).terms
    return {"format": FORMAT, "kind": "scoring", **dataclasses.asdict(terms)}


def scoring_bytes(job: Job, table: dict[str, Any]) -> bytes:
    return save({"theta": job.theta.detach().clone()}, metadata={"dpfed": json.dumps(table)})


def test_the_same_for_counts_on_held_out_records(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SCORING.keys() == {f.name for f in dataclasses.fields(ScoringTerms)}
    keys = {"evaluate": True, "held_out": 80, "held_out_share": 0.25, "records": 300}
    spy, good = Spy(job, tmp_path, monkeypatch, **keys), scoring_of(job)
    for field, values in SCORING.items():
        for value in values:
            spy.refuses(scoring_bytes(job, {**good, field: value}))
    with pytest.raises(AssertionError, match="charged"):
        spy.client.answer(scoring_bytes(job, good))
    off = Spy(job, tmp_path / "off", monkeypatch)
    assert "policy.evaluate is false" in off.refuses(scoring_bytes(job, good))


@pytest.mark.parametrize(
    "kind", [ZeroDivisionError, OSError, KeyError, DpfedError, MemoryError, AssertionError]
)
def test_of_any_other_error_the_server_learns_that_there_was_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise kind("patient Smith, born 1950")

    client = client_of(job, 0, tmp_path)
    monkeypatch.setattr(Client, "_compute", failing)
    requests = {"clinic-0": packed(job, table_of(job))}
    answers = Loopback({"clinic-0": client.answer}).send_all(requests, 1.0)
    assert str(dict(answers)["clinic-0"]) == "it failed, and its own log says why"
    assert public_text(kind("Smith")) == "it failed, and its own log says why"
    assert public_text(PublicError("lr is too high")) == "lr is too high"


def test_a_ledger_that_was_put_back_is_told_without_saying_where_it_lies(
    job: Job, tmp_path: Path
) -> None:
    client = client_of(job, 0, tmp_path)
    data = packed(job, {**table_of(job), "rows": 5, "head": "ab"})
    with pytest.raises(RefusedError, match="row 1 is missing in its ledger") as caught:
        client.answer(data)
    assert str(tmp_path) not in str(caught.value)


def test_no_rule_of_a_client_asks_what_time_it_is(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spending and the next round do not depend on the times of rows."""
    decade = 10 * 365 * 86400.0
    client, table = client_of(job, 0, tmp_path), table_of(job)
    for t, now in ((1, 1.8e9 + decade), (2, 1.8e9 - decade), (3, 1.8e9)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        client.answer(packed(job, {**table, "round": t}))
        with pytest.raises(RefusedError, match=f"not after round {t}"):
            client.answer(packed(job, {**table, "round": t, "lr": 0.005}))
    rows = rows_of(tmp_path)
    charges = [(row.charge.mechanism, row.charge.steps) for row in rows]
    assert charges == [(job.plan.mechanism(0), 2)] * 3
    assert [row.time for row in rows] == [1.8e9 + decade, 1.8e9 - decade, 1.8e9]
    # Certificates and logs have dates, and the guard compares the clocks of two machines.
    dated = {"keys.py", "certificates.py", "log_line.py", "status.py", "guard.py"}
    for path in Path(policy_module.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "time.time(" not in text or path.name == "guard.py", path.name
        assert "datetime" not in text or path.name in dated, path.name
