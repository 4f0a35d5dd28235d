"""DP-FedAdamW (CVPR 2026): AdamW on each client, made to work under per-sample clipping and Gaussian noise.

    server state: θ, v̄ (one number per block, starts at 0), Δ_G (starts at 0)
    round t, client i:
        θ_i = θ ;  m = 0 ;  v = expand(v̄)                                     (1) block-wise second moments
        for k = 1..K:
            (g, Φ) = dp_grad(θ_i)
            m ← β1 m + (1−β1) g ;  v ← β2 v + (1−β2) g²
            m̂ = m/(1−β1^k) ;  v̂ = v/(1−β2^n),  n = (t−1)K + k
            u = max(v̂ − Φ, κΦ)                                                (2) without the noise's known bias
            θ_i ← θ_i − η_t ( m̂/(√u+ϵ) + γ Δ_G + λ θ_i )                      (3) aligned with the global direction
        send Δ_i = θ_i − θ and block_mean(v)
    server: Δ_G ← −Δ̄/(K η_t) ;  θ ← θ + Δ̄ ;  v̄ ← mean of block_mean(v)

Where the paper's text cannot be run as printed, the default is the form that can, and the printed form has a name:
`v_exponent = local | round`, `bc_floor = "none"`, `wd_sign = literal`, `align = convex`.
With unequal Φ_i the raw v_i may not be averaged: each client then sends v_i less its own share of noise,
(1−β2^{tK})Φ_i, and adds its own share back at the start of the next round (`agg_center = corrected`).
Where Φ changes from round to round (quantile clipping, `scale`), what is subtracted is w/(1−β2^n), the same moving
average of Φ that v is of g²; the server keeps w, because everything in it is public.
`scale = block` (scale-then-privatize, Li, Zaheer, Reddi, Smith 2022; Ganesh, McMahan, Thakurta 2025): gradients are multiplied by
1/√(v̄−w) of their block, of root mean square 1, before they are clipped, and divided by it after.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from dpfed.algorithms.base import (
    Algorithm,
    Context,
    Facts,
    Memory,
    Message,
    Oracle,
    bias_correction,
    spread,
)


@dataclass(frozen=True)
class Server:
    theta: Tensor
    v: Tensor
    dg: Tensor
    w: Tensor  # average noise in v: empty while Φ is constant, else one number, or one per block with `scale`


@dataclass(frozen=True)
class Local:
    theta: Tensor
    m: Tensor
    v: Tensor
    dg: Tensor
    w: Tensor
    scale: Tensor
    v_hat: Tensor


@dataclass(frozen=True)
class DPFedAdamW(Algorithm):
    name = "dp-fedadamw"
    lr_grid = (1e-4, 3e-4, 1e-3, 3e-3)
    summary = "AdamW with block-wise second moments, noise bias removed, steps aligned with the global direction"

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 3e-4
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), "decay of the first moment"] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), "decay of the second moment"] = 0.999
    eps: Annotated[float, Ge(0), "ϵ added to √u"] = 1e-8
    gamma: Annotated[float, Ge(0), Le(1), "weight γ of the global direction"] = 0.5
    agg: Annotated[Literal["mean", "full_v", "off"], "what second moments travel: block means, all, none"] = "mean"
    bc: Annotated[bool, "subtract the noise's known variance Φ from v̂"] = True
    bc_floor: Annotated[float | Literal["none"], 'relative floor κ of v̂−Φ; "none" is the printed form'] = 0.5
    bc_floor_abs: Annotated[float | None, "absolute floor as in DP-AdamBC, then without ϵ"] = None
    bc_level: Annotated[Literal["coordinate", "block"], "where the correction is made"] = "coordinate"
    align: Annotated[Literal["on", "off", "convex"], "how Δ_G enters the step"] = "on"
    v_exponent: Annotated[Literal["total", "local", "round"], "step count in the correction of v"] = "total"
    m_exponent: Annotated[Literal["local", "total"], "step count in the correction of m"] = "local"
    v_send: Annotated[Literal["raw", "hat"], "which second moment is sent"] = "raw"
    wd_sign: Annotated[Literal["decay", "literal"], "literal is the printed −λθ, which grows weights"] = "decay"
    dg_lr: Annotated[Literal["round", "base"], "the learning rate that scales Δ_G"] = "round"
    granularity: Annotated[Literal["block", "tensor"], "blocks by architecture, or one per tensor"] = "block"
    lora_merge_ab: Annotated[bool, "one block for A and B of a layer that is not split by heads"] = False
    cnn_blocks: Annotated[Literal["module", "residual"], "blocks of a CNN: each convolution, or a residual block's"] = (
        "module"
    )
    agg_center: Annotated[Literal["auto", "plain", "corrected"], "how v is averaged when Φ_i differ"] = "auto"
    scale: Annotated[Literal["off", "block"], "scale-then-privatize: precondition before clipping"] = "off"

    @property
    def broadcast(self) -> tuple[str, ...]:
        return ("theta", "v", "w") if self.align == "off" else ("theta", "v", "w", "dg")

    def check(self, facts: Facts) -> list[str]:
        if isinstance(self.bc_floor, float | int) and not self.bc_floor >= 0:
            self.refuse(f'bc_floor is a number >= 0 or "none", not {self.bc_floor}')
        if self.bc_floor_abs is not None and not self.bc_floor_abs > 0:
            self.refuse(f"bc_floor_abs is a number > 0, not {self.bc_floor_abs}")
        if self.bc and self.bc_floor == "none" and self.bc_floor_abs is None and not facts.allow_nan:
            self.refuse('bc_floor = "none" takes the root of negative numbers; set run.allow_nan = true to see it fail')
        if self.agg == "off" and (self.v_exponent == "round" or self.v_send == "hat" or self.agg_center != "auto"):
            self.refuse('with agg = "off" no second moment travels: v_exponent, v_send and agg_center have no effect')
        if self.v_send == "hat" and self.v_exponent != "total":
            self.refuse('v_send = "hat" sends corrected moments: v_exponent has no effect, leave it at "total"')
        if not facts.equal_phi and self.agg != "off":
            if self.v_send == "hat":
                self.refuse('v_send = "hat" needs the same noise level for all clients; use v_send = "raw"')
            if self.agg_center == "plain":
                self.refuse('agg_center = "plain" needs the same noise level for all clients; use "auto"')
            if self.v_exponent != "total":
                self.refuse('unequal noise levels need v_exponent = "total"')
        self._check_tracking(facts)
        return self._warnings()

    def _check_tracking(self, facts: Facts) -> None:
        if self.scale != "off" and self.agg != "mean":
            self.refuse('scale = "block" is made from the server\'s block means: it needs agg = "mean"')
        if self.agg == "off" or not (facts.varying_phi or self.scale != "off"):
            return
        what = 'scale = "block"' if self.scale != "off" else 'privacy.clip_mode = "quantile"'
        if not facts.equal_phi:
            self.refuse(f"{what} needs the same noise level for all clients")
        if self.v_send == "hat":
            self.refuse(f'{what} changes the noise level, and v_send = "hat" cannot follow: use v_send = "raw"')
        if self.agg_center == "corrected":
            self.refuse(
                f'{what} changes the noise level, which agg_center = "corrected" takes for constant: use "auto"'
            )

    def _warnings(self) -> list[str]:
        said = []
        if self.v_exponent != "total" and self.agg != "off":
            said.append(f'v_exponent = "{self.v_exponent}" makes v̂ too large by a factor that drifts with the round')
        if self.wd_sign == "literal":
            said.append('wd_sign = "literal" makes weights grow instead of decay')
        if self.align != "off" and self.gamma == 1:
            said.append("gamma = 1 has no damping")
        return said

    def init(self, ctx: Context, theta: Tensor) -> Server:
        size = {"mean": ctx.space.num_blocks, "full_v": ctx.space.size, "off": 0}[self.agg]
        noise = 0 if not self._tracks(ctx) else ctx.space.num_blocks if self.scale == "block" else 1
        return Server(theta, theta.new_zeros(size), torch.zeros_like(theta), theta.new_zeros(noise))

    def start(self, ctx: Context, server: Server, memory: Memory) -> Local:
        theta = spread(server.theta, ctx.S)
        v = torch.zeros_like(theta) if self.agg == "off" else self._expand(ctx, self._uncenter(ctx, server.v))
        w = ctx.space.expand(server.w) if self.scale == "block" else server.w
        dg = theta.new_zeros(1) if self.align == "off" else server.dg
        return Local(theta, torch.zeros_like(theta), v, dg, w, self._scale(ctx, server.v, server.w), v)

    def step(self, ctx: Context, local: Local, oracle: Oracle, k: Tensor) -> Local:
        g, phi = oracle(local.theta) if self.scale == "off" else oracle(local.theta, local.scale)
        m = torch.lerp(local.m, g, 1 - self.beta1)
        v = (self.beta2 * local.v).addcmul(g, g, value=1 - self.beta2)
        m_hat = m / bias_correction(self.beta1, k if self.m_exponent == "local" else (ctx.t - 1) * ctx.K + k)
        correction = self._v_correction(ctx, k)
        v_hat, w = v / correction, local.w
        if self._tracks(ctx):
            w = self.beta2 * local.w + (1 - self.beta2) * phi
            phi = w / correction
        step = m_hat / self._denominator(ctx, v_hat, phi)
        if self.align == "convex":
            step = (1 - self.gamma) * step
        decay = self.weight_decay if self.wd_sign == "decay" else -self.weight_decay
        theta = local.theta - ctx.lr * (step + self._pull(ctx, local.dg) + decay * local.theta)
        return replace(local, theta=theta, m=m, v=v, w=w, v_hat=v_hat)

    def finish(self, ctx: Context, server: Server, local: Local) -> tuple[Message, Memory]:
        message = {"delta": local.theta - server.theta}
        if self.agg != "off":
            v = local.v_hat if self.v_send == "hat" else local.v
            v = ctx.space.block_mean(v) if self.agg == "mean" else v
            message["v"] = v - self._share(ctx, ctx.t * ctx.K) if self._corrected(ctx) else v
        return message, {}

    def aggregate(self, ctx: Context, server: Server, mean: Message) -> Server:
        eta = ctx.lr if self.dg_lr == "round" else ctx.lr0
        dg = -mean["delta"] / (ctx.K * eta)
        return Server(server.theta + mean["delta"], mean.get("v", server.v), dg, self._next_w(ctx, server))

    # (1) block-wise second moments

    def _expand(self, ctx: Context, v: Tensor) -> Tensor:
        v = ctx.space.expand(v) if self.agg == "mean" else v
        return v.expand(ctx.S, -1)

    def _corrected(self, ctx: Context) -> bool:
        return self.agg_center == "corrected" or (self.agg_center == "auto" and not ctx.equal_phi)

    def _share(self, ctx: Context, steps: Tensor) -> Tensor:
        """What the noise alone has put into v after so many steps."""
        return bias_correction(self.beta2, steps).to(ctx.phi.dtype) * ctx.phi

    def _uncenter(self, ctx: Context, v: Tensor) -> Tensor:
        if not self._corrected(ctx):
            return v
        return (v + self._share(ctx, (ctx.t - 1) * ctx.K)).clamp_min(0)

    def _v_correction(self, ctx: Context, k: Tensor) -> Tensor:
        if self.agg == "off" or self.v_exponent == "local":
            return bias_correction(self.beta2, k)
        if self.v_send == "hat":  # what arrives is corrected already; only round 1 starts from zero
            return torch.where(ctx.t > 1, torch.ones_like(k, dtype=torch.float64), bias_correction(self.beta2, k))
        if self.v_exponent == "round":
            return bias_correction(self.beta2, ctx.t)
        return bias_correction(self.beta2, (ctx.t - 1) * ctx.K + k)

    # (2) without the noise's known bias

    def _denominator(self, ctx: Context, v_hat: Tensor, phi: Tensor) -> Tensor:
        if not self.bc:
            return v_hat.sqrt() + self.eps
        if self.bc_level == "block":
            v_hat = ctx.space.expand(ctx.space.block_mean(v_hat))
        u = v_hat - phi
        if self.bc_floor_abs is not None:
            return u.clamp_min(self.bc_floor_abs).sqrt()
        if self.bc_floor != "none":
            u = torch.maximum(u, self.bc_floor * phi)
        return u.sqrt() + self.eps

    def _tracks(self, ctx: Context) -> bool:
        """Whether Φ changes while v remembers: then its moving average is subtracted instead of itself."""
        return self.agg != "off" and (ctx.varying_phi or self.scale != "off")

    def _next_w(self, ctx: Context, server: Server) -> Tensor:
        """w after K steps at this round's Φ, which everybody knows."""
        if not self._tracks(ctx):
            return server.w
        phi = (
            ctx.phi.mean() / self._block_scale(ctx, server.v, server.w) ** 2
            if self.scale == "block"
            else ctx.phi.mean()
        )
        kept = self.beta2**ctx.K
        return (kept * server.w + (1 - kept) * phi).to(server.w.dtype)

    def _scale(self, ctx: Context, v: Tensor, w: Tensor) -> Tensor:
        return ctx.space.expand(self._block_scale(ctx, v, w)) if self.scale == "block" else v.new_ones(1)

    def _block_scale(self, ctx: Context, v: Tensor, w: Tensor) -> Tensor:
        """Public, since v̄ is noised. A common factor cancels, so v̄ and w need no correction here."""
        floor = 0.0 if self.bc_floor == "none" else self.bc_floor
        u = torch.maximum(v - w, floor * w) if self.bc else v
        scale = 1 / (u.double().clamp_min(0).sqrt() + max(self.eps, 1e-30))
        return (scale / ctx.space.expand(scale).square().mean(-1, keepdim=True).sqrt()).to(v.dtype)

    # (3) aligned with the global direction

    def _pull(self, ctx: Context, dg: Tensor) -> Tensor:
        if self.align == "off":
            return torch.zeros_like(dg)
        pull = self.gamma * dg
        return pull if self.dg_lr == "round" else pull * (ctx.lr0 / ctx.lr)
