"""Swin's layers with fewer passes over memory give equal numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gradient_case import Case, adapted, images, labels_of, swin
from torch import nn
from transformers.models.swin.modeling_swin import SwinAttention, SwinLayer, SwinPatchMerging

from dpfed.model.fast_paths.swin import _STORED, fuse_windows


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    _STORED.clear()


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, SwinLayer)]


# 8 x 8 patches; 10 x 10, padded to windows; 9 x 9, padded to be merged too.
@pytest.mark.parametrize("side", [16, 20, 18])
def test_same_numbers_with_and_without_padding(side: int) -> None:
    model = swin(image_size=side, window_size=4)
    want = model(**images(side)(2)).logits
    fuse_windows(model)
    assert all(type(layer).__name__ == "FusedSwinLayer" for layer in layers(model))
    assert all(type(layer.attention).__name__ == "FusedSwinAttention" for layer in layers(model))
    # The second pass uses stored tensors.
    for _ in range(2):
        assert torch.equal(model(**images(side)(2)).logits, want)


def test_masks_are_made_once_for_all_layers_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    plain = SwinLayer.get_attn_mask

    def counted(self: Any, height: int, width: int, **kwargs: Any) -> Any:
        made.append((height, width))
        return plain(self, height, width, **kwargs)

    monkeypatch.setattr(SwinLayer, "get_attn_mask", counted)
    # Shifted: the second and fourth layer at 8 x 8, the second at 4 x 4.
    model = swin(depths=[4, 2])
    fuse_windows(model)
    for layer in layers(model):
        if layer.shift_size == 0:
            monkeypatch.setattr(layer, "get_attn_mask", lambda *args, **kwargs: None)
    for _ in range(3):
        model(**images(16)(2))
    assert made == [(8, 8), (4, 4)]
    model.double()(pixel_values=images(16)(2)["pixel_values"].double())
    assert made == 2 * [(8, 8), (4, 4)]


def test_masks_of_other_windows_and_shifts_are_others() -> None:
    model = swin(image_size=32, window_size=4)
    fuse_windows(model)
    (_, layer, *_) = layers(model)

    def mask(window: int, shift: int) -> Any:
        layer.window_size, layer.shift_size = window, shift
        got = layer.get_attn_mask(8, 8, dtype=torch.float32, device=torch.device("cpu"))
        want = SwinLayer.get_attn_mask(layer, 8, 8, dtype=torch.float32, device=torch.device("cpu"))
        assert (got is None and want is None) or torch.equal(got, want)
        return got

    for window, shift in ((4, 2), (4, 1), (2, 1), (4, 0), (4, 2)):
        mask(window, shift)
    assert mask(4, 2) is mask(4, 2)


def test_a_mask_made_without_gradients_serves_a_pass_with_them() -> None:
    model = swin()
    fuse_windows(model)
    with torch.inference_mode():
        model(**images(16)(2))
    assert len(_STORED) == 2
    model(**images(16)(2)).logits.sum().backward()


def test_nothing_is_copied_where_nothing_is_padded() -> None:
    model = swin()
    fuse_windows(model)
    layer, x = layers(model)[0], torch.randn(1, 8, 8, 8)
    assert layer.maybe_pad(x, 8, 8)[0] is x
    assert layer.maybe_pad(x, 8, 8)[1] == SwinLayer.maybe_pad(layer, x, 8, 8)[1]
    for height, width in ((7, 8), (8, 7)):
        got, want = layer.maybe_pad(x, height, width), SwinLayer.maybe_pad(layer, x, height, width)
        assert torch.equal(got[0], want[0])
        assert got[1] == want[1]


@pytest.mark.parametrize("size", [(4, 6), (5, 6), (6, 5), (2, 2)])
def test_merged_patches_and_their_gradients(size: tuple[int, int]) -> None:
    model = swin()
    plain = next(m for m in model.modules() if isinstance(m, SwinPatchMerging))
    x = torch.randn(
        3, size[0] * size[1], 8, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    out = []
    for fused in (False, True):
        if fused:
            fuse_windows(model)
        y = plain(x, size)
        out.append(
            (
                y,
                *torch.autograd.grad(
                    y.square().sum(), [x, plain.norm.weight, plain.reduction.weight]
                ),
            )
        )
    assert type(plain).__name__ == "FusedSwinPatchMerging"
    for one, other in zip(*out, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(out[0][0], out[1][0])


@pytest.mark.parametrize("side", [16, 18])
@pytest.mark.parametrize("before", [False, True])
def test_hidden_states_of_stages(side: int, before: bool) -> None:
    model = swin(image_size=side).swin
    asked = {"output_hidden_states": True, "output_hidden_states_before_downsampling": before}
    with torch.no_grad():
        want = model(**images(side)(2), **asked).reshaped_hidden_states
        fuse_windows(model)
        got = model(**images(side)(2), **asked).reshaped_hidden_states
    assert [y.shape for y in got] == [y.shape for y in want]
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_the_model_stays_what_it_was() -> None:
    model = adapted(swin(), "lora")
    names = list(model.state_dict())
    fuse_windows(model)
    want = model(**images(16)(2)).logits
    # A second call changes nothing.
    fuse_windows(model)
    assert list(model.state_dict()) == names
    assert torch.equal(copy.deepcopy(model)(**images(16)(2)).logits, want)
    assert all(isinstance(layer.attention, SwinAttention) for layer in layers(model))


def test_other_models_are_left_alone() -> None:
    class SwinLayer(nn.Linear):
        pass

    model = nn.Sequential(SwinLayer(2, 2))
    fuse_windows(model)
    assert type(model[0]) is SwinLayer


def test_compiled_layers_give_the_same() -> None:
    """Tracing makes and reads no stored tensor, so none causes a recompilation."""
    case = Case(adapted(swin(depths=[2], num_heads=[2]), "lora"))
    args = case.rows(2), torch.tensor([0, 1]), images(16)(2), labels_of(2)
    want = case.ready.grads(*args)
    _STORED.clear()
    torch._dynamo.reset()
    case.ready.compile(backend="aot_eager")
    for _ in range(2):
        for one, other in zip(case.ready.grads(*args), want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not _STORED, "a way that was not traced keeps its masks"
