"""Find a model's files in a local folder, in the cache of the Hugging Face hub, or on the hub."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from functools import lru_cache
from pathlib import Path
from typing import Any

from dpfed.errors import DpfedError, reason

# Timeout in seconds for the first answer of the Hugging Face hub.
SECONDS = 5.0


class HubSilentError(DpfedError):
    """The Hugging Face hub gave no answer, so it is unknown if it has the wanted file."""


def folder_of(weights: str, key: str = "model.weights") -> Path | None:
    """Return the folder with the path `weights`, or None if `weights` is a name on the hub.

    Raise DpfedError if the text looks like a path but is no folder with a model.

    key  the configuration key that contains `weights`, for error messages
    """
    path = Path(weights).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and key == "model.weights":
            raise DpfedError(
                f"{key} = {weights!r} has no config.json: give a folder written by save_pretrained"
            )
        return path
    looks_like_path = path.is_absolute() or weights.startswith((".", "~"))
    if path.exists() or looks_like_path or weights.count("/") > 1:
        raise DpfedError(
            f"{key} = {weights!r} is not a folder: give one with config.json and model.safetensors"
        )
    return None


def source_of(weights: str, key: str = "model.weights") -> tuple[str, bool]:
    """Return the folder or hub name of `weights`, and True if transformers must not use the hub."""
    folder = folder_of(weights, key)
    if folder is not None:
        return str(folder), True
    if _snapshot(weights) is not None or offline():
        return weights, True
    reach(weights, key)
    return weights, False


def offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE") == "1"


def _snapshot(name: str) -> Path | None:
    """Return the folder of a hub model in the local cache, or None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:
        # The name is not valid on the hub, so no such model can be in the cache.
        return None
    return Path(config).parent if isinstance(config, str) else None


@lru_cache(maxsize=16)
def reach(name: str, key: str) -> None:
    """Raise DpfedError if the hub does not answer or does not have the model `name`.

    Call this before other requests: without a network, the hub's libraries retry for minutes.
    """
    from huggingface_hub import constants

    try:
        with urllib.request.urlopen(f"{constants.ENDPOINT}/api/models/{name}", timeout=SECONDS):
            return
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403, 404):
            raise DpfedError(
                f"{key} = {name!r}: the hub answered with error {error.code}; try a local folder"
            ) from None
        if error.code == 404 or not os.environ.get("HF_TOKEN"):
            raise DpfedError(
                f"{key} = {name!r} is neither a folder here nor a public model on the hub"
            ) from None
    except (OSError, ValueError) as error:
        cause = str(getattr(error, "reason", error))[:80]
        raise DpfedError(
            f"{key} = {name!r} is not a folder here, and the hub cannot be reached ({cause}): "
            "download the model elsewhere and give its folder"
        ) from None


def hub_file(name: str, file: str) -> Path | None:
    """Return the local path of a small file of a hub model, or None if the model has no such file.

    A file that is not cached is downloaded. If other files of the model are cached, the file of the
    same version is downloaded.
    Raise HubSilentError if the hub does not answer.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    silent = HubSilentError(
        f"the hub does not say whether {name} has {file}: try again with a network"
    )
    try:
        found = try_to_load_from_cache(name, file)
        if found is not None:
            return Path(found) if isinstance(found, str) else None
        snapshot = _snapshot(name)
        if offline():
            if snapshot is None:
                # Offline, a model that is not cached cannot be loaded: its files are not needed.
                return None
            raise silent
        reach(name, "model.weights")
        version = None if snapshot is None else snapshot.name
        return Path(hf_hub_download(name, file, revision=version, etag_timeout=SECONDS))
    except LocalEntryNotFoundError:
        # This subclass of EntryNotFoundError means that the hub could not be reached.
        raise silent from None
    except (EntryNotFoundError, RepositoryNotFoundError):
        return None
    except (DpfedError, HfHubHTTPError, OSError, ValueError):
        raise silent from None


def hub_metadata(name: str) -> dict[str, dict[str, str]]:
    """Return the metadata of each safetensors file of a hub model, by file name.

    Cached files are read from the local cache. For other files, only the start is downloaded,
    which holds the metadata.
    Raise HubSilentError if the hub does not answer.
    """
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError
    from safetensors import safe_open

    silent = HubSilentError(
        f"the hub does not say what the weights of {name} are: try again with a network"
    )
    try:
        snapshot = _snapshot(name)
        found = {}
        for path in sorted(snapshot.glob("*.safetensors")) if snapshot else ():
            with safe_open(path, framework="pt") as file:
                found[path.name] = dict(file.metadata() or {})
        if found or (snapshot is None and offline()):
            return found
        if offline():
            raise silent
        reach(name, "model.weights")
        version = snapshot.name if snapshot else None
        headers = get_safetensors_metadata(name, revision=version).files_metadata
        return {file: dict(header.metadata or {}) for file, header in headers.items()}
    except NotASafetensorsRepoError:
        return {}
    except Exception:
        # The network and damaged files raise errors of many classes, so catch all of them.
        raise silent from None


def json_beside(weights: str, name: str) -> tuple[Path, Any] | None:
    """Return the path and the content of the JSON file `name` of the model `weights`.

    Return None if there is no such file or if the hub does not answer.

    weights  folder or hub name of the model
    """
    folder = folder_of(weights)
    try:
        path = hub_file(weights, name) if folder is None else folder / name
    except HubSilentError:
        return None
    if path is None or not path.is_file():
        return None
    try:
        return path, json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DpfedError(f"{path} cannot be read: {reason(error)}") from None
