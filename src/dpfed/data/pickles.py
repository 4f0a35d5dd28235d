"""Read pickles of arrays, lists and texts without running the code that a pickle can contain.

CIFAR is published in this format.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np

from dpfed.errors import reason

PLAIN_DTYPES = frozenset(("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"))
MEMO_OPCODES = ("PUT", "BINPUT", "LONG_BINPUT")
ARRAY_CLASS = object()


class RefusedError(Exception):
    """The pickle is damaged, or names a class or function that arrays and strings do not need."""


class _DataUnpickler(pickle.Unpickler):
    """An unpickler that reads arrays, lists and texts, and runs no code that a pickle names.

    A pickle names the functions that rebuild its values. This class accepts only the names of
    functions for arrays and byte strings, and runs a safe function in place of each.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")
        self._text_left = len(data)
        self._known = {
            "numpy.core.multiarray._reconstruct": self._array,
            "numpy._core.multiarray._reconstruct": self._array,
            "numpy.ndarray": ARRAY_CLASS,
            "numpy.dtype": self._dtype,
            "_codecs.encode": self._encode,
            "__builtin__.bytes": self._no_bytes,
            "builtins.bytes": self._no_bytes,
        }

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in self._known:
            raise RefusedError(f"it asks for {path[:80]}, which is code and not data")
        return self._known[path]

    def _array(self, kind: Any, shape: Any, code: Any) -> np.ndarray:
        # Ignore `shape`: a malicious pickle could make it very large and so fill the memory. The
        # array gets its real shape and content later, with its state.
        if kind is not ARRAY_CLASS:
            raise RefusedError("it makes an array in a way that is not known")
        return np.empty(0, np.uint8)

    def _dtype(self, code: Any, align: Any = False, copy: Any = True) -> np.dtype[Any]:
        name = code.decode("latin1") if isinstance(code, bytes) else code
        if name not in PLAIN_DTYPES:
            raise RefusedError(
                f"it holds an array of type {str(name)[:20]!r}, which is not a plain number"
            )
        return np.dtype(name, align=False, copy=True)

    def _encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise RefusedError("it encodes something other than text as bytes")
        self._text_left -= len(text)
        if self._text_left < 0:
            raise RefusedError("it unpacks to more than the size of the file")
        return text.encode("latin1")

    def _no_bytes(self) -> bytes:
        return b""


def loads(data: bytes) -> Any:
    """Return the value in a pickle of plain data: numbers, texts, lists, dictionaries and arrays.

    Raise RefusedError for any other pickle.
    """
    try:
        for opcode, argument, _ in pickletools.genops(data):
            # A pickle stores values in a table (memo) by index. Refuse a huge index, because the
            # unpickler would allocate a table of this length.
            if opcode.name in MEMO_OPCODES and int(argument or 0) > len(data):
                raise RefusedError("it numbers more values than it has bytes")
        return _DataUnpickler(data).load()
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise RefusedError(reason(error)) from None
