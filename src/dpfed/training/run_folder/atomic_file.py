"""Files that are there whole or not at all: written beside, synced, renamed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from dpfed.errors import DpfedError
from dpfed.privacy.private_files import make_private_folder, open_private


def write_file(path: Path, write: Callable[[IO[bytes]], object], for_release: bool = False) -> str:
    """Writes through `write`, replaces `path` only when all bytes are on the disk, and returns their SHA-256.

    Only its owner can read the file and the folders made for it. With `for_release` the umask decides.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        if for_release:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            make_private_folder(path.parent)
        with beside.open("wb") if for_release else open_private(beside, "wb") as file:
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
