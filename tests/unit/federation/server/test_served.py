"""A server's whole run: no private record, the simulation's numbers in test mode, and resuming."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from federation_case import RAW, Loopback, job_of, rows_of, server_of
from served_case import KilledError, Net, config_of, serve

from dpfed.cli.run import closing
from dpfed.config import build, to_toml
from dpfed.errors import DpfedError, StoppedError
from dpfed.federation.server.server import served
from dpfed.privacy.accounting.pld import epsilon
from dpfed.registry import registry
from dpfed.report.statement.build import statement_of_run
from dpfed.training.budget.prior_spending import checked
from dpfed.training.budget.recorded_spending import read_recorded_spending
from dpfed.training.budget.site_spending import read_site_spending
from dpfed.training.export import export, read_run
from dpfed.training.job.job import prepare, prepare_server
from dpfed.training.run import run


def theta_in(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["dp-fedadamw", "dp-scaffold"])
def test_a_server_and_a_simulation_of_one_configuration_take_the_same_way(
    name: str, tmp_path: Path
) -> None:
    algorithm = {"name": name, "lr": 0.01}
    job = job_of(algorithm=algorithm)
    config = config_of(job, algorithm=algorithm, run={"participation": 0.67})
    run(config, tmp_path / "simulated")
    result = serve(config, tmp_path / "served", Net(job, tmp_path))
    assert result["log"] == []
    from safetensors.torch import load_file

    one, two = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("simulated", "served")
    )
    assert max(float((one[k] - two[k]).abs().max()) for k in one) < 1e-5
    assert result["release"].startswith("simulation")
    assert not (tmp_path / "served" / "ledger.sqlite").exists()


def test_a_server_has_the_precision_of_its_clients() -> None:
    """With another precision the frozen weights would have another hash than at the clients."""
    config = config_of(job_of(), run={"precision": "bf16"})
    assert served(config).run.precision == "float32"


def test_the_servers_job_has_no_private_record_and_the_simulations_plan() -> None:
    job = job_of()
    config = config_of(job)
    found = prepare_server(config)
    assert len(found.private.records.labels) == 0
    assert len(found.private.shards.records) == 0
    assert found.private.shards.sizes.tolist() == [0, 0, 0]
    for field in ("sizes", "rates", "expected", "multipliers"):
        assert np.array_equal(getattr(found.plan, field), getattr(job.plan, field))
    assert torch.equal(found.theta, job.theta)
    assert len(found.public.test.labels) == len(job.public.test.labels)
    assert not any("federation" in note for note in prepare(config).notes)
    other = config_of(
        job, federation={"clients": {"a": 5, "b": 700}}, privacy={"batch": None, "rate": 0.1}
    )
    assert any("will not take the same way" in note for note in prepare(other).notes)


def test_clients_are_numbered_by_name_whatever_the_order_in_the_file() -> None:
    job = job_of()
    mixed = config_of(job, federation={"clients": {"zoe": 100, "abe": 300, "mia": 200}})
    assert prepare_server(mixed).plan.sizes.tolist() == [300, 200, 100]


def test_without_a_test_set_the_server_is_told_the_shapes_and_says_no_accuracy(
    tmp_path: Path,
) -> None:
    job = job_of()
    config = config_of(
        job, federation={"test_set": False, "shape": [1, 8, 8], "classes": 10, "white": 16.0}
    )
    result = serve(config, tmp_path / "out", Net(job, tmp_path))
    assert (result["test_accuracy"], result["start_accuracy"], result["test_records"]) == (
        None,
        None,
        0,
    )
    assert result["rounds"] == 3
    assert closing(result)[0].startswith(
        "no accuracy, as the server has no test set, after 3 rounds"
    )
    with pytest.raises(DpfedError, match=r"federation\.shape"):
        prepare_server(config_of(job, federation={"test_set": False}))


def test_mistakes_in_the_section_are_one_sentence() -> None:
    raw = {name: dict(table) for name, table in RAW.items()}
    with pytest.raises(DpfedError, match=r"\[federation\.clients\]"):
        prepare_server(build(raw, registry()))
    for table, what in (
        ({"clients": {"a": 0}}, "clients"),
        ({"clients": {"a": True}}, "clients"),
        ({"clients": ["a"]}, "clients"),
        ({"client": {}}, "did you mean clients"),
        ({"timeout": 0}, "timeout"),
    ):
        with pytest.raises(DpfedError, match=what):
            build({**raw, "federation": table}, registry())
    config = build({**raw, "federation": {"clients": {"b": 3, "a": 2}}}, registry())
    import tomllib

    assert build(tomllib.loads(to_toml(config)), registry()) == config


@pytest.mark.parametrize("when", ["before", "within"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_killed_server_goes_on_with_the_same_bytes_and_nobody_pays_twice(
    when: str, at: int, tmp_path: Path
) -> None:
    algorithm = {"name": "dp-scaffold", "lr": 0.1}
    job = job_of(algorithm=algorithm)
    config = config_of(job, algorithm=algorithm, run={"participation": 0.67, "checkpoint_every": 2})
    net = Net(job, tmp_path, seeded=False)
    setattr(net, f"kill_{when}", at)
    out = tmp_path / "out"
    with pytest.raises(KilledError):
        serve(config, out, net, seeded=False)
    interrupted = net.sent[-1]
    result = serve(config, out, net, seeded=False, mode="resume")
    assert net.sent[at] == interrupted, "the repeated requests must have the same bytes"
    assert len(net.sent) == 4
    assert (result["rounds"], result["log"]) == (3, [])
    asked = {
        name: sum(name in requests for requests in [*net.sent[:at], *net.sent[at + 1 :]])
        for name in net.clients
    }
    for i, name in enumerate(sorted(asked)):
        assert len(rows_of(tmp_path, i)) == asked[name]
    # The clients decide if they reply, so the cohort is no random sample for a third party.
    assert result["epsilon"]["third_party"] == result["epsilon"]["server_worst"]
    key = out / "cohorts.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_server_does_not_go_on_in_a_simulations_folder_nor_the_other_way_round(
    tmp_path: Path,
) -> None:
    job = job_of()
    config = config_of(job)
    with pytest.raises(StoppedError):
        serve(config_of(job, federation={"patience": 1}), tmp_path / "served", Loopback({}))
    with pytest.raises(DpfedError, match="the run of a server"):
        run(config, tmp_path / "served", mode="resume")
    run(config_of(job, run={"rounds": 1}), tmp_path / "simulated")
    (tmp_path / "simulated" / "run.json").write_text('{"run": "r", "state": "interrupted"}')
    with pytest.raises(DpfedError, match="the run of a simulation"):
        serve(
            config_of(job, run={"rounds": 1}), tmp_path / "simulated", Loopback({}), mode="resume"
        )


def test_a_servers_run_is_accounted_for_and_exported_with_upper_bounds(tmp_path: Path) -> None:
    job = job_of()
    result = serve(config_of(job), tmp_path / "out", Net(job, tmp_path, seeded=False), seeded=False)
    accounts = read_recorded_spending(tmp_path / "out")
    assert accounts.server_max == pytest.approx(epsilon([(job.plan.mechanism(0), 6)], 1e-5))
    assert accounts.server_worst == pytest.approx(result["epsilon"]["server_worst"])
    assert accounts.third_party == accounts.server_worst
    assert not accounts.seeded
    trained = read_run(tmp_path / "out")
    assert export(trained, tmp_path / "model") == "model"
    stored = checked((tmp_path / "model" / "dpfed.json").read_text(), "dpfed.json")
    assert stored.prior == ((job.plan.mechanism(0), 6),)
    statement = statement_of_run(tmp_path / "out")
    assert statement.ledger_head is None
    assert statement.guarantee is not None
    server, third = statement.guarantee.observers
    assert server.epsilon == third.epsilon == accounts.server_worst
    assert statement.guarantee.delta.all_records == int(job.plan.sizes.sum())
    with pytest.raises(DpfedError, match="clients keep their own ledgers"):
        read_site_spending([tmp_path / "out"])
    own = read_site_spending([tmp_path / "clinic-0"])
    assert own.unit == "record"
    assert 0 < own.epsilon <= accounts.server_worst


def test_waiting_may_change_when_a_server_goes_on_and_the_clients_may_not(tmp_path: Path) -> None:
    job = job_of()
    net = Net(job, tmp_path)
    net.kill_within = 2
    with pytest.raises(KilledError):
        serve(config_of(job), tmp_path / "out", net)
    more = {f"clinic-{i}": int(size) - 1 for i, size in enumerate(job.plan.sizes)}
    with pytest.raises(DpfedError, match=r"federation\.clients was"):
        serve(config_of(job, federation={"clients": more}), tmp_path / "out", net, mode="resume")
    result = serve(
        config_of(job, federation={"timeout": 9.0, "patience": 7}),
        tmp_path / "out",
        net,
        mode="resume",
    )
    assert result["rounds"] == 3


def test_a_checkpoint_that_is_no_servers_is_refused() -> None:
    job = job_of()
    federation = server_of(job, {})
    for wrong in ({}, {"heads": 3, "used": {}}, {"heads": {"x": [1]}, "used": {}}):
        with pytest.raises(DpfedError, match="no server's"):
            federation.restore(wrong)  # type: ignore[arg-type]


def test_the_declared_sizes_of_a_federation_bound_delta(tmp_path: Path) -> None:
    job = job_of()
    config = config_of(job, privacy={"delta": 0.5})
    with pytest.raises(DpfedError, match=r"privacy\.delta = 0\.5 is at least 1 / "):
        serve(config, tmp_path / "served", Net(job, tmp_path))
    assert not (tmp_path / "served").exists()
    allowed = config_of(job, privacy={"delta": 0.5, "allow_large_delta": True})
    result = serve(allowed, tmp_path / "served", Net(job, tmp_path))
    assert result["client_names"] == sorted(config.federation.clients)
    assert result["largest_client"] == max(config.federation.clients.values())
    assert any("privacy.delta = 0.5" in said for said in result["warnings"])
