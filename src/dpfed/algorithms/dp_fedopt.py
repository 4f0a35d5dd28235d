"""DP-FedOpt: DP-FedAvg clients and an adaptive server (Reddi et al. 2021).

    server state: θ, m (starts at 0), v (starts at τ²); m and v stay at the server
    client: repeat K:  (g, _) = dp_grad(θ_i)
                       θ_i ← θ_i − η_t (g + λ θ_i)
            send Δ_i = θ_i − θ
    server: m ← β1 m + (1−β1) Δ̄
            v ← β2 v + (1−β2) Δ̄²                          (server_opt = adam)
              | v − (1−β2) Δ̄² sign(v − Δ̄²)                (yogi)
              | v + Δ̄²                                    (adagrad)
            θ ← θ + η_s m/(√v + τ)                          no bias correction

g is the noised mean gradient of client i with parameters θ_i, and Δ̄ the mean of the Δ_i. K is the
number of local steps, η_t the learning rate, η_s the server's learning rate and λ the weight decay.

`fedopt_preset = authors` is FedAdam as the authors of DP-FedAdamW use it: β2 = 0.98, τ = 0.01, and
v starts at 0. If beta2 or tau is set, it replaces the preset's value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from dpfed.algorithms.base import Averaging, Context, Facts, Message, Moments, Oracle, Point

BETA2 = {"default": 0.99, "authors": 0.98}
TAU = {"default": 1e-3, "authors": 0.01}


@dataclass(frozen=True)
class DPFedOpt(Averaging):
    name = "dp-fedopt"
    lr_grid = (0.01, 0.03, 0.1, 0.3)
    server_lr_grid: ClassVar[tuple[float, ...]] = (1e-3, 1e-2, 1e-1)
    summary = (
        "local DP-SGD; the server treats the mean update as a gradient for Adam, Yogi or Adagrad"
    )

    lr: Annotated[float, Gt(0), "base learning rate η0 of the clients"] = 0.1
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ on the clients"] = 1e-3
    server_opt: Annotated[Literal["adam", "yogi", "adagrad"], "the server's step"] = "adam"
    server_lr: Annotated[float, Gt(0), "server learning rate η_s"] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1), "decay of the server's first moment"] = 0.9
    beta2: Annotated[
        float | None, Ge(0), Lt(1), "decay of the server's second moment; default: the preset's"
    ] = None
    tau: Annotated[float | None, Gt(0), "τ added to √v; default: the preset's"] = None
    fedopt_preset: Annotated[
        Literal["default", "authors"],
        "beta2, tau and the start of v: 0.99, 1e-3, τ² or 0.98, 0.01, 0",
    ] = "default"

    def check(self, facts: Facts) -> list[str]:
        if self.fedopt_preset == "authors" and self.server_opt != "adam":
            self.refuse(
                'fedopt_preset = "authors" is a FedAdam: '
                f'use it with server_opt = "adam", not "{self.server_opt}"'
            )
        if self.server_opt == "adagrad" and self.beta2 is not None:
            self.refuse('server_opt = "adagrad" has no beta2: leave it out')
        return []

    def init(self, ctx: Context, theta: Tensor) -> Moments:
        start = self._tau**2 if self.fedopt_preset == "default" else 0.0
        return Moments(theta, torch.zeros_like(theta), torch.full_like(theta, start))

    def step(self, ctx: Context, local: Point, oracle: Oracle, k: Tensor) -> Point:
        g, _ = oracle(local.theta)
        return Point(local.theta - ctx.lr * (g + self.weight_decay * local.theta))

    def aggregate(self, ctx: Context, server: Any, mean: Message) -> Moments:
        delta = mean["delta"]
        m = self.beta1 * server.m + (1 - self.beta1) * delta
        v = self._second_moment(server.v, delta * delta)
        return Moments(server.theta + self.server_lr * m / (v.sqrt() + self._tau), m, v)

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        beta2 = BETA2[self.fedopt_preset] if self.beta2 is None else self.beta2
        if self.server_opt == "adam":
            return beta2 * v + (1 - beta2) * square
        if self.server_opt == "yogi":
            return v - (1 - beta2) * square * torch.sign(v - square)
        return v + square

    @property
    def _tau(self) -> float:
        return TAU[self.fedopt_preset] if self.tau is None else self.tau
