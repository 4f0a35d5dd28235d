"""Non-finite values and out-of-memory errors give no wrong results and no private output."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpfed.config import Config, build
from dpfed.data.tables import Source, Table
from dpfed.errors import DivergedError, StoppedError
from dpfed.privacy import oracle as oracle_module
from dpfed.privacy.noise import OsNoise, Streams
from dpfed.privacy.oracle import FleetOracle, out_of_memory
from dpfed.registry import registry
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job.job import Job, prepare
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import aggregate, choose
from dpfed.training.run import run

torch.set_num_threads(1)
CLIENTS, EACH = 5, 12


def config_of(**sections: dict[str, Any]) -> Config:
    raw: dict[str, dict[str, Any]] = {
        "data": {
            "name": "digits",
            "clients": CLIENTS,
            "partition": "natural",
            "client_column": "site",
        },
        "model": {"name": "linear"},
        "algorithm": {"name": "dp-scaffold", "lr": 0.1},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 6},
        "run": {"rounds": 2, "local_steps": 2, "participation": 1.0, "device": "cpu"},
    }
    for name, keys in sections.items():
        raw[name] = {**raw[name], **keys}
    return build(raw, registry())


def source(spoil: Callable[[np.ndarray], None] = lambda x: None) -> Source:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS * EACH, 4)).astype(np.float32)
    spoil(x)
    columns = {"site": np.repeat(np.arange(CLIENTS), EACH)}
    train = Table({"features": x}, rng.integers(0, 3, len(x)), columns)
    test = Table({"features": rng.normal(size=(9, 4)).astype(np.float32)}, rng.integers(0, 3, 9))
    return Source(train, test, ("a", "b", "c"), "features")


def job_of(given: Source | None = None, **sections: dict[str, Any]) -> Job:
    return prepare(config_of(**sections), given or source())


def after(job: Job, fleet: Fleet | None = None, rounds: int = 2) -> dict[str, Tensor]:
    """Return the server's state and the clients' memory after rounds of all clients."""
    state, fleet = first_state(job), fleet or Fleet(job)
    for t in range(1, rounds + 1):
        cohort = choose(job, t, np.arange(CLIENTS), np.zeros(CLIENTS))
        mean, answered = fleet.run_cohort(t, state, cohort)
        state = aggregate(job, t, state, cohort, mean, answered)
    return state.tensors() | fleet.memory.gather(range(CLIENTS), job.device)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6, msg=name)


# --- non-finite values ---


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [slice(3, 4), slice(EACH, 2 * EACH)])
def test_records_without_a_finite_gradient_count_as_zero(bad: float, rows: slice) -> None:
    """The spoiled records are one record or all of client 1; the reference has zeros for them."""

    def spoil(x: np.ndarray) -> None:
        x[rows] = bad

    job, reference = job_of(source(spoil)), job_of(source())
    grads = reference.model.grads

    def silent(
        theta: Tensor, client: Tensor, inputs: Any, labels: Tensor, keys: Tensor | None = None
    ) -> list[Tensor]:
        lost = torch.isin(
            inputs["features"][:, 0], reference.private.records.inputs["features"][rows, 0]
        )
        return [
            g * (~lost).float().unsqueeze(1) for g in grads(theta, client, inputs, labels, keys)
        ]

    reference.model.grads = silent  # type: ignore[method-assign]
    found = after(job)
    same(found, after(reference))
    assert all(bool(v.isfinite().all()) for v in found.values())
    # Without the fault these records change the result.
    with pytest.raises(AssertionError):
        same(found, after(job_of(source())))


def test_fixed_size_passes_log_lost_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(x: np.ndarray) -> None:
        x[EACH : 2 * EACH] = math.nan

    caplog.set_level(logging.DEBUG, logger="dpfed.private")
    run(config_of(run={"slots": 24}), tmp_path / "logged", source=source(spoil))
    assert any("client 1:" in r.getMessage() for r in caplog.records)


def test_lost_records_are_in_the_private_log_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def spoil(x: np.ndarray) -> None:
        x[EACH : 2 * EACH] = math.nan

    # Even a program that logs everything does not enable the private log.
    caplog.set_level(logging.DEBUG)
    quiet = run(config_of(), tmp_path / "quiet", source=source(spoil))
    assert not caplog.records
    caplog.set_level(logging.DEBUG, logger="dpfed.private")
    logged = run(config_of(), tmp_path / "logged", source=source(spoil))
    lines = [r.getMessage() for r in caplog.records]
    assert lines
    assert all(r.name == "dpfed.private" and r.levelno == logging.DEBUG for r in caplog.records)
    assert all("client 1:" in line and "not finite" in line for line in lines)
    assert {line.split(",")[0] for line in lines} == {"round 1", "round 2"}
    out, err = capfd.readouterr()
    assert "finite" not in out + err
    for file in (tmp_path / "logged").rglob("*"):
        if file.suffix in (".json", ".jsonl", ".toml"):
            assert "finite" not in file.read_text()
    drop = {"out", "seconds"}
    assert {k: v for k, v in quiet.items() if k not in drop} == {
        k: v for k, v in logged.items() if k not in drop
    }


class Struck(FleetOracle):
    """An oracle whose noised gradient of client 3 is infinite in round 2."""

    def _release(self, theta: Tensor, slots: Any) -> tuple[Tensor, Tensor]:
        g, phi = super()._release(theta, slots)
        if self._round == 2 and 3 in self._clients:
            g[self._clients.index(3), 0] = math.inf
        return g, phi


@pytest.mark.parametrize("size", [1, 2, "auto"])
def test_a_client_with_non_finite_values_stops_the_run(
    size: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpfed.training.backends.fleet.FleetOracle", Struck)
    settings = {"fleet_size": size}
    with pytest.raises(
        DivergedError, match=r"round 2 the \w+ of client 3 is no longer finite"
    ) as caught:
        run(config_of(run=settings), tmp_path / "run", source=source())
    assert "\n" not in str(caught.value)
    result = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (result["state"], result["diverged"], result["rounds"]) == ("stopped", True, 1)
    assert (tmp_path / "run" / "checkpoint" / "round-1.json").exists()
    monkeypatch.undo()
    whole = run(config_of(run=settings), tmp_path / "whole", source=source())
    again = run(config_of(run=settings), tmp_path / "run", source=source(), mode="resume")
    assert again["test_loss"] == whole["test_loss"]


def test_with_allow_nan_the_run_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpfed.training.backends.fleet.FleetOracle", Struck)
    found = after(job_of(run={"allow_nan": True}))
    assert not bool(found["theta"].isfinite().all())


def test_a_non_finite_memory_stops_the_run() -> None:
    job = job_of()
    fleet = Fleet(job)
    fleet.memory.put(
        0,
        [2],
        {name: torch.full((1, job.space.size), math.nan) for name in job.algorithm.remembers},
    )
    with pytest.raises(DivergedError, match=r"round 1 .* client 2"):
        after(job, fleet)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_overflow_in_half_precision_is_clipped(dtype: torch.dtype) -> None:
    from dpfed.privacy.clipping import Clipping, UnitRows, clip_and_sum

    grads = torch.tensor([[3.0, 4.0], [1e30, 1.0], [60000.0, 60000.0], [0.25, 0.0]])
    halves = [grads[:, :1].to(dtype), grads[:, 1:].to(dtype)]
    unit, owner = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    total, _ = clip_and_sum(halves, UnitRows(owner, torch.ones_like(unit), 1), 1.0, Clipping())
    assert total.dtype == torch.float32
    # 60000² overflows float16, so a norm in float16 would lose the third record.
    half = 0.5**0.5
    expected = [0.6 + half + 0.25, 0.8 + half]
    # 1e30 is finite in bfloat16; its square overflows float32.
    if dtype == torch.bfloat16:
        assert halves[0][1].isfinite().all()
    torch.testing.assert_close(total[0], torch.tensor(expected), rtol=1e-2, atol=1e-2)


# --- out of memory ---


def crowd(job: Job, most: int, error: Exception | None = None, by: str = "records") -> list[int]:
    """Raise in passes of more than `most` records or clients; return the sizes of all passes."""
    grads, tried = job.model.grads, []

    def tight(
        theta: Tensor, client: Tensor, inputs: Any, labels: Tensor, keys: Tensor | None = None
    ) -> list[Tensor]:
        size = len(client) if by == "records" else len(theta)
        tried.append(size)
        if size > most:
            raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return grads(theta, client, inputs, labels, keys)

    job.model.grads = tight  # type: ignore[method-assign]
    return tried


ALGORITHMS = ["dp-scaffold", "dp-fedsam", "dp-fedadamw"]
CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1 bytes"
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("by", ["records", "clients"])
def test_a_full_device_does_not_change_results(
    algorithm: str, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"algorithm": {"name": algorithm}}
    job = job_of(**keys)
    tried = crowd(job, 5 if by == "records" else 2, by=by)
    same(after(job), after(job_of(**keys)))
    assert max(tried) > 5 or by == "clients"
    said = [r.getMessage() for r in caplog.records if r.name == "dpfed"]
    assert len(said) == 1
    assert "ran out of memory" in said[0]
    assert said[0] in job.notes


def test_the_size_that_fits_is_kept() -> None:
    job = job_of()
    tried = crowd(job, 2, by="clients")
    fleet = Fleet(job)
    after(job, fleet, rounds=1)
    tried.clear()
    fleet.run_cohort(2, first_state(job), range(CLIENTS))
    assert tried
    assert max(tried) <= 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("x"),
        RuntimeError(CPU_MESSAGE),
        MemoryError(),
        RuntimeError("not enough memory"),
    ],
)
def test_every_out_of_memory_error_is_recognised(error: Exception) -> None:
    assert out_of_memory(error)
    job = job_of()
    crowd(job, 4, error)
    same(after(job), after(job_of()))


def test_other_errors_are_raised_without_a_retry() -> None:
    job = job_of()
    tried = crowd(job, 0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes"):
        after(job)
    assert len(tried) == 1
    assert not out_of_memory(ValueError("out of memory"))


def test_nothing_is_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second draw would favour small batches, which the charged mechanism does not describe."""
    settings = {"run": {"noise": "os"}, "privacy": {"sigma": 1.0}}
    given = source()
    object.__setattr__(given, "declared", True)
    job = job_of(given, **settings)
    entropy = {"drawn": 0}
    first = OsNoise.__init__

    def counted(self: OsNoise, device: torch.device, key: Any = None) -> None:
        entropy["drawn"] += key is None
        first(self, device, key)

    released: dict[tuple[int, int], list[Tensor]] = {}
    fill = OsNoise.fill

    def watched(self: OsNoise, row: Tensor) -> None:
        fill(self, row)
        released.setdefault(self._key, []).append(row.clone())  # type: ignore[call-overload]

    monkeypatch.setattr(OsNoise, "__init__", counted)
    monkeypatch.setattr(OsNoise, "fill", watched)
    batches: list[tuple[tuple[int, ...], list[int]]] = []
    draw = FleetOracle._draw

    def noted(self: FleetOracle) -> Any:
        slots = draw(self)
        batches.append((tuple(self._clients), slots.row.tolist()))
        return slots

    monkeypatch.setattr(FleetOracle, "_draw", noted)
    grads, calls = job.model.grads, []

    def out_of_memory_later(theta: Tensor, *rest: Any) -> list[Tensor]:
        """Raise for more than two rows of theta after the first step of the fleet."""
        calls.append(len(theta))
        if len(theta) > 2 and len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grads(theta, *rest)

    job.model.grads = out_of_memory_later  # type: ignore[method-assign]
    Fleet(job).run_cohort(1, first_state(job), range(CLIENTS))
    assert entropy["drawn"] == CLIENTS
    assert len(released) == CLIENTS
    # One step of the first attempt, then both steps of the second one.
    for numbers in released.values():
        assert len(numbers) >= 3
        assert torch.equal(numbers[0], numbers[-2])
        assert not torch.equal(numbers[-1], numbers[-2])
    whole = batches[0][1]
    second: dict[tuple[int, ...], list[int]] = {}
    for clients, rows in batches:
        if len(clients) <= 2:
            # The first step of a fleet that fits.
            second.setdefault(clients, rows)
    assert sorted(row for rows in second.values() for row in rows) == sorted(whole)


