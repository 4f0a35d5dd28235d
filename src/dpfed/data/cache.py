"""Prepared arrays kept on disk, so that an archive is decoded once and mapped into memory afterwards.

An entry is a folder of plain .npy files beside a small manifest. It is written under another name, synced and renamed, so
a reader meets a whole entry or none; one that does not fit its manifest is built again. A cache that cannot be written
(read-only, full, another user's) never fails a run: the arrays are then used as they were built.

The folder is DPFED_CACHE, else XDG_CACHE_HOME/dpfed, else ~/.cache/dpfed; DPFED_CACHE=off keeps nothing. It may hold
private records: only its owner can open it, and it can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "manifest.json"
STALE_SECONDS = 24 * 3600
SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Arrays = dict[str, np.ndarray]


def cache_folder() -> Path | None:
    """Where entries are kept; None where the user wants none or there is no home."""
    own, xdg = os.environ.get("DPFED_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return None if own == "off" else Path(own)
    try:
        return Path(xdg) / "dpfed" if xdg else Path.home() / ".cache" / "dpfed"
    except RuntimeError:
        return None


def key_of(
    name: str,
    version: int,
    files: Sequence[Path | str] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """Names an entry: who made it, in which format, from which files as they are now, with which options."""
    facts = []
    folders: dict[str, str] = {}  # resolving each of 100,000 images anew would take seconds
    for file in files:
        stat = os.stat(file)
        folder, last = os.path.split(file)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        facts.append([folders[folder], last, stat.st_size, stat.st_mtime_ns])
    text = json.dumps([name, version, facts, dict(options or {})], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def cached(key: str, build: Callable[[], Arrays], folder: Path | None = None) -> Arrays:
    """The arrays that `build` gives, from disk where they are there. They are private copies on write: changes stay here."""
    root = folder or cache_folder()
    if root is None:
        return build()
    entry = root / hashlib.sha256(key.encode()).hexdigest()[:40]
    found = _read(entry, key)
    if found is not None:
        return found
    arrays = build()
    for name, array in arrays.items():
        if not SAFE.fullmatch(name) or array.dtype.hasobject:
            raise ValueError(f"array {name!r} of type {array.dtype} cannot be kept as a plain file")
    try:
        _write(root, entry, key, arrays)
    except OSError:
        return arrays
    return _read(entry, key) or arrays


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read(entry: Path, key: str) -> Arrays | None:
    """The arrays of an entry, or None where there is none or it is damaged in any way."""
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        facts = manifest["facts"]
        if manifest["sha256"] != _digest(facts) or facts["key"] != key:
            return None
        arrays: Arrays = {}
        for name, (size, dtype, shape) in facts["arrays"].items():
            file = entry / f"{name}.npy"
            if file.stat().st_size != size:
                return None
            # "c": changes stay in this process, and torch takes the array without a word about writing
            empty = 0 in shape
            array = np.load(file, mmap_mode=None if empty else "c", allow_pickle=False)
            if array.dtype.str != dtype or list(array.shape) != shape:
                return None
            arrays[name] = array
        return arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError):
        return None


def _write(root: Path, entry: Path, key: str, arrays: Arrays) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(root)
    beside = Path(
        tempfile.mkdtemp(suffix=".tmp", dir=root)
    )  # mkdtemp: only the owner may look inside
    try:
        facts: dict[str, Any] = {"key": key, "arrays": {}}
        for name, array in arrays.items():
            file = beside / f"{name}.npy"
            with file.open("wb") as out:
                np.save(out, array, allow_pickle=False)
                out.flush()
                os.fsync(out.fileno())
            facts["arrays"][name] = [file.stat().st_size, array.dtype.str, list(array.shape)]
        with (beside / MANIFEST).open("w", encoding="utf-8") as text:
            json.dump({"facts": facts, "sha256": _digest(facts)}, text)
            text.flush()
            os.fsync(text.fileno())
        if entry.exists() and _read(entry, key) is None:
            _set_aside(entry)
        if not entry.exists():  # else another process was faster, with the same arrays
            beside.rename(entry)
            _sync_folder(root)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _set_aside(entry: Path) -> None:
    """A damaged entry makes room in one step; a process that still maps its files keeps them."""
    old = Path(tempfile.mkdtemp(suffix=".tmp", dir=entry.parent)) / "old"
    entry.rename(old)
    shutil.rmtree(old.parent, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(root: Path) -> None:
    """Removes what a process that was killed while writing has left."""
    for left in root.glob("*.tmp"):
        try:
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue


def pack_text(name: str, texts: Sequence[str]) -> Arrays:
    """Strings as two arrays: all their UTF-8 bytes, and where each begins."""
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    bounds = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=bounds[1:])
    return {
        f"{name}.bytes": np.frombuffer(b"".join(parts), dtype=np.uint8),
        f"{name}.bounds": bounds,
    }


def unpack_text(name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The strings of `pack_text`, as an array of objects."""
    blob = arrays[f"{name}.bytes"].tobytes()
    bounds = arrays[f"{name}.bounds"].tolist()
    return text_array(
        [blob[a:b].decode("utf-8", "surrogatepass") for a, b in itertools.pairwise(bounds)]
    )


def text_array(texts: Sequence[str]) -> np.ndarray:
    """An array of Python strings; one that numpy makes itself would be as wide as the longest."""
    out = np.empty(len(texts), dtype=object)
    out[:] = texts
    return out
