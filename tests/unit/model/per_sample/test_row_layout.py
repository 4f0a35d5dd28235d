"""Row layouts put every number in its place, by pieces or by an index."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpfed.model.parameter_vector import Space, space_of
from dpfed.model.per_sample import row_layout
from dpfed.model.per_sample.row_layout import Layout

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 5), st.integers(1, 5)), st.tuples(st.integers(1, 9)), st.just(())
    ),
    min_size=1,
    max_size=6,
)


def spaced(shapes: list[tuple[int, ...]]) -> Space:
    return space_of({str(i): torch.zeros(shape) for i, shape in enumerate(shapes)})


def both(space: Space, turned: list[bool], step: int) -> tuple[Layout, Layout]:
    """Return a layout that copies by pieces, and one that copies by an index."""
    made = []
    for large in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(row_layout, "LARGE", large)
            made.append(Layout(space, turned, step))
    assert made[0].by_pieces
    return made[0], made[1]


@given(
    SHAPES,
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.sampled_from([1, 4, 64]),
    st.sampled_from([1, 3]),
)
def test_both_ways_are_the_same(
    shapes: list[tuple[int, ...]], turn: list[bool], step: int, count: int
) -> None:
    space = spaced(shapes)
    turned = [t and len(shape) == 2 for t, shape in zip(turn, shapes, strict=False)]
    vectors = torch.randn(count, space.size, generator=torch.Generator().manual_seed(0))
    pieces, index = both(space, turned, step)
    for dtype in (torch.float32, torch.bfloat16):
        rows = pieces.rows(vectors, dtype)
        assert rows.dtype == dtype
        assert torch.equal(rows, index.rows(vectors, dtype))
        assert rows.data_ptr() != vectors.data_ptr()
        for part, start, shape, is_turned in zip(
            space.slices(), pieces.starts, shapes, turned, strict=False
        ):
            assert start % step == 0
            found = rows[:, start : start + part.stop - part.start]
            wanted = vectors[:, part].to(dtype)
            if is_turned:
                wanted = wanted.view(count, *shape).transpose(1, 2).reshape(count, -1)
            assert torch.equal(found, wanted)
        # The gaps are zeros.
        assert int((rows != 0).sum()) == vectors.numel()
    rows = pieces.rows(vectors, torch.float32)
    assert torch.equal(pieces.vectors(rows), vectors)
    assert torch.equal(index.vectors(rows), vectors)


def test_tensors_side_by_side_are_one_piece() -> None:
    space = spaced([(64,), (2, 32), (3, 4), (4, 3), (5,), (6,)])
    plain = Layout(space, [False] * 6)
    assert len(plain.pieces) == 1
    assert plain.is_vector
    rows = torch.randn(2, space.size)
    assert plain.vectors(rows) is rows
    turned = Layout(space, [False, False, True, False, False, False])
    assert [(p.vector, p.size) for p in turned.pieces] == [(0, 128), (128, 12), (140, 23)]
    assert not turned.is_vector
    apart = Layout(space, [False] * 6, step=64)
    assert [(p.vector, p.row, p.size) for p in apart.pieces] == [
        (0, 0, 140),
        (140, 192, 12),
        (152, 256, 5),
        (157, 320, 6),
    ]
    assert apart.starts == [0, 64, 128, 192, 256, 320, 384]


def test_few_large_tensors_are_copied_one_by_one() -> None:
    assert Layout(spaced([(300, 300), (300, 300)]), [True, True]).by_pieces
    assert not Layout(spaced([(8, 300)] * 50), [True] * 50).by_pieces
