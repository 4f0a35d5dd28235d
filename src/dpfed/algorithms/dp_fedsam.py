"""DP-FedSAM: sharpness-aware local steps on noised gradients (after Shi et al. 2023).

    client: repeat K:  (g1, _) = dp_grad(θ_i, batch J) ;      e = ρ g1/(‖g1‖ + 1e-12)
                       (g2, _) = dp_grad(θ_i + e, batch J) ;  θ_i ← θ_i − η_t (g2 + λ θ_i)
            send Δ_i = θ_i − θ
    server: θ ← θ + Δ̄

g1 and g2 are noised mean gradients of client i with parameters θ_i, and Δ̄ is the mean of the Δ_i.
K is the number of local steps, η_t the learning rate and λ the weight decay.

The paper protects clients; this version protects records. Two releases of the same batch cost as
much privacy as one release with the noise multiplier divided by √2. `equal_eps` multiplies the
noise by √2, so that a step costs as much as a step with one release. Two batches
(`sam_batches = independent`) cost as much as two steps.

At usual noise levels g1 is almost only noise, so e is a random direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from torch import Tensor

from dpfed.algorithms.base import Averaging, Context, Facts, Oracle, Point, Releases


@dataclass(frozen=True)
class DPFedSAM(Averaging):
    name = "dp-fedsam"
    lr_grid = (0.01, 0.03, 0.1, 0.3)
    summary = "sharpness-aware local steps; spends more than the others unless equal_eps is set"

    lr: Annotated[float, Gt(0), "base learning rate η0"] = 0.1
    weight_decay: Annotated[float, Ge(0), "decoupled weight decay λ"] = 1e-3
    rho: Annotated[float, Ge(0), "radius ρ of the perturbation"] = 0.05
    sam_batches: Annotated[
        Literal["shared", "independent"], "whether both gradients use one batch"
    ] = "shared"
    equal_eps: Annotated[
        bool, "√2 times the given sigma, so that epsilon equals that of the other methods"
    ] = False

    @property
    def releases(self) -> Releases:
        if self.sam_batches == "shared":
            return Releases(batches=1, releases=2)
        return Releases(batches=2, releases=1)

    @property
    def noise_factor(self) -> float:
        return math.sqrt(2) if self.equal_eps else 1.0

    def check(self, facts: Facts) -> list[str]:
        if self.equal_eps and self.sam_batches == "independent":
            self.refuse(
                "equal_eps is exact for a shared batch only; give privacy.target_epsilon instead"
            )
        if self.equal_eps and facts.calibrated:
            self.refuse(
                "equal_eps has no effect with privacy.target_epsilon, "
                "which every method reaches alike"
            )
        if self.equal_eps and not facts.private:
            return ["equal_eps has no effect without noise"]
        return []

    def step(self, ctx: Context, local: Point, oracle: Oracle, k: Tensor) -> Point:
        g1, _ = oracle(local.theta)
        e = self.rho * g1 / (g1.norm(dim=1, keepdim=True) + 1e-12)
        second = oracle.again if self.sam_batches == "shared" else oracle
        g2, _ = second(local.theta + e)
        return Point(local.theta - ctx.lr * (g2 + self.weight_decay * local.theta))
