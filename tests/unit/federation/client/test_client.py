"""The client: charge, compute, store, send, and a kill between any two of these operations."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_case import (
    client_config,
    client_of,
    job_of,
    rows_of,
    server_of,
    source_of,
)

from dpfed.cli.privacy import show_own
from dpfed.errors import DpfedError
from dpfed.federation.client import client as client_module
from dpfed.federation.client import storage as store_module
from dpfed.federation.client.client import Client
from dpfed.federation.client.round_setup import ModelBuilder, plan_of
from dpfed.federation.messages import (
    MessageError,
    Reply,
    Request,
    digest,
    pack,
    unpack_reply,
    unpack_request,
)
from dpfed.federation.policy import RefusedError
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.oracle import FleetOracle
from dpfed.privacy.published import show_loss
from dpfed.training.budget.recorded_spending import own_ledger, own_spending
from dpfed.training.job.job import Job
from dpfed.training.messages.message_format import Field
from dpfed.training.round_context import first_state


class KilledError(BaseException):
    """No code in the program catches this exception, like a kill."""


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of()


@pytest.fixture(scope="module")
def scaffold() -> Job:
    return job_of(algorithm={"name": "dp-scaffold", "lr": 0.1})


def request_of(
    job: Job, t: int = 1, head: tuple[int, str] = (0, ""), used: int = 0, **changed: Any
) -> bytes:
    request = server_of(job, {}).training_requests(t, first_state(job), [0])[0]
    terms = dataclasses.replace(request.terms, rows=head[0], head=head[1], used=used, **changed)
    return pack(Request(terms, request.fields))


def opened(data: bytes, request: bytes, job: Job) -> Reply:
    layout = {"delta": Field(job.space.size), "v": Field(job.space.num_blocks)}
    if job.algorithm.name == "dp-scaffold":
        layout = {"delta": Field(job.space.size), "c": Field(job.space.size)}
    return unpack_reply(data, layout, unpack_request(request, 1 << 24).terms, digest(request), 1e9)


def test_the_same_request_gets_the_stored_bytes_and_is_charged_once(
    job: Job, tmp_path: Path
) -> None:
    client, asked = client_of(job, 0, tmp_path), request_of(job)
    first = client.answer(asked)
    assert client.answer(asked) == first
    # Another process with the same files.
    assert client_of(job, 0, tmp_path).answer(asked) == first
    assert len(rows_of(tmp_path)) == 1
    reply = opened(first, asked, job)
    with Ledger.open(
        tmp_path / "clinic-0" / "ledger.db", client="clinic-0", readonly=True
    ) as ledger:
        assert (reply.receipt.rows, reply.receipt.head) == tuple(ledger.head())
        (row,) = ledger.rows()
        assert (row.run, row.charge.noise, row.charge.void) == ("run-1", "os", False)
        assert row.charge.mechanism == job.plan.mechanism(0)


def test_a_round_cannot_be_had_twice_with_other_noise(job: Job, tmp_path: Path) -> None:
    client = client_of(job, 0, tmp_path)
    client.answer(request_of(job, 2))
    for t, changed in ((2, {"lr": 0.005}), (2, {"clip": 0.4}), (1, {}), (2, {"rounds": 4})):
        with pytest.raises(RefusedError, match="not after round 2"):
            client.answer(request_of(job, t, **changed))
    assert len(rows_of(tmp_path)) == 1
    # Another run has its own rounds in the same ledger.
    client.answer(request_of(job, 1, run="run-2"))
    assert len(rows_of(tmp_path)) == 2


@pytest.mark.parametrize(
    ("changed", "keys", "what"),
    [
        ({"server": "evil"}, {}, "client.servers"),
        ({"client": "clinic-1"}, {}, "clinic-1"),
        ({"seeded": True}, {}, "allow_seeded"),
        ({"sigma": 0.4}, {}, "min_sigma"),
        ({"sigma": 1e11}, {}, "too much for a grid"),
        ({"sigma": 1e308}, {}, "sigma"),
        ({"rate": 1e-300, "expected": 1e-300}, {}, "rate"),
        ({"clip": 11.0}, {}, "max_clip"),
        ({"local_steps": 101}, {}, "max_local_steps"),
        ({"expected": 9.0}, {}, "policy.records"),
        ({"model": "00"}, {}, "frozen weights"),
        ({"algorithm": {"name": "dp-nothing"}}, {}, "no algorithm"),
        ({"algorithm": {"name": "dp-fedavg", "lr": -1.0}}, {}, "algorithm.lr"),
        ({"algorithm": {"name": "dp-fedavg", "lr": 0.1}}, {}, "holds"),
        ({}, {"max_epsilon": 0.01}, "max_epsilon"),
        ({}, {"algorithms": ["dp-fedavg"]}, "policy.algorithms"),
        ({}, {"models": ["00"]}, "policy.models"),
        ({"round": 4}, {}, "never due"),
        ({"used": 1}, {}, "never due"),
        ({"rows": 3, "head": "00"}, {}, "row 1 is missing"),
        ({"rows": 0, "head": "00"}, {}, "not the row"),
    ],
)
def test_what_is_refused_spends_nothing_and_touches_no_record(
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    keys: dict[str, Any],
    what: str,
) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("a record was touched")

    monkeypatch.setattr(FleetOracle, "_draw", touched)
    asked = request_of(job)
    request = unpack_request(asked, 1 << 24)
    data = pack(Request(dataclasses.replace(request.terms, **changed), request.fields))
    with pytest.raises(DpfedError, match=what):
        client_of(job, 0, tmp_path, **keys).answer(data)
    assert len(rows_of(tmp_path)) == 0


def test_a_theta_that_is_not_finite_or_of_another_size_is_refused(job: Job, tmp_path: Path) -> None:
    client, request = client_of(job, 0, tmp_path), unpack_request(request_of(job), 1 << 24)
    for theta in (torch.full_like(request.fields["theta"], float("nan")), torch.zeros(3)):
        with pytest.raises(MessageError, match="theta"):
            client.answer(pack(Request(request.terms, {**request.fields, "theta": theta})))
    with pytest.raises(MessageError, match="at most 1048576 are read"):
        client_of(job, 0, tmp_path, max_message=1).answer(bytes(1 << 21))
    assert len(rows_of(tmp_path)) == 0


def test_the_budget_ends_exactly_where_it_would_be_passed(tmp_path: Path) -> None:
    job = job_of()
    two = epsilon([(job.plan.mechanism(0), 4)], 1e-5)
    client = client_of(job, 0, tmp_path, max_epsilon=two * 1.0001)
    client.answer(request_of(job, 1))
    client.answer(request_of(job, 1, run="run-2"))
    with pytest.raises(RefusedError, match="max_epsilon"):
        client.answer(request_of(job, 1, run="run-3"))
    assert len(rows_of(tmp_path)) == 2


def kill(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool) -> None:
    real = getattr(owner, name)

    def killed(*args: Any, **keys: Any) -> Any:
        if after:
            real(*args, **keys)
        raise KilledError

    monkeypatch.setattr(owner, name, killed)


POINTS: list[tuple[Any, str, bool, int, bool]] = [
    # owner, name, kill after it, rows in the ledger, reply is stored
    (client_module, "check_training", False, 1, False),
    (ModelBuilder, "build", True, 1, False),
    (store_module.Store, "memory", True, 1, False),
    (Ledger, "charge", False, 1, False),
    (Ledger, "charge", True, 2, False),
    (Client, "_compute", True, 2, False),
    (store_module.Store, "keep_memory", False, 2, False),
    (store_module.Store, "keep_memory", True, 2, False),
    (store_module.Store, "keep_reply", False, 2, False),
    (store_module.Store, "keep_reply", True, 2, True),
]


@pytest.mark.parametrize(
    ("owner", "name", "after", "rows", "stored"),
    POINTS,
    ids=lambda x: str(getattr(x, "__name__", x)),
)
def test_a_kill_between_any_two_operations_neither_loses_nor_repeats_a_charge(
    scaffold: Job, tmp_path: Path, owner: Any, name: str, after: bool, rows: int, stored: bool
) -> None:
    first = request_of(scaffold)
    reply = opened(client_of(scaffold, 0, tmp_path).answer(first), first, scaffold)
    head = (reply.receipt.rows, reply.receipt.head)
    second = request_of(scaffold, 2, head, used=1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        client = client_of(scaffold, 0, tmp_path)
        kill(monkeypatch, owner, name, after)
        with pytest.raises(KilledError):
            client.answer(second)
    assert len(rows_of(tmp_path)) == rows
    again = client_of(scaffold, 0, tmp_path)
    if stored or rows == 1:
        data = again.answer(second)
        assert opened(data, second, scaffold).receipt.rows == 2
        assert again.answer(second) == data
    else:
        with pytest.raises(RefusedError, match="not after round 2"):
            again.answer(second)
    assert len(rows_of(tmp_path)) == 2
    # The server never used the message of round 2.
    third = request_of(scaffold, 3, head, used=1)
    assert opened(again.answer(third), third, scaffold).receipt.rows == 3
    folder = next((tmp_path / "clinic-0" / "runs").iterdir())
    assert sorted(path.name for path in folder.glob("memory-*")) == [
        "memory-1.kept",
        "memory-3.pending",
    ]


def test_an_old_copy_of_the_ledger_is_noticed(job: Job, tmp_path: Path) -> None:
    client, state = client_of(job, 0, tmp_path), tmp_path / "clinic-0"
    client.answer(request_of(job, 1))
    shutil.copytree(state, tmp_path / "copy")
    asked = request_of(job, 2)
    reply = opened(client.answer(asked), asked, job)
    head = (reply.receipt.rows, reply.receipt.head)
    late = shutil.copytree(state, tmp_path / "late")
    for name in ("ledger.db", "ledger.db.head"):
        shutil.copy(tmp_path / "copy" / name, state / name)
    # The stored reply shows that the ledger is old.
    with pytest.raises(RefusedError, match="lacks round 2"):
        client.answer(request_of(job, 3))
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "copy", state)
    # The head in the request shows that the ledger is old.
    with pytest.raises(DpfedError, match="row 2 is missing"):
        client.answer(request_of(job, 3, head))
    shutil.rmtree(state)
    shutil.copytree(late, state)
    client.answer(request_of(job, 3, head))
    (state / "ledger.db").unlink()
    with pytest.raises(DpfedError, match="gone"):
        client.answer(request_of(job, 3, head))


def test_a_ledger_that_cannot_be_written_lets_nothing_out(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    client = client_of(job, 0, tmp_path)
    client.answer(request_of(job, 1))
    monkeypatch.setattr("dpfed.privacy.ledger.ledger.write_head", full)
    monkeypatch.setattr(Client, "_compute", lambda *_: pytest.fail("computed without a charge"))
    with pytest.raises(DpfedError, match="No space left"):
        client.answer(request_of(job, 2))


def test_memory_is_committed_only_when_its_message_was_used(scaffold: Job, tmp_path: Path) -> None:
    client, job = client_of(scaffold, 0, tmp_path), scaffold
    client.answer(request_of(job, 1))
    folder = next((tmp_path / "clinic-0" / "runs").iterdir())
    names = lambda: sorted(path.name for path in folder.glob("memory-*"))  # noqa: E731
    assert names() == ["memory-1.pending"]
    client.answer(request_of(job, 2, used=0))
    assert names() == ["memory-2.pending"]
    client.answer(request_of(job, 3, used=2))
    assert names() == ["memory-2.kept", "memory-3.pending"]
    with pytest.raises(RefusedError, match="said 2 before"):
        client.answer(request_of(job, 4, used=1, rounds=9, lr=0.01))
    (folder / "memory-2.kept").unlink()
    with pytest.raises(RefusedError, match="memory of round 2 is gone"):
        client.answer(request_of(job, 4, used=2, rounds=9, lr=0.01))
    assert len(rows_of(tmp_path)) == 3


def test_a_client_may_declare_fewer_records_and_every_one_keeps_its_coin(
    job: Job, tmp_path: Path
) -> None:
    real = int(job.plan.sizes[0])
    client = client_of(job, 0, tmp_path, records=real - 100)
    rate = float(job.plan.rates[0])
    asked = request_of(job, expected=rate * (real - 100))
    client.answer(asked)
    units = len(client._shards.units) - 1
    plan = plan_of(unpack_request(asked, 1 << 24).terms, job.algorithm, units, "record")
    assert plan.sizes.tolist() == [real]
    assert plan.expected.tolist() == [rate * (real - 100)]
    assert plan.phi(0) == pytest.approx((0.5 / (rate * (real - 100))) ** 2)


def test_a_reply_holds_noised_values_and_public_constants_only(job: Job, tmp_path: Path) -> None:
    asked = request_of(job)
    reply = opened(client_of(job, 0, tmp_path).answer(asked), asked, job)
    assert set(reply.fields) == {"delta", "v"}
    assert {f.name for f in dataclasses.fields(reply.receipt)} == {
        "run",
        "client",
        "round",
        "request",
        "rows",
        "head",
    }


def test_undeclared_classes_are_refused_with_real_noise_even_if_test_mode_is_allowed(
    job: Job, tmp_path: Path
) -> None:
    undeclared = dataclasses.replace(source_of(job, 0), declared=False)
    with pytest.raises(DpfedError, match=r"declare data\.classes"):
        Client(client_config(job, 0, tmp_path), undeclared)
    client = Client(client_config(job, 0, tmp_path, allow_seeded=True), undeclared, insecure=True)
    with pytest.raises(DpfedError, match=r"declare data\.classes"):
        client.answer(request_of(job))
    client.answer(request_of(job, seeded=True))
    assert [row.charge.void for row in rows_of(tmp_path)] == [True]


def test_repeatable_noise_needs_a_link_on_this_machine_as_well(tmp_path: Path) -> None:
    """The client.toml of a trial is refused in a real federation before the first request."""
    job = job_of()
    config = client_config(job, 0, tmp_path, allow_seeded=True)
    with pytest.raises(DpfedError, match="allow_seeded = true is for tests with --insecure"):
        Client(config, source_of(job, 0))
    Client(config, source_of(job, 0), insecure=True)


def test_a_client_can_ask_what_it_has_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of()
    client_of(job, 0, tmp_path).answer(request_of(job))
    account = own_spending(tmp_path / "clinic-0" / "ledger.db")
    with Ledger.open(
        tmp_path / "clinic-0" / "ledger.db", client="clinic-0", readonly=True
    ) as ledger:
        spent = epsilon(ledger.history("clinic-0"), account.delta)
    assert (account.client, account.runs, account.rows, account.void) == ("clinic-0", 1, 1, 0)
    assert account.epsilon == pytest.approx(spent)
    show_own(account, as_json=True)
    said = capsys.readouterr().out
    assert f"clinic-0 has spent epsilon {show_loss(spent, 4)}" in said
    assert own_ledger(tmp_path / "clinic-0") == tmp_path / "clinic-0" / "ledger.db"
    assert own_ledger(tmp_path) is None
