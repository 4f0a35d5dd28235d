"""DP-SCAFFOLD: control variates against client drift (Karimireddy et al. 2020), record-level DP.

    server state: θ, c (starts at 0);   client i keeps c_i (starts at 0)
    client: repeat K:  (g, _) = dp_grad(θ_i)
                       θ_i ← θ_i − η_t (g − c_i + c + λ θ_i)
            c_i' = mean of its K gradients g                        (scaffold_c = mean)
                 | c_i − c + (θ − θ_i)/(K η_t)                      (scaffold_c = displacement)
            send Δ_i = θ_i − θ and c_i' − c_i ;  c_i ← c_i'
    server: θ ← θ + Δ̄ ;  c ← c + (1/N) Σ_{i answered} (c_i' − c_i)

g is the noised mean gradient of client i with parameters θ_i, and Δ̄ the mean of the Δ_i. K is the
number of local steps, η_t the learning rate and λ the weight decay. N is the number of all clients,
so that c stays the mean of all c_i.

Noble, Bellet and Dieuleveut (2022) made the algorithm private. Per-record gradients are clipped
before c and c_i are added. c_i' depends only on noised gradients and costs no privacy. Without
weight decay both formulas for c_i' are equal. With weight decay, `displacement` adds the mean of
the terms λ θ_i to c_i'.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from dpfed.algorithms.base import (
    Algorithm,
    ClientState,
    Context,
    Facts,
    Message,
    Oracle,
    Point,
    spread,
)


@dataclass(frozen=True)
class Server(Point):
    c: Tensor


@dataclass(frozen=True)
class Local(Point):
    """State of S clients of DP-SCAFFOLD within a round.

    c      control variate of the server
    own    control variate of each client
    total  sum of each client's noised gradients in this round so far
    """

    c: Tensor
    own: Tensor
    total: Tensor


@dataclass(frozen=True)
class DPScaffold(Algorithm):
    name = "dp-scaffold"
    lr_grid = (0.01, 0.03, 0.1, 0.3)
    summary = (
        "local DP-SGD with control variates against client drift; "
        "clients keep a vector between rounds"
    )

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 0.1
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 1e-3
    scaffold_c: Annotated[
        Literal["mean", "displacement"], "c_i' from the gradients, or from the way travelled"
    ] = "mean"

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("c",)

    @property
    def broadcast(self) -> tuple[str, ...]:
        return ("theta", "c")

    @property
    def rounded(self) -> tuple[str, ...]:
        return ("theta", "delta", "c")

    def check(self, facts: Facts) -> list[str]:
        warnings = []
        if self.scaffold_c == "displacement" and self.weight_decay > 0:
            warnings.append(
                'scaffold_c = "displacement" counts weight decay into c_i; '
                "with weight_decay = 0 it does not"
            )
        if self.agg_weights == "size":
            warnings.append(
                'with agg_weights = "size" c is only near the weighted mean of the c_i, '
                "unless all clients take part"
            )
        return warnings

    def init(self, ctx: Context, theta: Tensor) -> Server:
        return Server(theta, torch.zeros_like(theta))

    def start(self, ctx: Context, server: Server, memory: ClientState) -> Local:
        theta = spread(server.theta, ctx.S)
        return Local(theta, server.c, memory["c"], torch.zeros_like(theta))

    def step(self, ctx: Context, local: Local, oracle: Oracle, k: Tensor) -> Local:
        g, _ = oracle(local.theta)
        theta = local.theta - ctx.lr * (g - local.own + local.c + self.weight_decay * local.theta)
        return replace(local, theta=theta, total=local.total + g)

    def finish(self, ctx: Context, server: Server, local: Local) -> tuple[Message, ClientState]:
        if self.scaffold_c == "mean":
            own = local.total / ctx.K
        else:
            own = local.own - local.c + (server.theta - local.theta) / (ctx.K * ctx.lr)
        return {"delta": local.theta - server.theta, "c": own - local.own}, {"c": own}

    def aggregate(self, ctx: Context, server: Server, mean: Message) -> Server:
        return Server(server.theta + mean["delta"], server.c + (ctx.answered / ctx.N) * mean["c"])
