"""The interface of an algorithm: a frozen dataclass with five pure methods on `[S, P]` tensors.

    init(ctx, theta)             -> server           state of the server before round 1
    start(ctx, server, memory)   -> local            state of S clients at the start of a round
    step(ctx, local, oracle, k)  -> local            one local step of all S clients
    finish(ctx, server, local)   -> message, memory  what each client sends, and what it keeps
    aggregate(ctx, server, mean) -> server           `mean` is the mean of the clients' messages

The oracle is the only access to data. An algorithm has no hidden state, no data, no model and no
I/O. Its fields are the keys of the section [algorithm] in a configuration. The annotation of a
field gives its allowed range and its help text. States are dataclasses of tensors and messages are
dictionaries of tensors `[S, ...]`, so both can be stored and sent without pickling.

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
    """The methods of the oracle that an algorithm calls to get noised gradients."""

    def __call__(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Draw a new batch; return its noised mean gradient `[S, P]` and noise variance `[S, 1]`.

        theta  `[S, P]` parameter vectors at which the clients' gradients are computed
        """

    def again(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return a noised gradient of the last batch, with new noise, and its noise variance.

        An algorithm may call this only if its property `releases` counts the second release.
        """


class Space(Protocol):
    """The layout of the parameter vector `[P]`: its size, its tensors and its blocks."""

    @property
    def size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def slices(self) -> list[slice]:
        """Return the range of the vector `[P]` that each tensor occupies, in tensor order."""

    def block_mean(self, vector: Tensor) -> Tensor:
        """Average over each block: `[..., P]` -> `[..., blocks]`."""

    def expand(self, values: Tensor) -> Tensor:
        """Repeat each block's value: `[..., blocks]` -> `[..., P]`."""


@dataclass(frozen=True)
class Releases:
    """How often one local step uses the oracle.

    batches   number of batches that are drawn
    releases  number of noised gradients that are released for each batch
    """

    batches: int = 1
    releases: int = 1


@dataclass(frozen=True)
class Context:
    """The public numbers of a round.

    `t` and `lr` are tensors: torch would compile a step again for each new Python number.

    Attributes:
        space: Size, tensors and blocks of the parameter space.
        N: Number of all clients.
        S: Number of clients that are computed side by side.
        T: Number of rounds.
        K: Number of local steps in a round.
        t: This round, 1 to T.
        lr: η_t, this round's learning rate: a scalar; in start and step it may be `[S, 1]`.
        lr0: The base learning rate η0, of the same shape as lr.
        phi: Φ_i, the noise variance of each client's mean gradient in this round, `[S, 1]`.
        equal_phi: True if Φ_i is equal for all clients.
        varying_phi: True if Φ changes over rounds (quantile clipping).
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

    equal_phi    True if the noise variance Φ_i is equal for all clients
    private      True if noise is added
    allow_nan    True if a run may continue with values that are not finite
    calibrated   True if sigma is computed from privacy.target_epsilon
    varying_phi  True if Φ changes over rounds (quantile clipping)
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
        """How often one local step uses the oracle. The ledger charges every step accordingly."""
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
        """Names of the vectors of length P that may be rounded in messages.

        Second moments must not be among them: rounding would destroy small differences such as
        v − Φ.
        """
        return ("theta", "delta")

    def check(self, facts: Facts) -> list[str]:
        """Return warnings about the keys. Raise DpfedError if the keys cannot work together."""
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
    """A state that holds θ alone: `[P]` at the server, `[S, P]` at the clients."""

    theta: Tensor


@dataclass(frozen=True)
class Moments(Point):
    """A state with θ, and the first and second moments m and v of gradients."""

    m: Tensor
    v: Tensor


class Averaging(Algorithm):
    """Base of algorithms whose clients send Δ_i = θ_i − θ and whose server sets θ ← θ + Δ̄.

    Δ̄ is the mean of the Δ_i. A subclass defines the local step.
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
    """Return a copy of the server's vector `[P]` for every client: `[S, P]`."""
    return theta.expand(clients, -1).clone()


def bias_correction(beta: float, steps: Tensor) -> Tensor:
    """Return 1 - beta^steps, computed in float64.

    In float32 the result would be wrong in the fifth digit at steps = 1. beta remains a Python
    number, because copying it to a GPU would wait until the GPU has finished its work.
    """
    return 1 - torch.pow(beta, steps.double())
