"""The tests of batches and noise accept the accounted distributions and refuse others."""

from __future__ import annotations

import numpy as np
import pytest

from dpfed.privacy.auditing.laws import batch_law, noise_law
from dpfed.privacy.mechanism import Mechanism


def poisson(rng: np.random.Generator, q: float, shape: tuple[int, int, int]) -> np.ndarray:
    return rng.random(shape) < q


def fixed(rng: np.random.Generator, b: int, shape: tuple[int, int, int]) -> np.ndarray:
    return np.argsort(np.argsort(rng.random(shape), axis=2), axis=2) < b


@pytest.mark.parametrize("q", [0.02, 0.25, 1.0])
def test_true_batches_pass(q: float) -> None:
    shape = (8, 40, 64)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        assert batch_law(Mechanism("poisson", q, 1.0), poisson(rng, q, shape)).p_value > 1e-4
        b = max(1, round(q * 64))
        assert batch_law(Mechanism("fixed_wor", b / 64, 1.0), fixed(rng, b, shape)).p_value > 1e-4


def test_wrong_batches_fail() -> None:
    rng = np.random.default_rng(1)
    shape = (8, 40, 64)
    law = Mechanism("poisson", 0.25, 1.0)
    assert batch_law(law, fixed(rng, 16, shape)).broken
    assert batch_law(law, poisson(rng, 0.28, shape)).broken
    assert batch_law(law, np.repeat(poisson(rng, 0.25, (8, 20, 64)), 2, axis=1)).broken
    assert batch_law(law, np.repeat(poisson(rng, 0.25, (4, 40, 64)), 2, axis=0)).broken
    assert batch_law(Mechanism("fixed_wor", 0.25, 1.0), poisson(rng, 0.25, shape)).broken
    assert batch_law(
        Mechanism("fixed_wor", 0.25, 1.0), np.repeat(fixed(rng, 16, (8, 1, 64)), 40, axis=1)
    ).broken


def test_noise_law() -> None:
    rng = np.random.default_rng(2)
    assert min(noise_law(rng.standard_normal((8, 20, 16))).p_value for _ in range(100)) > 1e-4
    noise = rng.standard_normal((8, 20, 16))
    assert noise_law(noise * 1.2).broken
    assert noise_law(noise * 0.8).broken
    assert noise_law(noise + 0.2).broken
    assert noise_law(np.repeat(noise[:, ::2], 2, axis=1)).broken
    assert noise_law(np.repeat(noise[::2], 2, axis=0)).broken
