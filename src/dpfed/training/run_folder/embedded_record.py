"""Store the spending record inside safetensors files, where it stays with the weights.

The spending record is a JSON text that states the privacy spent on the weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open

from dpfed.errors import DpfedError
from dpfed.training.run_folder.atomic_file import write_file

METADATA = "dpfed_spending"


def embed(folder: Path, record: str) -> None:
    """Write a spending record into the metadata of every safetensors file in a folder."""
    for path in sorted(folder.glob("*.safetensors")):
        _embed_one(path, record)


def _embed_one(path: Path, record: str) -> None:
    with path.open("rb") as tensors:
        length = int.from_bytes(tensors.read(8), "little")
        header = json.loads(tensors.read(length))
        header["__metadata__"] = {**header.get("__metadata__", {}), METADATA: record}
        text = json.dumps(header, separators=(",", ":")).encode()
        # Pad the JSON header with blanks to a multiple of 8 bytes, because the tensors after it
        # must be aligned in memory.
        text += b" " * (-len(text) % 8)

        def write(file: IO[bytes]) -> None:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            shutil.copyfileobj(tensors, file)

        write_file(path, write, for_release=True)


def embedded(start: Path) -> dict[Path, str]:
    """Return the spending records inside safetensors files, by path. Leave out files without one.

    start  a folder, or one safetensors file
    """
    files = [start] if start.is_file() else sorted(start.glob("*.safetensors"))
    found = {path: _metadata(path).get(METADATA) for path in files}
    return {path: record for path, record in found.items() if record is not None}


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        raise DpfedError(
            f"{path} is damaged, so nobody knows what was spent on it: export it again or choose "
            "another start"
        ) from None
