"""Message sizes equal values by hand and the messages of a real round."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpfed.algorithms import REGISTRY
from dpfed.algorithms.dp_fedadamw import DPFedAdamW
from dpfed.config import build
from dpfed.model.parameter_vector import Space
from dpfed.registry import registry
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job.job import Job, prepare
from dpfed.training.messages.message_size import Traffic, traffic
from dpfed.training.round_context import first_state

P = 12
BLOCKS = 3
NAMES = ("a", "b", "c")
SHAPES = (torch.Size([2, 3]), torch.Size([4]), torch.Size([2]))
BLOCK_OF_EACH = torch.repeat_interleave(torch.arange(3), torch.tensor([6, 4, 2]))
SPACE = Space(NAMES, SHAPES, NAMES, BLOCK_OF_EACH)


@pytest.mark.parametrize(
    ("options", "up", "down"),
    [
        ({}, P + BLOCKS, 2 * P + BLOCKS),
        ({"gamma": 0.0}, P + BLOCKS, P + BLOCKS),
        ({"agg": "full_v"}, 2 * P, 3 * P),
        ({"agg": "off"}, P, 2 * P),
        ({"agg": "off", "gamma": 0.0, "bc": False}, P, P),
        ({"bc_level": "block"}, P + BLOCKS, 2 * P + BLOCKS),
    ],
    ids=str,
)
def test_dp_fedadamw_sizes_by_hand(options: dict[str, Any], up: int, down: int) -> None:
    assert traffic(DPFedAdamW(**options), SPACE) == Traffic(up, 4 * up, down, 4 * down)


@pytest.mark.parametrize("name", ["dp-fedavg", "dp-local-adamw", "dp-fedsam"])
def test_methods_that_only_average_send_the_vector_both_ways(name: str) -> None:
    assert traffic(REGISTRY[name](), SPACE) == Traffic(P, 4 * P, P, 4 * P)  # type: ignore[call-arg]


def job_of(algorithm: dict[str, Any]) -> Job:
    raw = {
        "data": {"clients": 8},
        "model": {"name": "linear", "liveness": False},
        "algorithm": algorithm,
        "privacy": {"sigma": 1.0, "batch": 10},
        "run": {"rounds": 2, "local_steps": 1, "participation": 0.25, "device": "cpu"},
    }
    return prepare(build(raw, registry()))


@pytest.mark.parametrize(
    "algorithm",
    [
        *({"name": name} for name in sorted(set(REGISTRY) - {"dp-fedadamw-printed"})),
        {"name": "dp-fedadamw", "agg": "full_v"},
        {"name": "dp-fedadamw", "agg": "off"},
        {"name": "dp-fedadamw", "bc_level": "block"},
    ],
    ids=str,
)
def test_sizes_are_those_of_real_messages_and_of_the_fields_that_clients_read(
    algorithm: dict[str, Any],
) -> None:
    job = job_of(algorithm)
    said = traffic(job.algorithm, job.space)
    state = first_state(job)
    message, _ = Fleet(job).run_cohort(1, state, [3])
    assert said.up_numbers == sum(value.numel() for value in message.values())
    assert said.up_bytes == sum(value.numel() * value.element_size() for value in message.values())
    read: set[str] = set()

    class Watched:
        """A server state that records which fields are read."""

        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return getattr(state.server, name)

    Fleet(job).run_cohort(1, type(state)(Watched(), state.clip), [0, 3])
    assert {name for name in read if getattr(state.server, name).numel()} == {
        name for name in job.algorithm.broadcast if getattr(state.server, name).numel()
    }
    assert said.down_numbers == sum(getattr(state.server, name).numel() for name in read)


class Huge:
    """A space of a billion numbers, whose vectors do not fit into memory."""

    size, num_blocks = 10**9, 1

    def slices(self) -> list[slice]:
        return [slice(0, self.size)]


def test_sizes_are_computed_without_allocating_vectors() -> None:
    assert traffic(DPFedAdamW(), Huge()).down_bytes == 8 * Huge.size + 4  # type: ignore[arg-type]
