"""Reads the pickles that data sets are published in, without running anything that they say.

A pickle is a small program for a stack machine, and Python's own machine would call whatever the program names. This one
knows only how to build numbers, texts, bytes, lists, tuples, dicts and arrays of plain numbers. Its globals are marks,
never functions: an array is made here from the bytes in the file, so the memory used stays within a few times the size
of the file. Everything else is refused before it happens.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DTYPES = frozenset(("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"))  # no objects, no records
MOST_VALUES = 20_000_000  # of one pickle: a bound where many tiny values would outgrow the file

GLOBALS = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    "_codecs encode": "encode",
    "__builtin__ bytes": "bytes",  # only ever called for b""
}


class RefusedError(Exception):
    """The pickle is damaged or asks for something that data does not need."""


@dataclass
class _Global:
    name: str


@dataclass
class _Dtype:
    code: str
    order: str = "="

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.code if self.order in "<>" else self.code)


@dataclass
class _Array:
    value: np.ndarray | None = None


@dataclass
class _Machine:
    budget: int
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise RefusedError("a value is missing")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or not isinstance(self.stack[-1], kind):
            raise RefusedError(f"a {kind.__name__.strip('_').lower()} is missing")
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise RefusedError("a mark is missing")
        at = self.marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def recall(self, index: int) -> Any:
        if index not in self.memo:
            raise RefusedError("it refers to a value that is not there")
        return self.memo[index]

    def drop(self) -> None:
        self.pop()

    def last(self) -> Any:
        if not self.stack:
            raise RefusedError("a value is missing")
        return self.stack[-1]


def loads(data: bytes) -> Any:
    """The value of a pickle. Raises RefusedError, whatever the bytes are."""
    machine = _Machine(budget=len(data))
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if opcode.name == "STOP":
                return _plain(machine.pop())
            if count > MOST_VALUES:
                raise RefusedError(f"it holds more than {MOST_VALUES:,} values")
            step = _STEPS.get(opcode.name)
            if step is None:
                raise RefusedError(f"it uses {opcode.name}, which no array, list or text needs")
            step(machine, argument)
    except RefusedError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, MemoryError) as error:
        raise RefusedError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    raise RefusedError("it ends too early")


def _plain(value: Any) -> Any:
    """The finished value, its arrays as numpy's; they may stand alone, in a list or under a dict's key."""

    def one(item: Any) -> Any:
        if isinstance(item, _Array):
            if item.value is None:
                raise RefusedError("an array has no content")
            return item.value
        if isinstance(item, _Global | _Dtype):
            raise RefusedError("it holds something other than data")
        return item

    if isinstance(value, dict):
        return {key: one(item) for key, item in value.items()}
    if isinstance(value, list):
        return [one(item) for item in value]
    return one(value)


def _key(value: Any) -> Any:
    if not isinstance(value, str | bytes | int):  # hashing deeply nested tuples would end the process
        raise RefusedError(f"a dict has a key of type {type(value).__name__}")
    return value


def _fill(mapping: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise RefusedError("a dict has a key without a value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        mapping[_key(key)] = value


def _global(name: str) -> _Global:
    if name not in GLOBALS:
        raise RefusedError(f"it asks for {name.replace(' ', '.')[:80]}, which is code and not data")
    return _Global(GLOBALS[name])


def _reduce(m: _Machine) -> Any:
    args, what = m.pop(), m.pop()
    if not isinstance(args, tuple) or not isinstance(what, _Global):
        raise RefusedError("it calls something other than an array's maker")
    if what.name == "encode":
        if len(args) not in (1, 2) or not isinstance(args[0], str) or args[1:] not in ((), ("latin1",), (b"latin1",)):
            raise RefusedError("it encodes something other than text as bytes")
        m.budget -= len(args[0])  # one text may not be encoded over and over
        if m.budget < 0:
            raise RefusedError("it unpacks to more than the size of the file")
        return args[0].encode("latin-1")
    if what.name == "bytes" and args == ():
        return b""
    if what.name == "dtype":
        code = args[0].decode("latin-1") if args and isinstance(args[0], bytes) else args[0] if args else None
        if code not in DTYPES:
            raise RefusedError(f"it holds an array of type {str(code)[:20]!r}, which is not a plain number")
        return _Dtype(str(code))
    if what.name == "array" and args and isinstance(args[0], _Global) and args[0].name == "ndarray":
        return _Array()
    raise RefusedError("it makes an array in a way that is not known")


def _build(m: _Machine) -> None:
    state, target = m.pop(), m.last()
    if not isinstance(state, tuple):
        raise RefusedError("the state of an array is not a tuple")
    if isinstance(target, _Dtype) and len(state) >= 2:
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise RefusedError("it holds an array of records, not of plain numbers")
        target.order = order
    elif isinstance(target, _Array) and len(state) == 5 and target.value is None:
        _, shape, dtype, fortran, raw = state
        if isinstance(raw, str):  # Python 2 wrote the bytes as a text
            raw = raw.encode("latin-1")
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes) or not isinstance(shape, tuple):
            raise RefusedError("an array's content is not bytes")
        if not all(type(n) is int and n >= 0 for n in shape) or len(shape) > 8:
            raise RefusedError("an array's shape is not a list of whole numbers")
        target.value = np.frombuffer(raw, dtype.numpy()).reshape(shape, order="F" if fortran else "C")
    else:
        raise RefusedError("it sets the state of something other than an array")


def _list(m: _Machine, items: list[Any]) -> None:
    m.top(list).extend(items)


def _append(m: _Machine) -> None:
    item = m.pop()
    m.top(list).append(item)


def _set_item(m: _Machine) -> None:
    value, key = m.pop(), m.pop()
    m.top(dict)[_key(key)] = value


def _set_items(m: _Machine) -> None:
    items = m.since_mark()
    _fill(m.top(dict), items)


def _new_dict(m: _Machine) -> None:
    made: dict[Any, Any] = {}
    _fill(made, m.since_mark())
    m.stack.append(made)


def _tuple(m: _Machine, count: int) -> None:
    items = [m.pop() for _ in range(count)]
    m.stack.append(tuple(items[::-1]))


def _stack_global(m: _Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise RefusedError("it asks for something without a name")
    m.stack.append(_global(f"{module} {name}"))


def _push(m: _Machine, value: Any) -> None:
    m.stack.append(value)


Step = Callable[[_Machine, Any], None]
_VALUES = """INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING
BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"""
_STEPS: dict[str, Step] = {
    **dict.fromkeys(_VALUES.split(), _push),
    "PROTO": lambda m, a: None,
    "FRAME": lambda m, a: None,
    "MARK": lambda m, a: m.marks.append(len(m.stack)),
    "POP": lambda m, a: m.drop(),
    "POP_MARK": lambda m, a: m.since_mark().clear(),
    "NONE": lambda m, a: _push(m, None),
    "NEWTRUE": lambda m, a: _push(m, True),
    "NEWFALSE": lambda m, a: _push(m, False),
    "EMPTY_LIST": lambda m, a: _push(m, []),
    "EMPTY_DICT": lambda m, a: _push(m, {}),
    "EMPTY_TUPLE": lambda m, a: _push(m, ()),
    "LIST": lambda m, a: _push(m, m.since_mark()),
    "TUPLE": lambda m, a: _push(m, tuple(m.since_mark())),
    "TUPLE1": lambda m, a: _tuple(m, 1),
    "TUPLE2": lambda m, a: _tuple(m, 2),
    "TUPLE3": lambda m, a: _tuple(m, 3),
    "DICT": lambda m, a: _new_dict(m),
    "APPEND": lambda m, a: _append(m),
    "APPENDS": lambda m, a: _list(m, m.since_mark()),
    "SETITEM": lambda m, a: _set_item(m),
    "SETITEMS": lambda m, a: _set_items(m),
    "GET": lambda m, a: _push(m, m.recall(int(a))),
    "BINGET": lambda m, a: _push(m, m.recall(a)),
    "LONG_BINGET": lambda m, a: _push(m, m.recall(a)),
    "PUT": lambda m, a: m.memo.__setitem__(int(a), m.last()),
    "BINPUT": lambda m, a: m.memo.__setitem__(a, m.last()),
    "LONG_BINPUT": lambda m, a: m.memo.__setitem__(a, m.last()),
    "MEMOIZE": lambda m, a: m.memo.__setitem__(len(m.memo), m.last()),
    "GLOBAL": lambda m, a: _push(m, _global(a)),
    "STACK_GLOBAL": lambda m, a: _stack_global(m),
    "REDUCE": lambda m, a: _push(m, _reduce(m)),
    "BUILD": lambda m, a: _build(m),
}
