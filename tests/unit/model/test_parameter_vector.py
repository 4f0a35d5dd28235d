"""The flat vector: named tensors to one vector without copies, and the means over blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dpfed.model.parameter_vector import Space, space_of

SHAPES = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=5)
SEEDS = st.integers(0, 2**16)


def tensors_of(shapes: list[tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}


def blocks_of(size: int, seed: int) -> tuple[list[str], Tensor]:
    """Draw a partition in which every block has a coordinate, in any order."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, size + 1, (1,), generator=generator))
    index = torch.cat(
        [torch.arange(count), torch.randint(0, count, (size - count,), generator=generator)]
    )
    return [f"b{i}" for i in range(count)], index[torch.randperm(size, generator=generator)]


@given(SHAPES, SEEDS)
def test_flatten_and_unflatten_are_inverse(shapes: list[tuple[int, ...]], seed: int) -> None:
    tensors = tensors_of(shapes, seed)
    space = space_of(tensors)
    vector = space.flatten(tensors)
    assert vector.shape == (space.size,)
    back = space.unflatten(vector)
    assert list(back) == list(tensors)
    assert all(torch.equal(back[n], tensors[n]) for n in tensors)
    assert torch.equal(space.flatten(back), vector)


@given(SHAPES, st.sampled_from([(), (2,), (2, 3)]))
def test_unflatten_is_a_view(shapes: list[tuple[int, ...]], lead: tuple[int, ...]) -> None:
    space = space_of(tensors_of(shapes))
    vector = torch.zeros(*lead, space.size)
    for i, (tensor, shape) in enumerate(
        zip(space.unflatten(vector).values(), shapes, strict=True), start=1
    ):
        assert tensor.shape == (*lead, *shape)
        assert tensor.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()
        # Writing to the tensor writes to the vector.
        tensor.fill_(i)
    for i, part in enumerate(space.slices(), start=1):
        assert (vector[..., part] == i).all()


def test_flatten_orders_by_the_space_not_by_the_mapping() -> None:
    space = space_of({"a": torch.zeros(2), "b": torch.zeros(1)})
    assert space.flatten({"b": torch.tensor([3.0]), "a": torch.tensor([1.0, 2.0])}).tolist() == [
        1.0,
        2.0,
        3.0,
    ]


def test_the_vector_is_float32_and_free_of_the_graph() -> None:
    half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    vector = space_of({"a": half}).flatten({"a": half})
    assert vector.dtype == torch.float32
    assert not vector.requires_grad


@given(SHAPES, SEEDS, st.sampled_from([(), (3,), (2, 3)]))
def test_block_mean_and_expand(
    shapes: list[tuple[int, ...]], seed: int, lead: tuple[int, ...]
) -> None:
    tensors = tensors_of(shapes)
    names, index = blocks_of(sum(t.numel() for t in tensors.values()), seed)
    shapes_of = tuple(tensor.shape for tensor in tensors.values())
    space = Space(tuple(tensors), shapes_of, tuple(names), index)
    values = torch.randn(*lead, space.num_blocks)
    torch.testing.assert_close(space.block_mean(space.expand(values)), values)
    vector = torch.randn(*lead, space.size)
    want = torch.stack([vector[..., index == b].mean(-1) for b in range(len(names))], -1)
    torch.testing.assert_close(space.block_mean(vector), want)
    assert space.expand(values).shape == vector.shape


@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=8),
    SEEDS,
    st.sampled_from([(), (1,), (3,), (2, 3), (0,)]),
)
def test_means_of_blocks_of_any_length(
    lengths: list[int], seed: int, lead: tuple[int, ...]
) -> None:
    """Blocks may consist of several stretches that start and end within chunks.

    The numbers are exact in every order of addition.
    """
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(0, 3, (len(lengths),), generator=generator)
    index = torch.repeat_interleave(
        torch.unique(which, return_inverse=True)[1], torch.tensor(lengths)
    )
    names = [f"b{i}" for i in range(int(index.max()) + 1)]
    space = Space(("a",), (torch.Size([sum(lengths)]),), tuple(names), index)
    # A vector with a stride.
    vector = torch.randint(-9, 10, (*lead, 2 * space.size), generator=generator).float()[..., ::2]
    want = torch.stack(
        [vector[..., index == b].double().mean(-1) for b in range(len(names))], -1
    ).float()
    assert torch.equal(space.block_mean(vector), want)
    assert torch.equal(space.to("cpu").block_mean(vector), want)


def test_a_large_block_loses_no_small_numbers() -> None:
    """Adding four million times 1e-6 to one float32 number would give far too little."""
    size = 2**22 + 5
    space = space_of({"a": torch.zeros(7), "b": torch.zeros(size)})
    vector = torch.full((2, 7 + size), 1e-6)
    assert space.block_mean(vector).tolist() == [[torch.tensor(1e-6).item()] * 2] * 2
    vector = torch.rand(2, 7 + size)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found += [space.block_mean(vector)[0], space.block_mean(vector[0])]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_a_vector_of_another_length_is_refused() -> None:
    space = space_of({"a": torch.zeros(70)})
    for size in (69, 71, 64):
        with pytest.raises(ValueError, match=f"the vector has {size} numbers, the space has 70"):
            space.block_mean(torch.zeros(2, size))


@given(SHAPES, SEEDS)
def test_order_inside_a_block_does_not_matter(shapes: list[tuple[int, ...]], seed: int) -> None:
    """Permuting the coordinates of a block leaves its mean."""
    tensors = tensors_of(shapes)
    names, index = blocks_of(sum(t.numel() for t in tensors.values()), seed)
    shapes_of = tuple(tensor.shape for tensor in tensors.values())
    space = Space(tuple(tensors), shapes_of, tuple(names), index)
    vector = torch.randn(space.size)
    permuted = vector.clone()
    for b in range(len(names)):
        (where,) = torch.nonzero(index == b, as_tuple=True)
        permuted[where] = vector[where[torch.randperm(len(where))]]
    torch.testing.assert_close(space.block_mean(permuted), space.block_mean(vector))


def test_without_blocks_each_tensor_is_one() -> None:
    space = space_of({"a": torch.zeros(2, 2), "b": torch.zeros(3)})
    assert space.block_names == ("a", "b")
    assert space.blocks.tolist() == [0] * 4 + [1] * 3
    assert space.to("cpu").blocks.tolist() == space.blocks.tolist()


def test_wrong_names_and_shapes_are_errors() -> None:
    space = space_of({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"\['c'\]"):
        space.flatten({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"\['b'\]"):
        space.flatten({"a": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"b has shape \(1, 3\)"):
        space.flatten({"a": torch.zeros(2), "b": torch.zeros(1, 3)})
    for size in (4, 6):
        with pytest.raises(ValueError, match=f"{size} numbers, the space has 5"):
            space.unflatten(torch.zeros(2, size))


def test_a_block_index_that_does_not_fit_is_an_error() -> None:
    shapes = (torch.Size([3]),)
    with pytest.raises(ValueError, match="the block index has shape"):
        Space(("a",), shapes, ("x",), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="every block needs"):
        # Block y is empty.
        Space(("a",), shapes, ("x", "y"), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="every block needs"):
        # Block 1 has no name.
        Space(("a",), shapes, ("x",), torch.tensor([0, 1, 0]))
