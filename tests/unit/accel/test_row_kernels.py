"""The kernels over rows of gradients agree with plain numbers, on a GPU or in the interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dpfed.accel.gradient_matrices import piece_squares
from dpfed.privacy.clipping import row_norms

pytest.importorskip("triton")
from dpfed.accel import rows as row_kernels

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 63, 64, 4095, 4096, 4097, 3 * 4096 + 192]


def drawn(count: int, size: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(size)
    return (
        torch.randn(count, size, generator=g) * 10.0 ** torch.arange(-4, count - 4).unsqueeze(1)
    ).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", SIZES)
def test_squares_of_pieces(size: int, dtype: torch.dtype) -> None:
    rows = drawn(7, size, dtype)
    found = row_kernels.squares(rows)
    assert found.shape == (7, math.ceil(size / 4096))
    for piece in range(found.shape[1]):
        wanted = rows[:, piece * 4096 : (piece + 1) * 4096].double().square().sum(1)
        torch.testing.assert_close(found[:, piece].double(), wanted, rtol=24 * 2.0**-24, atol=0)
    torch.testing.assert_close(
        row_norms([rows]).double(), rows.double().norm(dim=1), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("place", [0, 4095, 4096, 5000])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -3e38])
def test_what_is_no_number_is_seen_wherever_it_is(
    value: float, place: int, dtype: torch.dtype
) -> None:
    rows = drawn(3, 5001, dtype)
    rows[1, place] = value
    norm = row_norms([rows])
    assert norm.isfinite().tolist() == [True, False, True]
    assert piece_squares(rows).sum(1).float().sqrt().isfinite().tolist() == [
        True,
        False,
        True,
    ]


def test_squares_that_overflow_only_together_have_no_norm_either() -> None:
    """Each piece has a finite sum in float32, but the row has none."""
    rows = torch.zeros(2, 3 * 4096, device=DEVICE)
    # The squares are 2.25e38 each.
    rows[0, ::4096] = 1.5e19
    rows[1, ::4096] = 1e19
    assert row_kernels.squares(rows).isfinite().all()
    assert row_norms([rows]).isfinite().tolist() == [False, True]
    assert piece_squares(rows).sum(1).float().isfinite().tolist() == [False, True]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [*SIZES, 9 * 4096 + 64])
def test_rows_that_are_not_kept_are_zero_and_no_other_number_changes(
    size: int, dtype: torch.dtype
) -> None:
    rows = drawn(5, size, dtype)
    rows[1], rows[3, -1] = math.nan, math.inf
    keep = torch.tensor([True, False, True, False, False], device=DEVICE)
    wanted = rows.clone()
    wanted[[1, 3, 4]] = 0
    row_kernels.zero_rows(rows, keep)
    assert torch.equal(rows, wanted)
    row_kernels.zero_rows(rows, torch.ones_like(keep))
    assert torch.equal(rows, wanted)


def test_numbers_beside_the_rows_are_neither_read_nor_written() -> None:
    wide = torch.full((4, 200), math.nan, device=DEVICE)
    rows = wide[1:3, 50:150]
    rows.fill_(2.0)
    assert row_kernels.squares(rows).tolist() == [[400.0], [400.0]]
    row_kernels.zero_rows(rows, torch.tensor([True, False], device=DEVICE))
    assert rows[0].eq(2).all()
    assert rows[1].eq(0).all()
    assert wide.isnan().sum() == 800 - 200


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_beyond_the_first_two_thousand_million_numbers(dtype: torch.dtype) -> None:
    """The stride fits 32 bits, the third row's place does not.

    The memory between is not touched.
    """
    stride = 2**30 + 64
    rows = torch.empty(2 * stride + 128, dtype=dtype, device=DEVICE).as_strided(
        (3, 128), (stride, 1)
    )
    rows[0], rows[1], rows[2] = 1.0, 2.0, 3.0
    assert row_kernels.squares(rows).tolist() == [[128.0], [512.0], [1152.0]]
    row_kernels.zero_rows(rows, torch.tensor([True, True, False], device=DEVICE))
    assert rows.sum(1).tolist() == [128.0, 256.0, 0.0]


def test_nothing_at_all() -> None:
    for shape in ((0, 64), (3, 0), (0, 0)):
        rows = torch.empty(shape, device=DEVICE)
        assert row_norms([rows]).tolist() == [0.0] * shape[0]
        row_kernels.zero_rows(rows, torch.zeros(shape[0], dtype=torch.bool, device=DEVICE))


def test_rows_that_are_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="one after another"):
        row_kernels.squares(torch.ones(4, 8, device=DEVICE).t())
    with pytest.raises(ValueError, match="one after another"):
        row_kernels.zero_rows(torch.ones(4, 8, device=DEVICE).t(), torch.ones(8, device=DEVICE))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_trial_before_the_first_use(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert row_kernels.right(DEVICE, dtype)
    squares, zero_rows = row_kernels.squares, row_kernels.zero_rows
    monkeypatch.setattr(row_kernels, "squares", lambda rows: squares(rows.nan_to_num(0, 0, 0)))
    assert not row_kernels.right(DEVICE, dtype)
    monkeypatch.setattr(row_kernels, "squares", lambda rows: squares(rows[:, :-1]))
    assert not row_kernels.right(DEVICE, dtype)
    monkeypatch.setattr(row_kernels, "squares", squares)
    monkeypatch.setattr(row_kernels, "zero_rows", lambda rows, keep: zero_rows(rows[:, :-64], keep))
    assert not row_kernels.right(DEVICE, dtype)
    monkeypatch.setattr(row_kernels, "zero_rows", lambda rows, keep: zero_rows(rows, keep | True))
    assert not row_kernels.right(DEVICE, dtype)


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dpfed.accel import rows as row_kernels

for kernel in (row_kernels._squares, row_kernels._zero_rows):
    types = {"rows": "*bf16", "out": "*fp32", "keep": "*i32"}
    types |= dict.fromkeys(("PIECE", "WRITERS"), "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    places = {name: (i,) for i, name in enumerate(signature)}
    constants = {at: getattr(row_kernels, name) for name, at in places.items() if name.isupper()}
    aligned = ("rows", "stride", "size")
    even = {at: [["tt.divisibility", 16]] for name, at in places.items() if name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even)
    options = {"num_warps": row_kernels.WARPS}
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(made.asm["ptx"].count("global.v4.b32"))
"""


def test_a_gpu_compiles_what_the_interpreter_runs(tmp_path: Path) -> None:
    """Compiling for a GPU needs no GPU, and the interpreter accepts more than the compiler."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Sixteen bytes at once: two for each thread of a program.
    assert [int(n) for n in done.stdout.split()] == [
        2,
        2,
    ]
