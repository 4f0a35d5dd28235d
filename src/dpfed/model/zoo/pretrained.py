"""Configurations, weights and tokenizers from a local folder, or from the hub where the machine can reach it.

Nothing here runs code that comes with weights: `trust_remote_code` is never set.
"""

from __future__ import annotations

import json
import math
import os
import urllib.error
import urllib.request
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dpfed.errors import DpfedError
from dpfed.model.zoo.built import zero_head

Head = Literal["new", "kept"]
HEADS = ("classifier", "score", "head", "cls_classifier")
SECONDS = 5.0  # to wait for the hub's first answer
MOST_FRESH = 4  # modules that a checkpoint may lack: a head and a pooler, not half a model


def folder_of(weights: str, key: str = "model.weights") -> Path | None:
    """The folder, or None when it can only be the name of a model on the hub."""
    path = Path(weights).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and key == "model.weights":
            raise DpfedError(
                f"{key} = {weights!r} has no config.json: give a folder written by save_pretrained"
            )
        return path
    if (
        path.exists()
        or path.is_absolute()
        or weights.startswith((".", "~"))
        or weights.count("/") > 1
    ):
        raise DpfedError(
            f"{key} = {weights!r} is not a folder: give one with config.json and model.safetensors"
        )
    return None


def source_of(weights: str, key: str = "model.weights") -> tuple[str, bool]:
    """(what to hand to transformers, whether only local files may be used)."""
    folder = folder_of(weights, key)
    if folder is not None:
        return str(folder), True
    if _cached(weights) or os.environ.get("HF_HUB_OFFLINE") == "1":
        return weights, True
    reach(weights, key)
    return weights, False


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # not a possible name
        return False


@lru_cache(maxsize=16)
def reach(name: str, key: str) -> None:
    """One short question to the hub, because the libraries below retry for minutes where there is no network."""
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
        reason = str(getattr(error, "reason", error))[:80]
        raise DpfedError(
            f"{key} = {name!r} is not a folder here, and the hub cannot be reached ({reason}): "
            "download the model elsewhere and give its folder"
        ) from None


