"""The interface of an algorithm: a frozen dataclass with five pure methods.

The methods compute S clients side by side, on tensors `[S, P]` of P trainable numbers per client.

    init(ctx, theta)             -> server           state of the server before round 1
    start(ctx, server, memory)   -> local            state of S clients at the start of a round
    step(ctx, local, oracle, k)  -> local            one local step of all S clients
    finish(ctx, server, local)   -> message, memory  what each client sends, and what it keeps
    aggregate(ctx, server, mean) -> server           `mean` is the mean of the clients' messages

The oracle returns noised gradients and is the only access to data. An algorithm has no hidden
state, no data, no model and no I/O. Its fields are the keys of the section [algorithm] in a
configuration. The annotation of a field gives its allowed range and its help text. States are
dataclasses of tensors, and messages are dictionaries of tensors `[S, ...]`. States and messages can
therefore be stored and sent without pickling.

An algorithm whose clients keep vectors between rounds names these vectors in `remembers`. `memory`
holds each vector as `[S, P]`, with zeros for clients that never took part. The mask `seen` `[S]` in
`memory` is True for clients that have taken part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from annotated_types import Ge
from torch import Tensor

from dpfed.errors import DpfedError

Message = dict[str, Tensor]
ClientState = dict[str, Tensor]


class Oracle(Protocol):
    """The part of the oracle that an algorithm calls to get noised gradients of S clients."""

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a new batch at each client; return noised mean gradients and their noise variances.

        The gradients are `[S, P]`, and the noise variances of a coordinate are `[S, 1]`.

        theta  `[S, P]` one vector of P parameters for each of S clients
        """

    def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return noised mean gradients of the last batches with new noise, and noise variances.

        This second release of a batch costs privacy. An algorithm may call this method only if its
        property `releases` counts the second release.

        theta  `[S, P]` one vector of P parameters for each of S clients
        """


class Space(Protocol):
    """The layout of the vector of P trainable numbers: its size, its tensors and its blocks.

    A block is a group of numbers that belong together, such as one layer or one attention head.
    """

    @property
    def size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def slices(self) -> list[slice]:
        """Return the range of the parameter vector that each tensor occupies, in tensor order."""

    def block_mean(self, vector: Tensor) -> Tensor:
        """Return the mean of the numbers in each block: `[..., P]` -> `[..., blocks]`."""

    def expand(self, values: Tensor) -> Tensor:
        """Repeat each block's value: `[..., blocks]` -> `[..., P]`."""


@dataclass(frozen=True)
class Releases:
    """The number of batches and noised gradients in one local step, which decide its privacy cost.

    batches   number of batches that are drawn
    releases  number of noised gradients that are released for each batch
    """

    batches: int = 1
    releases: int = 1


