"""The dropout kernel gives the bits of PyTorch's own operations, tested in triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dpfed import accel
from dpfed.accel.operators.dropout import DropoutFunction, drop, drop_records
from dpfed.model.per_sample.keyed_dropout import (
    KEY,
    RULE,
    KeyedDropout,
    install_keyed_dropout,
    rule_of,
)

pytest.importorskip("triton")
KEYS = torch.tensor([3, -(2**62), 0, 2**63 - 1, 77])


def both(
    x: torch.Tensor, keys: torch.Tensor, rate: float, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return values and gradients of the plain path, then of the kernel."""
    layer, calls, out = KeyedDropout(rate), list[int](), []
    setattr(layer, KEY, keys)
    setattr(layer, RULE, rule_of(9, rate))
    apply = DropoutFunction.apply
    monkeypatch.setattr(DropoutFunction, "apply", lambda *given: calls.append(1) or apply(*given))
    for by_kernel in (False, True):
        monkeypatch.setattr(accel, "interpreted", by_kernel)
        given = x.clone().requires_grad_()
        y = layer(given)
        out.append((y.detach(), *torch.autograd.grad((y.float().pow(2) / 2).sum(), given)))
        # Forward and backward.
        assert len(calls) == 2 * by_kernel
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("shape", "drop"), [((5, 7, 24), 0.1), ((10, 3), 0.5), ((5, 1100), 0.9), ((5,), 0.37)]
)
def test_it_is_torchs_own(
    shape: tuple[int, ...], drop: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = (3 + torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    plain, fused = both(x, KEYS, drop, monkeypatch)
    assert torch.equal(plain[0], fused[0])
    assert torch.equal(plain[1], fused[1])
    if x.numel() > 100:
        assert abs(float((fused[0] == 0).float().mean()) - drop) < 0.15


def test_a_mask_is_the_records_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's mask does not depend on the other records."""
    x = torch.ones(5, 40)
    monkeypatch.setattr(accel, "interpreted", True)
    whole = drop(x, KEYS, rule_of(1, 0.5))
    for i in range(5):
        alone = drop(x[i : i + 1], KEYS[i : i + 1], rule_of(1, 0.5))
        assert torch.equal(alone, whole[i : i + 1])
    assert not torch.equal(whole[0], whole[1])


def test_where_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        DropoutFunction, "apply", lambda *given: pytest.fail("the kernel was called")
    )
    rule, x = rule_of(1, 0.5), torch.ones(5, 6, 4)
    monkeypatch.setattr(accel, "interpreted", False)
    # No GPU.
    drop(x, KEYS, rule)
    monkeypatch.setattr(accel, "interpreted", True)
    drop_records(x, KEYS, rule)
    drop(x.double(), KEYS, rule)
    # Not contiguous.
    drop(x.transpose(1, 2), KEYS, rule)
    drop(x[:, :0], KEYS, rule)
    # A rule that is not contiguous.
    drop(x, KEYS, torch.stack([rule, rule], 1)[:, 0])
    model = nn.Sequential(nn.Dropout(0.5))
    install_keyed_dropout(model)
    # Evaluation has no keys.
    assert torch.equal(model(x), x)


def test_wrong_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpfed.accel import dropout

    here = torch.device("cpu")
    assert dropout.right(here)
    known = dropout.drop
    monkeypatch.setattr(dropout, "drop", lambda x, key, rule: known(x, key + 1, rule))
    assert not dropout.right(here)


def test_all_may_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = both(torch.ones(5, 9), KEYS, 1.0, monkeypatch)
    for found in (plain, fused):
        assert all((part == 0).all() for part in found)


def test_gradients_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "interpreted", True)
    x = torch.full((5, 8), 1.5, requires_grad=True)
    y = drop(x.square(), KEYS, rule_of(1, 0.25))
    kept = (y.detach() != 0).float() / 0.75
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 12 * x.detach().square() * kept.square())


def test_rounding_of_the_scale_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpfed.accel import dropout

    known = dropout.drop
    monkeypatch.setattr(
        dropout, "drop", lambda x, key, rule: known(x.float(), key, rule).to(x.dtype)
    )
    assert not dropout.right(torch.device("cpu"))