def config_of(weights: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    know_pooled()
    name, local = source_of(weights)
    try:
        return AutoConfig.from_pretrained(
            name, local_files_only=local, trust_remote_code=False, **changes
        )
    except Exception as error:  # values of another type or out of range raise a dozen kinds
        raise DpfedError(
            f"the configuration of {weights!r} cannot be used: {first_line(error)}"
        ) from None


def know_pooled() -> None:
    """Let transformers load pooled exports, whose type it does not know, without their code."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from dpfed.model.shipped.modeling_pooled import PooledConfig, PooledForSequenceClassification

    model = PooledForSequenceClassification
    AutoConfig.register(PooledConfig.model_type, PooledConfig, exist_ok=True)
    AutoModelForSequenceClassification.register(PooledConfig, model, exist_ok=True)


def on_meta() -> bool:
    """Inside `with torch.device("meta")` only shapes are wanted: no weights are read."""
    return torch.get_default_device().type == "meta"


def shape_suffices(weights: str | None) -> bool:
    """Whether a model whose shape is known by name needs nothing of its weights: they are random, or only shapes of
    something on the hub are wanted."""
    return weights is None or (on_meta() and folder_of(weights) is None)


def model_of(
    auto: Any, config: Any, weights: str | None, classes: int | None, keep_head: bool = False
) -> tuple[nn.Module, tuple[str, ...], tuple[str, ...]]:
    """(the model in float32, its heads, notes). Without weights: random. The head is new and starts at zero, unless kept."""
    if keep_head and (weights is None or classes is None):
        raise DpfedError(
            'model.head = "kept" needs model.weights with a classifier in them: leave it out'
        )
    if classes is not None:
        config.num_labels = classes
    if weights is None or on_meta():
        model, lacking, misfit = _shaped(auto, config, weights), set[str](), set[str]()
    else:
        model, lacking, misfit = _load(auto, config, weights)
    if classes is None:
        heads: tuple[str, ...] = ()
    else:
        heads = heads_of(model)
        if not keep_head:
            zero_head(model.get_submodule(heads[0]), heads[0])
        elif any(_inside(name, heads) for name in lacking | misfit):
            raise DpfedError(
                f'model.head = "kept": the weights in {weights!r} have no head for {classes} classes, leave it out to begin a new one'
            )
    fresh = {name.rpartition(".")[0] for name in lacking if not _inside(name, heads)}
    wrong = sorted(name for name in misfit if not _inside(name, heads))
    if wrong or len(fresh) > MOST_FRESH:
        example = (wrong or sorted(lacking))[0]
        raise DpfedError(
            f"the weights in {weights!r} do not fit {type(model).__name__}: {len(wrong) or len(lacking)} tensors are "
            f"missing or of another shape, such as {example}"
        )
    notes = (
        (f"the weights lack {', '.join(sorted(fresh))}: trained like the head",) if fresh else ()
    )
    return model.eval(), (*heads, *sorted(fresh)), notes


def _inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == m or name.startswith(f"{m}.") for m in modules)


def _shaped(auto: Any, config: Any, weights: str | None) -> nn.Module:
    try:
        model: nn.Module = auto.from_config(config, trust_remote_code=False).float()
    except Exception as error:  # sizes that do not go together fail anywhere inside a model
        what = "of this shape" if weights is None else f"of {weights!r}"
        raise DpfedError(f"a model {what} cannot be built: {first_line(error)}") from None
    return model


def _load(auto: Any, config: Any, weights: str) -> tuple[nn.Module, set[str], set[str]]:
    from transformers.utils import logging

    name, local = source_of(weights)
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # what is missing is judged above
    try:
        model, info = auto.from_pretrained(
            name,
            config=config,
            local_files_only=local,
            trust_remote_code=False,
            dtype="float32",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # damaged files raise a dozen kinds
        raise DpfedError(
            f"the weights in {weights!r} cannot be loaded: {first_line(error)}"
        ) from None
    finally:
        logging.set_verbosity(before)
    misfit = {entry if isinstance(entry, str) else entry[0] for entry in info["mismatched_keys"]}
    return model, set(info["missing_keys"]), misfit


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """The head first; then what peft takes for it too, as it goes by the end of a name (DistilBERT's pre_classifier)."""
    children = dict(model.named_children())
    for name in HEADS:
        if name in children:
            return (name, *(other for other in children if other != name and other.endswith(name)))
    raise DpfedError(
        f"{type(model).__name__} has no head called {', '.join(HEADS)}; its parts are {', '.join(children)}: "
        "it cannot be trained as a classifier here"
    )


def public_constants(weights: str | None) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation that the weights were trained with, where their folder says so."""
    if weights is None or on_meta():
        return None
    folder = folder_of(weights)
    if folder is None:
        folder = _hub_folder(weights)
    path = None if folder is None else folder / "preprocessor_config.json"
    if path is None or not path.is_file():
        return None
    try:
        public = json.loads(path.read_text(encoding="utf-8"))
        mean, std = (tuple(float(v) for v in public[k]) for k in ("image_mean", "image_std"))
        if (
            len(mean) != len(std)
            or not all(map(math.isfinite, (*mean, *std)))
            or not all(s > 0 for s in std)
        ):
            raise ValueError(
                "image_mean and image_std must be numbers, one of each for a channel, and image_std above 0"
            )
    except KeyError:
        return None
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise DpfedError(f"{path} cannot be read: {first_line(error)}") from None
    return mean, std


def _hub_folder(name: str) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "preprocessor_config.json", etag_timeout=SECONDS)).parent
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError):
        return None


class HubSilentError(DpfedError):
    """The hub gave no answer, so nobody knows whether it has a file."""


def hub_file(name: str, file: str) -> Path | None:
    """Return a small file beside a model on the hub; None if it is known that there is none.

    It is that of the cached version of the model, if there is one. Without an answer from the hub
    it raises HubSilentError.
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
        here, model = (
            try_to_load_from_cache(name, file),
            try_to_load_from_cache(name, "config.json"),
        )
        if here is not None:
            return Path(here) if isinstance(here, str) else None
        if os.environ.get("HF_HUB_OFFLINE") == "1":
            # Weights that are not here cannot be loaded either.
            if isinstance(model, str):
                raise silent
            return None
        reach(name, "model.weights")
        version = Path(model).parent.name if isinstance(model, str) else None
        return Path(hf_hub_download(name, file, revision=version, etag_timeout=SECONDS))
    except LocalEntryNotFoundError:
        # It is an EntryNotFoundError too, and means that the hub could not be reached.
        raise silent from None
    except (EntryNotFoundError, RepositoryNotFoundError):
        return None
    except (DpfedError, HfHubHTTPError, OSError, ValueError):
        raise silent from None


def hub_metadata(name: str) -> dict[str, dict[str, str]]:
    """Return the metadata of each safetensors file of a hub model.

    Files in the local cache are read there; otherwise only headers are downloaded. Without an answer
    from the hub it raises HubSilentError.
    """
    from huggingface_hub import get_safetensors_metadata, try_to_load_from_cache
    from huggingface_hub.errors import NotASafetensorsRepoError
    from safetensors import safe_open

    silent = HubSilentError(
        f"the hub does not say what the weights of {name} are: try again with a network"
    )

    try:
        model = try_to_load_from_cache(name, "config.json")
        snapshot = Path(model).parent if isinstance(model, str) else None
        found = {}
        for path in sorted(snapshot.glob("*.safetensors")) if snapshot else ():
            with safe_open(path, framework="pt") as file:
                found[path.name] = dict(file.metadata() or {})
        if found or (snapshot is None and os.environ.get("HF_HUB_OFFLINE") == "1"):
            return found
        if os.environ.get("HF_HUB_OFFLINE") == "1":
            raise silent
        reach(name, "model.weights")
        version = snapshot.name if snapshot else None
        headers = get_safetensors_metadata(name, revision=version).files_metadata
        return {file: dict(header.metadata or {}) for file, header in headers.items()}
    except NotASafetensorsRepoError:
        return {}
    except Exception:
        # Transport and format raise a dozen kinds.
        raise silent from None


@lru_cache(maxsize=4)
def tokenizer_of(name: str, key: str) -> Any:
    """A fast tokenizer; it pads on the right, with its end token where it has no padding token."""
    return padded_right(plain_tokenizer(name, key), name, key)


def padded_right(tokenizer: Any, name: str, key: str) -> Any:
    """Return the tokenizer, changed so that it pads and cuts on the right."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DpfedError(
                f"the tokenizer of {key} = {name!r} has neither a padding nor an end token: add one"
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def plain_tokenizer(name: str, key: str) -> Any:
    """Return a fast tokenizer as its files describe it, read anew."""
    from transformers import AutoTokenizer

    source, local = source_of(name, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=local, trust_remote_code=False
        )
        size, special = (
            len(tokenizer),
            len(tokenizer.all_special_ids),
        )  # a damaged one may fail only here
    except Exception as error:  # missing, damaged or unknown files raise a dozen kinds
        raise DpfedError(
            f"{key} = {name!r} has no tokenizer that can be loaded ({first_line(error)}): set model.tokenizer to a folder "
            "with tokenizer.json"
        ) from None
    if size <= special:  # made up by the library where the files are missing
        raise DpfedError(
            f"{key} = {name!r} has no tokenizer: set model.tokenizer to a folder with tokenizer.json"
        )
    if not tokenizer.is_fast:
        raise DpfedError(
            f"{key} = {name!r} has only a slow tokenizer: convert it to one with tokenizer.json"
        )
    return tokenizer


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160].rstrip(".")


def load_tensors(model: nn.Module, weights: str, name: str, new_head: str | None = None) -> None:
    """Load a safetensors file, or model.safetensors of a folder, into a model that is not of transformers.

    Tensors of the module `new_head` keep their initial values.
    """
    from safetensors.torch import load_file

    path = Path(weights).expanduser()
    if not path.exists():
        raise DpfedError(
            f"model.weights = {weights!r} is not a file or folder: {name} takes no names of a hub"
        )
    try:
        stored = load_file(path / "model.safetensors" if path.is_dir() else path)
        state = {key: value.float() for key, value in stored.items()}
        if new_head is not None:
            start = f"{new_head}."
            kept = {
                key: value for key, value in model.state_dict().items() if key.startswith(start)
            }
            state = {key: value for key, value in state.items() if not key.startswith(start)} | kept
        model.load_state_dict(state)
    except Exception as error:
        # Missing and damaged files and other shapes raise kinds of their own.
        raise DpfedError(
            f"model.weights = {weights!r} cannot be loaded into {name}: {first_line(error)}"
        ) from None
