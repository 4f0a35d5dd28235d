"""DP-FedLADA: local adaptive steps, mixed with the last global direction (Sun et al. 2023).

    server state: θ, v̄ (starts at Φ, or at ϵ² without noise), g_a (starts at 0)
    client: m = 0 ;  v = v_max = v̄
            repeat K:  (g, _) = dp_grad(θ_i)
                       m ← β1 m + (1−β1) g ;  v ← β2 v + (1−β2) g² ;  v_max ← max(v_max, v)
                       θ_i ← θ_i − η_t ( a m/(√v_max+ϵ) + (1−a) g_a + λ θ_i )     no bias correction
            send Δ_i = θ_i − θ and v_max
    server: g_a ← −Δ̄/(K η_t) ;  θ ← θ + Δ̄ ;  v̄ ← mean of v_max

g is the noised mean gradient of client i with parameters θ_i, and Φ the variance of its noise. K is
the number of local steps, η_t the learning rate, λ the weight decay, and Δ̄ the mean of the Δ_i.
v_max never decreases, and DP noise increases it. `lada_amsgrad = false` uses v in place of v_max,
as plain Adam does.
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
    spread,
)


@dataclass(frozen=True)
class Server(Point):
    v: Tensor
    ga: Tensor


@dataclass(frozen=True)
class Local(Moments):
    v_max: Tensor
    ga: Tensor


@dataclass(frozen=True)
class DPFedLADA(Algorithm):
    name = "dp-fedlada"
    # The range of learning rates is wide: a = 0.1 multiplies the client's own step by 0.1, and the
    # global direction g_a grows over rounds.
    lr_grid = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    summary = "local AMSGrad steps mixed with the global direction of the last round"

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 1e-2
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), "decay of the first moment"] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), "decay of the second moment"] = 0.999
    eps: Annotated[float, Ge(0), "ϵ added to √v_max"] = 1e-8
    a: Annotated[
        float, Gt(0), Le(1), "weight of the client's own step; 1−a is that of the global direction"
    ] = 0.1
    lada_amsgrad: Annotated[bool, "divide by the largest v so far; false: by v itself"] = True

    @property
    def broadcast(self) -> tuple[str, ...]:
        return ("theta", "v", "ga")

    @property
    def rounded(self) -> tuple[str, ...]:
        return ("theta", "delta", "ga")

    def check(self, facts: Facts) -> list[str]:
        if not facts.equal_phi:
            self.refuse(
                "the averaged v needs the same noise level for all clients; "
                "use equal client sizes or dp-fedadamw"
            )
        if self.eps == 0 and not facts.private:
            self.refuse(
                "without noise v̄ starts at ϵ², so eps = 0 would divide by zero; give eps > 0"
            )
        if facts.varying_phi and self.lada_amsgrad:
            return [
                "v_max never falls, so it stays at the largest noise level there was; "
                "see lada_amsgrad"
            ]
        return []

    def init(self, ctx: Context, theta: Tensor) -> Server:
        start = torch.where(ctx.phi[0] > 0, ctx.phi[0], self.eps**2)
        return Server(theta, start * torch.ones_like(theta), torch.zeros_like(theta))

    def start(self, ctx: Context, server: Server, memory: ClientState) -> Local:
        theta = spread(server.theta, ctx.S)
        v = spread(server.v, ctx.S)
        return Local(theta, torch.zeros_like(theta), v, v, server.ga)

    def step(self, ctx: Context, local: Local, oracle: Oracle, k: Tensor) -> Local:
        g, _ = oracle(local.theta)
        m = torch.lerp(local.m, g, 1 - self.beta1)
        v = (self.beta2 * local.v).addcmul(g, g, value=1 - self.beta2)
        v_max = torch.maximum(local.v_max, v) if self.lada_amsgrad else v
        step = self.a * m / (v_max.sqrt() + self.eps) + (1 - self.a) * local.ga
        theta = local.theta - ctx.lr * (step + self.weight_decay * local.theta)
        return replace(local, theta=theta, m=m, v=v, v_max=v_max)

    def finish(self, ctx: Context, server: Server, local: Local) -> tuple[Message, ClientState]:
        return {"delta": local.theta - server.theta, "v": local.v_max}, {}

    def aggregate(self, ctx: Context, server: Server, mean: Message) -> Server:
        return Server(server.theta + mean["delta"], mean["v"], -mean["delta"] / (ctx.K * ctx.lr))
