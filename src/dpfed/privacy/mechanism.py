"""The mechanism of one local step: sampling, noise and releases.

The oracle executes a `Mechanism`, the ledger stores it, and the accountant composes it. There is no
other description, so the three cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Sampling = Literal["poisson", "fixed_wor"]
Adjacency = Literal["add/remove one", "replace one"]


@dataclass(frozen=True)
class Mechanism:
    """One local step: `batches` fresh batches, each with `releases` independently noised releases.

    sampling          poisson: each record is in a batch independently of the others
                      fixed_wor: a fixed number of distinct records, drawn anew at every step
    rate              probability that a given record is in a batch
    noise_multiplier  noise of one release, as standard deviation divided by the clip norm C;
                      with quantile clipping that of sum and count together; 0 means no privacy
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
        """The neighbouring relation that the accountant uses; see docs/privacy.md (The number)."""
        return "add/remove one" if self.sampling == "poisson" else "replace one"

    @property
    def sensitivity(self) -> float:
        """The change of a clipped sum between neighbouring data sets, in units of C."""
        return 1.0 if self.sampling == "poisson" else 2.0

    @property
    def effective_multiplier(self) -> float:
        """The noise multiplier of all releases of one batch together, per unit of sensitivity.

        k Gaussian releases of one batch equal one release with the multiplier divided by sqrt(k).
        """
        return self.noise_multiplier / (self.sensitivity * math.sqrt(self.releases))
