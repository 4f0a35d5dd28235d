"""`dpfed privacy --statement`, `--curve` and `--ledgers` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import dpfed

KEYS = (
    "model.name=linear data.clients=4 data.partition=iid run.rounds=2 run.local_steps=2 "
    "run.participation=1 privacy.rate=1 privacy.sigma=2 run.checkpoint_every=0"
)
PLAN = ["--records", "100", "--batch", "100", "--rounds", "2", "--local-steps", "2", "--sigma", "2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stated") / "run"
    keys = [word for key in KEYS.split() for word in ("--set", key)]
    assert dpfed("run", *keys, "--out", str(out)) == 0
    return out


def test_a_statement_is_printed_and_written(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dpfed("privacy", str(finished), "--statement", "--json") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("NOT FOR RELEASE: the noise was seeded")
    assert json.loads(printed[-1]) == json.loads((finished / "statement.json").read_text())
    assert any(line.startswith("Mu              1.00") for line in printed)


def test_a_curve_comes_with_one_sentence(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in ([str(finished)], PLAN):
        curve = tmp_path / f"{len(target)}.svg"
        assert dpfed("privacy", *target, "--curve", str(curve)) == 0
        # By hand, for mu = 1: Phi(Phi^-1(0.001) + 1) = 1.83 %, 9.24 % and 38.91 %; rounded up.
        assert (
            "an attacker that wrongly accuses 0.1 % of the records that were not used recognises "
            "at most 1.9 % of those that were; at 1 %, at most 9.3 %; at 10 %, at most 39.0 %"
        ) in capsys.readouterr().out
        text = curve.read_text()
        for words in ("false-positive rate", "this run", "guessing", "Gaussian, mu 1.00"):
            assert f"<!-- {words}" in text


def test_ledgers_are_added_up(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dpfed("privacy", "--ledgers", str(finished), "--json") == 0
    printed = capsys.readouterr().out.splitlines()
    assert "NOT FOR RELEASE" in printed[0]
    figures = json.loads(printed[-1])
    assert figures["unit"] == "record"
    assert figures["epsilon"] == figures["ledgers"][0]["epsilon"] > 0
    assert "has spent at most epsilon" in printed[-2]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--statement"], "--statement needs the folder of a run"),
        (["--ledgers"], "--ledgers needs the folder of a run"),
        (["a", "--statement", "--ledgers"], "give one of --statement and --ledgers"),
        (["a", "b"], "b is one target too many"),
        (["a", "b", "--statement"], "b is one run too many"),
        (["a", "--statement", "--sigma", "1"], "--sigma cannot change what was spent"),
        (["a", "--statement", "--meaning"], "--meaning is no part of a statement"),
        (["a", "--ledgers", "--curve", "c.svg"], "--curve is no part of a statement"),
        (["nowhere", "--statement"], "nowhere is not the folder of a run"),
        (["nowhere", "--ledgers"], "nowhere has no ledger"),
        ([*PLAN, "--curve", "c.pdf"], "--curve c.pdf must end in .png or .svg"),
    ],
)
def test_misuse_is_refused_in_one_sentence(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dpfed("privacy", *args) == 2
    error = capsys.readouterr().err.strip()
    assert words in error
    assert len(error.splitlines()) == 1
