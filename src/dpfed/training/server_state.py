"""The server's side of a run between two rounds: all that the next round needs besides the clients' own memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AVERAGE, WEIGHT = (
    "run.average",
    "run.average.weight",
)  # no field of an algorithm's state has a point in its name


@dataclass(frozen=True)
class State:
    """What rounds hand on.

    server           the algorithm's own state
    clip             the clip norm of the next round (constant unless it follows a quantile)
    average, weight  with `run.average` a: Σ (1-a)·a^(n-i)·θ_i over the rounds so far, and the same sum of the weights alone.
                     Made of released values only, so it costs nothing; clients may be asked to score it, and never train it
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
        """What is evaluated and saved: the average of the iterates where one is kept, or else the last."""
        if self.average is None or self.weight is None:
            return self.theta
        return torch.where(
            self.weight > 0, self.average / self.weight, self.theta
        )  # before round 1 there is no average

    def averaging(self) -> State:
        """This state with an average that has seen no round."""
        weight = torch.zeros((), dtype=torch.float64, device=self.theta.device)
        return dataclasses.replace(self, average=torch.zeros_like(self.theta), weight=weight)

    def after(self, server: Any, clip: float, average: float) -> State:
        """The state after a round that came to this."""
        if self.average is None or self.weight is None:
            return State(server, clip)
        summed = average * self.average + (1 - average) * server.theta
        return State(server, clip, summed, average * self.weight + (1 - average))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state by name: what a checkpoint holds."""
        own = {
            field.name: getattr(self.server, field.name)
            for field in dataclasses.fields(self.server)
        }
        if self.average is None or self.weight is None:
            return own
        return {**own, AVERAGE: self.average, WEIGHT: self.weight}

    def with_tensors(self, tensors: Mapping[str, Tensor], clip: float) -> State:
        """This state with other values; names, shapes and types must be the same."""
        mine = self.tensors()
        if mine.keys() != tensors.keys():
            raise ValueError(f"the state has {sorted(mine)}, not {sorted(tensors)}")
        for name, value in mine.items():
            if value.shape != tensors[name].shape or value.dtype != tensors[name].dtype:
                raise ValueError(
                    f"{name} has shape {tuple(tensors[name].shape)}, the state has {tuple(value.shape)}"
                )
        moved = {name: value.to(mine[name].device) for name, value in tensors.items()}
        average, weight = moved.pop(AVERAGE, None), moved.pop(WEIGHT, None)
        return State(dataclasses.replace(self.server, **moved), clip, average, weight)
