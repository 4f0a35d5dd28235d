"""The mechanism of one local step: how batches are sampled, noised and released.

The oracle is the code that computes noised gradients: it executes a `Mechanism`. The ledger is the
file of all privacy spending: it stores the `Mechanism`. The accountant computes epsilon from it.
All three use the same object, so they cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Sampling = Literal["poisson", "fixed_wor"]
Adjacency = Literal["add/remove one", "replace one"]


@dataclass(frozen=True)
class Mechanism:
    """The constants of one local step that decide its privacy loss.

    A unit is one record, or all records of one person. A release is one sum of clipped gradients
    with noise.

    sampling          poisson: each unit is in a batch independently of the others
                      fixed_wor: each batch has a fixed number of distinct units
    rate              probability that a given unit is in a batch
    noise_multiplier  standard deviation of the noise of one release, divided by the clip norm C;
                      0 means no privacy; quantile clipping releases a sum and a count, and this
                      is the multiplier of one Gaussian release that is as private as both
    batches           new batches in the step
    releases          releases of each batch, each with new noise
    """

    sampling: Sampling
    rate: float
    noise_multiplier: float
    batches: int = 1
    releases: int = 1

    def __post_init__(self) -> None:
        if self.sampling not in ("poisson", "fixed_wor"):
            raise ValueError(f"sampling {self.sampling!r} has no accounting")
        if not 0 < self.rate <= 1:
            raise ValueError(f"a sampling rate lies in (0, 1], not {self.rate}")
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise ValueError(f"a noise multiplier is a number >= 0, not {self.noise_multiplier}")
        if self.batches < 1 or self.releases < 1:
            raise ValueError("a step releases at least one batch at least once")

    @property
    def adjacency(self) -> Adjacency:
        """How neighbouring data sets differ: by one added, removed or replaced protected unit."""
        return "add/remove one" if self.sampling == "poisson" else "replace one"

    @property
    def sensitivity(self) -> float:
        """Sensitivity of a sum of clipped gradients in L2 norm, divided by the clip norm C."""
        return 1.0 if self.sampling == "poisson" else 2.0

    @property
    def effective_multiplier(self) -> float:
        """Noise multiplier of one Gaussian release that costs as much as all releases of a batch.

        A batch may be released k times, each time with new noise. The k releases cost as much
        privacy as one release with a noise multiplier that is sqrt(k) times smaller. The single
        release here has sensitivity 1.
        """
        return self.noise_multiplier / (self.sensitivity * math.sqrt(self.releases))
