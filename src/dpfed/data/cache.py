"""Cache of prepared arrays on disk: an archive is decoded once and memory-mapped afterwards.

An entry of the cache is a folder of .npy files and a manifest, a JSON file that lists them. The
folder is written under a temporary name and then renamed, so that a reader finds a whole entry or
none. A damaged entry is built again. If the cache cannot be written (read-only, full, owned by
another user), the run uses the newly built arrays.

The cache is in the folder DPFED_CACHE, else XDG_CACHE_HOME/dpfed, else ~/.cache/dpfed.
DPFED_CACHE=off turns the cache off. Entries may hold private records, so only their owner can open
the folder. The user may delete the folder at any time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "manifest.json"
STALE_SECONDS = 24 * 3600

Arrays = dict[str, np.ndarray]


def cache_folder() -> Path | None:
    """Return the folder of the cache; None if the cache is off or the user has no home folder."""
    own = os.environ.get("DPFED_CACHE")
    if own == "off":
        return None
    if own:
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(xdg or Path.home() / ".cache") / "dpfed"
    except RuntimeError:
        return None


def key_of(
    name: str,
    version: int,
    files: Sequence[Path | str] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the key of a cache entry: a hash of its source's name, version, files and options.

    name     name of the data source
    version  version of the entry's format
    files    raw files; the key changes with the path, size or modification time of any of them
    options  settings that change the prepared arrays
    """
    facts = []
    # Resolve each folder only once, instead of the path of every file. Resolving 100,000 paths of
    # images one by one takes seconds.
    folders: dict[str, str] = {}
    for file in files:
        stat = os.stat(file)
        folder, last = os.path.split(file)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        facts.append([folders[folder], last, stat.st_size, stat.st_mtime_ns])
    text = json.dumps([name, version, facts, dict(options or {})], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def cached(key: str, build: Callable[[], Arrays], folder: Path | None = None) -> Arrays:
    """Return the arrays that `build` makes, from the cache if it has an entry for `key`.

    Otherwise call `build` and store its arrays in the cache. The caller may change the returned
    arrays: this does not change the files of the cache.
    """
    root = folder or cache_folder()
    if root is None:
        return build()
    entry = root / hashlib.sha256(key.encode()).hexdigest()[:40]
    found = _read(entry, key)
    if found is not None:
        return found
    arrays = build()
    try:
        _write(root, entry, key, arrays)
    except OSError:
        return arrays
    return _read(entry, key) or arrays


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read(entry: Path, key: str) -> Arrays | None:
    """Return the arrays of a cache entry; None if it is missing, damaged or has another key."""
    try:
        manifest = json.loads((entry / MANIFEST).read_text(encoding="utf-8"))
        facts = manifest["facts"]
        if manifest["sha256"] != _digest(facts) or facts["key"] != key:
            return None
        arrays: Arrays = {}
        for name, (size, dtype, shape) in facts["arrays"].items():
            file = entry / f"{name}.npy"
            # Mode "c" (copy on write) keeps changes by the caller in memory, so the file stays as
            # it is. An empty array cannot be memory-mapped, so it is read.
            mode: Any = None if 0 in shape else "c"
            array = np.load(file, mmap_mode=mode, allow_pickle=False)
            if [file.stat().st_size, array.dtype.str, list(array.shape)] != [size, dtype, shape]:
                return None
            arrays[name] = array
        return arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError):
        return None


def _write(root: Path, entry: Path, key: str, arrays: Arrays) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(root)
    # mkdtemp makes a folder that only its owner can open, because entries may be private.
    new = Path(tempfile.mkdtemp(suffix=".tmp", dir=root))
    try:
        facts: dict[str, Any] = {"key": key, "arrays": {}}
        for name, array in arrays.items():
            file = new / f"{name}.npy"
            with file.open("wb") as out:
                np.save(out, array, allow_pickle=False)
                out.flush()
                os.fsync(out.fileno())
            facts["arrays"][name] = [file.stat().st_size, array.dtype.str, list(array.shape)]
        with (new / MANIFEST).open("w", encoding="utf-8") as text:
            json.dump({"facts": facts, "sha256": _digest(facts)}, text)
            text.flush()
            os.fsync(text.fileno())
        if _read(entry, key) is None:
            # If an entry exists here, it is damaged: delete it. Another process that has
            # memory-mapped its files can still read them afterwards.
            shutil.rmtree(entry, ignore_errors=True)
        if not entry.exists():
            new.rename(entry)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Remove temporary folders that killed processes left behind more than a day ago."""
    for folder in root.glob("*.tmp"):
        try:
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def pack_text(name: str, texts: Sequence[str]) -> Arrays:
    """Return the texts as two arrays: the UTF-8 bytes of all texts, and the bounds of each text.

    The cache can store only arrays. Text i has the bytes from `bounds[i]` to `bounds[i + 1]`.
    """
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    return {
        f"{name}.bytes": np.frombuffer(b"".join(parts), dtype=np.uint8),
        f"{name}.bounds": np.cumsum([0, *map(len, parts)], dtype=np.int64),
    }


def unpack_text(name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the texts that `pack_text` stored under `name`, as an array of Python strings."""
    blob = arrays[f"{name}.bytes"].tobytes()
    bounds = itertools.pairwise(arrays[f"{name}.bounds"].tolist())
    return text_array([blob[a:b].decode("utf-8", "surrogatepass") for a, b in bounds])


def text_array(texts: Sequence[str]) -> np.ndarray:
    """Return the texts as an array of Python strings.

    An array of numpy's own string type would give every element the width of the longest text.
    """
    out = np.empty(len(texts), dtype=object)
    out[:] = texts
    return out
