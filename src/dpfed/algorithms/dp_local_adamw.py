"""DP-LocalAdamW: each client runs a new AdamW on noised gradients in each round.

    client: m = v = 0;  for k = 1..K:
                (g, _) = dp_grad(θ_i)
                m ← β1 m + (1−β1) g ;  v ← β2 v + (1−β2) g²
                m̂ = m/(1−β1^k) ;  v̂ = v/(1−β2^k)
                θ_i ← θ_i − η_t ( m̂/(√v̂+ϵ) + λ θ_i )
            send Δ_i = θ_i − θ
    server: θ ← θ + Δ̄

g is the noised mean gradient of client i with parameters θ_i, and Δ̄ the mean of the Δ_i. K is the
number of local steps, η_t the learning rate and λ the weight decay. The adaptive step is AdamW
(Loshchilov, Hutter 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from dpfed.algorithms.base import (
    Averaging,
    ClientState,
    Context,
    Moments,
    Oracle,
    Point,
    bias_correction,
    spread,
)


@dataclass(frozen=True)
class Local(Moments):
    v_hat: Tensor


@dataclass(frozen=True)
class DPLocalAdamW(Averaging):
    name = "dp-local-adamw"
    lr_grid = (3e-4, 1e-3, 3e-3, 1e-2)
    summary = "a fresh AdamW on every client in every round, averaged"

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 1e-3
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), "decay of the first moment"] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), "decay of the second moment"] = 0.999
    eps: Annotated[float, Ge(0), "ϵ added to √v̂"] = 1e-8

    def start(self, ctx: Context, server: Point, memory: ClientState) -> Local:
        theta = spread(server.theta, ctx.S)
        zero = torch.zeros_like(theta)
        return Local(theta, zero, zero, zero)

    def step(self, ctx: Context, local: Local, oracle: Oracle, k: Tensor) -> Local:
        g, _ = oracle(local.theta)
        m = torch.lerp(local.m, g, 1 - self.beta1)
        v = (self.beta2 * local.v).addcmul(g, g, value=1 - self.beta2)
        m_hat = m / bias_correction(self.beta1, k)
        v_hat = v / bias_correction(self.beta2, k)
        step = m_hat / (v_hat.sqrt() + self.eps)
        return Local(local.theta - ctx.lr * (step + self.weight_decay * local.theta), m, v, v_hat)
