"""What one local step of one client releases.

The oracle samples and adds noise by reading a `Mechanism`; the ledger stores it and the accountant composes it.
There is no other description of the mechanism, so the three cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Sampling = Literal["poisson", "fixed_wor"]
Adjacency = Literal["add/remove one", "replace one"]


@dataclass(frozen=True)
class Mechanism:
    """One local step: `batches` fresh batches, each released `releases` times with independent noise.

    sampling          how a batch is drawn: each record by its own coin (poisson), or a fixed number of distinct
                      records redrawn at every step (fixed_wor)
    rate              probability that one given record is in a batch
    noise_multiplier  of one release: standard deviation of its noise divided by what one record may add (the clip norm C;
                      where a count is released beside the sum, that of both together); 0 means no privacy
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
        """The neighbouring relation under which this mechanism is accounted for (SPEC 6.4)."""
        return "add/remove one" if self.sampling == "poisson" else "replace one"

    @property
    def sensitivity(self) -> float:
        """How far one neighbouring change moves a clipped sum, in units of C."""
        return 1.0 if self.sampling == "poisson" else 2.0

    @property
    def effective_multiplier(self) -> float:
        """Noise against sensitivity of all releases on one batch together.

        k Gaussian releases of the same batch are one Gaussian release with the multiplier divided by sqrt(k).
        """
        return self.noise_multiplier / (self.sensitivity * math.sqrt(self.releases))
