"""Create files and folders that only their owner can read, whatever the umask is."""

from __future__ import annotations

import fcntl
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
    """Create a folder and its missing parents, all with mode 0700.

    If the folder exists already, its mode is changed to 0700. Existing parents keep their mode.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=OWNER_FOLDER, exist_ok=True)
        _restrict(folder)
    _restrict(path)


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file for writing; set its mode to 0600 before the first byte is written."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags & ~os.O_TRUNC, OWNER_FILE)
        try:
            # Set the mode explicitly. `os.open` does not change the mode of an existing file, which
            # other users might be able to read.
            if stat.S_IMODE(os.fstat(descriptor).st_mode) != OWNER_FILE:
                os.fchmod(descriptor, OWNER_FILE)
            if flags & os.O_TRUNC:
                os.ftruncate(descriptor, 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)


def lock_file(path: Path) -> IO[bytes]:
    """Create the file at `path`, lock it, and return it open. Closing it ends the lock.

    Raise BlockingIOError if another process has the lock. The system ends the lock when its process
    ends, even after a crash.
    """
    file = open_private(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def replace_file(path: Path, write: Callable[[IO[bytes]], object], private: bool = True) -> None:
    """Replace a file atomically: after a crash it has either its old or its new content.

    write    writes the new content to the open file that it gets
    private  True: only the owner can read the file; False: the umask decides
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with open_private(part, "wb") if private else part.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        # If removing the partial file fails too, ignore this error, so that the first error is
        # reported.
        with suppress(OSError):
            part.unlink()
        raise
    # Also write the folder to disk. Otherwise a crash could undo the renaming of the file.
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Wait until the content of a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def restrict_tree(folder: Path) -> None:
    """Set mode 0700 for a folder and the folders in it, and 0600 for their files; skip links."""
    for parent, _, names in os.walk(folder):
        _restrict(Path(parent))
        for name in names:
            restrict_file(Path(parent) / name)


def restrict_file(path: Path) -> None:
    """Set mode 0600 for a regular file; do nothing if it is missing or a link."""
    try:
        found = path.lstat().st_mode
    except FileNotFoundError:
        # Another process may remove the file at any time, which is no error.
        return
    if stat.S_ISREG(found) and stat.S_IMODE(found) != OWNER_FILE:
        path.chmod(OWNER_FILE)


def _restrict(folder: Path) -> None:
    if stat.S_IMODE(folder.stat().st_mode) != OWNER_FOLDER:
        folder.chmod(OWNER_FOLDER)
