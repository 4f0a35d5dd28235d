"""Vision Transformers: shapes and counts of the paper, gradients, image sizes, weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    DeiTConfig,
    DeiTForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)
from vision_case import tiny_swin, tiny_vit
from zoo_case import ZooCase, alone_image, lora, save, with_train

from dpfed.accel.operators.dropout import keep_mask
from dpfed.errors import DpfedError
from dpfed.model.build import block_sizes, describe_space
from dpfed.model.export_files import ImageInput
from dpfed.model.per_sample.keyed_dropout import rule_of
from dpfed.model.task import InputSpec
from dpfed.model.zoo.image_inputs import blurred, images
from dpfed.model.zoo.vision import AutoImage, SwinBase, SwinTiny, ViTBase, stages

SPEC = InputSpec("image", "pixel_values", (3, 32, 32), 10)


# ---- the paper's models, on the meta device


def swin_count(dim: int, depths: tuple[int, ...], heads: tuple[int, ...], classes: int) -> int:
    total = dim * (3 * 16 + 1) + 2 * dim  # patches of 4x4x3, and their norm
    for stage, (depth, h) in enumerate(zip(depths, heads, strict=True)):
        d = dim * 2**stage
        attention = 4 * (d * d + d) + 13 * 13 * h
        total += depth * (attention + (8 * d * d + 5 * d) + 4 * d)
        if stage < len(depths) - 1:
            total += 4 * d * 2 * d + 2 * 4 * d  # patch merging and its norm
    last = dim * 2 ** (len(depths) - 1)
    return total + 2 * last + last * classes + classes


def vit_count(d: int, layers: int, mlp: int, classes: int) -> int:
    layer = 4 * (d * d + d) + (2 * d * mlp + mlp + d) + 4 * d
    return (16 * 16 * 3 * d + d) + d + 197 * d + layers * layer + 2 * d + d * classes + classes


def test_parameter_counts_of_the_paper() -> None:
    """The counts are those published for ImageNet, less 990 classes."""
    counts = {
        ViTBase: (vit_count(768, 12, 3072, 10), 85_806_346),
        SwinTiny: (swin_count(96, (2, 2, 6, 2), (3, 6, 12, 24), 10), 27_527_044),
        SwinBase: (swin_count(128, (2, 2, 18, 2), (4, 8, 16, 32), 10), 86_753_474),
    }
    for cls, (formula, figure) in counts.items():
        described = describe_space(cls(weights="random"), SPEC)
        assert described.total == formula == figure


def test_blocks_of_swin_base() -> None:
    """LoRA on q, k, v and o: three separate projections have three A, so 3H + 3 + 2 per layer."""
    section = SwinBase(
        weights="random", lora=lora(r=16, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    )
    space = describe_space(section, SPEC).space
    assert space.num_blocks == 1200 + 2 * 24 + 1
    assert (
        space.num_blocks
        == sum(d * (3 * h + 5) for d, h in zip((2, 2, 18, 2), (4, 8, 16, 32), strict=True)) + 1
    )
    for stage, heads in enumerate((4, 8, 16, 32)):
        stem = f"swin.encoder.layers.{stage}.blocks.0.attention.k_proj.lora_B.head"
        sizes = [size for name, size in block_sizes(space).items() if name.startswith(stem)]
        assert sizes == [32 * 16] * heads  # heads are 32 wide in every stage


@pytest.mark.parametrize("cls", [ViTBase, SwinTiny, SwinBase])
def test_blocks_partition_the_papers_models(cls: type) -> None:
    space = describe_space(cls(weights="random", lora=lora(r=16)), SPEC).space
    sizes = block_sizes(space)
    assert sum(sizes.values()) == space.size
    values = torch.randn(space.num_blocks)
    torch.testing.assert_close(space.block_mean(space.expand(values)), values, rtol=1e-3, atol=1e-3)


def test_swin_of_full_training_has_blocks_for_tables_and_merging(tmp_path: Path) -> None:
    space = describe_space(AutoImage(weights=tiny_swin(tmp_path), train="full"), SPEC).space
    sizes = block_sizes(space)
    assert sizes["swin.encoder.layers.0.blocks.0.attention.relative_position_bias"] == 9 * 2
    assert sizes["swin.encoder.layers.0.downsample.reduction"] == 4 * 8 * 2 * 8
    assert sizes["swin.encoder.layers.0.downsample.norm"] == 2 * 4 * 8
    assert sizes["swin.embeddings.patch_embeddings.projection"] == 8 * 3 * 4 + 8
    assert sizes["swin.encoder.layers.1.blocks.1.attention.v_proj.head3"] == 4 * 16 + 4


# ---- gradients


@pytest.mark.parametrize("train", ["lora", "full", "head"])
@pytest.mark.parametrize("build", [tiny_swin, tiny_vit])
def test_gradients_equal_the_loop(build: object, train: str, tmp_path: Path) -> None:
    """From a folder, with images of another size than the model's, that are grey."""
    section = with_train(AutoImage(weights=build(tmp_path)), train)  # type: ignore[operator]
    spec = InputSpec("image", "pixel_values", (1, 12, 12), 3)
    case = ZooCase(section, spec)
    case.check(
        spec.synthetic(3, torch.Generator().manual_seed(1)),
        torch.tensor([0, 2, 1]),
        alone_image(case),
    )
    case.alive()


