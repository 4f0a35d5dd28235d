"""Blocks of every known architecture, of the user's own layouts, and of an unknown model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_case import GROUPED, TEXT, gemma2, gemma3, mixtral, neox, olmo2, phi3, qwen2, qwen3
from text_case import bert, distilbert, gpt2, llama, mistral, roberta
from torch import nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    GemmaConfig,
    GemmaForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)
from vision_case import tiny_swin, tiny_vit
from zoo_case import save, text_spec, with_train

from dpfed.config import ModelSection
from dpfed.errors import DpfedError
from dpfed.model.blocks import ARCHITECTURES
from dpfed.model.build import assemble, block_sizes, describe_space
from dpfed.model.parameter_vector import Space
from dpfed.model.task import InputSpec
from dpfed.model.zoo import REGISTRY
from dpfed.model.zoo.glyph_vit import GlyphViT
from dpfed.model.zoo.linear import Linear
from dpfed.model.zoo.resnet import GNResNet18
from dpfed.model.zoo.text import AutoCausal, AutoText
from dpfed.model.zoo.vision import AutoImage

IMAGE = InputSpec("image", "pixel_values", (3, 8, 8), 3)
PATCHES: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip


def image(build: Callable[[Path], str]) -> Callable[[Path], tuple[ModelSection, InputSpec]]:
    return lambda folder: (AutoImage(weights=build(folder)), IMAGE)


def text(build: Callable[[], nn.Module]) -> Callable[[Path], tuple[ModelSection, InputSpec]]:
    return lambda folder: (AutoText(weights=save(build(), folder), max_length=8), text_spec())


def causal(build: Callable[[], nn.Module]) -> Callable[[Path], tuple[ModelSection, InputSpec]]:
    return lambda folder: (
        AutoCausal(weights=save(build(), folder), max_length=8),
        text_spec(classes=1),
    )


def xlm() -> nn.Module:
    return XLMRobertaForSequenceClassification(XLMRobertaConfig(**{**TEXT, "pad_token_id": 1}))


def deit() -> nn.Module:
    return DeiTForImageClassification(DeiTConfig(**PATCHES))


# Section and inputs; blocks of one layer's q or fused projection; heads of q, heads of k and v.
SMALL: dict[str, tuple[Callable[[Path], tuple[ModelSection, InputSpec]], int, int]] = {
    "linear": (lambda folder: (Linear(), IMAGE), 0, 0),
    "glyph-vit": (
        lambda folder: (GlyphViT(), InputSpec("image", "pixel_values", (1, 8, 8), 10)),
        4,
        4,
    ),
    "gn-resnet": (lambda folder: (GNResNet18(width=4, groups=2), IMAGE), 0, 0),
    "swin": (image(tiny_swin), 2, 2),
    "vit": (image(tiny_vit), 2, 2),
    "deit": (image(lambda folder: save(deit(), folder)), 2, 2),
    "bert": (text(bert), 2, 2),
    "roberta": (text(roberta), 2, 2),
    "xlm-roberta": (text(xlm), 2, 2),
    "distilbert": (text(distilbert), 2, 2),
    "gpt2": (causal(gpt2), 2, 2),
    "gpt_neox": (causal(neox), 2, 2),
    "llama": (causal(llama), 4, 2),
    "mistral": (causal(mistral), 2, 1),
    "qwen2": (causal(qwen2), 2, 1),
    "qwen3": (causal(qwen3), 4, 2),
    "gemma2": (causal(gemma2), 4, 2),
    "gemma3_text": (causal(gemma3), 4, 2),
    "phi3": (causal(phi3), 4, 2),
    "mixtral": (causal(mixtral), 4, 2),
    "olmo2": (causal(olmo2), 4, 2),
}


def test_every_known_architecture_is_tried_here() -> None:
    # test_vision.py tests ResNet.
    assert set(ARCHITECTURES) - {"resnet"} <= set(SMALL)


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("name", SMALL)
def test_blocks_partition_and_heads_are_counted(name: str, train: str, tmp_path: Path) -> None:
    build, queries, keys = SMALL[name]
    section, spec = build(tmp_path)
    if train == "lora" and name == "linear":
        pytest.skip("softmax regression has no adapters")
    parts = describe_space(with_train(section, train), spec)
    space = parts.space
    assert not any("no block rules" in note for note in parts.notes)
    assert sum(block_sizes(space).values()) == space.size
    assert set(space.blocks.tolist()) == set(range(space.num_blocks))
    values = torch.randn(space.num_blocks, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(space.block_mean(space.expand(values)), values, rtol=1e-3, atol=1e-4)
    heads = [n for n in space.block_names if ".head" in n]
    first = {n.rpartition(".head")[0] for n in heads if ".1." not in n}
    if queries == 0:
        assert heads == []
        return
    counts = {stem: sum(n.startswith(f"{stem}.head") for n in heads) for stem in first}
    for stem, count in counts.items():
        tail = stem.removesuffix(".lora_B").rpartition(".")[2]
        assert count == (queries if tail.startswith("q") else keys), stem
    assert len(counts) % 3 == 0
    sizes = block_sizes(space)
    for stem in first:
        assert len({sizes[n] for n in heads if n.startswith(f"{stem}.head")}) == 1


@pytest.mark.parametrize("name", [n for n in SMALL if n not in ("linear", "gn-resnet")])
def test_rows_inside_a_head_and_swapped_heads(name: str, tmp_path: Path) -> None:
    """The order inside a block does not matter.

    Exchanging two heads exchanges their entries alone.
    """
    section, spec = SMALL[name][0](tmp_path)
    space = describe_space(with_train(section, "full"), spec).space
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(space.size, generator=generator)
    before = space.block_mean(vector)
    pairs = [
        (b, space.block_names.index(n[:-1] + "1"))
        for b, n in enumerate(space.block_names)
        if _first(n, space)
    ]
    assert pairs
    for a, b in pairs[:3]:
        one, two = (torch.nonzero(space.blocks == block).flatten() for block in (a, b))
        mixed = vector.clone()
        mixed[one] = vector[one[torch.randperm(len(one), generator=generator)]]
        torch.testing.assert_close(space.block_mean(mixed), before, rtol=1e-3, atol=1e-4)
        swapped = vector.clone()
        swapped[one], swapped[two] = vector[two], vector[one]
        want = before.clone()
        want[a], want[b] = before[b], before[a]
        torch.testing.assert_close(space.block_mean(swapped), want, rtol=1e-3, atol=1e-4)


def _first(name: str, space: Space) -> bool:
    return name.endswith(".head0") and name[:-1] + "1" in space.block_names


def test_gpt_neox_interleaves_its_heads(tmp_path: Path) -> None:
    """With its value rows at zero a head adds nothing to the projection."""
    model = neox().eval()
    folder = save(model, tmp_path)
    space = describe_space(
        with_train(AutoCausal(weights=folder), "full"), text_spec(classes=1)
    ).space
    attention = model.gpt_neox.layers[0].attention
    seen: list[torch.Tensor] = []
    attention.dense.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    path = "gpt_neox.layers.0.attention.query_key_value"
    layout = space.unflatten(space.blocks)
    for h in (0, 1):
        block = space.block_names.index(f"{path}.v.head{h}")
        kept = {n: p.detach().clone() for n, p in attention.query_key_value.named_parameters()}
        for n, p in attention.query_key_value.named_parameters():
            p.data[layout[f"{path}.{n}"] == block] = 0
        model(input_ids=torch.tensor([[3, 4, 5]]))
        out = seen[-1].reshape(3, 2, 4)
        assert not out[:, h].any()
        assert out[:, 1 - h].all()
        attention.query_key_value.load_state_dict(kept)


# ---- grouped-query attention


@pytest.mark.parametrize("train", ["lora", "full"])
def test_grouped_heads_of_an_unlisted_architecture(train: str, tmp_path: Path) -> None:
    """There are four query heads of six rows and two key and value heads; LoRA's A is one block."""
    model = GemmaForCausalLM(GemmaConfig(**GROUPED, head_dim=6))
    assert "gemma" not in ARCHITECTURES
    names = ("q_proj", "k_proj", "v_proj")
    section = AutoCausal(weights=save(model, tmp_path), attention=names)
    space = describe_space(with_train(section, train), text_spec(classes=1)).space
    sizes = block_sizes(space)
    factor, inputs = ("", 16) if train == "full" else (".lora_B", 2)
    for name, heads in zip(names, (4, 2, 2), strict=True):
        stem = f"model.layers.0.self_attn.{name}{factor}"
        found = {n: size for n, size in sizes.items() if n.startswith(f"{stem}.head")}
        assert found == {f"{stem}.head{h}": 6 * inputs for h in range(heads)}
    if train == "lora":
        assert sizes["model.layers.0.self_attn.k_proj.lora_A"] == 2 * 16


