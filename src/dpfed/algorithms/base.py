"""The contract of an algorithm: a frozen dataclass of switches and five pure methods over `[S, P]` tensors.

    init(ctx, theta)            -> server     the server's state before round 1
    start(ctx, server, memory)  -> local      the state of S clients at the start of a round
    step(ctx, local, oracle, k) -> local      one local step of all S clients; `oracle` is the only way to data
    finish(ctx, server, local)  -> message, memory
    aggregate(ctx, server, mean) -> server    `mean` is the mean of the clients' messages, all a server ever needs

An algorithm holds no hidden state, no data, no model and does no I/O. Its fields are its `[algorithm]` keys: the
annotation carries the allowed range and a sentence for the reference. States are plain dataclasses of tensors and
messages are dictionaries of tensors `[S, ...]`, so they can be checkpointed and sent without pickling.

`memory` is what clients keep for themselves between rounds. An algorithm that has one names its vectors in `remembers`;
they come stacked, `[S, P]`, zero for clients that were never drawn, with a mask `seen` `[S]`; `finish` gives them back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from dpfed.errors import DpfedError

Message = dict[str, Tensor]
ClientState = dict[str, Tensor]


class Oracle(Protocol):
    """The DP gradient oracle as an algorithm sees it (SPEC 1.4)."""

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Noised mean gradient `[S, P]` on a fresh batch, and its known noise variance `[S, 1]`."""

    def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """A second release on the same batch, with fresh noise; only if `releases` declares it."""


class Space(Protocol):
    """What an algorithm may know of the parameter space: its size, tensors and blocks, never the model."""

    @property
    def size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def slices(self) -> list[slice]:
        """The stretch of the vector that belongs to each tensor, in order."""

    def block_mean(self, vector: Tensor) -> Tensor:
        """`[..., P]` -> `[..., blocks]`."""

    def expand(self, values: Tensor) -> Tensor:
        """`[..., blocks]` -> `[..., P]`."""


@dataclass(frozen=True)
class Releases:
    """What one local step takes from the oracle: so many fresh batches, each released so many times."""

    batches: int = 1
    releases: int = 1


@dataclass(frozen=True)
class Context:
    """The public facts of a round. `t` and `lr` may be tensors, so that one compiled step serves every round.

    lr    η_t, a scalar tensor; in start and step it may be `[S, 1]`, in aggregate it is one number
    lr0   the base learning rate η0, same shape
    phi   Φ_i, the known noise variance of each client's mean gradient in this round, `[S, 1]`
    equal_phi   whether Φ_i is the same for all clients
    varying_phi whether Φ changes from round to round (quantile clipping)
    answered  how many clients' messages are in the mean (aggregate only)
    """

    space: Space
    N: int
    S: int
    T: int
    K: int
    t: Tensor
    lr: Tensor
    lr0: Tensor
    phi: Tensor
    equal_phi: bool = True
    varying_phi: bool = False
    answered: int = 0


@dataclass(frozen=True)
class Facts:
    """What is known before round 1, for `Algorithm.check`."""

    equal_phi: bool
    private: bool
    allow_nan: bool
    calibrated: bool = False
    varying_phi: bool = False


@dataclass(frozen=True)
class Algorithm(ABC):
    """Base of every optimizer: the two keys that all of them have."""

    name: ClassVar[str]
    lr_grid: ClassVar[tuple[float, ...]]
    summary: ClassVar[str]

    lr: Annotated[float, Gt(0), "base learning rate η0"]
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"]
    agg_weights: Annotated[
        Literal["uniform", "size"], "weights of the mean; size: by R_i, then public"
    ] = field(default="uniform", kw_only=True)

    @property
    def releases(self) -> Releases:
        """What one local step takes from the oracle; the ledger charges from this declaration."""
        return Releases()

    @property
    def noise_factor(self) -> float:
        """What a given sigma is multiplied by before anything else; the accountant sees the product."""
        return 1.0

    @property
    def remembers(self) -> tuple[str, ...]:
        """Names of the vectors of length P that each client keeps between rounds."""
        return ()

    @property
    def broadcast(self) -> tuple[str, ...]:
        """The fields of the server's state that `start` and `finish` read, and so travel to every client of a round."""
        return ("theta",)

    def check(self, facts: Facts) -> list[str]:
        """Refuses combinations of switches that cannot work (DpfedError); returns warnings."""
        return []

    @abstractmethod
    def init(self, ctx: Context, theta: Tensor) -> Any: ...

    @abstractmethod
    def start(self, ctx: Context, server: Any, memory: ClientState) -> Any: ...

    @abstractmethod
    def step(self, ctx: Context, local: Any, oracle: Oracle, k: Tensor) -> Any: ...

    @abstractmethod
    def finish(self, ctx: Context, server: Any, local: Any) -> tuple[Message, ClientState]: ...

    @abstractmethod
    def aggregate(self, ctx: Context, server: Any, mean: Message) -> Any: ...

    def refuse(self, sentence: str) -> None:
        raise DpfedError(f"{self.name}: {sentence}")


@dataclass(frozen=True)
class Point:
    """A state that is nothing but θ: `[P]` at the server, `[S, P]` at the clients."""

    theta: Tensor


class Averaging(Algorithm):
    """What most methods share: θ travels down, Δ_i = θ_i − θ travels up, and θ ← θ + Δ̄. The step is their own."""

    def init(self, ctx: Context, theta: Tensor) -> Point:
        return Point(theta)

    def start(self, ctx: Context, server: Point, memory: ClientState) -> Any:
        return Point(spread(server.theta, ctx.S))

    def finish(self, ctx: Context, server: Point, local: Any) -> tuple[Message, ClientState]:
        return {"delta": local.theta - server.theta}, {}

    def aggregate(self, ctx: Context, server: Point, mean: Message) -> Point:
        return Point(server.theta + mean["delta"])


def spread(theta: Tensor, clients: int) -> Tensor:
    """The server's vector `[P]` as every client's own starting point `[S, P]`."""
    return theta.expand(clients, -1).clone()


def bias_correction(beta: float, steps: Tensor) -> Tensor:
    """1 - beta^steps, in double precision: at steps = 1 single precision would be wrong in the fifth digit.

    beta stays a Python number: a tensor of it would be brought to the device, which waits for all that it has to do.
    """
    return 1 - torch.pow(beta, steps.double())
