"""The contract of an algorithm: a frozen dataclass with five pure methods over `[S, P]` tensors.

    init(ctx, theta)             -> server           state of the server before round 1
    start(ctx, server, memory)   -> local            state of S clients at the start of a round
    step(ctx, local, oracle, k)  -> local            one local step of all S clients
    finish(ctx, server, local)   -> message, memory  what each client sends, and what it keeps
    aggregate(ctx, server, mean) -> server           `mean` is the mean of the clients' messages

The oracle is the only access to data. An algorithm has no hidden state, no data, no model and no
I/O. Its fields are its `[algorithm]` keys; their annotations hold the allowed range and a sentence.
States are dataclasses of tensors and messages are dictionaries of tensors `[S, ...]`, so both can
be stored and sent without pickling.

An algorithm whose clients keep vectors between rounds names them in `remembers`. `memory` holds
them stacked, `[S, P]`, zero for clients that never took part, with a mask `seen` `[S]`.
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
    """Source of noised gradients, an algorithm's only access to data."""

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noised mean gradient `[S, P]` of a fresh batch and its variance `[S, 1]`."""

    def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Release the same batch again with fresh noise, if `releases` declares it."""


class Space(Protocol):
    """The parameter space as an algorithm sees it: size, tensors and blocks, but no model."""

    @property
    def size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def slices(self) -> list[slice]:
        """Return the range of the vector that each tensor occupies, in order."""

    def block_mean(self, vector: Tensor) -> Tensor:
        """Average over each block: `[..., P]` -> `[..., blocks]`."""

    def expand(self, values: Tensor) -> Tensor:
        """Repeat each block's value: `[..., blocks]` -> `[..., P]`."""


@dataclass(frozen=True)
class Releases:
    """Use of the oracle in one local step: number of batches, and of releases of each batch."""

    batches: int = 1
    releases: int = 1


@dataclass(frozen=True)
class Context:
    """The public facts of a round.

    `t` and `lr` are tensors, so that one compiled step serves every round.

    Attributes:
        space: Size, tensors and blocks of the parameter space.
        N: Number of clients.
        S: Number of clients side by side.
        T: Number of rounds.
        K: Number of local steps in a round.
        t: This round, 1 to T.
        lr: η_t, a scalar; in start and step it may be `[S, 1]`.
        lr0: The base learning rate η0, of the same shape as lr.
        phi: Φ_i, the noise variance of each client's mean gradient in this round, `[S, 1]`.
        equal_phi: True if Φ_i is equal for all clients.
        varying_phi: True if Φ changes over rounds (quantile clipping).
        answered: Number of clients whose messages are in the mean (aggregate only).
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
    """Facts known before round 1, for `Algorithm.check`."""

    equal_phi: bool
    private: bool
    allow_nan: bool
    calibrated: bool = False
    varying_phi: bool = False


@dataclass(frozen=True)
class Algorithm(ABC):
    """Base of every algorithm, with the keys that all of them have."""

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
        """Use of the oracle in one local step, from which the ledger charges."""
        return Releases()

    @property
    def noise_factor(self) -> float:
        """Factor on the configured sigma; the accountant sees the product."""
        return 1.0

    @property
    def remembers(self) -> tuple[str, ...]:
        """Names of the vectors of length P that each client keeps between rounds."""
        return ()

    @property
    def broadcast(self) -> tuple[str, ...]:
        """Fields of the server's state that `start` and `finish` read, which clients download."""
        return ("theta",)

    def check(self, facts: Facts) -> list[str]:
        """Refuse combinations of keys that cannot work (DpfedError); return warnings."""
        return []

    @abstractmethod
    def init(self, ctx: Context, theta: Tensor) -> Any:
        """Return the server's state before round 1."""

    @abstractmethod
    def start(self, ctx: Context, server: Any, memory: ClientState) -> Any:
        """Return the state of S clients at the start of a round."""

    @abstractmethod
    def step(self, ctx: Context, local: Any, oracle: Oracle, k: Tensor) -> Any:
        """Return the state of S clients after local step k = 1..K."""

    @abstractmethod
    def finish(self, ctx: Context, server: Any, local: Any) -> tuple[Message, ClientState]:
        """Return the message of each client, and the vectors that it keeps."""

    @abstractmethod
    def aggregate(self, ctx: Context, server: Any, mean: Message) -> Any:
        """Return the server's next state from the mean of the messages."""

    def refuse(self, sentence: str) -> None:
        """Raise DpfedError with the algorithm's name."""
        raise DpfedError(f"{self.name}: {sentence}")


@dataclass(frozen=True)
class Point:
    """A state that holds θ alone: `[P]` at the server, `[S, P]` at the clients."""

    theta: Tensor


@dataclass(frozen=True)
class Moments(Point):
    """A state with first and second moments of gradients beside θ."""

    m: Tensor
    v: Tensor


class Averaging(Algorithm):
    """Base of methods that send Δ_i = θ_i − θ and set θ ← θ + Δ̄; a method adds its step."""

    def init(self, ctx: Context, theta: Tensor) -> Point:
        return Point(theta)

    def start(self, ctx: Context, server: Point, memory: ClientState) -> Any:
        return Point(spread(server.theta, ctx.S))

    def finish(self, ctx: Context, server: Point, local: Any) -> tuple[Message, ClientState]:
        return {"delta": local.theta - server.theta}, {}

    def aggregate(self, ctx: Context, server: Point, mean: Message) -> Point:
        return Point(server.theta + mean["delta"])


def spread(theta: Tensor, clients: int) -> Tensor:
    """Copy the server's vector `[P]` to every client: `[S, P]`."""
    return theta.expand(clients, -1).clone()


def bias_correction(beta: float, steps: Tensor) -> Tensor:
    """Return 1 - beta^steps in float64; at steps = 1, float32 is wrong in the fifth digit.

    beta stays a Python number: copying a tensor to the device would wait for all of its work.
    """
    return 1 - torch.pow(beta, steps.double())
