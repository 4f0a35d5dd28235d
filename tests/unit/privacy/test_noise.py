"""Keyed streams never repeat and share nothing, and the noise is N(0, 1)."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpfed.errors import DpfedError
from dpfed.privacy.noise import SECRET, OsNoise, Purpose, SeededNoise, Streams

torch.set_num_threads(1)
CPU = torch.device("cpu")
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


def test_one_key_is_one_stream() -> None:
    for purpose in PURPOSES:
        a, b = (Streams(3).generator(purpose, 4, 5).random(20) for _ in range(2))
        assert np.array_equal(a, b)
        assert Streams(3).number(purpose, 4, 5) == Streams(3).number(purpose, 4, 5)


def test_streams_differ_by_seed_purpose_round_and_client() -> None:
    names = list(itertools.product((0, 1, -1, 2**40), PURPOSES, (0, 1, 2, 2**33), (0, 1, 2, 2**33)))
    keys = {Streams(seed).key(purpose, t, client) for seed, purpose, t, client in names}
    assert len(keys) == len(names)
    numbers = {Streams(seed).number(purpose, t, client) for seed, purpose, t, client in names}
    assert len(numbers) == len(names)


@given(
    st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3),
    st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 3),
)
@settings(max_examples=100, deadline=None)
def test_no_two_names_meet(a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
    same = Streams(a[0]).key("noise", a[1], a[2]) == Streams(b[0]).key("noise", b[1], b[2])
    assert same == (a == b)
    assert Streams(a[0]).key("noise", a[1], a[2]) != Streams(b[0]).key("batch", b[1], b[2])


def test_round_and_client_are_not_interchangeable() -> None:
    assert Streams(0).key("noise", 1, 2) != Streams(0).key("noise", 2, 1)


def test_every_number_of_the_key_matters() -> None:
    """Keys that agree in their first 64 bits are two streams: the generator uses all 128."""
    key = Streams(0).key("batch", 1, 1)
    generator = Streams(0).generator("batch", 1, 1)
    assert generator.bit_generator.state["state"]["key"].tobytes() == key


def test_secret_streams_cannot_be_repeated_and_public_ones_can() -> None:
    a, b, seeded = Streams(0, secret=True), Streams(0, secret=True), Streams(0)
    for purpose in PURPOSES:
        keys = {a.key(purpose, 1, 1), b.key(purpose, 1, 1), seeded.key(purpose, 1, 1)}
        assert len(keys) == (3 if purpose in SECRET else 1), purpose
        assert a.key(purpose, 1, 1) == a.key(purpose, 1, 1)
    secret = {"noise", "batch", "place", "cohort", "dropout", "augment", "upload"}
    assert secret == SECRET


def test_secret_noise_is_not_of_the_seed() -> None:
    streams = Streams(0, secret=True)
    first, second = streams.noise(1, 1, CPU), streams.noise(1, 1, CPU)
    assert isinstance(first, OsNoise)
    assert not torch.equal(first.normal64(50), second.normal64(50))
    assert isinstance(Streams(0).noise(1, 1, CPU), SeededNoise)


def test_a_seed_beyond_64_bits_is_a_sentence_not_a_traceback() -> None:
    with pytest.raises(DpfedError, match=r"run\.seed"):
        Streams(2**63)
    Streams(-(2**63)).key("noise")


def test_noise_is_drawn_in_order_and_never_again() -> None:
    noise = Streams(0).noise(1, 1, CPU)
    first, second = noise.normal64(1000).float(), noise.normal64(1000).float()
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.2
    again = Streams(0).noise(1, 1, CPU)
    assert torch.equal(again.normal64(1000).float(), first)
    assert torch.equal(again.normal64(1000).float(), second)


def test_noise_of_neighbouring_streams_is_uncorrelated() -> None:
    """Rounds, clients and steps are uncorrelated; generators with equal seeds would not be."""
    size = 20_000
    rows = []
    for t, client in itertools.product((1, 2, 3), (0, 1, 2)):
        noise = Streams(5).noise(t, client, CPU)
        rows += [noise.normal64(size).float(), noise.normal64(size).float()]
    rows.append(
        torch.from_numpy(stats.norm.ppf(Streams(5).generator("batch", 1, 0).random(size))).float()
    )
    matrix = torch.corrcoef(torch.stack(rows))
    off = (matrix - torch.eye(len(rows))).abs().max()
    assert float(off) < 5.5 / math.sqrt(size)


@pytest.mark.parametrize("kind", ["os", "seeded"])
def test_noise_is_standard_normal(kind: str) -> None:
    n = 400_000
    noise = OsNoise(CPU) if kind == "os" else Streams(11).noise(1, 1, CPU)
    x = noise.normal64(n).float().double().numpy()
    assert x.dtype == np.float64
    # The system's noise has no seed: 6 standard errors, one false alarm in 10^8 runs.
    assert abs(x.mean()) < 6 / math.sqrt(n)
    assert abs(x.var() - 1) < 6 * math.sqrt(2 / n)
    assert abs(stats.skew(x)) < 6 * math.sqrt(6 / n)
    assert abs(stats.kurtosis(x)) < 6 * math.sqrt(24 / n)
    assert stats.kstest(x, "norm").pvalue > 1e-8
    assert abs(np.mean(np.abs(x) > 3) / (2 * stats.norm.sf(3)) - 1) < 0.25  # tails are there
    lag = np.corrcoef(x[:-1], x[1:])[0, 1]
    halves = np.corrcoef(x[: n // 2], x[n // 2 :])[0, 1]  # Box-Muller's cosine and sine halves
    assert abs(lag) < 6 / math.sqrt(n)
    assert abs(halves) < 6 / math.sqrt(n / 2)


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_any_number_of_noise_values(size: int) -> None:
    for noise in (OsNoise(CPU), Streams(0).noise(1, 1, CPU)):
        values = noise.normal64(size).float()
        assert values.shape == (size,)
        assert values.dtype == torch.float32
        assert values.isfinite().all()


@pytest.mark.parametrize("size", [0, 1, 7, 1000])
@pytest.mark.parametrize("kind", ["os", "seeded"])
def test_a_row_is_filled_with_the_very_numbers_that_would_be_given(kind: str, size: int) -> None:
    noise = OsNoise(CPU) if kind == "os" else Streams(3).noise(2, 1, CPU)
    wanted = noise.again()
    matrix = torch.full((3, size), 7.0)
    noise.fill(matrix[1])
    noise.fill(matrix[0])
    assert torch.equal(matrix[1], wanted.normal64(size).float())
    assert torch.equal(matrix[0], wanted.normal64(size).float())
    assert matrix[2].eq(7).all()


def test_os_uniform_numbers_exclude_zero_and_fill_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = OsNoise(CPU)
    u = noise.uniform(100_000)
    assert u.min() > 0
    assert u.max() <= 1
    assert stats.kstest(u, "uniform").pvalue > 1e-8

    class Zeros:
        def update(self, data: bytes) -> bytes:
            return data  # a key stream of zeros: the smallest uniform number

    monkeypatch.setattr(noise, "_stream", Zeros())
    assert noise.uniform(4).tolist() == [2.0**-53] * 4
    assert noise.normal64(8).isfinite().all()


def test_key_and_nonce_of_secret_noise_come_from_the_operating_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fixed key with a fresh nonce gives fresh numbers too, so this reads the key itself."""
    given: list[bytes] = []

    def entropy(size: int) -> bytes:
        given.append(bytes([len(given) + 1]) * size)
        return given[-1]

    monkeypatch.setattr("os.urandom", entropy)
    noise = OsNoise(torch.device("cpu"))
    assert noise._key == (b"\x01" * 32, b"\x02" * 16)
