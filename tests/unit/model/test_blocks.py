"""The partition into blocks follows from the architecture alone, complete and disjoint."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from gradient_case import MODELS, TRAIN, adapted, swin, vit
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.roberta.configuration_roberta import RobertaConfig
from transformers.models.roberta.modeling_roberta import RobertaForSequenceClassification

from dpfed.model.blocks import Architecture, architecture_of, block_index, head_rows
from dpfed.model.parameter_vector import Space
from dpfed.model.per_sample.gradients import trainable


def partition(
    model: nn.Module, architecture: Architecture | None = None, **options: object
) -> Space:
    shapes = {n: p.shape for n, p in trainable(model).items()}
    names, index = block_index(model, shapes, architecture or architecture_of(model), **options)  # type: ignore[arg-type]
    return Space(tuple(shapes), tuple(shapes.values()), tuple(names), index)


def blocks_of(space: Space, tensor: str) -> list[str]:
    """Return the blocks of a tensor's coordinates in order of appearance."""
    part = space.slices()[space.names.index(tensor)]
    return [space.block_names[b] for b in dict.fromkeys(space.blocks[part].tolist())]


# ---- a partition, for every model


@pytest.mark.parametrize("options", [{}, {"granularity": "tensor"}], ids=str)
@pytest.mark.parametrize("train", TRAIN)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_partition_the_vector(name: str, train: str, options: dict[str, object]) -> None:
    space = partition(adapted(MODELS[name][0](), train), **options)
    # One block for each coordinate: complete, and disjoint by its form.
    assert space.blocks.shape == (space.size,)
    assert set(space.blocks.tolist()) == set(range(space.num_blocks))
    assert len(set(space.block_names)) == space.num_blocks
    values = torch.randn(2, space.num_blocks, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(space.block_mean(space.expand(values)), values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_full_training_by_the_rules(name: str) -> None:
    """The module tree gives H blocks each for Q, K, V and one for any other module."""
    model = adapted(MODELS[name][0](), "full")
    want: Counter[str] = Counter()
    for path, module in model.named_modules():
        own = [n for n, _ in module.named_parameters(recurse=False)]
        if own and path.rpartition(".")[2] in (
            "q_proj",
            "k_proj",
            "v_proj",
            "query",
            "key",
            "value",
        ):
            heads = model.get_submodule(path.rpartition(".")[0]).num_attention_heads
            for h in range(heads):
                want[f"{path}.head{h}"] = sum(p.numel() for p in module.parameters()) // heads
        elif own and not list(module.children()):
            want[path] = sum(p.numel() for p in module.parameters())
        else:
            for n in own:
                want[f"{path}.{n}"] = module.get_parameter(n).numel()
    space = partition(model)
    sizes = torch.bincount(space.blocks).tolist()
    assert dict(zip(space.block_names, sizes, strict=True)) == dict(want)


def test_loose_tensors_have_their_own_block() -> None:
    names = partition(adapted(vit(), "full")).block_names
    assert "vit.embeddings.cls_token" in names
    assert "vit.embeddings.position_embeddings" in names
    assert "vit.embeddings.patch_embeddings.projection" in names
    names = partition(adapted(swin(), "full")).block_names
    assert "swin.encoder.layers.0.blocks.0.attention.relative_position_bias" in names


def test_swin_heads_differ_by_stage() -> None:
    for train, factor in (("full", ""), ("lora", ".lora_B")):
        space = partition(adapted(swin(), train))
        for stage, heads in enumerate((2, 4)):
            for block in range(2):
                for part in "qkv":
                    layer = f"swin.encoder.layers.{stage}.blocks.{block}"
                    stem = f"{layer}.attention.{part}_proj{factor}.head"
                    assert sum(n.startswith(stem) for n in space.block_names) == heads


def test_bias_joins_its_heads_block() -> None:
    space = partition(adapted(vit(), "full"))
    path = "vit.layers.0.attention.q_proj"
    assert (
        blocks_of(space, f"{path}.weight")
        == blocks_of(space, f"{path}.bias")
        == [f"{path}.head0", f"{path}.head1"]
    )
    norm = "vit.layers.0.layernorm_before"
    assert blocks_of(space, f"{norm}.weight") == blocks_of(space, f"{norm}.bias") == [norm]


# ---- LoRA


@pytest.mark.parametrize("name", MODELS)
def test_a_is_never_split_and_b_is_split_by_head(name: str) -> None:
    model = adapted(MODELS[name][0](), "lora")
    space = partition(model)
    for tensor in space.names:
        if ".lora_" not in tensor:
            continue
        path = tensor.partition(".lora_")[0]
        got = blocks_of(space, tensor)
        if ".lora_A." in tensor:
            assert got == [f"{path}.lora_A"]
        elif path.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "query", "key", "value"):
            heads = model.get_submodule(path.rpartition(".")[0]).num_attention_heads
            assert got == [f"{path}.lora_B.head{h}" for h in range(heads)]
        else:
            assert got == [f"{path}.lora_B"]
    assert "classifier" in space.block_names or "classifier.out_proj" in space.block_names


def test_granularity_tensor_is_one_block_per_tensor() -> None:
    for train in TRAIN:
        space = partition(adapted(vit(), train), granularity="tensor")
        assert space.block_names == space.names


def test_unknown_architecture_is_one_block_per_tensor() -> None:
    """Names are not used to guess: this module is called q_proj and is one block."""

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_attention_heads = 2
            self.q_proj = nn.Linear(4, 4)

    assert architecture_of(Mine()) is None
    assert partition(Mine()).block_names == ("q_proj.weight", "q_proj.bias")


def test_roberta_base_example_of_the_specification() -> None:
    """LoRA on q, k, v gives 12 layers x 3 x (12 heads of B + A) = 468, and two head modules."""
    with torch.device("meta"):
        model = RobertaForSequenceClassification(RobertaConfig())
        model = adapted(model, "lora", targets=("query", "key", "value"), r=16)
    names, index = block_index(
        model, {n: p.shape for n, p in trainable(model).items()}, architecture_of(model)
    )
    assert sum(".lora_" in n for n in names) == 468
    assert [n for n in names if ".lora_" not in n] == ["classifier.dense", "classifier.out_proj"]
    assert len(index) == 12 * 3 * 16 * 2 * 768 + (768 * 768 + 768) + (768 * 2 + 2)


# ---- fused projections, on modules of our own


class Fused(nn.Module):
    """Attention with one projection for q, k and v, in either order."""

    def __init__(self, width: int, heads: int, layout: str = "3HD") -> None:
        super().__init__()
        self.num_attention_heads, self.layout = heads, layout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v as `[N, L, H, d]`."""
        y = self.qkv(x)
        if self.layout == "3HD":
            return y.unflatten(-1, (3, self.num_attention_heads, -1)).unbind(-3)
        return y.unflatten(-1, (self.num_attention_heads, 3, -1)).unbind(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.split(x))
        return self.proj(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


class Separate(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_attention_heads = heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            p(x).unflatten(-1, (self.num_attention_heads, -1))
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (part.transpose(1, 2) for part in parts)
        return self.proj(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )


class Holder(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x)


SEPARATE = Architecture(dict.fromkeys(("q_proj", "k_proj", "v_proj"), "separate"))


def fuse(separate: Separate, layout: str, heads: int) -> Fused:
    """The attention with its weights converted to the other layout."""
    fused = Fused(separate.proj.in_features, heads, layout)
    for name in ("weight", "bias"):
        parts = torch.stack(
            [getattr(m, name).data for m in (separate.q_proj, separate.k_proj, separate.v_proj)]
        )
        if layout == "H3D":
            parts = parts.unflatten(1, (heads, -1)).transpose(0, 1)
        getattr(fused.qkv, name).data.copy_(parts.reshape(getattr(fused.qkv, name).shape))
    fused.proj.load_state_dict(separate.proj.state_dict())
    return fused


@pytest.mark.parametrize("layout", ["3HD", "H3D"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_fused_blocks_equal_separate_blocks_after_conversion(layout: str, heads: int) -> None:
    separate = Separate(8, heads)
    fused = fuse(separate, layout, heads)
    x = torch.randn(2, 3, 8)
    # The conversion is right, so the layout has the meaning that its name says.
    torch.testing.assert_close(fused(x), separate(x))
    one, three = Holder(fused), Holder(separate)
    a, b = partition(one, Architecture({"qkv": layout})), partition(three, SEPARATE)  # type: ignore[dict-item]
    assert a.num_blocks == b.num_blocks == 3 * heads + 1

    def means(space: Space, model: nn.Module) -> dict[str, float]:
        values = space.block_mean(space.flatten(trainable(model)))
        return dict(zip(space.block_names, values.tolist(), strict=True))

    mine, want = means(a, one), means(b, three)
    for part in "qkv":
        for h in range(heads):
            assert mine[f"attn.qkv.{part}.head{h}"] == pytest.approx(
                want[f"attn.{part}_proj.head{h}"], abs=1e-6
            )
    assert mine["attn.proj"] == pytest.approx(want["attn.proj"], abs=1e-6)


@pytest.mark.parametrize("layout", ["3HD", "H3D"])
def test_each_fused_row_belongs_to_the_head_it_feeds(layout: str) -> None:
    """Changing a row changes one head of one part in the module's own attention."""
    heads, fused = 2, Fused(4, 2, layout)
    labels = list(head_rows(layout, 12, heads))  # type: ignore[arg-type]
    x = torch.randn(1, 1, 4)
    before = [part.clone() for part in fused.split(x)]
    for row, label in enumerate(labels):
        fused.qkv.bias.data[row] += 1
        moved = [
            (p, h)
            for p in range(3)
            for h in range(heads)
            if not torch.equal(fused.split(x)[p][..., h, :], before[p][..., h, :])
        ]
        fused.qkv.bias.data[row] -= 1
        assert [f"{'qkv'[p]}.head{h}" for p, h in moved] == [label]
        before = [part.clone() for part in fused.split(x)]


def test_swin_base_fused_example_of_the_specification() -> None:
    """LoRA on fused qkv and proj gives 15*2 + 27*2 + 51*18 + 99*2 = 1200 blocks, and the head's.

    The widths are small, the numbers of heads are real.
    """
    layers = [
        Fused(heads, heads)
        for depth, heads in zip((2, 2, 18, 2), (4, 8, 16, 32), strict=True)
        for _ in range(depth)
    ]

    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)
            self.classifier = nn.Linear(2, 2)

    model = adapted(Backbone(), "lora", targets=("qkv", "proj"), r=1)
    for layout in ("3HD", "H3D"):
        space = partition(model, Architecture({"qkv": layout}))  # type: ignore[dict-item]
        assert space.num_blocks == 1200 + 1
        for i, layer in enumerate(layers):
            assert blocks_of(space, f"layers.{i}.qkv.lora_A.default.weight") == [
                f"layers.{i}.qkv.lora_A"
            ]
            assert (
                len(blocks_of(space, f"layers.{i}.qkv.lora_B.default.weight"))
                == 3 * layer.num_attention_heads
            )


