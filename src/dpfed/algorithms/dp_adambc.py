"""DP-AdamBC: Adam without the noise's known bias in its second moment (Tang et al. 2024).

    client: m = v = 0;  for k = 1..K:
                (g, Φ) = dp_grad(θ_i)
                m ← β1 m + (1−β1) g ;  v ← β2 v + (1−β2) g²
                m̂ = m/(1−β1^k) ;  v̂ = v/(1−β2^k)
                u = max(v̂ − Φ, γ′)
                θ_i ← θ_i − η_t ( m̂/√u + λ θ_i )                   no ϵ
            send Δ_i = θ_i − θ
    server: θ ← θ + Δ̄

g is the noised mean gradient of client i with parameters θ_i, and Φ the variance of its noise. K is
the number of local steps, η_t the learning rate, λ the weight decay, and Δ̄ the mean of the Δ_i.
The paper trains on one machine. Here every client starts with m = v = 0 in every round, as in
DP-LocalAdamW. The floor γ′ is an absolute number and must be tuned with the learning rate. Where v̂
is below Φ, the step m̂/√γ′ is large. The learning rates of `lr_grid` are therefore low.
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
class DPAdamBC(Averaging):
    name = "dp-adambc"
    lr_grid = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    summary = (
        "Adam on every client with the noise's variance taken out of its second moment, averaged"
    )

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 1e-4
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), "decay of the first moment"] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), "decay of the second moment"] = 0.999
    bc_floor_abs: Annotated[float, Gt(0), "absolute floor γ′ of v̂−Φ"] = 1e-8

    def start(self, ctx: Context, server: Point, memory: ClientState) -> Moments:
        theta = spread(server.theta, ctx.S)
        return Moments(theta, torch.zeros_like(theta), torch.zeros_like(theta))

    def step(self, ctx: Context, local: Moments, oracle: Oracle, k: Tensor) -> Moments:
        g, phi = oracle(local.theta)
        m = torch.lerp(local.m, g, 1 - self.beta1)
        v = (self.beta2 * local.v).addcmul(g, g, value=1 - self.beta2)
        m_hat = m / bias_correction(self.beta1, k)
        v_hat = v / bias_correction(self.beta2, k)
        u = (v_hat - phi).clamp_min(self.bc_floor_abs)
        direction = m_hat / u.sqrt() + self.weight_decay * local.theta
        return Moments(local.theta - ctx.lr * direction, m, v)
