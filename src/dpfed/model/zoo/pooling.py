"""Pool a sentence encoder's token vectors into one vector, as `modules.json` of the weights says.

A pooled classifier is an encoder with such a pooling and a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from dpfed.errors import DpfedError
from dpfed.model.export_files import Companions
from dpfed.model.zoo.hub import json_beside

MODULES = "modules.json"
# Attribute with the encoder in `PooledForSequenceClassification`.
BODY = "body"
WAYS = ("mean", "cls")
# Older versions of sentence-transformers write these flags into `1_Pooling/config.json`, instead of
# `pooling_mode`. Each flag is mapped to the mode that it stands for.
OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
PUBLIC = (
    "The weights contain the mean and the spread of features of the server's public records. "
    "Privacy does not protect these records."
)
REMEDY = 'set model.pooling = "none" for the model\'s own head'


@dataclass(frozen=True)
class Pooling:
    """How the token vectors of a text become one vector.

    way        "mean" of all token vectors, or "cls" for the first token vector
    normalize  True if the vector is then divided by its norm
    """

    way: str
    normalize: bool


def pooling_of(weights: str) -> Pooling | None:
    """Return the pooling that `modules.json` of a folder or hub model asks for.

    Return None if the file is missing or names no pooling.
    """
    found = json_beside(weights, MODULES)
    if found is None:
        return None
    kinds = _kinds(weights, found[1])
    if "Pooling" not in kinds:
        return None
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise DpfedError(
            f"model.weights = {weights!r}: {MODULES} has a module {unknown[0]}, which is not "
            f"supported here (Transformer, Pooling and Normalize are): {REMEDY}"
        )
    return Pooling(_way(weights, kinds["Pooling"]), "Normalize" in kinds)


def pooled_config(config: Any, pooling: Pooling) -> Any:
    """Return the configuration of a classifier that reads an encoder's pooled vector.

    `config` is the configuration of the encoder.
    """
    from dpfed.model.shipped.modeling_pooled import PooledConfig

    # Remove the path, because an export must not contain paths of this machine.
    config._name_or_path = ""
    return PooledConfig(text_config=config, pooling=pooling.way, normalize=pooling.normalize)


def with_model_code(model: nn.Module, companions: Companions) -> Companions:
    """Return the companions of an export, with the model's code if dpfed defines its class.

    companions  files and settings that the export writes beside the weights
    """
    from dpfed.model.shipped import modeling_layers, modeling_pooled

    if isinstance(model, modeling_pooled.PooledForSequenceClassification):
        return _with_code(modeling_pooled.__file__, model, "SequenceClassification", companions)
    if not isinstance(model, modeling_layers.LayersClassifier):
        return companions
    companions = replace(companions, notes=(*companions.notes, PUBLIC))
    is_image = isinstance(model, modeling_layers.LayersForImageClassification)
    task = "ImageClassification" if is_image else "SequenceClassification"
    return _with_code(modeling_layers.__file__, model, task, companions)


def _with_code(file: str, model: Any, task: str, companions: Companions) -> Companions:
    """Return the companions of an export, with the Python file that defines the class of `model`.

    file  path of this Python file
    task  end of the name of transformers' auto class, such as "ImageClassification"
    """
    path = Path(file)
    # Training may replace a class by a faster subclass, so find the class that the file defines.
    original = next(cls for cls in type(model).__mro__ if cls.__module__.endswith(path.stem))
    name = f"{path.stem}.{original.__name__}"
    classes = {
        "AutoConfig": f"{path.stem}.{model.config_class.__name__}",
        f"AutoModelFor{task}": name,
    }
    note = (
        "Classifiers of transformers for this encoder do not pool as this model does. "
        f"`{path.name}` in this folder does: load with `trust_remote_code=True`."
    )
    return replace(
        companions,
        files={**companions.files, path.name: path.read_text(encoding="utf-8")},
        config={**companions.config, "auto_map": classes},
        notes=(*companions.notes, note),
        model_class=name,
    )


def adapter_is_pooled(folder: Path) -> bool:
    """Return True if the adapter in `folder` was trained on a classifier of pooled token vectors.

    The names of the adapter's tensors show this. Adapters of old versions of dpfed give False.
    """
    try:
        with safe_open(folder / "adapter_model.safetensors", "pt") as tensors:
            names = list(tensors.keys())
    except (OSError, SafetensorError):
        # A missing or damaged file raises a clear error later, when the adapter is loaded.
        return True
    return any(name.startswith(f"base_model.model.{BODY}.") for name in names)


def _kinds(weights: str, modules: Any) -> dict[str, str]:
    """Return {class name: folder} of the modules that `modules.json` lists."""
    try:
        return {str(m["type"]).rpartition(".")[2]: str(m["path"]) for m in modules}
    except (KeyError, TypeError):
        raise DpfedError(
            f"model.weights = {weights!r}: {MODULES} is not a list with type and path: {REMEDY}"
        ) from None


def _way(weights: str, folder: str) -> str:
    name = f"{folder}/config.json"
    _, stated = json_beside(weights, name) or ("", None)
    if not isinstance(stated, dict):
        raise DpfedError(
            f"model.weights = {weights!r}: {MODULES} names {name}, which is missing or no table: "
            f"put it back, or {REMEDY}"
        )
    ways = stated.get("pooling_mode")
    if ways is None:
        # Without any flag sentence-transformers uses the mean.
        ways = [way for key, way in OLD_KEYS.items() if stated.get(key)] or ["mean"]
    ways = [ways] if isinstance(ways, str) else list(ways)
    if len(ways) != 1 or ways[0] not in WAYS:
        raise DpfedError(
            f"model.weights = {weights!r}: {name} asks for pooling {' + '.join(map(str, ways))}, "
            f"and only {' or '.join(WAYS)} can be trained here: {REMEDY}"
        )
    return str(ways[0])
