"""Valid files changed at random: bytes of any file, and values of those that are JSON or TOML.

The generator of the caller decides everything: Hypothesis's in the tests, a seeded one in
fuzz_loop.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

Files = dict[str, bytes]
SMALL: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    0.5,
    -0.0,
    "",
    "x",
    "\ud800",
    "0",
    "../../x",
    [],
    {},
    [[]],
    [1, "x"],
)
ODD: tuple[Any, ...] = (
    *SMALL,
    float("nan"),
    float("inf"),
    -float("inf"),
    1e308,
    1e-320,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    "\x00",
    "a" * 300,
    {"": None},
    [None] * 50,
)
NESTED = (
    b"[" * 20_000,
    b'{"a":' * 20_000,
    b"a = " + b"[" * 5_000,
    b"9" * 5_000,
    b"\xff\xfe",
    b"\x00" * 64,
    b"null",
    b"[]",
)


def mutate(rng: Random, name: str, content: bytes, odd: tuple[Any, ...] = ODD) -> bytes:
    """Return the files after one change, or rarely several."""
    out = content
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if name.endswith((".json", ".jsonl")) and rng.random() < 0.6:
            out = change_value(rng, out, odd)
        else:
            out = change_bytes(rng, out)
    return out


def change_bytes(rng: Random, content: bytes) -> bytes:
    how = rng.choice(("bytes", "bytes", "bytes", "cut", "insert", "repeat", "swap", "whole"))
    if how == "whole":
        return rng.choice((b"", rng.randbytes(rng.randrange(100)), rng.choice(NESTED)))
    if not content:
        return rng.randbytes(8)
    at = rng.randrange(len(content))
    if how == "cut":
        return content[:at]
    if how == "insert":
        return content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at:]
    if how == "repeat":
        return content[:at] + content[at : at + 40] * rng.randrange(2, 5) + content[at:]
    if how == "swap":
        return (
            content[:at]
            + rng.choice((*NESTED[4:], b'"', b"]", b"}", b"=", b"-", b"1e999", b"NaN"))
            + content[at + 1 :]
        )
    out = bytearray(content)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(min(len(out), 400) if rng.random() < 0.5 else len(out))
        out[place] = rng.choice((rng.randrange(256), out[place] ^ (1 << rng.randrange(8)), 0, 255))
    return bytes(out)


def change_value(rng: Random, content: bytes, odd: tuple[Any, ...]) -> bytes:
    """Replace, delete or add one value in the JSON of a file or of one of its lines."""
    lines = content.splitlines(keepends=True)
    whole = not all(line.strip().startswith(b"{") for line in lines)
    at = 0 if whole or not lines else rng.randrange(len(lines))
    try:
        tree = json.loads(content if whole else lines[at])
    except (ValueError, RecursionError, IndexError):
        return change_bytes(rng, content)
    changed = json.dumps(_changed(rng, tree, odd)).encode()
    return changed if whole else b"".join([*lines[:at], changed + b"\n", *lines[at + 1 :]])


def _changed(rng: Random, tree: Any, odd: tuple[Any, ...]) -> Any:
    keys = (
        list(tree)
        if isinstance(tree, dict)
        else list(range(len(tree)))
        if isinstance(tree, list)
        else []
    )
    if not keys or rng.random() < 0.05:
        return rng.choice(odd)
    key = rng.choice(keys)
    how = rng.random()
    if how < 0.1:
        tree.pop(key)
    elif how < 0.15 and isinstance(tree, dict):
        tree[rng.choice(("x", "", str(key) + " ", "-1", "999999999999999999999"))] = tree[key]
    elif isinstance(tree[key], dict | list) and tree[key] and how < 0.9:
        tree[key] = _changed(rng, tree[key], odd)
    else:
        tree[key] = rng.choice(odd)
    return tree


def read_folder(folder: Path) -> Files:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def write_folder(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