def test_rows_of_fused_projections_with_fewer_key_heads() -> None:
    q_k_v = ["q.head0", "q.head1", "q.head2", "q.head3", "k.head0", "k.head1", "v.head0", "v.head1"]
    assert head_rows("3HD", 16, 4, 2)[::2] == q_k_v
    first = ["q.head0", "q.head1", "k.head0", "v.head0"]
    second = ["q.head2", "q.head3", "k.head1", "v.head1"]
    assert head_rows("H3D", 16, 4, 2)[::2] == first + second


def test_rows_that_heads_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match="7 output rows cannot be divided among 2 heads"):
        head_rows("separate", 7, 2)
    with pytest.raises(ValueError, match="8 output rows"):
        head_rows("3HD", 8, 2)


# ---- order inside a block


@given(st.integers(0, 2**16), st.sampled_from(["separate", "3HD", "H3D"]))
def test_permuting_rows_inside_a_head_and_swapping_heads(seed: int, layout: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    if layout == "separate":
        model, tensor, stem = Holder(Separate(6, 2)), "attn.q_proj.weight", "attn.q_proj"
        space = partition(model, SEPARATE)
    else:
        model, tensor, stem = Holder(Fused(6, 2, layout)), "attn.qkv.weight", "attn.qkv.k"
        space = partition(model, Architecture({"qkv": layout}))  # type: ignore[dict-item]
    vector = torch.randn(space.size, generator=generator)
    before = space.block_mean(vector)
    # It shares memory with the vector.
    rows = space.unflatten(vector)[tensor]
    owner = space.unflatten(space.blocks)[tensor][:, 0]
    a, b = (space.block_names.index(f"{stem}.head{h}") for h in (0, 1))
    first, second = (torch.nonzero(owner == block).flatten() for block in (a, b))
    assert len(first) == len(second) == 3
    # A head is one stretch of rows.
    assert torch.equal(first, torch.arange(int(first[0]), int(first[0]) + 3))

    rows[first] = rows[first[torch.randperm(3, generator=generator)]]
    torch.testing.assert_close(space.block_mean(vector), before)

    bias = space.unflatten(vector)[tensor.replace("weight", "bias")]
    rows[first], rows[second] = rows[second], rows[first].clone()
    bias[first], bias[second] = bias[second], bias[first].clone()
    after = space.block_mean(vector)
    torch.testing.assert_close(after[[a, b]], before[[b, a]])
    others = [i for i in range(space.num_blocks) if i not in (a, b)]
    torch.testing.assert_close(after[others], before[others])
    assert after[a] != before[a]
