"""Public figures come from a list of allowed fields; all other fields are private."""

from __future__ import annotations

import math

import pytest
import torch

from dpfed.privacy.accounting.guarantee import Planned
from dpfed.privacy.mechanism import Mechanism
from dpfed.training.callbacks.public_figures import (
    flat,
    public_metrics,
    public_result,
    public_row,
    public_settings,
)
from dpfed.training.rounds import Round


def test_public_metrics_have_no_cohort_and_no_times() -> None:
    row = {
        "round": 3,
        "accuracy": 0.5,
        "loss": 1.0,
        "clip": 0.1,
        "cohort": 5,
        "eligible": 9,
        "seconds": 2.0,
    }
    row |= {"epsilon_server_max": 1.5, "something_new": 1}
    assert public_row(row) == {"round": 3, "accuracy": 0.5, "loss": 1.0, "clip": 0.1}


def test_a_public_result_has_no_figures_of_single_clients() -> None:
    figures = {"server_worst": 8.0, "server_max": 6.4, "third_party": 5.8}
    result = {
        "epsilon": figures,
        "seed": 3,
        "out": "runs/secret",
        "run": "abc",
        "seconds": 1.0,
        "stopped": "only 3 clients",
    }
    assert public_result({**result, "rounds": 4}) == {
        "rounds": 4,
        "epsilon": {"server_worst": 8.0, "third_party": 5.8},
    }


@pytest.mark.parametrize(
    ("tables", "left"),
    [
        ({"run": {"seed": 3, "rounds": 5}}, {"run.rounds": 5}),
        ({"data": {"path": "anything", "test_path": "x", "name": "npz"}}, {"data.name": "npz"}),
        ({"model": {"weights": "/home/somebody/model"}}, {}),
        ({"model": {"weights": "~/model", "adapter": "../adapter"}}, {}),
        ({"model": {"weights": "org/model"}}, {"model.weights": "org/model"}),
        ({"model": {"lora": {"r": 2}}}, {"model.lora.r": 2}),
    ],
)
def test_public_settings_have_no_seed_and_no_paths(
    tables: dict[str, object], left: dict[str, object]
) -> None:
    assert flat(public_settings(tables)) == left


def round_of(t: int, accuracy: float | None, loss: float | None = 1.0) -> Round:
    return Round(t, accuracy, loss, 3.0, 5, 9, 0.1, 1.0, torch.zeros(1))


def test_trackers_get_the_planned_epsilon_and_no_clients_epsilon() -> None:
    planned = Planned((Mechanism("poisson", 0.1, 2.0),), 2, 0.5, ((0.5, 4),), 1e-5)
    reported = public_metrics(round_of(2, 0.7), planned)
    assert reported == {
        "accuracy": 0.7,
        "loss": 1.0,
        "clip": 0.1,
        "epsilon_planned": planned.server(2),
    }
    assert public_metrics(round_of(2, None, None), planned) == {"clip": 0.1}
    assert public_metrics(round_of(2, 0.7, math.inf), None) == {"accuracy": 0.7, "clip": 0.1}


def test_public_settings_have_no_names_of_clients_or_folders() -> None:
    tables = {
        "model": {"adapter": "runs/clinic-b", "name": "linear"},
        "federation": {"clients": {"clinic-a": 5}, "held_out": {"clinic-a": 2}, "timeout": 9.0},
    }
    assert public_settings(tables) == {"model": {"name": "linear"}, "federation": {"timeout": 9.0}}
