"""DP-FedAvg: local DP-SGD and a mean (Noble, Bellet, Dieuleveut 2022, at the level of one record).

client: repeat K:  (g, _) = dp_grad(θ_i)
                   θ_i ← θ_i − η_t (g + λ θ_i)
        send Δ_i = θ_i − θ
server: θ ← θ + η_g Δ̄
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Gt
from torch import Tensor

from dpfed.algorithms.base import Algorithm, Context, Memory, Message, Oracle, spread


@dataclass(frozen=True)
class Server:
    theta: Tensor


@dataclass(frozen=True)
class Local:
    theta: Tensor


@dataclass(frozen=True)
class DPFedAvg(Algorithm):
    name = "dp-fedavg"
    lr_grid = (0.01, 0.03, 0.1, 0.3)
    summary = "local DP-SGD, averaged"

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 0.1
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 1e-3
    server_lr: Annotated[float, Gt(0), "server learning rate η_g"] = 1.0

    def init(self, ctx: Context, theta: Tensor) -> Server:
        return Server(theta)

    def start(self, ctx: Context, server: Server, memory: Memory) -> Local:
        return Local(spread(server.theta, ctx.S))

    def step(self, ctx: Context, local: Local, oracle: Oracle, k: Tensor) -> Local:
        g, _ = oracle(local.theta)
        return replace(local, theta=local.theta - ctx.lr * (g + self.weight_decay * local.theta))

    def finish(self, ctx: Context, server: Server, local: Local) -> tuple[Message, Memory]:
        return {"delta": local.theta - server.theta}, {}

    def aggregate(self, ctx: Context, server: Server, mean: Message) -> Server:
        return Server(server.theta + self.server_lr * mean["delta"])
