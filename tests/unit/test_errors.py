"""Numbers with their nouns, and no "1 rounds" in what a run says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command import dpfed

from dpfed.errors import counted

PLURAL_OF_ONE = re.compile(
    r"(?<![\d.,])1 (?:local |trainable |test |training )?"
    r"(?:clients|rounds|steps|blocks|runs|records)\b"
)


def test_counted() -> None:
    assert counted(1, "local step") == "1 local step"
    assert counted(0, "client") == "0 clients"
    assert counted(12_000, "record") == "12,000 records"


def test_a_run_of_one_of_everything_has_no_plural_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["data.clients=1", "run.rounds=1", "run.local_steps=1", "run.participation=1.0"]
    flags = [word for key in keys for word in ("--set", key)]
    assert dpfed("run", *flags, "--out", str(tmp_path / "run")) == 0
    assert dpfed("export", str(tmp_path / "run"), str(tmp_path / "adapter")) == 0
    assert dpfed("report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")) == 0
    assert dpfed("data", "describe", *flags) == 0
    said = capsys.readouterr()
    page = (tmp_path / "page.html").read_text()
    card = (tmp_path / "adapter" / "README.md").read_text()
    for text in (said.out, said.err, page.split("<script")[0], card):
        assert not PLURAL_OF_ONE.findall(text)
    assert "1 round of 1 local step" in said.err