class Fixed(nn.Module):
    """Stochastic depth for a given draw: the branch of this record is scaled or dropped."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_drop_path_drops_whole_branches_of_a_record(tmp_path: Path) -> None:
    section = with_train(AutoImage(weights=tiny_swin(tmp_path), drop_path=0.6), "lora")
    spec = InputSpec("image", "pixel_values", (3, 16, 16), 3)
    case = ZooCase(section, spec)
    assert case.ready.has_dropout
    inputs, labels = spec.synthetic(4, torch.Generator().manual_seed(1)), torch.tensor([0, 2, 1, 0])
    keys, client = torch.tensor([11, 22, 33, 44]), torch.zeros(4, dtype=torch.int64)
    theta = case.rows(1)
    got = torch.cat(case.ready.grads(theta, client, inputs, labels, keys), 1)
    layers = [
        (salt, name, m.drop_prob)
        for salt, (name, m) in enumerate(case.ready.model.named_modules(), start=1)
        if type(m).__name__.endswith("DropPath")
    ]
    assert [round(float(rate), 3) for _, _, rate in layers] == [
        0.2,
        0.4,
        0.6,
    ]  # rising with depth, none at the first
    decisions = torch.cat([keep_mask(keys, rule_of(salt, rate), 1) for salt, _, rate in layers], 1)
    assert 0 < decisions.float().mean() < 1
    plain = case.at(theta[0])
    for j in range(4):
        for (_, name, rate), keep in zip(layers, decisions[j], strict=True):
            owner, _, leaf = name.rpartition(".")
            setattr(plain.get_submodule(owner), leaf, Fixed(float(keep) / (1 - rate)))
        plain.zero_grad(set_to_none=True)
        alone_image(case)(plain, {k: x[j : j + 1] for k, x in inputs.items()}, labels[j]).backward()
        grads = (plain.get_parameter(n) for n in case.space.names)
        want = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in grads]
        )
        torch.testing.assert_close(got[j], want, rtol=1e-3, atol=1e-5)


def test_swin_drops_paths_as_in_the_paper() -> None:
    assert SwinTiny().drop_path == SwinBase().drop_path == 0.1
    with torch.device("meta"):
        model = SwinTiny(weights="random", drop_path=0.3).build(SPEC).model
    assert model.config.drop_path_rate == 0.3
    with pytest.raises(DpfedError, match=r"needs model.weights"):
        AutoImage().build(SPEC)


# ---- sizes of Swin


def test_stages_round_up() -> None:
    assert stages(224, 4, 4) == [56, 28, 14, 7]
    assert stages(193, 4, 4) == [49, 25, 13, 7]
    assert stages(30, 4, 3) == [8, 4, 2]


@pytest.mark.parametrize(
    ("keys", "ways"),
    [
        (
            {"image_size": 64},
            "model.image_size >= 193 or model.patch_size = 4 with model.window = 2 or",
        ),
        (
            {"image_size": 32},
            "model.image_size >= 193 or model.patch_size = 2 with model.window = 2 or",
        ),
        (
            {"image_size": 32, "patch_size": 1},
            "model.image_size >= 49 or model.patch_size = 1 with model.window = 4",
        ),
        ({"window": 8}, "model.image_size >= 225"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_some_that_do(
    keys: dict[str, int], ways: str
) -> None:
    with pytest.raises(DpfedError, match="less than its window") as error:
        SwinTiny(weights="random", **keys)  # type: ignore[arg-type]
    assert ways in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "keys", [{}, {"image_size": 32, "patch_size": 1, "window": 4}, {"image_size": 193}], ids=str
)
def test_sizes_that_are_accepted_do_work(
    keys: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow Swin of the same geometry runs its forward pass if the check accepts it."""
    monkeypatch.setattr(
        SwinTiny, "shape", {"embed_dim": 4, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)}
    )
    built = SwinTiny(weights="random", **keys).build(SPEC)  # type: ignore[arg-type]
    out = built.model(**built.prepare(SPEC.synthetic(1, torch.Generator().manual_seed(0))))
    assert out.logits.shape == (1, 10)


