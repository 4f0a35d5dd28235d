"""The server's state between two rounds: everything that the next round needs from the server.

The vectors that clients keep between rounds are stored elsewhere (backends/client_state.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Names of tensors in a checkpoint. The dot in each name prevents a conflict with the fields of an
# algorithm's state.
AVERAGE = "run.average"
WEIGHT = "run.average.weight"
BEST = "run.best."


@dataclass(frozen=True)
class Best:
    """The round with the best score on public data so far.

    theta   the evaluated vector of this round, `[P]` on the device
    score   the score of this round; larger is better
    round   number of this round
    waited  number of evaluations since this round

    `score`, `round` and `waited` are scalar tensors on the CPU.
    """

    theta: Tensor
    score: Tensor
    round: Tensor
    waited: Tensor

    @classmethod
    def none_yet(cls, theta: Tensor) -> Best:
        """Return a placeholder for the best round before any evaluation: the lowest finite score.

        The score is not minus infinity, because a run stops if its state is not finite.
        """
        lowest = torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64)
        return cls(theta, lowest, torch.tensor(0), torch.tensor(0))

    def after(self, theta: Tensor, score: float, t: int) -> Best:
        """Return the best round after round t was evaluated. A score of NaN is never better."""
        if score > float(self.score):
            found = torch.tensor(score, dtype=torch.float64)
            return Best(theta, found, torch.tensor(t), torch.tensor(0))
        return dataclasses.replace(self, waited=self.waited + 1)

    def tensors(self) -> dict[str, Tensor]:
        return {f"{BEST}{f.name}": getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True)
class State:
    """The server's state after a round, with which the next round begins.

    server   the state of the algorithm
    clip     clip norm C of the next round; only quantile clipping changes it
    average  Σ (1-a)·a^(n-i)·θ_i over the vectors θ_i of the n rounds so far, for a = `run.average`;
             None without `run.average`
    weight   sum of the weights (1-a)·a^(n-i) in `average`; None without `run.average`
    best     the best round so far; None without `run.keep` = "best" and `run.early_stopping`

    The average is computed from released values, so it costs no privacy. Clients continue from the
    last vector θ_n, not from the average.
    """

    server: Any
    clip: float
    average: Tensor | None = None
    weight: Tensor | None = None
    best: Best | None = None

    @property
    def theta(self) -> Tensor:
        theta: Tensor = self.server.theta
        return theta

    @property
    def result(self) -> Tensor:
        """The vector to evaluate and save: the average with `run.average`, else the last vector."""
        if self.average is None or self.weight is None:
            return self.theta
        # Before round 1 the weight is zero and the average would be 0/0. Return theta in this case.
        return torch.where(self.weight > 0, self.average / self.weight, self.theta)

    def averaging(self) -> State:
        """Return this state with an empty average, for the start of a run with `run.average`."""
        weight = torch.zeros((), dtype=torch.float64, device=self.theta.device)
        return dataclasses.replace(self, average=torch.zeros_like(self.theta), weight=weight)

    def after(self, server: Any, clip: float, average: float) -> State:
        """Return the state after one more round.

        server   the algorithm's state after the round
        clip     clip norm of the next round
        average  decay of the average, from `run.average`; not used if this state has no average
        """
        if self.average is None or self.weight is None:
            return State(server, clip, best=self.best)
        summed = average * self.average + (1 - average) * server.theta
        return State(server, clip, summed, average * self.weight + (1 - average), self.best)

    def judged(self, score: float | None, t: int) -> State:
        """Return the state after round t was evaluated, with the best round so far.

        Return the state unchanged if it keeps no best round, or if the round has no score.
        """
        if self.best is None or score is None:
            return self
        return dataclasses.replace(self, best=self.best.after(self.result, score, t))

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state by name, as a checkpoint stores them."""
        own = {
            field.name: getattr(self.server, field.name)
            for field in dataclasses.fields(self.server)
        }
        if self.best is not None:
            own |= self.best.tensors()
        if self.average is None or self.weight is None:
            return own
        return {**own, AVERAGE: self.average, WEIGHT: self.weight}

    def with_tensors(self, tensors: Mapping[str, Tensor], clip: float) -> State:
        """Return a copy of this state with other tensors and clip norm, such as from a checkpoint.

        Raise ValueError if names, shapes or dtypes differ from this state's tensors.
        """
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
        kept = {name: moved.pop(name) for name in list(moved) if name.startswith(BEST)}
        best = Best(**{name.removeprefix(BEST): x for name, x in kept.items()}) if kept else None
        return State(dataclasses.replace(self.server, **moved), clip, average, weight, best)
