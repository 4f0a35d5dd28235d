"""The restricted reader of pickles: plain data is read, and no code in the file runs."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfed.data.pickles import RefusedError, loads

PROTOCOLS = range(5)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(values, st.sampled_from(PROTOCOLS))
def test_plain_data_is_read_as_python_reads_it(value: Any, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", "f4", "?", "<f8"])
def test_arrays(protocol: int, dtype: str) -> None:
    c = np.arange(6).reshape(2, 3).astype(dtype)
    for array in (c, np.asfortranarray(c), c[:0], c[0, 0:1]):
        found = loads(pickle.dumps({"data": array}, protocol))["data"]
        assert found.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(found, array)


def test_the_form_that_python_2_wrote() -> None:
    """The published batches: byte strings as text opcodes, the old module's name."""
    old = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
        b"(K\x01K\x02K\x02\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89U\x04\x01\x02\xff\x04tbU\x06labelsq\x08]q\x09(K\x06K\x09eu."
    )
    found = loads(old)
    assert found["data"].tolist() == [[1, 2], [255, 4]]
    assert found["labels"] == [6, 9]


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_is_refused_and_never_made(tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "trace"
    for value in (Evil(str(trace)), {"data": Evil(str(trace))}, [Evil(str(trace))]):
        with pytest.raises(RefusedError, match="open, which is code"):
            loads(pickle.dumps(value, protocol))
    assert not trace.exists()
    pickle.loads(pickle.dumps(Evil(str(trace)), protocol)).close()
    assert trace.exists()  # the same bytes do run under Python's own reader


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x02cos\nsystem\nq\x00)\x81.",  # NEWOBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x80\x02\x82\x01.",  # EXT1
        b"P1\n.",  # PERSID
        b"cnumpy\nndarray\n(K\x05\x85tR.",  # calls ndarray itself
        b"cnumpy\nload\n.",
        b"c__builtin__\nbytes\nJ\x00\x00\x00\x40\x85R.",  # a gigabyte of zeros
    ],
)
def test_programs_are_refused(program: bytes) -> None:
    with pytest.raises(RefusedError):
        loads(program)


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, None]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        np.array(["a"]),
        np.array([b"x"]),
    ],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_of_anything_but_numbers_are_refused(array: np.ndarray, protocol: int) -> None:
    with pytest.raises(RefusedError, match="not a plain number"):
        loads(pickle.dumps(array, protocol))


def test_memory_stays_within_the_file() -> None:
    text = "x" * 100_000
    encode = b"c_codecs\nencode\nq\x01"
    bomb = (
        b"\x80\x02"
        + pickle.dumps(text, 2)[2:-1]
        + b"q\x00"
        + encode
        + b"("
        + b"h\x01h\x00\x85R" * 1000
        + b"t."
    )
    with pytest.raises(RefusedError, match="more than the size"):
        loads(bomb)
    with pytest.raises(RefusedError):
        loads(b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"abc.")  # a text of a terabyte
    shape = pickle.dumps(np.zeros(3, dtype=np.uint8), 2).replace(
        b"K\x03\x85", b"J\xff\xff\xff\x7f\x85"
    )
    with pytest.raises(RefusedError):
        loads(shape)
    with pytest.raises(RefusedError, match="numbers more values"):
        loads(b"\x80\x02Nr\xff\xff\xff\xff.")  # a memo of four billion places, one of them used


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(RefusedError):
        loads(data + b"\xff")


@settings(max_examples=100)
@given(st.data())
def test_changed_bytes(data: st.DataObject) -> None:
    good = bytearray(
        pickle.dumps({"data": np.arange(6, dtype=np.uint8), "labels": [1, 2], b"k": "text"}, 2)
    )
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RefusedError):
        loads(bytes(good))