def test_a_pretrained_swin_keeps_its_patch_and_window(tmp_path: Path) -> None:
    weights = tiny_swin(tmp_path)  # 2 stages, patch 2, window 2
    with pytest.raises(
        DpfedError,
        match=r"auto-image at 3 pixels.*less than its window of 2: set model.image_size >= 5$",
    ):
        AutoImage(weights=weights, image_size=3).build(SPEC)
    built = AutoImage(weights=weights, image_size=24).build(SPEC)
    assert built.prepare(SPEC.synthetic(1, torch.Generator()))["pixel_values"].shape == (
        1,
        3,
        24,
        24,
    )
    with pytest.raises(
        DpfedError, match=r"have embed_dim = 8, not 96: use model.name = 'auto-image'"
    ):
        SwinTiny(weights=weights).build(SPEC)


def test_positions_of_a_pretrained_vit_are_fixed(tmp_path: Path) -> None:
    weights = tiny_vit(tmp_path)
    with pytest.raises(DpfedError, match="these weights are for 8 pixels; leave it unset"):
        AutoImage(weights=weights, image_size=16).build(SPEC)
    with pytest.raises(DpfedError, match="have hidden_size = 8, not 768"):
        ViTBase(weights=weights).build(SPEC)
    with pytest.raises(DpfedError, match="multiple of the patch of 16"):
        ViTBase(weights="random", image_size=40).build(SPEC)


# ---- how images enter


def test_images_are_repeated_resized_and_normalised_one_by_one() -> None:
    spec = InputSpec("image", "x", (1, 2, 2), 2, white=10.0)
    prepare = images(ImageInput(spec, 4, 3, (0.5, 0.0, 0.0), (0.5, 1.0, 2.0)))
    x = torch.tensor([[[[0, 10], [0, 10]]], [[[5, 5], [5, 5]]]], dtype=torch.uint8)
    got = prepare({"x": x})["x"]
    # bilinear between the centres of two pixels: 0, a quarter, three quarters, 1
    row = torch.tensor([0.0, 0.25, 0.75, 1.0])
    for channel, (m, s) in enumerate(((0.5, 0.5), (0.0, 1.0), (0.0, 2.0))):
        torch.testing.assert_close(got[0, channel], ((row - m) / s).expand(4, 4))
        torch.testing.assert_close(got[1, channel], torch.full((4, 4), (0.5 - m) / s))
    torch.testing.assert_close(prepare({"x": x[:1]})["x"], got[:1])


def test_smaller_images_are_averaged_not_picked() -> None:
    spec = InputSpec("image", "x", (1, 8, 8), 2, white=1.0)
    x = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    x[..., 0::2] = 1
    got = images(ImageInput(spec, 2, 1, (0.0,), (1.0,)))({"x": x})["x"]
    want = F.interpolate(x.float(), (2, 2), mode="bilinear", align_corners=False, antialias=True)
    torch.testing.assert_close(got, want)
    assert (got - 0.5).abs().max() < 0.1


def test_constants_are_those_of_the_weights(tmp_path: Path) -> None:
    weights = tiny_vit(tmp_path)
    spec = InputSpec("image", "pixel_values", (3, 8, 8), 3)
    x = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    plain = AutoImage(weights=weights).build(spec).prepare({"pixel_values": x})["pixel_values"]
    torch.testing.assert_close(
        plain[0, :, 0, 0],
        (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225]),
    )
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0, 0, 0.5], "image_std": [1, 2, 0.5]})
    )
    own = AutoImage(weights=weights).build(spec).prepare({"pixel_values": x})["pixel_values"]
    torch.testing.assert_close(own[0, :, 0, 0], torch.tensor([1.0, 0.5, 1.0]))
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(DpfedError, match=r"preprocessor_config.json cannot be read"):
        AutoImage(weights=weights).build(spec)


@pytest.mark.parametrize(
    "spec", [InputSpec("features", "features", (4,), 2), InputSpec("image", "x", (2, 8, 8), 2)]
)
def test_other_data_is_refused(spec: InputSpec, tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="'auto-image' reads images"):
        AutoImage(weights=tiny_vit(tmp_path)).build(spec)


