"""Augmentations depend on the key alone.

They reach every shift and direction and change nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpfed.model.augment import augmentation_of, crop_flip, flip


def images(count: int = 6, side: int = 16) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, 3, side, side), generator=g).to(torch.uint8)


def keys(count: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(seed))


def test_a_record_is_viewed_alone_as_in_any_batch() -> None:
    x, k = images(), keys(6)
    for view in (flip, crop_flip):
        together = view(x, k)
        assert together.dtype == torch.uint8
        assert together.shape == x.shape
        for j in range(6):
            assert torch.equal(view(x[j : j + 1], k[j : j + 1])[0], together[j])


def test_flip_mirrors_half_of_the_records_and_keeps_the_rest() -> None:
    x = images(1).expand(2000, -1, -1, -1)
    seen = flip(x, keys(2000))
    mirrored = (seen == x.flip(-1)).flatten(1).all(1)
    kept = (seen == x).flatten(1).all(1)
    assert bool((mirrored ^ kept).all())
    assert 900 < int(mirrored.sum()) < 1100


def test_a_crop_is_a_shift_of_at_most_an_eighth_with_black_borders() -> None:
    """One of all 25 shifts and 2 directions of a 16-pixel image gives the result."""
    x, count = images(1), 1500
    seen = crop_flip(x.expand(count, -1, -1, -1), keys(count))
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    found = torch.zeros(5, 5, 2, dtype=torch.int64)
    for dy in range(5):
        for dx in range(5):
            shifted = padded[..., dy : dy + 16, dx : dx + 16]
            for mirrored, wanted in enumerate((shifted, shifted.flip(-1))):
                found[dy, dx, mirrored] = (seen == wanted).flatten(1).all(1).sum()
    # Every augmentation is exactly one of them.
    assert int(found.sum()) == count
    # All of them occur.
    assert int(found.min()) > 0.4 * count / 50
    assert int(found.max()) < 2 * count / 50


def test_none_is_no_view() -> None:
    assert augmentation_of("none") is None
    assert augmentation_of("flip") is flip
