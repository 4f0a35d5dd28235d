"""`dpfed doctor` says what is there and what is missing, and comes to an end whatever is broken."""

from __future__ import annotations

import json
from importlib import metadata
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dpfed import __version__
from dpfed.cli import doctor
from dpfed.cli.main import app


def asked() -> tuple[str, dict[str, object]]:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    *shown, last = done.stdout.strip().splitlines()
    return "\n".join(shown), json.loads(last)


def test_it_says_what_is_there() -> None:
    shown, found = asked()
    assert f"dpfed {__version__}" in shown
    assert found["versions"]["dpfed"] == __version__  # type: ignore[index]
    assert found["packages"]["torch"] == metadata.version("torch")  # type: ignore[index]
    assert "device   cpu:" in shown
    assert "extra    flower" in shown


def test_it_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["torch>=2.6", "no-such-core>=1", "pyarrow>=15 ; extra == 'parquet'", "no-such-thing ; extra == 'odd'"]
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    shown, found = asked()
    assert "package  no-such-core           MISSING" in shown
    assert "note: no-such-core is missing, though dpfed needs it: pip install dpfed" in shown
    assert "note: optional: no-such-thing: pip install 'dpfed[odd]'" in shown
    assert found["extras"]["odd"] == {"no-such-thing": None}  # type: ignore[index]


def test_tools_of_developers_are_not_missing_to_users(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["torch>=2.6", "no-such-linter ; extra == 'dev'", "no-such-builder ; extra == 'docs'"]
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    shown, found = asked()
    assert "no-such" not in shown
    assert found["extras"] == {}


def test_it_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("half an installation\nwith details")

    for part in ("own_versions", "devices", "packages", "extras", "cache", "advice"):
        monkeypatch.setattr(doctor, part, broken)
    shown, found = asked()
    assert "devices: could not be found out (RuntimeError: half an installation)" in shown
    assert len(shown.splitlines()) == 6
    assert all(part == {"failed": "RuntimeError: half an installation"} for part in found.values())


def test_no_metadata_is_a_finding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", none)
    shown, _ = asked()
    assert "packages: could not be found out" in shown
    assert "device   cpu:" in shown


@pytest.mark.usefixtures("from_source")
def test_run_from_its_source_it_still_gives_advice() -> None:
    shown, found = asked()
    assert "could not be found out" not in shown
    assert "note: dpfed is run from its source and not installed" in shown
    assert found["packages"] == {}


@pytest.mark.parametrize("works", [True, False])
def test_a_gpu_is_described(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dpfed import kernels

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    facts = SimpleNamespace(name="Some GPU", total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: facts)
    monkeypatch.setattr(kernels, "works", lambda device: works)
    assert doctor.devices()[1] == f"cuda:0: Some GPU, 24 GiB, kernels {'work' if works else 'do not work'}"
    with monkeypatch.context() as other:
        other.setenv("DPFED_KERNELS", "0")
        assert doctor.devices()[1].endswith("kernels are switched off")

    def full(device: torch.device) -> bool:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as other:
        other.setattr(kernels, "works", full)
        assert doctor.devices()[1].endswith("memory is full")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: works)
    assert any("flash attention" in line for line in doctor.advice()) is not works
