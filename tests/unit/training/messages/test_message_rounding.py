"""Rounding in simulations: the clients start from the rounded theta, and messages are rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from federation_case import job_of, simulated

from dpfed.config import FederationSection
from dpfed.training.backends.fleet import Fleet
from dpfed.training.messages.message_rounding import message_rounding
from dpfed.training.round_context import first_state
from dpfed.training.run import run

INT8 = FederationSection(upload="int8", download="int8")


def test_without_the_keys_nothing_is_copied_or_rounded() -> None:
    job = job_of()
    rounding = message_rounding(job, FederationSection())
    state = first_state(job)
    message = {name: torch.ones(2, field.size) for name, field in rounding.up.items()}
    assert rounding.received(1, state.server) is state.server
    assert rounding.answers(1, [0, 1], message) is message


def test_clients_draw_their_own_numbers_and_rounds_differ() -> None:
    job = job_of()
    rounding = message_rounding(job, INT8)
    row = torch.linspace(-1, 1, job.space.size)
    message = {"delta": torch.stack([row, row]), "v": torch.rand(2, job.space.num_blocks)}
    found = rounding.answers(1, [0, 2], message)
    assert torch.equal(found["v"], message["v"])
    assert not torch.equal(found["delta"][0], found["delta"][1])
    again = rounding.answers(1, [2], {name: value[1:] for name, value in message.items()})
    assert torch.equal(again["delta"][0], found["delta"][1])
    later = rounding.answers(2, [2], {name: value[1:] for name, value in message.items()})
    assert not torch.equal(later["delta"], again["delta"])


def test_all_clients_receive_one_rounded_theta_and_exact_moments() -> None:
    job = job_of()
    server = first_state(job).server
    server.theta.copy_(torch.linspace(-1, 1, job.space.size))
    rounding = message_rounding(job, INT8)
    received = rounding.received(3, server)
    assert 0 < float((received.theta - server.theta).abs().max()) < 1 / 127
    assert torch.equal(received.v, server.v)
    assert torch.equal(received.theta, rounding.received(3, server).theta)
    assert not torch.equal(received.theta, rounding.received(4, server).theta)


def test_delta_counts_from_the_theta_that_the_client_received() -> None:
    # The rate is so small that theta does not move: any delta would be the rounding of theta.
    algorithm = {"name": "dp-fedavg", "lr": 1e-12, "weight_decay": 0.0}
    job = job_of(algorithm=algorithm, federation={"upload": "float32", "download": "int8"})
    state = first_state(job)
    state.server.theta.copy_(torch.linspace(-1, 1, job.space.size))
    mean, _ = Fleet(job).run_cohort(1, state, [0, 1, 2])
    assert float(mean["delta"].abs().max()) < 1e-6


@pytest.mark.parametrize("sizes", [1, 2])
def test_a_split_fleet_rounds_as_one_fleet(sizes: int) -> None:
    keys: Any = {"federation": {"upload": "int8", "download": "int8"}}
    whole, _ = simulated(job_of(**keys))
    split, _ = simulated(job_of(**keys, run={"fleet_size": sizes}))
    exact, _ = simulated(job_of())
    assert float((whole - exact).abs().max()) > 1e-5
    # A last bit of a message may change its rounding by a step, so this is not exact.
    assert float((whole - split).norm()) < 0.05 * float((whole - exact).norm())


def test_results_and_pages_state_the_bytes_that_are_sent(tmp_path: Any) -> None:
    plain = run(job_of().config, tmp_path / "plain")["traffic"]
    keys: Any = {"federation": {"upload": "int8", "download": "bf16"}}
    small = run(job_of(**keys).config, tmp_path / "small")["traffic"]
    size, blocks = 650, 1
    assert plain["up_bytes"] == 4 * (size + blocks)
    assert small["up_bytes"] == size + 4 * 2 + 4 * blocks
    assert small["down_bytes"] == 2 * 2 * size + 4 * blocks
    assert small["up_numbers"] == plain["up_numbers"]
