"""DP-FedAdamW (CVPR 2026): AdamW on each client under per-record clipping and Gaussian noise.

    server state: θ, v̄ (one number per block, starts at 0), Δ_G (starts at 0)
    round t, client i:
        θ_i = θ ;  m = 0 ;  v = expand(v̄)                           (1) block-wise second moments
        for k = 1..K:
            (g, Φ) = dp_grad(θ_i)
            m ← β1 m + (1−β1) g ;  v ← β2 v + (1−β2) g²
            m̂ = m/(1−β1^k) ;  v̂ = v/(1−β2^n),  n = (t−1)K + k
            u = max(v̂ − Φ, κΦ)                                      (2) bias correction
            θ_i ← θ_i − η_t ( m̂/(√u+ϵ) + γ Δ_G + λ θ_i )            (3) alignment
        send Δ_i = θ_i − θ and block_mean(v)
    server: Δ_G ← −Δ̄/(K η_t) ;  θ ← θ + Δ̄ ;  v̄ ← mean of block_mean(v)

g is the noised mean gradient of client i with parameters θ_i, and Φ the variance of its noise. K is
the number of local steps, η_t the learning rate, λ the weight decay, and Δ̄ the mean of the Δ_i. Φ
times κ is the least value of u, Δ_G is the clients' mean direction in the last round, γ its weight,
and ϵ a small constant. A block is a group of numbers such as a layer: `block_mean` averages over
each block, and `expand` repeats the value of each block.

If the clients' noise variances Φ_i differ, each client removes its noise from v before the server
averages v: after round t, client i sends block_mean(v) − (1−β2^{tK})Φ_i. A client that starts round
t adds (1−β2^{(t−1)K})Φ_i, with its own Φ_i, to the mean that it receives.

If Φ changes over rounds (quantile clipping), step (2) subtracts w/(1−β2^n) instead of Φ. The server
tracks w, the moving average of Φ with decay β2. If Φ is constant, w is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

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

RateOrAuto = Annotated[float, Gt(0)] | Literal["auto"]


@dataclass(frozen=True)
class Server(Point):
    v: Tensor
    dg: Tensor
    w: Tensor


@dataclass(frozen=True)
class Local(Moments):
    """State of S clients of DP-FedAdamW within a round.

    dg     the global direction Δ_G: the clients' mean update in the last round, divided by −K η_t
    w      moving average of the noise variance Φ; empty if Φ is constant
    v_hat  bias-corrected second moment of the last step
    """

    dg: Tensor
    w: Tensor
    v_hat: Tensor


@dataclass(frozen=True)
class DPFedAdamW(Algorithm):
    name = "dp-fedadamw"
    lr_grid = (1e-4, 3e-4, 1e-3, 3e-3)
    summary = "AdamW with block-wise second moments, bias correction for the noise, and alignment"

    lr: Annotated[RateOrAuto, "base learning rate η0; auto: from public numbers"] = "auto"
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), "decay of the first moment"] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), "decay of the second moment"] = 0.999
    eps: Annotated[float, Ge(0), "ϵ added to √u"] = 1e-8
    gamma: Annotated[float, Ge(0), Le(1), "weight γ of the global direction; 0: no alignment"] = 0.5
    agg: Annotated[Literal["mean", "full_v", "off"], "sent v: block means, all, none"] = "mean"
    bc: Annotated[bool, "subtract the noise's known variance Φ from v̂"] = True
    bc_floor: Annotated[float, Ge(0), "floor κ of v̂−Φ, in units of Φ"] = 0.5
    bc_level: Annotated[Literal["coordinate", "block"], "level of the correction"] = "coordinate"
    granularity: Annotated[
        Literal["block", "tensor"], "blocks: by architecture, or one per tensor"
    ] = "block"

    @property
    def broadcast(self) -> tuple[str, ...]:
        return ("theta", "v", "w") if self.gamma == 0 else ("theta", "v", "w", "dg")

    @property
    def rounded(self) -> tuple[str, ...]:
        return ("theta", "delta", "dg")

    def check(self, facts: Facts) -> list[str]:
        if facts.varying_phi and not facts.equal_phi and self.agg != "off":
            self.refuse('privacy.clip_mode = "quantile" needs the same noise level for all clients')
        return ["gamma = 1 has no damping"] if self.gamma == 1 else []

    def init(self, ctx: Context, theta: Tensor) -> Server:
        size = {"mean": ctx.space.num_blocks, "full_v": ctx.space.size, "off": 0}[self.agg]
        w = theta.new_zeros(1 if self._tracks_phi(ctx) else 0)
        return Server(theta, theta.new_zeros(size), torch.zeros_like(theta), w)

    def start(self, ctx: Context, server: Server, memory: ClientState) -> Local:
        theta = spread(server.theta, ctx.S)
        dg = server.dg if self.gamma > 0 else theta.new_zeros(1)
        m = torch.zeros_like(theta)
        v = self._start_v(ctx, server.v, m)
        return Local(theta, m, v, dg, server.w, v_hat=v)

    def step(self, ctx: Context, local: Local, oracle: Oracle, k: Tensor) -> Local:
        g, phi = oracle(local.theta)
        m = torch.lerp(local.m, g, 1 - self.beta1)
        v = (self.beta2 * local.v).addcmul(g, g, value=1 - self.beta2)
        n = k if self.agg == "off" else (ctx.t - 1) * ctx.K + k
        m_hat = m / bias_correction(self.beta1, k)
        v_hat = v / bias_correction(self.beta2, n)
        w = local.w
        if self._tracks_phi(ctx):
            w = self.beta2 * w + (1 - self.beta2) * phi
            phi = w / bias_correction(self.beta2, n)
        step = m_hat / (self._without_noise(ctx, v_hat, phi).sqrt() + self.eps)
        direction = step + self.gamma * local.dg + self.weight_decay * local.theta
        theta = local.theta - ctx.lr * direction
        return replace(local, theta=theta, m=m, v=v, w=w, v_hat=v_hat)

    def finish(self, ctx: Context, server: Server, local: Local) -> tuple[Message, ClientState]:
        message = {"delta": local.theta - server.theta}
        if self.agg != "off":
            v = ctx.space.block_mean(local.v) if self.agg == "mean" else local.v
            message["v"] = v if ctx.equal_phi else v - self._noise_in_v(ctx, ctx.t * ctx.K)
        return message, {}

    def aggregate(self, ctx: Context, server: Server, mean: Message) -> Server:
        w = server.w
        if self._tracks_phi(ctx):
            decay = self.beta2**ctx.K
            w = (decay * w + (1 - decay) * ctx.phi.mean()).to(w.dtype)
        dg = -mean["delta"] / (ctx.K * ctx.lr)
        return Server(server.theta + mean["delta"], mean.get("v", server.v), dg, w)

    def _start_v(self, ctx: Context, v: Tensor, zero: Tensor) -> Tensor:
        if self.agg == "off":
            return zero
        if not ctx.equal_phi:
            v = (v + self._noise_in_v(ctx, (ctx.t - 1) * ctx.K)).clamp_min(0)
        return (ctx.space.expand(v) if self.agg == "mean" else v).expand(ctx.S, -1)

    def _noise_in_v(self, ctx: Context, steps: Tensor) -> Tensor:
        return bias_correction(self.beta2, steps).to(ctx.phi.dtype) * ctx.phi

    def _without_noise(self, ctx: Context, v_hat: Tensor, phi: Tensor) -> Tensor:
        if not self.bc:
            return v_hat
        if self.bc_level == "block":
            v_hat = ctx.space.expand(ctx.space.block_mean(v_hat))
        return torch.maximum(v_hat - phi, self.bc_floor * phi)

    def _tracks_phi(self, ctx: Context) -> bool:
        return self.agg != "off" and ctx.varying_phi
