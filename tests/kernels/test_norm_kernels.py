"""Frozen layer normalisation in Triton, tried by its interpreter: values and gradients of torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfed import kernels
from dpfed.model.layer_norm import FrozenNorm, FusedLayerNorm, fuse_norms

pytest.importorskip("triton")


@pytest.mark.parametrize("shape", [(5, 7, 24), (1, 96), (70, 16), (3, 2, 2, 130)])
def test_it_is_torchs_own(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    layer = nn.LayerNorm(shape[-1], eps=1e-3)
    with torch.no_grad():
        layer.weight.copy_(1 + 0.3 * torch.randn(shape[-1], generator=g))
        layer.bias.copy_(torch.randn(shape[-1], generator=g))
    fused = nn.Sequential(nn.LayerNorm(shape[-1], eps=1e-3)).requires_grad_(False)
    fused[0].load_state_dict(layer.state_dict())
    fuse_norms(fused)
    calls: list[int] = []
    apply = FrozenNorm.apply
    monkeypatch.setattr(FrozenNorm, "apply", lambda *args: calls.append(1) or apply(*args))
    x = (3 + torch.randn(shape, generator=g)).requires_grad_()
    weights = torch.randn(shape, generator=g)
    found = []
    for model in (layer.requires_grad_(False), fused):
        y = model(x)
        found.append((y, *torch.autograd.grad((y.pow(2) * weights).sum(), x)))
    assert calls == [1]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_where_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrozenNorm, "apply", lambda *args: pytest.fail("the kernel was called"))
    monkeypatch.setattr(kernels, "interpreted", False)
    layer = nn.LayerNorm(4)
    fuse_norms(layer)
    assert type(layer) is FusedLayerNorm
    x = torch.randn(2, 4)
    layer.requires_grad_(False)(x)  # no GPU
    monkeypatch.setattr(kernels, "interpreted", True)
    layer(x.double().to(torch.float64)[:0].float())  # nothing to do
    layer.requires_grad_(True)(x)
    plain = nn.LayerNorm(4, elementwise_affine=False)
    fuse_norms(plain)
    plain(x)