def test_a_projection_that_is_no_row_of_heads_is_refused(tmp_path: Path) -> None:
    model = GemmaForCausalLM(GemmaConfig(**GROUPED, head_dim=6))
    section = AutoCausal(weights=save(model, tmp_path), attention=("o_proj",), train="full")
    with pytest.raises(DpfedError, match=r"the 16 output rows .*o_proj are neither 4 query heads"):
        describe_space(section, text_spec(classes=1))


def test_phi3_rows_feed_the_heads_that_they_are_said_to(tmp_path: Path) -> None:
    """With a value head at zero, the two query heads that share it are zero."""
    model = phi3().eval()
    section = with_train(AutoCausal(weights=save(model, tmp_path)), "full")
    space = describe_space(section, text_spec(classes=1)).space
    path = "model.layers.0.self_attn.qkv_proj"
    rows = space.unflatten(space.blocks)[f"{path}.weight"][:, 0].tolist()
    labels = [space.block_names[b].removeprefix(f"{path}.") for b in rows]
    parts = [("q", 4), ("k", 2), ("v", 2)]
    assert labels[::4] == [f"{part}.head{h}" for part, count in parts for h in range(count)]
    attention = model.model.layers[0].self_attn
    seen: list[torch.Tensor] = []
    attention.o_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    kept = attention.qkv_proj.weight.detach().clone()
    for h in (0, 1):
        block = space.block_names.index(f"{path}.v.head{h}")
        attention.qkv_proj.weight.data[torch.tensor(rows) == block] = 0
        model(input_ids=torch.tensor([[3, 4, 5]]))
        out = seen[-1].reshape(3, 2, 2, 4)
        assert not out[:, h].any()
        assert out[:, 1 - h].all()
        attention.qkv_proj.weight.data.copy_(kept)


