"""`dpfed doctor` describes the installation and never fails, however broken it is."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w
from typer.testing import CliRunner

from dpfed import __version__
from dpfed.cli import doctor
from dpfed.cli.main import app
from dpfed.federation.client.declared_counts import rounded_down


def asked() -> tuple[str, dict[str, object]]:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    *shown, last = done.stdout.strip().splitlines()
    return "\n".join(shown), json.loads(last)


def test_doctor_lists_the_installation() -> None:
    shown, found = asked()
    assert f"dpfed {__version__}" in shown
    assert found["versions"]["dpfed"] == __version__  # type: ignore[index]
    assert found["packages"]["torch"] == metadata.version("torch")  # type: ignore[index]
    assert "device   cpu:" in shown
    assert "extra    flower" in shown


def test_doctor_names_missing_packages_and_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declared = [
        "torch>=2.6",
        "no-such-core>=1",
        "pyarrow>=15 ; extra == 'parquet'",
        "no-such-thing ; extra == 'odd'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    shown, found = asked()
    assert "package  no-such-core           MISSING" in shown
    assert "note: no-such-core is missing, though dpfed needs it: pip install dpfed" in shown
    assert "note: optional: no-such-thing: pip install 'dpfed[odd]'" in shown
    assert found["extras"]["odd"] == {"no-such-thing": None}  # type: ignore[index]


def test_doctor_does_not_list_developer_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = [
        "torch>=2.6",
        "no-such-linter ; extra == 'dev'",
        "no-such-builder ; extra == 'docs'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: declared)
    shown, found = asked()
    assert "no-such" not in shown
    assert found["extras"] == {}


def test_doctor_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("half an installation\nwith details")

    for part in ("own_versions", "devices", "packages", "extras", "cache", "advice"):
        monkeypatch.setattr(doctor, part, broken)
    shown, found = asked()
    assert "devices: could not be found out (RuntimeError: half an installation)" in shown
    assert len(shown.splitlines()) == 6
    assert all(part == {"failed": "RuntimeError: half an installation"} for part in found.values())


def test_missing_metadata_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", none)
    shown, _ = asked()
    assert "packages: could not be found out" in shown
    assert "device   cpu:" in shown


@pytest.mark.usefixtures("from_source")
def test_doctor_gives_advice_without_installation() -> None:
    shown, found = asked()
    assert "could not be found out" not in shown
    assert "note: dpfed is run from its source and not installed" in shown
    assert found["packages"] == {}


@pytest.mark.parametrize("works", [True, False])
def test_a_gpu_is_described(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dpfed import accel

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    facts = SimpleNamespace(name="Some GPU", total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: facts)
    monkeypatch.setattr(accel, "works", lambda device: works)
    assert (
        doctor.devices()[1]
        == f"cuda:0: Some GPU, 24 GiB, kernels {'work' if works else 'do not work'}"
    )
    with monkeypatch.context() as other:
        other.setenv("DPFED_KERNELS", "0")
        assert doctor.devices()[1].endswith("kernels are switched off")

    def full(device: torch.device) -> bool:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as other:
        other.setattr(accel, "works", full)
        assert doctor.devices()[1].endswith("memory is full")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: works)
    assert any("flash attention" in line for line in doctor.advice()) is not works


def client_file(folder: Path, **policy: object) -> Path:
    raw = {
        "client": {"name": "a", "state": "state", "servers": ["hub"], "held_out_share": 0.25},
        "policy": {"max_epsilon": 1.0, "evaluate": True, "held_out": 100, **policy},
        "data": {"name": "digits"},
        "model": {"name": "linear"},
    }
    path = folder / "client.toml"
    path.write_text(tomli_w.dumps(raw))
    return path


@pytest.mark.parametrize(
    ("records", "what"),
    [
        (5000, "is more than is held: epsilon holds"),
        (1000, None),
        (100, "is less than half of what is held"),
    ],
)
def test_doctor_compares_declared_numbers_with_the_data(
    tmp_path: Path, records: int, what: str | None
) -> None:
    path = client_file(tmp_path, records=records)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "held-out.key").write_bytes(bytes(32))
    done = CliRunner().invoke(app, ["doctor", str(path), "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout.strip().splitlines()[-1])["client"]
    assert [number["key"] for number in found] == ["policy.records", "policy.held_out"]
    held = found[0]["held"]
    assert sum(number["held"] for number in found) == 1433
    assert (
        f"client   policy.records = {records} declared, {held} held (unit: record)" in done.stdout
    )
    assert "keep this output on this machine" in done.stdout
    if what is None:
        assert found[0]["advice"] == ""
    else:
        assert what in done.stdout
        assert f"declare a rounded-down figure, such as {rounded_down(held)}" in found[0]["advice"]
        assert [rounded_down(n) for n in (15, 57, 99, 100, 471, 1433)] == [
            10,
            50,
            90,
            100,
            470,
            1400,
        ]
    exact = CliRunner().invoke(app, ["doctor", str(client_file(tmp_path, records=held))])
    assert f"policy.records = {held} tells the server nearly the exact number" in exact.stdout


def test_doctor_draws_no_held_out_records(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", str(client_file(tmp_path, records=1000))])
    assert "drawn at the client's first start" in done.stdout
    assert not (tmp_path / "state").exists()


def test_doctor_reports_an_unreadable_client_file(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "none.toml")])
    assert done.exit_code == 0
    assert "client: could not be found out (DpfedError: " in done.stdout
