"""`algorithm.lr = "auto"` becomes a number before round 1, and the run folder has the number."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from dpfed.algorithms.dp_fedadamw import DPFedAdamW
from dpfed.config import load
from dpfed.errors import DpfedError
from dpfed.model.parameter_vector import Space
from dpfed.privacy.planning.recipe import SPREAD_ADAPTER, SPREAD_HEAD
from dpfed.registry import registry
from dpfed.training.job.job import prepare
from dpfed.training.job.learning_rate import mean_fan_in
from dpfed.training.run import run

LONG = ["run.rounds=100", "run.local_steps=3", "model.name=linear", "algorithm.lr=auto"]


def rate(*settings: str) -> float:
    return prepare(load("digits", [*LONG, *settings], registry())).algorithm.base_lr


def test_the_run_folder_has_the_number_and_resumes_with_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(load("digits", [*LONG, "run.rounds=1"], registry()), out)
    stored = tomllib.loads((out / "config.toml").read_text(encoding="utf-8"))
    assert stored["algorithm"]["lr"] == rate("run.rounds=1")
    again = prepare(load(out / "config.toml", [], registry()))
    assert again.algorithm.base_lr == rate("run.rounds=1")


def test_an_explicit_rate_stays() -> None:
    assert rate("algorithm.lr=0.0123") == 0.0123


def test_the_rate_follows_the_plan() -> None:
    # Four times the steps: half the rate, up to rounding to three digits.
    assert rate("run.rounds=400") == pytest.approx(rate() / 2, rel=1e-2)
    assert rate("run.lr_schedule=constant") < rate()
    assert rate("algorithm.gamma=0.9") < rate()
    assert rate("algorithm.bc=false") > rate()


def test_the_rate_follows_what_is_trained() -> None:
    assert rate("model.name=glyph-vit", "model.train=head") == rate()
    adapter = rate("model.name=glyph-vit", "model.train=lora", "model.lora.r=2")
    assert adapter == pytest.approx(rate() * SPREAD_ADAPTER / SPREAD_HEAD, rel=1e-2)
    assert adapter == rate("model.name=glyph-vit", "model.train=lora", "model.lora.r=4")
    full = rate("model.name=glyph-vit", "model.train=full")
    assert 4 < rate() / full < 14


def test_the_mean_fan_in_weighs_matrices_by_their_sizes() -> None:
    shapes = tuple(torch.Size(s) for s in [(2, 3), (4, 5, 2), (7,)])
    blocks = torch.zeros(6 + 40 + 7, dtype=torch.int64)
    space = Space(("a", "b", "c"), shapes, ("all",), blocks)
    assert mean_fan_in(space) == pytest.approx((6 * 3 + 40 * 10) / 46)
    none = Space(("c",), (torch.Size([7]),), ("all",), torch.zeros(7, dtype=torch.int64))
    assert mean_fan_in(none) == 1.0


def test_other_methods_need_a_number() -> None:
    with pytest.raises(DpfedError, match=r"algorithm\.lr = 'auto' is not allowed"):
        load("digits", ["algorithm.name=dp-fedavg", "algorithm.lr=auto"], registry())


def test_an_algorithm_without_a_number_does_not_train() -> None:
    with pytest.raises(DpfedError, match='lr = "auto" must be replaced'):
        _ = DPFedAdamW().base_lr
