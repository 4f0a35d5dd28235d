"""The cap on a client's rounds: the server keeps it, and the client counts for itself."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from federation_case import client_of, federated, federation_of, job_of, rows_of, server_of
from served_case import KilledError, Net, config_of, serve

from dpfed.errors import StoppedError
from dpfed.federation.client.request_checks import check_cap
from dpfed.federation.messages import Request, pack
from dpfed.federation.policy import RefusedError
from dpfed.privacy.accounting.pld import epsilon
from dpfed.training import round_loop
from dpfed.training.budget.recorded_spending import read_recorded_spending
from dpfed.training.job.job import Job
from dpfed.training.round_context import first_state

BALANCED = {"participation": 0.4, "rounds": 6, "cohort_choice": "balanced"}


@pytest.fixture(scope="module")
def job() -> Job:
    """Return three clients, of which one takes part in each of six rounds."""
    return job_of(run=BALANCED)


def request_of(job: Job, t: int, **changed: Any) -> bytes:
    request = server_of(job, {}).training_requests(t, first_state(job), [0])[0]
    return pack(Request(dataclasses.replace(request.terms, **changed), request.fields))


def rounds_of(folder: Path, client: int = 0) -> list[int]:
    return [row.charge.round for row in rows_of(folder, client)]


def test_the_server_states_the_cap_and_no_client_exceeds_it(job: Job, tmp_path: Path) -> None:
    request = server_of(job, {}).training_requests(1, first_state(job), [0])[0]
    assert request.terms.max_rounds == 2
    plain = server_of(job_of(), {}).training_requests(1, first_state(job_of()), [0])[0]
    assert plain.terms.max_rounds == 0
    federation, _, log = federation_of(job, tmp_path)
    federated(job, federation)
    assert log == []
    found = [rounds_of(tmp_path, i) for i in range(3)]
    assert [len(rounds) for rounds in found] == [2, 2, 2]
    assert {t for rounds in found for t in rounds} == {1, 2, 3, 4, 5, 6}


def test_federation_and_simulation_choose_the_same_cohorts(job: Job, tmp_path: Path) -> None:
    chosen: list[list[int]] = []
    choose = round_loop.choose

    def watch(*args: Any) -> list[int]:
        chosen.append(choose(*args))
        return chosen[-1]

    federation, _, _ = federation_of(job, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_loop, "choose", watch)
        federated(job, federation)
    assert Counter(i for cohort in chosen for i in cohort) == {0: 2, 1: 2, 2: 2}
    for t, cohort in enumerate(chosen, 1):
        assert all(t in rounds_of(tmp_path, i) for i in cohort)


def test_a_server_that_asks_once_too_often_is_refused(job: Job, tmp_path: Path) -> None:
    """This broken server asks the same client in every round."""
    federation, _, log = federation_of(job, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_loop, "choose", lambda *args: [0])
        with pytest.raises(StoppedError, match="in round 3 only 0 clients gave a usable answer"):
            federated(job, federation)
    assert rounds_of(tmp_path) == [1, 2]
    assert log == [
        "round 3: client 'clinic-0' is left out: refused: this client has taken part in 2 rounds "
        "of this run, and its cap is 2"
    ]


def test_a_killed_server_asks_the_same_clients_again(tmp_path: Path) -> None:
    job = job_of()
    config = config_of(job, run={"participation": 0.67, "cohort_choice": "balanced"})
    net = Net(job, tmp_path, seeded=False)
    net.kill_within = 2
    with pytest.raises(KilledError):
        serve(config, tmp_path / "out", net, seeded=False)
    interrupted = net.sent[-1]
    result = serve(config, tmp_path / "out", net, seeded=False, mode="resume")
    assert net.sent[2] == interrupted
    assert (result["rounds"], result["log"]) == (3, [])
    assert [len(rounds_of(tmp_path, i)) for i in range(3)] == [2, 2, 2]
    # Two rounds of two steps, for every client.
    worst = epsilon([(job.plan.mechanism(0), 4)], 1e-5)
    assert result["epsilon"] == pytest.approx(dict.fromkeys(result["epsilon"], worst))
    recorded = read_recorded_spending(tmp_path / "out")
    assert (recorded.most_rounds, recorded.realised.cap) == (2, 2)
    assert recorded.server_worst == recorded.server_max == pytest.approx(worst)


def test_a_client_counts_the_rounds_of_each_run_in_its_own_ledger(job: Job, tmp_path: Path) -> None:
    client = client_of(job, 0, tmp_path)
    client.answer(request_of(job, 1))
    second = request_of(job, 4)
    reply = client.answer(second)
    for t in (5, 6):
        with pytest.raises(RefusedError, match=r"taken part in 2 rounds .* its cap is 2"):
            client_of(job, 0, tmp_path).answer(request_of(job, t))
    # A repeated request gets its stored reply, and another run counts from 0.
    assert client.answer(second) == reply
    client.answer(request_of(job, 1, run="run-2"))
    assert rounds_of(tmp_path) == [1, 4, 1]


def test_test_mode_counts_too(job: Job, tmp_path: Path) -> None:
    client = client_of(job, 0, tmp_path, allow_seeded=True)
    for t in (1, 2):
        client.answer(request_of(job, t, seeded=True))
    with pytest.raises(RefusedError, match="its cap is 2"):
        client.answer(request_of(job, 3, seeded=True))


def test_a_server_cannot_raise_or_drop_the_cap_of_a_run(job: Job, tmp_path: Path) -> None:
    client = client_of(job, 0, tmp_path)
    client.answer(request_of(job, 1))
    sentence = "the run began with at most 2 rounds of this client, and now asks for "
    for cap, asked in ((3, "3 rounds"), (0, "any number of rounds")):
        with pytest.raises(RefusedError, match=sentence + asked):
            client.answer(request_of(job, 2, max_rounds=cap))
    assert rounds_of(tmp_path) == [1]


def test_a_cap_may_begin_during_a_run(tmp_path: Path) -> None:
    """The run of an earlier version has rounds in the ledger, but no cap."""
    job = job_of()
    client = client_of(job, 0, tmp_path)
    client.answer(request_of(job, 1))
    client.answer(request_of(job, 2, max_rounds=2))
    with pytest.raises(RefusedError, match="its cap is 2"):
        client.answer(request_of(job, 3, max_rounds=2))


def test_a_damaged_cap_is_refused(job: Job, tmp_path: Path) -> None:
    client = client_of(job, 0, tmp_path)
    client.answer(request_of(job, 1))
    (path,) = (tmp_path / "clinic-0" / "runs").glob("*/cap")
    assert path.read_text() == "2\n"
    path.write_text("many")
    with pytest.raises(RefusedError, match="its cap on rounds of this run is damaged"):
        client.answer(request_of(job, 2))
    assert rounds_of(tmp_path) == [1]


def test_a_refused_request_leaves_no_cap(job: Job, tmp_path: Path) -> None:
    client = client_of(job, 0, tmp_path)
    with pytest.raises(RefusedError, match="max_rate"):
        client_of(job, 0, tmp_path, max_rate=1e-6).answer(request_of(job, 1))
    assert list((tmp_path / "clinic-0").glob("runs/*/cap")) == []
    client.answer(request_of(job, 1))


@pytest.mark.parametrize(
    ("stated", "agreed", "taken", "refused"),
    [
        (0, None, 9, False),
        (2, None, 1, False),
        (2, None, 2, True),
        (2, 2, 1, False),
        (2, 2, 2, True),
        (3, 2, 0, True),
        (0, 2, 0, True),
    ],
)
def test_the_rule_of_the_cap(stated: int, agreed: int | None, taken: int, refused: bool) -> None:
    assert (check_cap(stated, agreed, taken) is not None) is refused