def test_noise_can_be_repeated_from_its_start() -> None:
    for noise in (Streams(1).noise(2, 3, torch.device("cpu")), OsNoise(torch.device("cpu"))):
        numbers = [noise.normal64(5).float(), noise.normal64(3).float()]
        other = noise.again()
        assert torch.equal(other.normal64(5).float(), numbers[0])
        assert torch.equal(other.normal64(3).float(), numbers[1])


def test_no_memory_for_one_record_gives_a_one_sentence_error() -> None:
    job = job_of()
    tried = crowd(job, 0)
    with pytest.raises(StoppedError, match="not even one record of one client") as caught:
        after(job)
    assert "\n" not in str(caught.value)
    assert 'take run.precision = "bf16", model.gradient_checkpointing = true' in str(caught.value)
    assert 1 in tried
    assert len(job.notes) == len(set(job.notes))


def test_a_unit_is_never_split() -> None:
    """The gradient of a unit needs all its records at once, so the run stops."""
    given = source()
    given.train.columns["patient"] = np.arange(CLIENTS * EACH) // 3
    job = job_of(given, data={"unit_column": "patient"}, privacy={"batch": 2})
    crowd(job, 2)
    with pytest.raises(StoppedError, match="does not fit"):
        after(job)


def test_the_private_log_is_off_by_default() -> None:
    assert not oracle_module.PRIVATE.isEnabledFor(logging.DEBUG)
