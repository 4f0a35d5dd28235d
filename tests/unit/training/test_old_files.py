"""Files of version 0.1 still work: runs resume and report, exports load, old keys are ignored."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from command import dpfed
from safetensors.torch import load_file

from dpfed.algorithms.dp_fedadamw import DPFedAdamW
from dpfed.config import PrivacySection, load
from dpfed.config.key_history import DELETED, DELETED_VALUES, as_first_written
from dpfed.config.parsing import parse
from dpfed.errors import DpfedError
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.registry import registry
from dpfed.training.budget.prior_spending import record_of
from dpfed.training.job.plan import plan_of
from dpfed.training.run import run

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / "run-0.1", tmp_path / "run")


def test_an_old_run_resumes_with_equal_results(old_run: Path, tmp_path: Path) -> None:
    config = load(old_run / "config.toml", ["run.rounds=4"], registry())
    run(config, old_run, mode="resume")
    run(config, tmp_path / "whole")
    resumed = load_file(old_run / "model.safetensors")
    for name, whole in load_file(tmp_path / "whole" / "model.safetensors").items():
        torch.testing.assert_close(resumed[name], whole, rtol=1e-6, atol=1e-7)


def test_an_old_calibrated_run_resumes_with_its_recorded_noise(tmp_path: Path) -> None:
    """Version 0.1 used another root search, so its sigma differs in the sixth digit."""
    out = shutil.copytree(FIXTURES / "run-0.1-target", tmp_path / "run")
    config = load(out / "config.toml", [], registry())
    result = run(config, out, "resume")
    with Ledger.open(out / "ledger.sqlite", readonly=True) as ledger:
        recorded = dict(ledger.meta["kinds"])
        charged = [row.charge.mechanism for row in ledger.rows()]
    assert len(charged) == 8
    assert all(kind.noise_multiplier == recorded[kind.rate] for kind in charged)
    assert result["sigma"] == [min(recorded.values()), max(recorded.values())]
    # Version 0.1 reported this value.
    assert result["epsilon"]["server_worst"] == 1.9989122128856929
    today, _ = plan_of(config)
    assert not set(today.multipliers.tolist()) & set(recorded.values())


def test_privacy_report_and_export_read_an_old_run(old_run: Path, tmp_path: Path) -> None:
    assert dpfed("privacy", str(old_run)) == 0
    assert dpfed("report", str(old_run), "--out", str(tmp_path / "page.html")) == 0
    assert dpfed("export", str(old_run), str(tmp_path / "model")) == 0


def test_the_cost_of_an_old_adapter_is_counted() -> None:
    stored = record_of(str(FIXTURES / "export-0.1"))
    assert stored is not None
    assert [steps for _, steps in stored.prior] == [1]


def test_deleted_keys_are_ignored_only_at_their_defaults() -> None:
    for section, cls in (("algorithm", DPFedAdamW), ("privacy", PrivacySection)):
        gone = {
            key: deleted.default
            for key, deleted in DELETED.items()
            if key.startswith(f"{section}.")
        }
        table = {key.partition(".")[2]: value for key, value in gone.items() if value is not None}
        assert parse(section, cls, table) == cls()
    for full, deleted in DELETED.items():
        section, _, key = full.partition(".")
        with pytest.raises(DpfedError) as caught:
            parse(section, PrivacySection if section == "privacy" else DPFedAdamW, {key: "another"})
        assert str(caught.value) == f"{full} = 'another' is no longer supported: {deleted.advice}"
    for (full, value), instead in DELETED_VALUES.items():
        section, _, key = full.partition(".")
        with pytest.raises(DpfedError, match=re.escape(instead)):
            parse(section, PrivacySection if section == "privacy" else DPFedAdamW, {key: value})


def test_settings_keep_the_format_of_version_0_1() -> None:
    config = load(FIXTURES / "run-0.1" / "config.toml", [], registry())
    written = as_first_written(
        {"algorithm": {"name": "dp-fedadamw"}, "privacy": {"isolation": "fast", "sigma": 2.0}}
    )
    assert written["privacy"] == {"sigma": 2.0, "accounting": "pld", "noise_scale": "c"}
    assert written["algorithm"]["align"] == "on"
    assert as_first_written({"algorithm": {"name": "dp-fedavg"}}) == {
        "algorithm": {"name": "dp-fedavg"}
    }
    # A table of texts had these columns by default; now they are found.
    found = {"data": {"name": "text-table", "clients": 3}}
    stated = {"data": {**found["data"], "text": "text", "label": "label"}}
    assert as_first_written(found) == as_first_written(stated)
    other = {"data": {**stated["data"], "label": ""}}
    assert as_first_written(found) != as_first_written(other)
    assert as_first_written({"privacy": {"isolation": "exact"}})["privacy"]["isolation"] == "exact"
    assert config.algorithm == DPFedAdamW(lr=config.algorithm.lr)
