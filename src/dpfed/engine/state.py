"""The server's side of a run between two rounds: all that the next round needs besides the clients' own memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class State:
    """server: the algorithm's own state; clip: the clip norm of the next round (constant unless it follows a quantile)."""

    server: Any
    clip: float

    @property
    def theta(self) -> Tensor:
        theta: Tensor = self.server.theta
        return theta

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the algorithm's state by name: what a checkpoint holds."""
        return {field.name: getattr(self.server, field.name) for field in dataclasses.fields(self.server)}

    def with_tensors(self, tensors: Mapping[str, Tensor], clip: float) -> State:
        """This state with other values; names, shapes and types must be the same."""
        mine = self.tensors()
        if mine.keys() != tensors.keys():
            raise ValueError(f"the state has {sorted(mine)}, not {sorted(tensors)}")
        for name, value in mine.items():
            if value.shape != tensors[name].shape or value.dtype != tensors[name].dtype:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, the state has {tuple(value.shape)}")
        moved = {name: value.to(mine[name].device) for name, value in tensors.items()}
        return State(dataclasses.replace(self.server, **moved), clip)
