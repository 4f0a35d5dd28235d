"""DP-FedAvg: local DP-SGD, averaged by the server (record-level; Noble, Bellet, Dieuleveut 2022).

client: repeat K:  (g, _) = dp_grad(θ_i)
                   θ_i ← θ_i − η_t (g + λ θ_i)
        send Δ_i = θ_i − θ
server: θ ← θ + η_g Δ̄

g is the noised mean gradient of client i with parameters θ_i, and Δ̄ the mean of the Δ_i. K is the
number of local steps, η_t the learning rate, η_g the server's learning rate and λ the weight decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt
from torch import Tensor

from dpfed.algorithms.base import Averaging, Context, Message, Oracle, Point


@dataclass(frozen=True)
class DPFedAvg(Averaging):
    name = "dp-fedavg"
    lr_grid = (0.01, 0.03, 0.1, 0.3)
    summary = "local DP-SGD, averaged"

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 0.1
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 1e-3
    server_lr: Annotated[float, Gt(0), "server learning rate η_g"] = 1.0

    def step(self, ctx: Context, local: Point, oracle: Oracle, k: Tensor) -> Point:
        g, _ = oracle(local.theta)
        return Point(local.theta - ctx.lr * (g + self.weight_decay * local.theta))

    def aggregate(self, ctx: Context, server: Point, mean: Message) -> Point:
        return Point(server.theta + self.server_lr * mean["delta"])
