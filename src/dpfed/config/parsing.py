"""Parse `key=value` options, and check the tables of a configuration against dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dpfed.config.key_history import without_deleted
from dpfed.errors import DpfedError


def overrides_layer(items: Sequence[str]) -> dict[str, Any]:
    """Return the command line's `section.key=value` options as nested dictionaries.

    The order of different keys has no effect. If a key is given twice, the last value counts. A
    value that is not valid TOML is taken as a plain string.
    """
    return layer_of([_override(item) for item in items])


def _override(item: str) -> tuple[str, Any]:
    key, equals, text = item.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise DpfedError(f"--set {item!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    # Python raises ValueError both for invalid TOML and for a number with too many digits.
    except (ValueError, RecursionError):
        value = text.strip()
    return key.strip(), value


def layer_of(settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs (dotted key, value) as nested dictionaries; the order of keys has no effect.

    Raise DpfedError if a key is set both to a value and to a table.
    """
    leaves: dict[tuple[str, ...], Any] = {}
    for key, value in settings:
        leaves.update(_leaves(tuple(key.split(".")), value))
    layer: dict[str, Any] = {}
    for path in sorted(leaves):
        table = layer
        for depth, part in enumerate(path[:-1], 1):
            if leaves.get(path[:depth], {}) != {}:
                outer = ".".join(path[:depth])
                raise DpfedError(
                    f"{outer} = {leaves[path[:depth]]!r} and {'.'.join(path)} exclude each other: "
                    "leave one of them out"
                )
            table = table.setdefault(part, {})
        table[path[-1]] = {} if leaves[path] == {} else leaves[path]
    return layer


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (full path, value) for every key inside the nested table `value`, which lies at `path`.

    If the value is no table or an empty table, yield (path, value) itself.
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves((*path, str(key)), inner)
    else:
        yield path, value


def parse(section: str, cls: type[Any], table: Mapping[str, Any]) -> Any:
    """Return an object of the dataclass `cls` with the values of a configuration table.

    Raise DpfedError for the first unknown key or wrong value.
    """
    hints = get_type_hints(cls, include_extras=True)
    known = [f.name for f in dataclasses.fields(cls)]
    table = without_deleted(section, table, known)
    refuse_unknown(section, table, known)
    values = {}
    for key, value in table.items():
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise DpfedError(f"{section}.{key} = {value!r} must be a table, [{section}.{key}]")
            values[key] = parse(f"{section}.{key}", hints[key], value)
        else:
            values[key] = _field(f"{section}.{key}", hints[key], value)
    return cls(**values)


def refuse_unknown(section: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise DpfedError(f"{section}.{key} is not a key of [{section}]{nearest(key, known)}")


@lru_cache(maxsize=1024)
def _adapter(hint: Any, allow_inf_nan: bool) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=allow_inf_nan))


def _field(key: str, hint: Any, value: Any) -> Any:
    # Turn TOML's lists into tuples, because the values of a frozen dataclass must not change.
    if isinstance(value, list):
        value = tuple(value)
    try:
        return _adapter(hint, value == value).validate_python(value, strict=True)
    except ValidationError as error:
        allowed = [_allowed(e["type"], e.get("ctx", {}), e["msg"]) for e in error.errors()]
        either = " or ".join(dict.fromkeys(a for a in allowed if a))
        raise DpfedError(f"{key} = {value!r} is not allowed: it must be {either}") from None


_COMPARE = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}
_TYPES = {
    "float_type": "a number",
    "finite_number": "a number",
    "int_type": "a whole number",
    "string_type": "a text in quotes",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "none_required": "",
}


def _allowed(kind: str, ctx: Mapping[str, Any], message: str) -> str:
    if kind in _COMPARE:
        name, sign = _COMPARE[kind]
        return f"{sign} {ctx[name]:g}"
    if kind == "literal_error":
        return "one of " + str(ctx["expected"]).replace(" or ", ", ")
    return _TYPES.get(kind, message.removeprefix("Input should be ").removeprefix("a "))


def nearest(word: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """Return ", did you mean WORD?" with the most similar known word; "" if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else ""
