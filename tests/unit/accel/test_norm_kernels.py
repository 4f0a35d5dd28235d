"""The layer norm kernels give PyTorch's values and gradients, in triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpfed import accel
from dpfed.accel.operators.norm import FrozenLayerNorm
from dpfed.model.fast_paths.layer_norm import FusedLayerNorm, fuse_norms
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.gradients import PerSample, call, trainable
from dpfed.model.task import CLASSIFY

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
    apply = FrozenLayerNorm.apply
    monkeypatch.setattr(FrozenLayerNorm, "apply", lambda *args: calls.append(1) or apply(*args))
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
    monkeypatch.setattr(
        FrozenLayerNorm, "apply", lambda *args: pytest.fail("the kernel was called")
    )
    monkeypatch.setattr(accel, "interpreted", False)
    layer = nn.LayerNorm(4)
    fuse_norms(layer)
    assert type(layer) is FusedLayerNorm
    x = torch.randn(2, 4)
    # No GPU.
    layer.requires_grad_(False)(x)
    monkeypatch.setattr(accel, "interpreted", True)
    # No numbers at all.
    layer(x.double().to(torch.float64)[:0].float())
    with pytest.raises(RuntimeError, match="shape"):
        # Another width.
        layer(torch.randn(2, 8))
    layer.requires_grad_(True)(x)
    plain = nn.LayerNorm(4, elementwise_affine=False)
    fuse_norms(plain)
    plain(x)


def test_inside_vmap_it_is_plain() -> None:
    """vmap computes a module that owns a trained tensor and holds a frozen norm."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.zeros(1, 2, 8))
            self.norm = nn.LayerNorm(8).requires_grad_(False)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(
                self.norm(torch.cat([x, self.prompt.expand(len(x), -1, -1)], 1)).mean(1)
            )  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Prompted()
    trained = trainable(model)
    ready = PerSample(model, space_of(trained), call, CLASSIFY)
    theta = ready.space.flatten(trained).detach().expand(2, -1).clone()
    x, client, labels = torch.randn(4, 5, 8), torch.tensor([0, 0, 1, 1]), torch.arange(4) % 3
    together = torch.cat(ready.grads(theta, client, {"x": x}, labels), 1)
    for i in range(4):
        alone = torch.cat(
            ready.grads(theta, client[i : i + 1], {"x": x[i : i + 1]}, labels[i : i + 1]), 1
        )
        torch.testing.assert_close(together[i : i + 1], alone)
