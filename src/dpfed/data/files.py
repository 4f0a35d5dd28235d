"""Read files and archives. A missing or damaged file raises a DpfedError that names the file."""

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
from dpfed.errors import DpfedError, reason

# Largest accepted size in bytes of an unpacked file; all published files are smaller. The limit
# protects against damaged or malicious archives.
MOST_BYTES = 1 << 30
# Errors that libraries raise for a damaged file. zipfile raises NotImplementedError for an unknown
# compression and RuntimeError for an encrypted file.
DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    zlib.error,
    struct.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    OverflowError,
    KeyError,
)


def path_of(section: DataSection, what: str, url: str) -> Path:
    """Return the path in `data.path`. Raise DpfedError if it is not set or does not exist.

    The error message names the file to download, and its address.

    what  description of the file or folder that `data.path` must be, for the error
    url   address to download it from, for the error
    """
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
    """Within this context, turn errors of damaged files into a DpfedError that names `path`."""
    try:
        yield
    except DpfedError:
        raise
    except DAMAGE as error:
        raise DpfedError(f"{path} cannot be read: {reason(error)}") from None


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; a .gz file is decompressed."""
    with reading(path):
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path) as stream:
            data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError("it unpacks to more than 1 GiB")
        return data


def lines_of(data: bytes, label: str) -> Iterator[str]:
    """Yield the lines of UTF-8 text without their line ends. `label` names the file in errors.

    Only a line feed ends a line. Unicode has other line breaks, which may occur within a text.
    """
    for number, line in enumerate(io.BytesIO(data.removeprefix(b"\xef\xbb\xbf")), 1):
        try:
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError:
            raise DpfedError(f"line {number} of {label} is not UTF-8 text") from None


def check_md5(path: Path, published: str, url: str) -> None:
    """Raise DpfedError if the file does not have the md5 checksum `published`.

    url  address from which to download the file again, for the error
    """
    with reading(path), path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != published:
        raise DpfedError(
            f"{path} has md5 {found}, the published file {published}: "
            f"download it again from {url}, or set data.check = false to read it as it is"
        )


def tar_members(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Return the contents of the wanted files in a tar archive, by file name without folders.

    The archive is unpacked in memory; nothing is written to disk.
    """
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
        # Read the archive to its end, because gzip verifies the checksum of its content only there.
        while tar.fileobj is not None and tar.fileobj.read(1 << 20):
            pass
    return found


def expect_count(found: int, official: int | Collection[int], label: str, url: str) -> None:
    """Raise DpfedError if a data set does not have the published number of records.

    found     number of records in the user's files
    official  the published number of records, or a collection of accepted numbers
    label     name of the file or folder, for the error
    url       address from which to download it again, for the error
    """
    counts = (official,) if isinstance(official, int) else tuple(official)
    if found not in counts:
        raise DpfedError(
            f"{label} has {found:,} records, the published set {counts[0]:,}: download it again "
            f"from {url}, or set data.check = false to read it as it is"
        )


def image_source(
    key: str, build: Callable[[], Arrays], declared: bool = True, notes: tuple[str, ...] = ()
) -> Source:
    """Return the data source of a set of labelled images. Its arrays are cached on disk.

    key       key of the cache entry
    build     returns the arrays train_x, train_y, test_x, test_y and names (of the classes), if the
              cache does not have them
    declared  True if the number of classes is public, as for a published data set
    notes     remarks for the user about the files
    """
    arrays = {name: np.asarray(array) for name, array in cached(key, build).items()}
    return Source(
        train=Table({"pixel_values": arrays["train_x"]}, arrays["train_y"]),
        test=Table({"pixel_values": arrays["test_x"]}, arrays["test_y"]),
        classes=tuple(map(str, arrays["names"])),
        kind="image",
        declared=declared,
        fingerprint=key,
        notes=notes,
    )
