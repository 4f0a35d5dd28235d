"""Atomic writing: the mode of files, and failures midway."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from dpfed.training.run_folder.atomic_file import write_file


def test_a_file_is_never_readable_by_others(tmp_path: Path) -> None:
    seen: list[int] = []

    def write(file: IO[bytes]) -> None:
        file.write(b"key")
        seen.append((tmp_path / ".k.part").stat().st_mode & 0o777)

    write_file(tmp_path / "k", write)
    assert seen == [0o600]
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600


def test_a_file_for_release_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_file(tmp_path / "export" / "k", lambda file: file.write(b"model"), for_release=True)
    finally:
        os.umask(before)
    assert (tmp_path / "export").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "export" / "k").stat().st_mode & 0o777 == 0o644