# ---- an architecture that is not known


def dinov2(folder: Path, **keys: Any) -> AutoImage:
    config = Dinov2Config(**{**PATCHES, "mlp_ratio": 2})
    return AutoImage(
        weights=save(Dinov2ForImageClassification(config), folder), train="full", **keys
    )


def test_an_unknown_architecture_is_one_block_per_tensor_and_says_so(tmp_path: Path) -> None:
    parts = describe_space(dinov2(tmp_path), IMAGE)
    assert parts.space.block_names == parts.space.names
    note = "Dinov2ForImageClassification has no block rules here: each tensor is one block"
    assert note in parts.notes


def test_the_user_may_name_the_projections(tmp_path: Path) -> None:
    modules = {n.split(".")[-2] for n in describe_space(dinov2(tmp_path), IMAGE).space.names}
    names = tuple(modules & {"query", "q_proj"})
    parts = describe_space(dinov2(tmp_path, attention=names), IMAGE)
    heads = {n: size for n, size in block_sizes(parts.space).items() if ".head" in n}
    assert list(heads.values()) == [8 * 4 + 4] * 2
    assert not any("no block rules" in note for note in parts.notes)


def test_a_layout_needs_names_where_nothing_is_known(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"name its projections too.*model\.attention"):
        describe_space(dinov2(tmp_path, qkv_layout="3HD"), IMAGE)
    with pytest.raises(DpfedError, match="has no module called 'nothing'"):
        describe_space(dinov2(tmp_path, attention=("nothing",)), IMAGE)


def test_the_users_layout_wins(tmp_path: Path) -> None:
    folder = save(neox(), tmp_path)
    stem = "gpt_neox.layers.0.attention.query_key_value"

    def rows(**keys: Any) -> list[str]:
        section = AutoCausal(weights=folder, train="full", **keys)
        space = describe_space(section, text_spec(classes=1)).space
        part = space.unflatten(space.blocks)[f"{stem}.bias"]
        return [space.block_names[b].removeprefix(f"{stem}.") for b in part.tolist()]

    assert rows()[::4] == ["q.head0", "k.head0", "v.head0", "q.head1", "k.head1", "v.head1"]
    assert rows(qkv_layout="H3D") == rows()
    in_order = [f"{part}.head{h}" for part in "qkv" for h in (0, 1)]
    assert rows(qkv_layout="3HD")[::4] == in_order
    with pytest.raises(DpfedError, match="8 output rows cannot be divided among 6 heads"):
        rows(attention=("dense",), qkv_layout="3HD")


# ---- the same on the meta device and in memory


@pytest.mark.parametrize("train", ["lora", "full", "head"])
def test_describing_agrees_with_building(train: str, tmp_path: Path) -> None:
    section, spec = SMALL["swin"][0](tmp_path)
    section = with_train(section, train)
    real, described = assemble(section, spec), describe_space(section, spec)
    assert described.space.names == real.space.names
    assert described.space.shapes == real.space.shapes
    assert described.space.block_names == real.space.block_names
    assert torch.equal(described.space.blocks, real.space.blocks)
    assert described.total == real.total
    assert all(p.is_meta for p in described.adapted.model.parameters())


def test_the_start_follows_from_the_seeds() -> None:
    section = GNResNet18(width=4, groups=2)

    def start(*seeds: int) -> torch.Tensor:
        parts = assemble(section, IMAGE, seeds)  # type: ignore[arg-type]
        return parts.space.flatten(dict(parts.adapted.model.named_parameters()))

    assert torch.equal(start(1, 0), start(1, 0))
    assert not torch.equal(start(1, 0), start(2, 0))


@pytest.mark.parametrize("name", REGISTRY)
def test_every_model_says_what_inputs_are_usual(name: str) -> None:
    section: Any = REGISTRY[name]()
    assert isinstance(section.usual_spec(), InputSpec)
    assert section.name == name