@dataclass(frozen=True)
class Context:
    """The public numbers of a round that an algorithm's methods get.

    `t` and `lr` are tensors, because torch.compile would compile a local step again for each new
    Python number.

    Attributes:
        space: Size, tensors and blocks of the parameter space.
        N: Number of all clients.
        S: Number of clients that are computed side by side.
        T: Number of rounds.
        K: Number of local steps in a round.
        t: This round, 1 to T.
        lr: η_t, this round's learning rate: a scalar; `start` and `step` may get `[S, 1]` instead.
        lr0: The base learning rate η0, of the same shape as lr.
        phi: Φ_i, the noise variance of each client's mean gradient in this round, `[S, 1]`.
        equal_phi: True if Φ_i is equal for all clients.
        varying_phi: True if Φ_i changes over rounds (quantile clipping).
        answered: Number of clients whose messages were averaged; set for `aggregate` only.
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
    """Facts about a run that `Algorithm.check` compares with the algorithm's keys before round 1.

    equal_phi    True if the noise variance Φ_i of the mean gradient is equal for all clients i
    private      True if noise is added
    allow_nan    True if a run may continue with values that are not finite
    calibrated   True if sigma is computed from privacy.target_epsilon
    varying_phi  True if Φ_i changes over rounds (quantile clipping)
    """

    equal_phi: bool
    private: bool
    allow_nan: bool
    calibrated: bool = False
    varying_phi: bool = False


@dataclass(frozen=True)
class Algorithm(ABC):
    """Base class of the algorithms, with the configuration keys that every algorithm has."""

    name: ClassVar[str]
    lr_grid: ClassVar[tuple[float, ...]]
    summary: ClassVar[str]

    lr: Annotated[float | Literal["auto"], "base learning rate η0"]
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"]
    agg_weights: Annotated[
        Literal["uniform", "size"], "weights of the mean; size: by R_i, then public"
    ] = field(default="uniform", kw_only=True)

    @property
    def base_lr(self) -> float:
        """The base learning rate η0 as a number. Raise DpfedError if it is still "auto"."""
        if self.lr == "auto":
            self.refuse('lr = "auto" must be replaced by a number before round 1')
        return float(self.lr)

    @property
    def releases(self) -> Releases:
        """The batches and noised gradients of one local step, for which the ledger is charged."""
        return Releases()

    @property
    def noise_factor(self) -> float:
        """Factor by which the run multiplies `privacy.sigma` before it plans noise and epsilon."""
        return 1.0

    @property
    def remembers(self) -> tuple[str, ...]:
        """Names of the vectors of length P that each client keeps between rounds."""
        return ()

    @property
    def broadcast(self) -> tuple[str, ...]:
        """Names of the server's state fields that clients download to run `start` and `finish`."""
        return ("theta",)

    @property
    def rounded(self) -> tuple[str, ...]:
        """Names of the vectors of length P whose numbers may be rounded to shorten messages.

        Do not name second moments v. Rounding would destroy the small difference between v and the
        noise variance Φ.
        """
        return ("theta", "delta")

    def check(self, facts: Facts) -> list[str]:
        """Return warnings about the algorithm's keys, given facts about the run.

        Raise DpfedError if the keys contradict each other or the facts.
        """
        return []

    @abstractmethod
    def init(self, ctx: Context, theta: Tensor) -> Any:
        """Return the server's state before round 1."""

    @abstractmethod
    def start(self, ctx: Context, server: Any, memory: ClientState) -> Any:
        """Return the state of S clients at the start of a round."""

    @abstractmethod
    def step(self, ctx: Context, local: Any, oracle: Oracle, k: Tensor) -> Any:
        """Return the state of S clients after one more local step, the k-th of K."""

    @abstractmethod
    def finish(self, ctx: Context, server: Any, local: Any) -> tuple[Message, ClientState]:
        """Return the clients' messages, and the vectors that they store until their next round."""

    @abstractmethod
    def aggregate(self, ctx: Context, server: Any, mean: Message) -> Any:
        """Return the server's next state from the mean of the messages."""

    def refuse(self, sentence: str) -> None:
        """Raise DpfedError with this sentence, preceded by the algorithm's name."""
        raise DpfedError(f"{self.name}: {sentence}")


@dataclass(frozen=True)
class Point:
    """State that has only the P parameters θ: `[P]` at the server, `[S, P]` at S clients."""

    theta: Tensor


@dataclass(frozen=True)
class Moments(Point):
    """State of an Adam-like algorithm: the parameters θ, and first and second moments m and v."""

    m: Tensor
    v: Tensor


class Averaging(Algorithm):
    """Base class of algorithms that average the clients' updates, like FedAvg.

    Client i sends its update Δ_i = θ_i − θ, where θ is the server's vector of parameters. The
    server adds the mean of all Δ_i to θ. A subclass defines the local step.
    """

    def init(self, ctx: Context, theta: Tensor) -> Point:
        return Point(theta)

    def start(self, ctx: Context, server: Point, memory: ClientState) -> Any:
        return Point(spread(server.theta, ctx.S))

    def finish(self, ctx: Context, server: Point, local: Any) -> tuple[Message, ClientState]:
        return {"delta": local.theta - server.theta}, {}

    def aggregate(self, ctx: Context, server: Point, mean: Message) -> Point:
        return Point(server.theta + mean["delta"])


def spread(theta: Tensor, clients: int) -> Tensor:
    """Return one copy of the server's vector `[P]` for each of S clients: `[S, P]`."""
    return theta.expand(clients, -1).clone()


def bias_correction(beta: float, steps: Tensor) -> Tensor:
    """Return 1 - beta^steps, the bias correction of a moving average as in Adam, in float64.

    In float32 the result would be wrong in the fifth digit at steps = 1. beta remains a Python
    number, because copying it to a GPU would wait until the GPU has finished its work.
    """
    return 1 - torch.pow(beta, steps.double())
