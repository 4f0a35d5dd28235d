"""Randomness: keyed streams that do not depend on fleet, order or resume; and the Gaussian noise itself (DESIGN 6).

There is one generator per (seed, purpose, round, client), and a purpose never shares a stream with another. In a
simulation all of them follow from the run's seed. With `noise = "os"` the streams that protect records come from the
operating system's entropy instead: they are never stored, cannot be repeated, and the noise is drawn through a
cryptographic generator. Besides noise, batches and cohort these are dropout and augmentation. Their masks follow a
record's place at its client, and a record that is left out moves all places behind it: whoever knew the masks could see
every later record change, not one. Unknown masks are the mechanism's own randomness, the same in law at every place.
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

Purpose = Literal["cohort", "batch", "noise", "init", "dropout", "augment", "partition", "check"]
SECRET: frozenset[Purpose] = frozenset({"cohort", "batch", "noise", "dropout", "augment"})


class Streams:
    """Every random number of a run, by name. `entropy`: that of secret streams, for a server that starts again."""

    def __init__(self, seed: int, secret: bool = False, entropy: bytes | None = None) -> None:
        if not -(2**63) <= seed < 2**63:
            raise DpfedError(f"run.seed = {seed} is not allowed: it must fit in 64 bits")
        self.seed = seed
        self.secret = secret
        self._entropy = (entropy or os.urandom(32)) if secret else b""

    def key(self, purpose: Purpose, round: int = 0, client: int = 0) -> bytes:
        """16 bytes that name the stream; 128 bits, so that two streams never meet by accident."""
        hidden = self._entropy if purpose in SECRET else b""
        name = purpose.encode().ljust(16) + struct.pack("<qqq", self.seed, round, client)
        return hashlib.blake2b(name, digest_size=16, key=hidden, person=b"dpfed-stream").digest()

    def generator(self, purpose: Purpose, round: int = 0, client: int = 0) -> np.random.Generator:
        key = np.frombuffer(self.key(purpose, round, client), dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key))

    def number(self, purpose: Purpose, round: int = 0, client: int = 0) -> int:
        """A signed 64-bit number, for generators that take one as their seed."""
        return int(np.frombuffer(self.key(purpose, round, client)[:8], dtype=np.int64)[0])

    def noise(self, round: int, client: int, device: torch.device) -> Noise:
        return OsNoise(device) if self.secret else SeededNoise(self, round, client, device)


class Noise(Protocol):
    """Standard normal numbers for one client in one round, drawn in order."""

    def normal(self, size: int) -> Tensor: ...

    def fill(self, row: Tensor) -> None:
        """Writes the numbers that `normal` would give over a row, so that those of many clients are made in place."""

    def again(self) -> Noise:
        """The same numbers from the first on, for steps that are run again because nothing came of them."""

    def normal64(self, size: int) -> Tensor:
        """In double precision, for noise on a grid."""


class SeededNoise:
    """Repeatable noise for simulations: not for release."""

    def __init__(self, streams: Streams, round: int, client: int, device: torch.device) -> None:
        self._device, self._named = device, (streams, round, client)
        if device.type == "cuda":
            self._cuda = torch.Generator(device)
            self._cuda.manual_seed(streams.number("noise", round, client))
        else:
            # numpy's Philox takes the full 128-bit key; torch's CPU generator keeps only 32 bits of its seed.
            self._cpu = streams.generator("noise", round, client)

    def normal(self, size: int) -> Tensor:
        row = torch.empty(size, device=self._device)
        self.fill(row)
        return row

    def fill(self, row: Tensor) -> None:
        if self._device.type == "cuda":
            row.normal_(generator=self._cuda)
        else:
            row.copy_(torch.from_numpy(self._cpu.standard_normal(len(row), dtype=np.float32)))

    def again(self) -> SeededNoise:
        return SeededNoise(*self._named, self._device)

    def normal64(self, size: int) -> Tensor:
        """The same numbers, so that a run on the grid can be held against one that is not."""
        return self.normal(size).double()


class OsNoise:
    """Noise that nobody can repeat: ChaCha20 keyed by the operating system, Box-Muller in double precision."""

    def __init__(self, device: torch.device, key: tuple[bytes, bytes] | None = None) -> None:
        self._device = device
        self._key = key or (os.urandom(32), os.urandom(16))
        self._stream = Cipher(ChaCha20(*self._key), mode=None).encryptor()

    def uniform(self, size: int) -> np.ndarray:
        """53-bit numbers in (0, 1]: never zero, so that the logarithm is finite."""
        bits = np.frombuffer(self._stream.update(bytes(8 * size)), dtype=np.uint64)
        return ((bits >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53

    def normal(self, size: int) -> Tensor:
        return self.normal64(size).float()

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
