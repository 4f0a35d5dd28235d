"""Files and folders that only their owner can read, whatever the umask is."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

OWNER_FILE = 0o600
OWNER_FOLDER = 0o700
OWNER_UMASK = 0o077


def make_private_folder(path: Path) -> None:
    """Make a folder and its missing parents with mode 0700; restrict the folder if it exists."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=OWNER_FOLDER, exist_ok=True)
        _restrict(folder)
    _restrict(path)


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file for writing; it has mode 0600 before the first byte is written."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags & ~os.O_TRUNC, OWNER_FILE)
        try:
            # A file that was there before may be open to others.
            if stat.S_IMODE(os.fstat(descriptor).st_mode) != OWNER_FILE:
                os.fchmod(descriptor, OWNER_FILE)
            if flags & os.O_TRUNC:
                os.ftruncate(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)


def replace_file(path: Path, write: Callable[[IO[bytes]], object], private: bool = True) -> None:
    """Write a file in one step: after a crash it has either the old or the new content.

    Only its owner can read it; without `private` the umask decides.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with open_private(part, "wb") if private else part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        # On a full or broken disk the removal may fail too.
        with suppress(OSError):
            part.unlink()
        raise
    # The rename is on the disk only when its folder is.
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def restrict_tree(folder: Path) -> None:
    """Restrict an existing folder and everything in it; links are left alone."""
    for parent, _, names in os.walk(folder):
        _restrict(Path(parent))
        for name in names:
            restrict_file(Path(parent) / name)


def restrict_file(path: Path) -> None:
    """Restrict a file to its owner, if it exists and is no link."""
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        # Another process removed it in the meantime.
        return
    if stat.S_ISREG(found) and stat.S_IMODE(found) != OWNER_FILE:
        path.chmod(OWNER_FILE)


def _restrict(folder: Path) -> None:
    if stat.S_IMODE(folder.stat().st_mode) != OWNER_FOLDER:
        folder.chmod(OWNER_FOLDER)
