"""Batches are independent draws per record, or a fixed number of distinct records (O8)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.noise import Streams
from dpfed.privacy.sampling import draw, fixed_size

Sampler = Callable[[np.random.Generator], np.ndarray]
UNITS, RATE, STEPS = 80, 0.2, 6000


def indicators(sample: Sampler, steps: int = STEPS, units: int = UNITS) -> np.ndarray:
    """Return `[steps, units]`, True for records in a batch; all steps use one stream."""
    rng = Streams(0).generator("batch", 1, 1)
    out = np.zeros((steps, units), dtype=bool)
    for k in range(steps):
        out[k, sample(rng)] = True
    return out


def is_poisson(seen: np.ndarray, rate: float) -> dict[str, bool]:
    """O8 as checks with five standard errors each."""
    steps, units = seen.shape
    x = (seen - rate) / math.sqrt(rate * (1 - rate))  # mean 0, variance 1
    sizes = seen.sum(1)
    variance = units * rate * (1 - rate)
    fourth = 3 * variance**2 + variance * (1 - 6 * rate * (1 - rate))
    error = math.sqrt((fourth - variance**2) / steps)
    pairs = np.triu(x.T @ x / steps, 1)  # correlation of two records within a batch
    return {
        "frequency": bool(np.abs(x.mean(0)).max() < 5 / math.sqrt(steps)),
        "size": abs(sizes.mean() - units * rate) < 5 * math.sqrt(variance / steps),
        "size variance": abs(sizes.var() - variance) < 5 * error,
        "steps": all(
            abs((x[lag:] * x[:-lag]).mean()) < 5 / math.sqrt(units * (steps - lag))
            for lag in range(1, 12)
        ),
        "records": bool(np.abs(pairs).max() < 6 / math.sqrt(steps)),
    }


def test_o8_poisson() -> None:
    mechanism = Mechanism("poisson", RATE, 1.0)
    assert all(is_poisson(indicators(lambda rng: draw(mechanism, UNITS, rng)), RATE).values())


def shuffled() -> Sampler:
    """The mutant: an epoch's permutation, cut into batches."""
    size, left = int(RATE * UNITS), []

    def sample(rng: np.random.Generator) -> np.ndarray:
        if not left:
            left.extend(np.split(rng.permutation(UNITS), UNITS // size))
        return left.pop()

    return sample


def test_o8_catches_shuffling_fixed_sizes_and_repeated_batches() -> None:
    broken = is_poisson(indicators(shuffled()), RATE)
    assert not broken["size variance"]
    assert not broken["steps"]  # who was in the last batch is not in this one
    fixed = Mechanism("fixed_wor", RATE, 1.0)
    assert not is_poisson(indicators(lambda rng: draw(fixed, UNITS, rng)), RATE)["size variance"]
    once = draw(Mechanism("poisson", RATE, 1.0), UNITS, np.random.default_rng(0))
    repeated = is_poisson(indicators(lambda rng: once), RATE)
    assert not repeated["frequency"]
    assert not repeated["steps"]


def test_fixed_wor_is_b_distinct_records_redrawn_at_every_step() -> None:
    mechanism = Mechanism("fixed_wor", RATE, 1.0)
    rng = Streams(0).generator("batch", 1, 1)
    batches = [draw(mechanism, UNITS, rng) for _ in range(3000)]
    assert all(len(b) == 16 == len(np.unique(b)) for b in batches)
    assert len({b.tobytes() for b in batches}) > 2990
    seen = np.zeros((3000, UNITS), dtype=bool)
    for k, b in enumerate(batches):
        seen[k, b] = True
    found = is_poisson(seen, RATE)
    assert found["frequency"]
    assert found["steps"]


@given(
    st.integers(1, 400),
    st.floats(1e-6, 1.0),
    st.sampled_from(["poisson", "fixed_wor"]),
    st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_positions_are_distinct_ascending_and_exist(
    units: int, rate: float, sampling: str, seed: int
) -> None:
    positions = draw(Mechanism(sampling, rate, 1.0), units, np.random.default_rng(seed))  # type: ignore[arg-type]
    assert np.all(np.diff(positions) > 0)
    assert len(positions) == 0 or (positions[0] >= 0 and positions[-1] < units)
    if sampling == "fixed_wor":
        assert len(positions) == fixed_size(rate, units) == max(1, round(rate * units))


def test_rate_one_takes_everybody_and_a_tiny_rate_nobody() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        assert len(draw(Mechanism("poisson", 1.0, 1.0), 100, rng)) == 100
        assert len(draw(Mechanism("poisson", 1e-12, 1.0), 100, rng)) == 0
    assert len(draw(Mechanism("fixed_wor", 1.0, 1.0), 7, rng)) == 7


def test_a_kind_of_sampling_without_accounting_does_not_exist() -> None:
    with pytest.raises(ValueError, match="accounting"):
        Mechanism("shuffle", 0.1, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("units", [1, 3, 17, 1000, 12345])
@pytest.mark.parametrize("size", [1, 2, 3, 16, 17])
def test_the_fixed_size_survives_the_way_through_the_rate(units: int, size: int) -> None:
    """The plan stores B as the rate B/R; what is drawn must be B again, whatever the rounding."""
    if size <= units:
        assert fixed_size(size / units, units) == size
