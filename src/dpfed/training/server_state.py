"""The server's state between two rounds, without the clients' memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Names with a dot: no field of an algorithm's state has one.
AVERAGE = "run.average"
WEIGHT = "run.average.weight"


@dataclass(frozen=True)
class State:
    """The state that each round passes to the next.

    server   the algorithm's own state
    clip     the clip norm of the next round; constant unless it follows a quantile
    average  with `run.average` a: Σ (1-a)·a^(n-i)·θ_i over the rounds so far
    weight   the sum of the weights in `average`

    The average is computed from released values, so it costs no privacy. No client trains it.
    """

    server: Any
    clip: float
    average: Tensor | None = None
    weight: Tensor | None = None

    @property
    def theta(self) -> Tensor:
        theta: Tensor = self.server.theta
        return theta

    @property
    def result(self) -> Tensor:
        """The vector that is evaluated and saved: the average of the iterates, or the last one."""
        if self.average is None or self.weight is None:
            return self.theta
        # The weight is zero before round 1.
        return torch.where(self.weight > 0, self.average / self.weight, self.theta)

    def averaging(self) -> State:
        """Return this state with an average over no rounds."""
        weight = torch.zeros((), dtype=torch.float64, device=self.theta.device)
        return dataclasses.replace(self, average=torch.zeros_like(self.theta), weight=weight)

    def after(self, server: Any, clip: float, average: float) -> State:
        """Return the state after a round that gave this server state and clip norm."""
        if self.average is None or self.weight is None:
            return State(server, clip)
        summed = average * self.average + (1 - average) * server.theta
        return State(server, clip, summed, average * self.weight + (1 - average))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state by name, as a checkpoint stores them."""
        own = {
            field.name: getattr(self.server, field.name)
            for field in dataclasses.fields(self.server)
        }
        if self.average is None or self.weight is None:
            return own
        return {**own, AVERAGE: self.average, WEIGHT: self.weight}

    def with_tensors(self, tensors: Mapping[str, Tensor], clip: float) -> State:
        """Return this state with other values; names, shapes and dtypes must be the same."""
        mine = self.tensors()
        if mine.keys() != tensors.keys():
            raise ValueError(f"the state has {sorted(mine)}, not {sorted(tensors)}")
        for name, value in mine.items():
            if value.shape != tensors[name].shape or value.dtype != tensors[name].dtype:
                found = tuple(tensors[name].shape)
                raise ValueError(f"{name} has shape {found}, the state has {tuple(value.shape)}")
        moved = {name: value.to(mine[name].device) for name, value in tensors.items()}
        average = moved.pop(AVERAGE, None)
        weight = moved.pop(WEIGHT, None)
        return State(dataclasses.replace(self.server, **moved), clip, average, weight)
