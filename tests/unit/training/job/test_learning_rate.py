"""`algorithm.lr = "auto"` becomes a number before round 1, and the run folder has the number."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dpfed.algorithms.dp_fedadamw import DPFedAdamW
from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.registry import registry
from dpfed.training.job.job import prepare
from dpfed.training.job.learning_rate import with_number
from dpfed.training.job.plan import plan_of
from dpfed.training.run import run

SHORT = ["run.rounds=2", "run.local_steps=1", "model.name=linear", "algorithm.lr=auto"]


def rate(*settings: str) -> float:
    config = load("digits", [*SHORT, *settings], registry())
    found = with_number(config, *plan_of(config)).algorithm.lr
    assert isinstance(found, float)
    return found


def test_the_run_folder_has_the_number_and_resumes_with_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(load("digits", SHORT, registry()), out)
    stored = tomllib.loads((out / "config.toml").read_text(encoding="utf-8"))
    assert stored["algorithm"]["lr"] == rate()
    again = prepare(load(out / "config.toml", [], registry()))
    assert again.algorithm.base_lr == rate()


def test_an_explicit_rate_stays() -> None:
    assert rate("algorithm.lr=0.0123") == 0.0123


def test_the_rate_follows_the_plan() -> None:
    # Four times the steps: half the rate, up to rounding to three digits.
    assert rate("run.rounds=8") == pytest.approx(rate() / 2, rel=1e-2)
    assert rate("run.lr_schedule=constant") < rate()
    assert rate("algorithm.gamma=0.9") < rate()
    assert rate("algorithm.bc=false") > rate()


def test_a_linear_head_may_move_further_than_other_weights() -> None:
    assert rate("model.name=glyph-vit", "model.train=head") == rate()
    assert rate("model.name=glyph-vit", "model.train=full") < rate()


def test_other_methods_need_a_number() -> None:
    with pytest.raises(DpfedError, match=r"algorithm\.lr = 'auto' is not allowed"):
        load("digits", ["algorithm.name=dp-fedavg", "algorithm.lr=auto"], registry())


def test_an_algorithm_without_a_number_does_not_train() -> None:
    with pytest.raises(DpfedError, match='lr = "auto" must be replaced'):
        _ = DPFedAdamW().base_lr