# ---- other image models


def test_any_image_classifier(tmp_path: Path) -> None:
    """DeiT has its own rules. LoRA freezes ResNet's BatchNorm; its head is a sequence."""
    config = DeiTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
    )
    weights = save(DeiTForImageClassification(config), tmp_path / "deit")
    spec = InputSpec("image", "pixel_values", (3, 8, 8), 3)
    case = ZooCase(with_train(AutoImage(weights=weights), "lora"), spec)
    assert case.notes == ()
    case.check(
        spec.synthetic(2, torch.Generator().manual_seed(1)), torch.tensor([0, 2]), alone_image(case)
    )


def test_a_convolutional_classifier_with_frozen_norms(tmp_path: Path) -> None:
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    weights = save(ResNetForImageClassification(config), tmp_path)
    spec = InputSpec("image", "pixel_values", (3, 16, 16), 3)
    case = ZooCase(with_train(AutoImage(weights=weights, image_size=16), "lora"), spec)
    assert "classifier.modules_to_save.default.1.weight" in case.space.names
    case.check(
        spec.synthetic(2, torch.Generator().manual_seed(1)), torch.tensor([0, 2]), alone_image(case)
    )
    with pytest.raises(DpfedError, match="mixes the records of a batch"):
        ZooCase(with_train(AutoImage(weights=weights, image_size=16), "full"), spec)


def test_a_blur_weighs_neighbours_by_one_four_six_four_one() -> None:
    x = torch.zeros(1, 1, 7, 7)
    x[0, 0, 3, 3] = 256.0
    row = torch.tensor([0.0, 1.0, 4.0, 6.0, 4.0, 1.0, 0.0])
    torch.testing.assert_close(blurred(x)[0, 0], torch.outer(row, row))
    corner = torch.zeros(1, 1, 5, 5)
    corner[0, 0, 0, 0] = 256.0
    # mirrored without the border itself: the corner is met once from within, never from outside
    torch.testing.assert_close(
        blurred(corner)[0, 0, 0], 6.0 * torch.tensor([6.0, 4.0, 1.0, 0.0, 0.0])
    )


def test_sharpened_images_have_more_detail_and_stay_in_range() -> None:
    spec = InputSpec("image", "x", (1, 8, 8), 2, white=10.0)
    x = torch.full((2, 1, 8, 8), 4, dtype=torch.uint8)
    x[0, 0, :, 4:] = 6
    plain, sharp = (
        images(ImageInput(spec, 8, 1, (0.0,), (1.0,), sharpen=s))({"x": x})["x"] for s in (0.0, 2.0)
    )
    want = (plain * 10 + 2.0 * (plain * 10 - blurred(plain * 10))).clamp(0, 10) / 10
    torch.testing.assert_close(sharp, want)
    assert sharp[0].max() > plain[0].max() + 0.05
    torch.testing.assert_close(sharp[1], plain[1])  # without detail nothing changes
    loud = images(ImageInput(spec, 8, 1, (0.0,), (1.0,), sharpen=50.0))({"x": x})["x"]
    assert loud.min() == 0
    assert loud.max() == 1


def test_bicubic_is_torchs_own_cut_to_the_range() -> None:
    spec = InputSpec("image", "x", (1, 4, 4), 2, white=1.0)
    x = (torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0)) > 0.5).to(torch.uint8)
    got = images(ImageInput(spec, 8, 1, (0.0,), (1.0,), resize="bicubic"))({"x": x})["x"]
    raw = F.interpolate(x.float(), (8, 8), mode="bicubic", align_corners=False)
    assert raw.max() > 1
    torch.testing.assert_close(got, raw.clamp(0, 1))


def test_a_head_is_kept_where_it_fits_and_refused_where_not(tmp_path: Path) -> None:
    weights = tiny_vit(tmp_path)
    own = AutoModelForImageClassification.from_pretrained(weights)
    classes = own.config.num_labels
    spec = InputSpec("image", "pixel_values", (3, 8, 8), classes)
    kept = AutoImage(weights=weights, head="kept").build(spec).model
    torch.testing.assert_close(kept.classifier.weight, own.classifier.weight)
    assert not AutoImage(weights=weights).build(spec).model.classifier.weight.any()
    with pytest.raises(DpfedError, match="have no head for"):
        AutoImage(weights=weights, head="kept").build(replace(spec, classes=classes + 1))
    with pytest.raises(DpfedError, match=r"needs model\.weights with a classifier"):
        ViTBase(weights="random", head="kept").build(SPEC)
