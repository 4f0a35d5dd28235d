"""The peak counts new tensors that are alive together, and nothing else."""

from __future__ import annotations

import torch

from dpfed.bench.peak_memory import PeakMemory, peak_bytes

KIB = 256
"""Numbers of float32 in one KiB."""


def test_tensors_alive_together_count() -> None:
    with PeakMemory() as memory:
        one = torch.zeros(KIB)
        two = torch.ones(2 * KIB)
        assert memory.bytes == 3 * 1024
        del one
        assert memory.bytes == 2 * 1024
        three = torch.zeros(KIB)
        assert two.numel() + three.numel() == 3 * KIB
    assert memory.peak == 3 * 1024


def test_views_and_older_tensors_do_not_count() -> None:
    old = torch.zeros(KIB)
    with PeakMemory() as memory:
        row = old.view(2, -1)[0]
        row.add_(1.0)
        new = torch.zeros(KIB)
        new.view(4, -1).t().mul_(2.0)
    assert memory.peak == 1024


def test_tensors_saved_for_the_backward_pass_count() -> None:
    x = torch.zeros(KIB, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(8):
            y = y.exp()
        y.sum().backward()

    # Each of the eight results is saved, and the backward pass adds at least one gradient.
    assert 9 * 1024 <= peak_bytes(chain) <= 12 * 1024
