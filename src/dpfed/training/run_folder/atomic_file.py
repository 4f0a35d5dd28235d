"""Write files atomically: after a crash a file has either its old or its new content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dpfed.errors import DpfedError
from dpfed.privacy.ledger.private_files import make_private_folder, replace_file


def write_file(path: Path, write: Callable[[IO[bytes]], object], for_release: bool = False) -> str:
    """Write a file atomically, and return the SHA-256 of its content.

    write        function that gets the open file and writes the content into it
    for_release  False: only the owner can read the file and the folders that are created for it;
                 True: the umask sets the permissions
    """
    with short_errors(path):
        if for_release:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.parent.is_dir():
            make_private_folder(path.parent)
        replace_file(path, write, private=not for_release)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def short_errors(path: Path, done: str = "written") -> Iterator[None]:
    """Convert an OSError, such as for a full disk, to a DpfedError of one sentence for the user.

    done  participle that completes "cannot be ..." in the sentence, such as "read"
    """
    try:
        yield
    except OSError as error:
        raise DpfedError(f"{path} cannot be {done}: {error.strerror or error}") from None
