"""What the readers of files share: where they are, what is said when they are missing or damaged, and how archives are read."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import numpy as np

from dpfed.config import DataSection
from dpfed.data.cache import Arrays, cached
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError

MOST_BYTES = (
    1 << 30
)  # of one member of an archive: far above any published one, far below what would end the process
DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    zlib.error,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    MemoryError,
    NotImplementedError,  # a compression method that zipfile does not know
    RuntimeError,  # an encrypted zip
    OverflowError,
    KeyError,
)


def path_of(section: DataSection, what: str, url: str) -> Path:
    """`data.path`, or a sentence that says what to download and what to set."""
    if section.path is None:
        raise DpfedError(
            f'data.name = "{section.name}" reads files: download {url} and set data.path to {what}'
        )
    path = Path(section.path).expanduser()
    with reading(path):
        if not path.exists():
            raise missing(path, what, url)
    return path


def missing(path: Path, what: str, url: str) -> DpfedError:
    return DpfedError(f"there is no {path}: download {url} and set data.path to {what}")


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Whatever a damaged file makes a library raise becomes one sentence that names the file."""
    try:
        yield
    except DpfedError:
        raise
    except DAMAGE as error:
        raise DpfedError(f"{path} cannot be read: {reason(error)}") from None


def reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return text.splitlines()[0][:200] if text.strip() else type(error).__name__


def read_bytes(path: Path) -> bytes:
    """The content of a file, of a .gz file unpacked."""
    with reading(path):
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError("it unpacks to more than 1 GiB")
        return data


def lines_of(data: bytes, label: str) -> Iterator[str]:
    """The lines of a UTF-8 text. Only a line feed ends a line: sentences may hold any other separator."""
    for number, line in enumerate(io.BytesIO(data.removeprefix(b"\xef\xbb\xbf")), 1):
        try:
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            raise DpfedError(f"line {number} of {label} is not UTF-8 text") from None


def check_md5(path: Path, published: str, url: str) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with reading(path), path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != published:
        raise DpfedError(
            f"{path} has md5 {digest.hexdigest()}, the published file {published}: download it again from {url}, or set "
            "data.check = false to read it as it is"
        )


def tar_members(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Files of a tar archive by their last name. Nothing is unpacked to disk."""
    found: dict[str, bytes] = {}
    with reading(path), tarfile.open(path, "r:*") as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            if name not in wanted or not member.isreg():
                continue
            if member.size > MOST_BYTES:
                raise ValueError(f"{member.name} in it is {member.size:,} bytes long")
            stream = tar.extractfile(member)
            data = stream.read() if stream else b""
            if len(data) != member.size:
                raise EOFError(f"it ends inside {member.name}")
            found[name] = data
        while tar.fileobj is not None and tar.fileobj.read(
            1 << 20
        ):  # to the end, where the compression's checksum is
            pass
    return found


def expect_count(found: int, official: int | Collection[int], label: str, url: str) -> None:
    """Counts as published; a set with other counts is another set, or a part of one."""
    counts = (official,) if isinstance(official, int) else tuple(official)
    if found not in counts:
        raise DpfedError(
            f"{label} has {found:,} records, the published set {counts[0]:,}: download it again from {url}, or set "
            "data.check = false to read it as it is"
        )


def image_source(
    key: str, build: Callable[[], Arrays], declared: bool = True, notes: tuple[str, ...] = ()
) -> Source:
    """A source of images from the cache; `build` gives train_x, train_y, test_x, test_y and the classes' names."""
    arrays = cached(key, build)
    parts = {
        part: Table(
            {"pixel_values": np.asarray(arrays[f"{part}_x"])}, np.asarray(arrays[f"{part}_y"])
        )
        for part in ("train", "test")
    }
    return Source(
        train=parts["train"],
        test=parts["test"],
        classes=tuple(str(name) for name in arrays["names"]),
        kind="image",
        declared=declared,
        fingerprint=key,
        notes=notes,
    )
