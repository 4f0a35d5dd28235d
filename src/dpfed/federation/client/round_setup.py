"""The plan, random streams and context of one client's round, taken from a request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Algorithm, Context
from dpfed.federation.client.request_model import RequestModel
from dpfed.federation.messages import AnyTerms, Terms
from dpfed.privacy.noise import Purpose, Streams
from dpfed.privacy.plan import Plan


@dataclass(frozen=True)
class OwnPlan(Plan):
    """The plan of one client: `sizes` is exact, `expected` follows from the declared number.

    All units take part in sampling, also those beyond the declared number. If some were left out,
    removing one unit would bring another one in.
    """

    def __post_init__(self) -> None:
        if not (self.sampling == "poisson" and self.multipliers.all()):
            raise ValueError("a real client releases nothing without noise and accounting")


class IndexedStreams(Streams):
    """The streams of the client with number `index` of a run, who is number 0 in its own rows."""

    def __init__(self, seed: int, index: int) -> None:
        super().__init__(seed)
        self._index = index

    def key(self, purpose: Purpose, round: int = 0, client: int = 0) -> bytes:
        return super().key(purpose, round, self._index)


def streams_of(terms: AnyTerms) -> Streams:
    """Return secret streams, or repeatable ones in test mode."""
    if terms.seeded:
        return IndexedStreams(terms.seed, terms.index)
    return Streams(terms.seed, secret=True)


def plan_of(terms: Terms, algorithm: Algorithm, units: int, unit: str) -> OwnPlan:
    """Return the plan of a client with `units` units; all else is taken from the request."""
    return OwnPlan(
        sampling="poisson",
        clip=terms.clip,
        sizes=np.array([units]),
        rates=np.array([terms.rate]),
        expected=np.array([terms.expected]),
        multipliers=np.array([terms.sigma]),
        batches=algorithm.releases.batches,
        releases=algorithm.releases.releases,
        unit=unit,
        clipping=terms.clipping.rule(),
    )


def context_of(terms: Terms, built: RequestModel, plan: OwnPlan, device: torch.device) -> Context:
    def scalar(x: float) -> Tensor:
        return torch.tensor(x, dtype=torch.float64, device=device)

    phi = torch.tensor([[plan.phi(0)]], dtype=torch.float64).to(torch.float32)
    return Context(
        space=built.model.space,
        N=terms.clients,
        S=1,
        T=terms.rounds,
        K=terms.local_steps,
        t=scalar(terms.round),
        lr=scalar(terms.lr),
        lr0=scalar(built.algorithm.lr),
        phi=phi.to(device),
        equal_phi=terms.equal_phi,
        varying_phi=plan.clipping.counts,
    )
