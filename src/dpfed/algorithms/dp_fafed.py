"""DP-FAFED: averaged moments, and one denominator for all clients (Wu, Huang, Hu, Huang 2023).

    server state: θ, m̄ (starts at 0), v̄ (starts at Φ, which is public)
    client: m = m̄ ;  v = v̄ ;  H = √v̄ + ρ, frozen for the round
            repeat K:  (g, _) = dp_grad(θ_i)
                       m ← (1−α) m + α g                                (fafed_vr = false)
                       v ← β2 v + (1−β2) g²
                       θ_i ← θ_i − η_t ( m/H + λ θ_i )
            send Δ_i = θ_i − θ, m and v
    server: θ ← θ + Δ̄ ;  m̄ ← mean of m ;  v̄ ← mean of v

g is the noised mean gradient of client i with parameters θ_i, and Φ the variance of its noise. K is
the number of local steps, η_t the learning rate, λ the weight decay, and Δ̄ the mean of the Δ_i.

`fafed_vr = true` is the published variance reduction (STORM). It releases one batch J twice:

                       (g, _) = dp_grad(θ_i, batch J) ;  (g', _) = dp_grad(x_prev, batch J)
                       m ← g + (1−α) (m − g') ;  x_prev ← θ_i, before its step

Each client keeps x_prev between rounds and starts with x_prev = θ. Two releases of one batch cost
as much privacy as one release with the noise multiplier divided by √2. The ledger charges this
cost. The paper computes one more gradient before the first step, which is left out here.

With fafed_vr, m contains the noise of both releases. The noise variance of m then tends to
(1+(1−α)²)/(1−(1−α)²) Φ, which is 9.5 Φ at α = 0.1. Without fafed_vr it tends to α/(2−α) Φ, which is
0.053 Φ at α = 0.1. Variance reduction therefore needs a smaller learning rate or a larger α.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from dpfed.algorithms.base import (
    Algorithm,
    ClientState,
    Context,
    Facts,
    Message,
    Moments,
    Oracle,
    Releases,
    spread,
)


@dataclass(frozen=True)
class Local(Moments):
    """State of S clients of DP-FAFED within a round.

    h       the denominator √v̄ + ρ of all steps of the round
    x_prev  parameters before the previous step, `[S, P]`; empty, `[S, 0]`, without variance
            reduction
    """

    h: Tensor
    x_prev: Tensor


@dataclass(frozen=True)
class DPFAFED(Algorithm):
    name = "dp-fafed"
    lr_grid = (1e-3, 3e-3, 1e-2, 3e-2)
    summary = "local adaptive steps with averaged moments and the server's denominator"

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 3e-3
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 0.01
    alpha: Annotated[float, Gt(0), Le(1), "weight α of the new gradient in m"] = 0.1
    beta2: Annotated[float, Ge(0), Le(1), "decay of the second moment; 1 leaves it at Φ"] = 0.999
    rho: Annotated[float, Ge(0), "ρ added to √v̄"] = 1e-3
    fafed_vr: Annotated[
        bool, "variance reduction with a second gradient per step, which spends more"
    ] = False

    @property
    def releases(self) -> Releases:
        return Releases(batches=1, releases=2) if self.fafed_vr else Releases()

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("x_prev",) if self.fafed_vr else ()

    @property
    def broadcast(self) -> tuple[str, ...]:
        return ("theta", "m", "v")

    @property
    def rounded(self) -> tuple[str, ...]:
        return ("theta", "delta", "m")

    def check(self, facts: Facts) -> list[str]:
        if not facts.equal_phi:
            self.refuse(
                "the averaged v needs the same noise level for all clients; "
                "use equal client sizes or dp-fedadamw"
            )
        if self.rho == 0 and not facts.private:
            self.refuse(
                "without noise v̄ starts at 0, so rho = 0 would divide by zero; give rho > 0"
            )
        return []

    def init(self, ctx: Context, theta: Tensor) -> Moments:
        return Moments(theta, torch.zeros_like(theta), ctx.phi[0] * torch.ones_like(theta))

    def start(self, ctx: Context, server: Moments, memory: ClientState) -> Local:
        theta = spread(server.theta, ctx.S)
        x_prev = theta[:, :0]
        if self.fafed_vr:
            x_prev = torch.where(memory["seen"][:, None], memory["x_prev"], theta)
        h = server.v.sqrt() + self.rho
        return Local(theta, spread(server.m, ctx.S), spread(server.v, ctx.S), h, x_prev)

    def step(self, ctx: Context, local: Local, oracle: Oracle, k: Tensor) -> Local:
        g, _ = oracle(local.theta)
        x_prev = local.x_prev
        if self.fafed_vr:
            g_prev, _ = oracle.again(x_prev)
            m = g + (1 - self.alpha) * (local.m - g_prev)
            x_prev = local.theta
        else:
            m = torch.lerp(local.m, g, self.alpha)
        v = (self.beta2 * local.v).addcmul(g, g, value=1 - self.beta2)
        theta = local.theta - ctx.lr * (m / local.h + self.weight_decay * local.theta)
        return replace(local, theta=theta, m=m, v=v, x_prev=x_prev)

    def finish(self, ctx: Context, server: Moments, local: Local) -> tuple[Message, ClientState]:
        message = {"delta": local.theta - server.theta, "m": local.m, "v": local.v}
        return message, {"x_prev": local.x_prev} if self.fafed_vr else {}

    def aggregate(self, ctx: Context, server: Moments, mean: Message) -> Moments:
        return Moments(server.theta + mean["delta"], mean["m"], mean["v"])
