"""DP-FedAvgM: DP-FedAvg with momentum at the server (Hsu, Qi, Brown 2019).

client: repeat K:  (g, _) = dp_grad(θ_i)
                   θ_i ← θ_i − η_t (g + λ θ_i)
        send Δ_i = θ_i − θ
server: m ← β m + Δ̄                                       m starts at 0 and stays at the server
        θ ← θ + m
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from dpfed.algorithms.base import Averaging, Context, Message, Oracle, Point


@dataclass(frozen=True)
class Server(Point):
    m: Tensor


@dataclass(frozen=True)
class DPFedAvgM(Averaging):
    name = "dp-fedavgm"
    lr_grid = (0.01, 0.03, 0.1, 0.3)
    summary = "local DP-SGD, averaged, with momentum at the server"

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 0.03
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 1e-3
    beta: Annotated[float, Ge(0), Lt(1), "momentum β at the server"] = 0.9

    def init(self, ctx: Context, theta: Tensor) -> Server:
        return Server(theta, torch.zeros_like(theta))

    def step(self, ctx: Context, local: Point, oracle: Oracle, k: Tensor) -> Point:
        g, _ = oracle(local.theta)
        return Point(local.theta - ctx.lr * (g + self.weight_decay * local.theta))

    def aggregate(self, ctx: Context, server: Any, mean: Message) -> Server:
        m = self.beta * server.m + mean["delta"]
        return Server(server.theta + m, m)
