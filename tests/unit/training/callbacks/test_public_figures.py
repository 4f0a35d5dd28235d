"""What may be published: a list of what is let through, so that a new field is private until somebody says otherwise."""

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


def test_a_line_of_metrics_loses_who_took_part_and_when() -> None:
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


def test_a_result_loses_what_single_clients_spent() -> None:
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
def test_settings_lose_the_seed_and_places(
    tables: dict[str, object], left: dict[str, object]
) -> None:
    assert flat(public_settings(tables)) == left


def round_of(t: int, accuracy: float | None, loss: float | None = 1.0) -> Round:
    return Round(t, accuracy, loss, 3.0, 5, 9, 0.1, 1.0, torch.zeros(1))


def test_a_tracker_hears_the_plan_and_not_the_client_that_spent_most() -> None:
    planned = Planned((Mechanism("poisson", 0.1, 2.0),), 2, 0.5, ((0.5, 4),), 1e-5)
    told = public_metrics(round_of(2, 0.7), planned)
    assert told == {"accuracy": 0.7, "loss": 1.0, "clip": 0.1, "epsilon_planned": planned.server(2)}
    assert public_metrics(round_of(2, None, None), planned) == {"clip": 0.1}
    assert public_metrics(round_of(2, 0.7, math.inf), None) == {"accuracy": 0.7, "clip": 0.1}


def test_names_of_clients_and_of_folders_are_left_out() -> None:
    tables = {
        "model": {"adapter": "runs/clinic-b", "name": "linear"},
        "federation": {"clients": {"clinic-a": 5}, "held_out": {"clinic-a": 2}, "timeout": 9.0},
    }
    assert public_settings(tables) == {"model": {"name": "linear"}, "federation": {"timeout": 9.0}}
