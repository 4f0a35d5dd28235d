"""Files that are there whole or not at all: written beside, synced, renamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from dpfed.errors import DpfedError


def write_file(path: Path, write: Callable[[IO[bytes]], object], secret: bool = False) -> str:
    """Writes through `write`, replaces `path` only when all bytes are on the disk, and returns their SHA-256.

    A `secret` file is its owner's alone from the first byte on.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(
            os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o666), "wb"
        ) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        digest = hashlib.sha256(beside.read_bytes()).hexdigest()
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            beside.unlink()
        raise DpfedError(f"{path} cannot be written: {error.strerror or error}") from None
    return digest


def sync_folder(folder: Path) -> None:
    """A rename is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
