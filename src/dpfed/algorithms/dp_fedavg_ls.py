"""DP-FedAvg-LS: DP-FedAvg with Laplacian smoothing (Liang et al. 2020; Osher et al. 2018).

    smooth(g) for a tensor of length m: the x with (I − σ_ls L) x = g, where L is circulant with −2
        on the diagonal and 1 on the two cyclic neighbours; by FFT,
        x = irfft( rfft(g) / (1 + 2σ_ls − 2σ_ls cos(2πj/m)) ) ;  m ≤ 2: x = g
    client: repeat K:  (g, _) = dp_grad(θ_i)
                       θ_i ← θ_i − η_t (g + λ θ_i)
            send Δ_i = θ_i − θ
    server: θ ← θ + smooth(Δ̄)

g is the noised mean gradient of client i with parameters θ_i, and Δ̄ the mean of the Δ_i. K is the
number of local steps, η_t the learning rate, λ the weight decay and σ_ls the smoothing strength.
`ls_where = client_grad` smooths each g instead of Δ̄. Smoothing keeps the mean of a tensor and never
increases its norm. It multiplies the variance of white noise by (1+2σ_ls)/(1+4σ_ls)^{3/2}, which
is 0.268 at σ_ls = 1. Smoothing is applied after the noise is added, so it costs no privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from dpfed.algorithms.base import Averaging, Context, Facts, Message, Oracle, Point, Space


def smooth(space: Space, vector: Tensor, sigma: float) -> Tensor:
    """Return parameter vectors `[..., P]` after Laplacian smoothing of each of their tensors.

    Smoothing multiplies a tensor by (I − sigma L)⁻¹, where L is the cyclic Laplacian.
    """
    return torch.cat([_smooth_one(vector[..., part], sigma) for part in space.slices()], dim=-1)


def _smooth_one(g: Tensor, sigma: float) -> Tensor:
    m = g.shape[-1]
    if m <= 2:
        return g
    j = torch.arange(m // 2 + 1, dtype=torch.float64, device=g.device)
    eigenvalues = 1 + 2 * sigma - 2 * sigma * torch.cos(2 * math.pi * j / m)
    x: Tensor = torch.fft.irfft(torch.fft.rfft(g) / eigenvalues.to(g.dtype), n=m)
    return x


@dataclass(frozen=True)
class DPFedAvgLS(Averaging):
    name = "dp-fedavg-ls"
    lr_grid = (0.01, 0.03, 0.1, 0.3)
    summary = "local DP-SGD, averaged, the mean update smoothed along each tensor"

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 0.1
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 1e-3
    ls_sigma: Annotated[float, Ge(0), "strength σ_ls of the smoothing"] = 1.0
    ls_where: Annotated[
        Literal["server", "client_grad"], "what is smoothed: the mean update, or each gradient"
    ] = "server"

    def check(self, facts: Facts) -> list[str]:
        return ["ls_sigma = 0 smooths nothing: this is dp-fedavg"] if self.ls_sigma == 0 else []

    def step(self, ctx: Context, local: Point, oracle: Oracle, k: Tensor) -> Point:
        g, _ = oracle(local.theta)
        if self.ls_where == "client_grad":
            g = smooth(ctx.space, g, self.ls_sigma)
        return Point(local.theta - ctx.lr * (g + self.weight_decay * local.theta))

    def aggregate(self, ctx: Context, server: Point, mean: Message) -> Point:
        delta = mean["delta"]
        if self.ls_where == "server":
            delta = smooth(ctx.space, delta, self.ls_sigma)
        return Point(server.theta + delta)
