"""Random streams, keyed by (seed, purpose, round, client), and sources of Gaussian noise.

The numbers of a stream do not depend on other clients, on the order of work or on an interruption
of the run. Two purposes never share a stream. In a simulation the run's seed decides all streams.

With `run.noise = "os"` entropy of the operating system decides the streams that protect records.
These streams draw noise, batches, the clients of each round, positions of records in a computation,
dropout and augmentations. They cannot be repeated, and a cryptographic generator draws the noise.

Dropout and augmentations of a record depend on its position at its client, and removing a record
shifts all later positions. An observer who knew the dropout masks would see the mask of every
later record change. The masks are therefore secret: a secret mask has the same distribution at
every position.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import Literal, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

from dpfed.errors import DpfedError

Purpose = Literal[
    "cohort",
    "batch",
    "place",
    "noise",
    "init",
    "dropout",
    "augment",
    "partition",
    "check",
    "upload",
    "download",
]
SECRET: frozenset[Purpose] = frozenset(
    {"cohort", "batch", "place", "noise", "dropout", "augment", "check", "upload"}
)


class Streams:
    """The random streams of a run, by purpose, round and client.

    seed     the seed of the run
    secret   True: streams with a purpose in SECRET depend on `entropy` too
    entropy  32 secret bytes; None to draw new bytes; a restarted server passes the bytes that it
             stored, to continue with the same streams
    """

    def __init__(self, seed: int, secret: bool = False, entropy: bytes | None = None) -> None:
        if not -(2**63) <= seed < 2**63:
            raise DpfedError(f"run.seed = {seed} is not allowed: it must fit in 64 bits")
        self.seed = seed
        self.secret = secret
        self._entropy = (entropy or os.urandom(32)) if secret else b""

    def key(self, purpose: Purpose, round: int = 0, client: int = 0) -> bytes:
        """Return the 128-bit key of a stream, a hash that differs for every stream."""
        hidden = self._entropy if purpose in SECRET else b""
        name = purpose.encode().ljust(16) + struct.pack("<qqq", self.seed, round, client)
        return hashlib.blake2b(name, digest_size=16, key=hidden, person=b"dpfed-stream").digest()

    def generator(self, purpose: Purpose, round: int = 0, client: int = 0) -> np.random.Generator:
        key = np.frombuffer(self.key(purpose, round, client), dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    def number(self, purpose: Purpose, round: int = 0, client: int = 0) -> int:
        """Return the first 64 bits of the stream's key as a signed number, to seed a generator."""
        return int(np.frombuffer(self.key(purpose, round, client)[:8], dtype=np.int64)[0])

    def noise(self, round: int, client: int, device: torch.device) -> Noise:
        return OsNoise(device) if self.secret else SeededNoise(self, round, client, device)


class Noise(Protocol):
    """A source of standard normal numbers for one client in one round."""

    def normal64(self, size: int) -> Tensor:
        """Return the next `size` numbers in float64 `[size]`, which are then rounded to a grid."""

    def fill(self, row: Tensor) -> None:
        """Overwrite the vector `row` with the next numbers of this source."""

    def again(self) -> Noise:
        """Return a new source that repeats all numbers from the start.

        A local step that failed is then computed again with the same noise.
        """


class SeededNoise:
    """Repeatable noise for simulations, drawn from the run's seed.

    It protects nothing: anybody who knows the seed can subtract the noise from a released value.
    """

    def __init__(self, streams: Streams, round: int, client: int, device: torch.device) -> None:
        self._device = device
        self._name = (streams, round, client)
        if device.type == "cuda":
            self._cuda = torch.Generator(device)
            self._cuda.manual_seed(streams.number("noise", round, client))
        else:
            # Use NumPy's Philox generator, whose keys have 128 bits. torch's CPU generator uses
            # only 32 bits of its seed.
            self._cpu = streams.generator("noise", round, client)

    def fill(self, row: Tensor) -> None:
        if self._device.type == "cuda":
            row.normal_(generator=self._cuda)
        else:
            row.copy_(torch.from_numpy(self._cpu.standard_normal(len(row), dtype=np.float32)))

    def again(self) -> SeededNoise:
        return SeededNoise(*self._name, self._device)

    def normal64(self, size: int) -> Tensor:
        """Return the next `size` numbers in float64, equal to those that `fill` would write.

        Runs that round sums to a grid then have the same noise as runs that do not.
        """
        row = torch.empty(size, device=self._device)
        self.fill(row)
        return row.double()


class OsNoise:
    """Cryptographic noise: ChaCha20 with a key from the operating system, Box-Muller in float64."""

    def __init__(self, device: torch.device, key: tuple[bytes, bytes] | None = None) -> None:
        self._device = device
        self._key = key or (os.urandom(32), os.urandom(16))
        self._stream = Cipher(ChaCha20(*self._key), mode=None).encryptor()

    def uniform(self, size: int) -> np.ndarray:
        """Return uniform numbers of 53 bits in (0, 1], without 0 because it has no logarithm."""
        bits = np.frombuffer(self._stream.update(bytes(8 * size)), dtype=np.uint64)
        return ((bits >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53

    def fill(self, row: Tensor) -> None:
        row.copy_(self.normal64(len(row)))

    def normal64(self, size: int) -> Tensor:
        half = (size + 1) // 2
        radius = np.sqrt(-2.0 * np.log(self.uniform(half)))
        angle = 2.0 * np.pi * self.uniform(half)
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
        return torch.from_numpy(both).to(self._device)

    def again(self) -> OsNoise:
        return OsNoise(self._device, self._key)
