"""DP-FedAdamW as Algorithm 1 of the paper prints it, to show that the printed form fails.

    equal to dp-fedadamw (see dp_fedadamw.py), except:
        v̂ = v/(1−β2^k)                                   k restarts each round while v does not
        u = v̂ − Φ                                        no floor: √u is NaN wherever v̂ < Φ
        θ_i ← θ_i − η_t ( m̂/(√u+ϵ) + γ Δ_G − λ θ_i )     the sign makes weights grow

v̂ is the second moment of noised gradients, Φ the variance of the noise, and k the number of the
local step. If a gradient is mostly noise, v̂ < Φ holds for 68 % of its coordinates at the first
step. The run then stops with an error message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from dpfed.algorithms.base import (
    Algorithm,
    ClientState,
    Context,
    Facts,
    Message,
    Moments,
    Oracle,
    Point,
    bias_correction,
    spread,
)


@dataclass(frozen=True)
class Server(Point):
    v: Tensor
    dg: Tensor


@dataclass(frozen=True)
class Local(Moments):
    dg: Tensor
    v_hat: Tensor


@dataclass(frozen=True)
class DPFedAdamWPrinted(Algorithm):
    name = "dp-fedadamw-printed"
    lr_grid = (1e-4, 3e-4, 1e-3, 3e-3)
    summary = "Algorithm 1 of the DP-FedAdamW paper as printed, which fails at its first step"

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 3e-4
    weight_decay: Annotated[float, Ge(0), "λ, with the printed sign"] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), "decay of the first moment"] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), "decay of the second moment"] = 0.999
    eps: Annotated[float, Ge(0), "ϵ added to √u"] = 1e-8
    gamma: Annotated[float, Ge(0), Le(1), "weight γ of the global direction"] = 0.5

    @property
    def broadcast(self) -> tuple[str, ...]:
        return ("theta", "v", "dg")

    @property
    def rounded(self) -> tuple[str, ...]:
        return ("theta", "delta", "dg")

    def check(self, facts: Facts) -> list[str]:
        if not facts.equal_phi or facts.varying_phi:
            self.refuse("the printed form needs the same noise level for all clients and rounds")
        return ["the printed form takes roots of negative numbers: the run will probably stop"]

    def init(self, ctx: Context, theta: Tensor) -> Server:
        return Server(theta, theta.new_zeros(ctx.space.num_blocks), torch.zeros_like(theta))

    def start(self, ctx: Context, server: Server, memory: ClientState) -> Local:
        theta = spread(server.theta, ctx.S)
        v = ctx.space.expand(server.v).expand(ctx.S, -1)
        return Local(theta, torch.zeros_like(theta), v, server.dg, v)

    def step(self, ctx: Context, local: Local, oracle: Oracle, k: Tensor) -> Local:
        g, phi = oracle(local.theta)
        m = torch.lerp(local.m, g, 1 - self.beta1)
        v = (self.beta2 * local.v).addcmul(g, g, value=1 - self.beta2)
        m_hat = m / bias_correction(self.beta1, k)
        v_hat = v / bias_correction(self.beta2, k)
        step = m_hat / ((v_hat - phi).sqrt() + self.eps)
        direction = step + self.gamma * local.dg - self.weight_decay * local.theta
        return replace(local, theta=local.theta - ctx.lr * direction, m=m, v=v, v_hat=v_hat)

    def finish(self, ctx: Context, server: Server, local: Local) -> tuple[Message, ClientState]:
        return {"delta": local.theta - server.theta, "v": ctx.space.block_mean(local.v)}, {}

    def aggregate(self, ctx: Context, server: Server, mean: Message) -> Server:
        dg = -mean["delta"] / (ctx.K * ctx.lr)
        return Server(server.theta + mean["delta"], mean["v"], dg)
