"""The history of a client: which mechanisms it executed, and for how many local steps each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dpfed.errors import DpfedError
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_setting

History = Sequence[tuple[Mechanism, int]]
"""Pairs (mechanism, number of local steps), in any order."""

Floats = npt.NDArray[np.float64]

# Refuse smaller deltas: epsilon is computed with Fourier transforms, and their rounding errors
# would be too large in relation to delta.
SMALLEST_DELTA = 1e-10


def check_delta(delta: float) -> None:
    """Raise DpfedError for a delta outside (0, 1), or too small for double precision."""
    if not 0 < delta < 1:
        raise DpfedError(f"delta must lie strictly between 0 and 1, not {show_setting(delta)}.")
    if delta < SMALLEST_DELTA:
        raise DpfedError(
            f"delta {show_setting(delta)} is below {show_setting(SMALLEST_DELTA)}, "
            "the smallest this accountant can certify."
        )


def released(history: History) -> list[tuple[Mechanism, int]]:
    """Return the entries (mechanism, number of steps) of a history that have at least one step.

    Raise DpfedError if the entries mix Poisson and fixed-size sampling. The epsilons of the two
    samplings assume different neighbouring data sets, so no single epsilon covers both.
    """
    for _, steps in history:
        if steps < 0:
            raise DpfedError(f"a history cannot hold {steps} steps.")
    entries = [(mechanism, steps) for mechanism, steps in history if steps > 0]
    if len({mechanism.sampling for mechanism, _ in entries}) > 1:
        raise DpfedError(
            "a history mixes Poisson and fixed-size sampling, which are accounted for under "
            "different adjacencies, so no single epsilon covers it."
        )
    return entries
