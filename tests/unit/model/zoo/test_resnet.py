"""GN-ResNet-18: the paper's shapes, per-sample gradients in full and with LoRA, blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from zoo_case import ZooCase, alone_image, with_train

from dpfed.errors import DpfedError
from dpfed.model.build import block_sizes, describe_space
from dpfed.model.task import InputSpec
from dpfed.model.zoo.resnet import GNResNet18, ResNet

SPEC = InputSpec("image", "pixel_values", (3, 8, 8), 3)
SMALL = GNResNet18(width=4, groups=2)


def pixels(count: int) -> dict[str, torch.Tensor]:
    return SPEC.synthetic(count, torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("train", "keys"),
    [
        ("full", {}),
        ("head", {}),
        ("lora", {}),
        ("lora", {"freeze_a": True}),
        ("lora", {"targets": ("conv2",)}),
    ],
    ids=str,
)
def test_gradients_equal_the_loop(train: str, keys: dict[str, object]) -> None:
    case = ZooCase(with_train(SMALL, train, **keys), SPEC)
    for count in (1, 3):
        case.check(pixels(count), torch.arange(count) % 3, alone_image(case))
    case.alive()


def test_adapters_are_on_every_convolution() -> None:
    """A: r x in x k x k, B: out x r x 1 x 1, on 20 convolutions, and the whole head."""
    case = ZooCase(with_train(SMALL, "lora"), SPEC)
    shapes = dict(zip(case.space.names, case.space.shapes, strict=True))
    assert shapes["conv.lora_A.default.weight"] == (2, 3, 3, 3)
    assert shapes["conv.lora_B.default.weight"] == (4, 2, 1, 1)
    assert shapes["stages.1.0.shortcut.0.lora_A.default.weight"] == (2, 4, 1, 1)
    assert sum(".lora_A." in n for n in shapes) == sum(".lora_B." in n for n in shapes) == 20
    assert "classifier.modules_to_save.default.weight" in shapes


@pytest.mark.parametrize("classes", [10, 100])
def test_parameter_count_of_the_paper(classes: int) -> None:
    """By hand: stem, four stages of two blocks of two 3x3 convolutions, 1x1 shortcuts, norms, head.

    Shortcuts lead into stages 2 to 4. A norm has two numbers per channel. CIFAR-10: 11,173,962.
    """
    widths = (64, 128, 256, 512)
    convs = 3 * 64 * 9
    norms = 64
    inside = 64
    for w in widths:
        convs += (inside * w + 3 * w * w) * 9 + (inside * w if inside != w else 0)
        norms += 4 * w + (w if inside != w else 0)
        inside = w
    described = describe_space(
        GNResNet18(), InputSpec("image", "pixel_values", (3, 32, 32), classes)
    )
    assert described.total == described.space.size == convs + 2 * norms + 512 * classes + classes
    if classes == 10:
        assert described.total == 11_173_962


def test_stem_keeps_the_resolution() -> None:
    model = ResNet(3, 2, 4, 2)
    assert model.conv.kernel_size == (3, 3)
    assert model.conv.stride == (1, 1)
    assert not any(isinstance(m, nn.MaxPool2d) for m in model.modules())
    x = torch.randn(1, 3, 16, 16)
    sides = []
    for stage in model.stages:
        stage.register_forward_hook(lambda m, i, out: sides.append(out.shape[-1]))
    model(x)
    assert sides == [16, 8, 4, 2]


# ---- blocks


def test_one_block_for_each_module() -> None:
    names = block_sizes(describe_space(SMALL, SPEC).space)
    assert len(names) == 20 + 20 + 1  # convolutions, norms, head
    assert names["stages.0.0.conv1"] == 4 * 4 * 9
    assert names["stages.0.0.norm1"] == 8
    lora = block_sizes(describe_space(with_train(SMALL, "lora"), SPEC).space)
    assert lora["conv.lora_A"] == 2 * 3 * 9
    assert lora["conv.lora_B"] == 4 * 2
    assert len(lora) == 41


# ---- configuration and weights


def test_groups_must_divide_the_width() -> None:
    with pytest.raises(DpfedError, match=r"model\.groups = 3 must divide model\.width = 4"):
        GNResNet18(width=4, groups=3)


def test_other_data_is_refused() -> None:
    with pytest.raises(DpfedError, match="reads images, this data has features"):
        SMALL.build(InputSpec("features", "features", (4,), 2))


def test_weights_of_the_body_are_loaded_and_the_head_is_new(tmp_path: Path) -> None:
    torch.manual_seed(3)
    other = ResNet(3, 7, 4, 2)
    torch.nn.init.ones_(other.classifier.weight)
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    model = GNResNet18(width=4, groups=2, weights=str(tmp_path)).build(SPEC).model
    assert torch.equal(model.conv.weight, other.conv.weight)
    assert model.classifier.weight.shape == (3, 32)
    assert not model.classifier.weight.any()
    with pytest.raises(DpfedError, match="gn-resnet18"):
        GNResNet18(width=8, groups=2, weights=str(tmp_path)).build(SPEC)
    with pytest.raises(DpfedError, match="gn-resnet18"):
        GNResNet18(weights=str(tmp_path / "nothing")).build(SPEC)
