"""The server: it averages good replies, names faulty clients, and stops after too few replies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from callback_case import Watcher
from federation_case import (
    Loopback,
    federated,
    federation_of,
    job_of,
    names_of,
    section_of,
    server_of,
    spending_of,
)

from dpfed.errors import DpfedError, StoppedError
from dpfed.federation.messages import Receipt, Reply, digest, pack, unpack_request
from dpfed.federation.policy import RefusedError
from dpfed.federation.server import exchange
from dpfed.federation.server.server import Federation, RunPlace, norm_limit
from dpfed.model.frozen.model_hash import model_hash
from dpfed.training.job.job import Job
from dpfed.training.messages.message_format import Field, encode
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import RoundLoop


def job_with(least: int | None = 2, **algorithm: Any) -> Job:
    run = {} if least is None else {"min_clients": least}
    return job_of(run=run, algorithm={"name": "dp-fedavg", "lr": 0.1, **algorithm})


def say(delta: torch.Tensor | list[float], **changed: Any) -> Any:
    """Return a client that replies to everything with `delta`."""

    def answer(data: bytes) -> bytes:
        terms = unpack_request(data, 1 << 24).terms
        receipt = Receipt(terms.run, terms.client, terms.round, digest(data), 1, "ab")
        return pack(
            Reply(dataclasses.replace(receipt, **changed), {"delta": torch.as_tensor(delta)})
        )

    return answer


def say_fields(data: bytes, fields: dict[str, torch.Tensor]) -> bytes:
    terms = unpack_request(data, 1 << 24).terms
    return pack(Reply(Receipt(terms.run, terms.client, terms.round, digest(data), 1, "ab"), fields))


def faulty(job: Job, answer: Any) -> tuple[Federation, list[str]]:
    """Return a server whose clients 0 and 1 are good; `answer` is client 2."""
    ones = torch.ones(job.space.size)
    log: list[str] = []
    clients = {"clinic-0": say(ones), "clinic-1": say(3 * ones)} | (
        {"clinic-2": answer} if answer else {}
    )
    return server_of(job, clients, log.append), log


def raising(error: Exception) -> Any:
    def answer(data: bytes) -> bytes:
        raise error

    return answer


SIZE = job_of().space.size


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (None, "no answer within 5 seconds"),
        (raising(RefusedError("refused: no")), "refused: no"),
        (raising(DpfedError("the patient Smith")), "its own log says why"),
        (raising(ZeroDivisionError("record 17")), "its own log says why"),
        (raising(RefusedError("two\nlines\x1b[2J" + "x" * 9999)), "two lines [2J"),
        (say(torch.full((SIZE,), float("nan"))), "not finite"),
        (say(torch.full((SIZE,), 1e9)), "no honest one passes"),
        (say([1.0]), "shape"),
        (say(torch.ones(SIZE), round=9), "round 9"),
        (say(torch.ones(SIZE), client="clinic-0"), "client 'clinic-0'"),
        (lambda data: (2**31).to_bytes(8, "little") + bytes(8), "header"),
        (lambda data: b"", "header"),
    ],
)
def test_the_round_goes_on_without_the_offender_who_is_named(answer: Any, what: str) -> None:
    job = job_with()
    federation, log = faulty(job, answer)
    mean, answered = federation.run_cohort(1, first_state(job), [0, 1, 2])
    assert answered == 2
    assert mean["delta"].tolist() == [2.0] * job.space.size
    assert len(log) == 1
    assert log[0].startswith("round 1: client 'clinic-2' is left out: ")
    assert what in log[0]
    assert "\n" not in log[0]
    assert len(log[0]) < 400
    assert federation.used == {0: 1, 1: 1}
    assert federation.heads == {0: (1, "ab"), 1: (1, "ab")}


def test_a_reply_in_another_format_costs_only_its_own_client() -> None:
    job = job_of(
        run={"min_clients": 2},
        algorithm={"name": "dp-fedavg", "lr": 0.1},
        federation={"upload": "int8"},
    )
    size = job.space.size
    log: list[str] = []

    def small(value: float, **changed: torch.Tensor) -> Any:
        layout = {"delta": Field(size, "int8")}
        sent = encode({"delta": torch.full((size,), value)}, layout, torch.rand) | changed
        return lambda data: say_fields(data, sent)

    clients = {
        "clinic-0": small(1.0),
        "clinic-1": small(3.0),
        "clinic-2": small(9.0, **{"delta.scale": torch.tensor([float("nan")] * 2)}),
    }
    federation = server_of(job, clients, log.append)
    mean, answered = federation.run_cohort(1, first_state(job), [0, 1, 2])
    assert answered == 2
    assert mean["delta"].tolist() == pytest.approx([2.0] * size)
    assert "'clinic-2' is left out: delta.scale holds scales that are not finite" in log[0]
    clients["clinic-2"] = say(torch.ones(size))
    federation = server_of(job, clients, log.append)
    assert federation.run_cohort(1, first_state(job), [0, 1, 2])[1] == 2
    assert "delta is in float32, and int8 was asked for" in log[1]


def test_the_order_of_arrival_changes_no_bit_and_files_of_replies_are_deleted(
    tmp_path: Path,
) -> None:
    job = job_with()
    generator = torch.Generator().manual_seed(1)
    sent = {
        name: say(torch.randn(job.space.size, generator=generator) * 10.0**i)
        for i, name in enumerate(names_of(job))
    }
    (tmp_path / "replies-of-a-killed-server").mkdir()
    found = []

    class Turned(Loopback):
        def send_all(self, requests: Any, timeout: float) -> Any:
            for name in self.clients:
                yield name, self._reply(name, requests[name])
                assert list(tmp_path.glob("replies-*/*"))

    for order in (sent, dict(reversed(sent.items()))):
        place = RunPlace("run-1", tmp_path)
        federation = Federation(job, Turned(order), place, section_of(job))
        mean, _ = federation.run_cohort(1, first_state(job), [0, 1, 2])
        found.append(mean["delta"])
        assert list(tmp_path.glob("replies-*")) == []
    assert torch.equal(*found)


def test_a_full_disk_ends_the_run_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, mode: str) -> NoReturn:
        raise OSError(28, "No space left on device")

    job = job_with()
    monkeypatch.setattr(exchange, "open_private", full)
    with pytest.raises(DpfedError, match=r"0\.safetensors cannot be written: No space left"):
        faulty(job, None)[0].run_cohort(1, first_state(job), [0, 1, 2])


@pytest.mark.parametrize("least", [3, None])
def test_too_few_answers_end_the_run(least: int | None) -> None:
    job = job_with(least)
    federation, log = faulty(job, None)
    with pytest.raises(StoppedError, match="only 2 clients gave a usable answer and 3 are needed"):
        federation.run_cohort(1, first_state(job), [0, 1, 2])
    assert federation.used == {}
    assert len(log) == 1


def test_who_is_missing_is_asked_again_with_the_same_bytes_before_a_round_is_lost() -> None:
    job = job_with(3)
    ones, sent = torch.ones(job.space.size), []
    log: list[str] = []

    def late(data: bytes) -> bytes:
        sent.append(data)
        if len(sent) == 1:
            raise RefusedError("busy")
        out: bytes = say(5 * ones)(data)
        return out

    clients = {"clinic-0": say(ones), "clinic-1": late, "clinic-2": say(3 * ones)}
    asked: list[list[str]] = []

    class Watched(Loopback):
        def send_all(self, requests: Any, timeout: float) -> Any:
            asked.append(sorted(requests))
            return super().send_all(requests, timeout)

    federation = server_of(job, Watched(clients), log.append, retries=1)
    mean, answered = federation.run_cohort(1, first_state(job), [0, 1, 2])
    assert (answered, mean["delta"][0]) == (3, 3.0)
    assert asked == [["clinic-0", "clinic-1", "clinic-2"], ["clinic-1"]]
    assert sent[0] == sent[1]
    assert len(log) == 1


def test_a_lost_round_leaves_the_state_and_three_in_a_row_end_the_run() -> None:
    job = job_with(3)
    ones = torch.ones(job.space.size)
    log: list[str] = []
    clients = {"clinic-0": say(ones), "clinic-1": say(3 * ones)}
    federation = server_of(job, clients, log.append, patience=3)
    seen: list[Any] = []
    with pytest.raises(StoppedError, match="in round 3 only 2"):
        RoundLoop(job, federation, spending_of(job), Watcher(on_round=seen.append)).run()
    assert [round.t for round in seen] == [0, 1, 2]
    assert all(torch.equal(round.theta, job.theta) for round in seen)
    assert sum("the round is lost" in line for line in log) == 2
    assert federation.used == {}


def test_weights_are_public_sizes_of_those_who_answered() -> None:
    job = job_with(agg_weights="size")
    job = dataclasses.replace(
        job,
        plan=dataclasses.replace(
            job.plan,
            sizes=torch.tensor([100, 300, 7]).numpy(),
            expected=job.plan.rates * torch.tensor([100, 300, 7]).numpy(),
        ),
    )
    federation, _ = faulty(job, None)
    mean, _ = federation.run_cohort(1, first_state(job), [0, 1, 2])
    assert mean["delta"][0] == pytest.approx(0.25 * 1 + 0.75 * 3)


def test_the_next_request_echoes_the_head_and_what_was_used(tmp_path: Path) -> None:
    job = job_of(algorithm={"name": "dp-scaffold", "lr": 0.1}, run={"min_clients": 2})
    federation, transport, log = federation_of(job, tmp_path)
    seen: dict[str, list[tuple[int, int, int]]] = {name: [] for name in names_of(job)}
    # The server never gets this client's reply of round 2.
    lost = {2: "clinic-1"}

    def watched(name: str, real: Any) -> Any:
        def answer(data: bytes) -> bytes:
            terms = unpack_request(data, 1 << 24).terms
            seen[name].append((terms.round, terms.rows, terms.used))
            out: bytes = real(data)
            if lost.get(terms.round) == name:
                raise RefusedError("too slow")
            return out

        return answer

    transport.clients = {name: watched(name, real) for name, real in transport.clients.items()}
    federated(job, federation)
    assert seen["clinic-0"] == [(1, 0, 0), (2, 1, 1), (3, 2, 2)]
    assert seen["clinic-1"] == [(1, 0, 0), (2, 1, 1), (3, 1, 1)]
    assert log == ["round 2: client 'clinic-1' is left out: too slow"]
    folder = next((tmp_path / "clinic-1" / "runs").iterdir())
    assert sorted(path.name for path in folder.glob("memory-*")) == [
        "memory-1.kept",
        "memory-3.pending",
    ]


def test_a_server_that_starts_again_within_a_round_gets_the_stored_messages(tmp_path: Path) -> None:
    job = job_of(algorithm={"name": "dp-scaffold", "lr": 0.1})
    federation, transport, _ = federation_of(job, tmp_path)
    state, everyone = first_state(job), [0, 1, 2]
    federation.run_cohort(1, state, everyone)
    checkpoint = federation.remembered()
    expected, _ = federation.run_cohort(2, state, everyone)
    again = server_of(job, transport)
    again.restore(checkpoint)
    found, answered = again.run_cohort(2, state, everyone)
    assert answered == 3
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    log: list[str] = []
    forgot = server_of(job, transport, log.append)
    with pytest.raises(StoppedError):
        forgot.run_cohort(2, state, everyone)
    assert "not after round 2" in log[0]


def test_figures_bound_the_run_and_nothing_is_charged_at_the_server() -> None:
    job = job_with()
    spending = spending_of(job)
    spending.charge(1, [0, 1, 2])
    figures = spending.figures()
    assert figures["server_max"] is not None
    assert 0 < figures["server_max"] <= (figures["server_worst"] or 0)


def test_what_cannot_be_sent_is_refused_before_the_first_round() -> None:
    job = job_with()
    with pytest.raises(DpfedError, match="3 clients"):
        server_of(job, {}, clients={"a": 1, "b": 1})
    with pytest.raises(DpfedError, match="real clients answer with noise only"):
        server_of(job_of(privacy={"sigma": 0.0}), {})
    with pytest.raises(DpfedError, match="poisson"):
        server_of(job_of(privacy={"sampling": "fixed_wor"}), {})


def test_the_norm_limit_is_public_and_far_from_honest_messages() -> None:
    job = job_with()
    assert norm_limit(job, 1, first_state(job)) > 1e3


def test_the_models_hash_follows_frozen_weights_and_shapes_only() -> None:
    job = job_of(model={"name": "glyph-vit", "train": "head"})
    model, before = job.adapted.model, model_hash(job.adapted.model, job.space)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        parameters[job.space.names[0]].add_(1.0)
    assert model_hash(model, job.space) == before
    frozen = next(name for name in parameters if name not in job.space.names)
    with torch.no_grad():
        parameters[frozen].view(-1)[0] += 1e-3
    assert model_hash(model, job.space) != before
    assert model_hash(job_of().adapted.model, job_of().space) != before
