"""Load configurations and weights of pretrained models.

Code that comes with weights never runs: `trust_remote_code` is always False.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn

from dpfed.config import ModelSection
from dpfed.errors import DpfedError, reason
from dpfed.model.frozen.quantised import Quantize, compute_with_numbers, quantisation
from dpfed.model.zoo.built import zero_head
from dpfed.model.zoo.hub import folder_of, json_beside, source_of

Head = Literal["new", "kept"]
HEADS = ("classifier", "score", "head", "cls_classifier")
# Besides the head, at most this many modules may be missing in the weights, such as a pooler. They
# start untrained. If more modules are missing, the weights belong to another model.
MAX_FRESH_MODULES = 4
# Quantise weights on the CPU, so that runs on a CPU and on a GPU have equal quantised weights.
_ON_CPU = {"device_map": {"": "cpu"}}


@dataclass(frozen=True)
class PretrainedSection(ModelSection):
    """A `[model]` section whose key `weights` the user must set."""

    quantize: Annotated[
        Quantize,
        "frozen linear layers in 8 or 4 bits (pip install 'dpfed[quant]'); none: as in the weights",
    ] = "none"

    def chosen(self) -> str | None:
        """Return the folder or hub name of the weights, or None for random weights."""
        if self.weights is None:
            raise DpfedError(
                f"model.name = {self.name!r} needs model.weights: a folder or hub name with "
                'pretrained weights, or "random" to train from nothing'
            )
        return None if self.weights == "random" else self.weights

    def pretrained(self) -> str:
        """Return the folder or hub name of the weights, which also determine the model's shape.

        Raise DpfedError for random weights, which determine no shape.
        """
        weights = self.chosen()
        if weights is None:
            raise DpfedError(
                f"model.name = {self.name!r} takes its shape from model.weights: "
                "give a folder or hub name"
            )
        return weights


def refuse_other(name: str, found: Any, expected: Mapping[str, Any], other: str) -> None:
    """Raise DpfedError if weights do not have the shape that the paper gives the model `name`.

    found     configuration of the weights
    expected  configuration keys and their values in the paper
    other     the model name that accepts such weights; the message recommends it
    """
    for key, value in expected.items():
        have = getattr(found, key, None)
        if have != value and have != list(value if isinstance(value, tuple) else ()):
            raise DpfedError(
                f"the weights for {name} have {key} = {have}, not {value}: "
                f"use model.name = {other!r} for them"
            )


def config_of(weights: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    know_own_classes()
    name, local = source_of(weights)
    try:
        return AutoConfig.from_pretrained(
            name, local_files_only=local, trust_remote_code=False, **changes
        )
    except Exception as error:
        # Wrong values in the configuration raise errors of many classes, so catch all of them.
        raise DpfedError(
            f"the configuration of {weights!r} cannot be used: {reason(error)}"
        ) from None


def generates(weights: str | None) -> bool:
    """Return True if the weights are those of a causal language model, by their configuration.

    Sentence encoders are no language models, whatever class their configuration names.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if weights is None or json_beside(weights, "modules.json") is not None:
        return False
    stated = getattr(config_of(weights), "architectures", None) or ()
    return not set(stated).isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def know_own_classes() -> None:
    """Register dpfed's own classifiers with transformers.

    transformers then loads exports of these classifiers without running the code in their folder.
    """
    from transformers import (
        AutoConfig,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
    )

    from dpfed.model.shipped import modeling_layers as layers
    from dpfed.model.shipped import modeling_pooled as pooled

    for config in (pooled.PooledConfig, layers.LayersConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto, config, model in (
        (
            AutoModelForSequenceClassification,
            pooled.PooledConfig,
            pooled.PooledForSequenceClassification,
        ),
        (
            AutoModelForSequenceClassification,
            layers.LayersConfig,
            layers.LayersForSequenceClassification,
        ),
        (
            AutoModelForImageClassification,
            layers.LayersConfig,
            layers.LayersForImageClassification,
        ),
    ):
        auto.register(config, model, exist_ok=True)


def on_meta() -> bool:
    """Return True inside `with torch.device("meta")`, where only shapes are needed, not weights."""
    return torch.get_default_device().type == "meta"


def shape_suffices(weights: str | None) -> bool:
    """Return True if the model can be built from its known shape, without files of weights.

    This holds for random weights (`weights` is None). It also holds for a name on the hub if only
    shapes are needed (see `on_meta`).
    """
    return weights is None or (on_meta() and folder_of(weights) is None)


def model_of(
    auto: Any,
    config: Any,
    weights: str | None,
    classes: int | None,
    keep_head: bool = False,
    quantize: Quantize = "none",
) -> tuple[nn.Module, tuple[str, ...], tuple[str, ...]]:
    """Return a model in float32, the names of its heads, and notes for the user.

    auto       class of transformers that loads the model, such as AutoModelForCausalLM
    config     its configuration
    weights    folder or hub name; None for random weights
    classes    number of classes; None for a language model without a classifier
    keep_head  True uses the head in the weights; False makes a new head that starts at zero
    quantize   how frozen linear layers are stored
    """
    _refuse_random(weights, classes, keep_head, quantize)
    if classes is not None:
        config.num_labels = classes
    lacking: set[str] = set()
    misfit: set[str] = set()
    if weights is None or on_meta():
        model = _shaped(auto, config, weights)
    else:
        skip = () if quantize == "none" else _never_quantised(auto, config, weights, classes)
        stored = quantisation(quantize, config, skip)
        model, lacking, misfit = _load(auto, config, weights, stored)
        compute_with_numbers(model)
    heads = () if classes is None else heads_of(model)
    unsuited = [name for name in lacking | misfit if _inside(name, heads)]
    if keep_head and unsuited:
        raise DpfedError(
            f'model.head = "kept": the weights in {weights!r} have no head for {classes} classes, '
            "leave it out to begin a new one"
        )
    if heads and not keep_head:
        zero_head(model.get_submodule(heads[0]), heads[0])
    fresh = sorted({name.rpartition(".")[0] for name in lacking if not _inside(name, heads)})
    wrong = sorted(name for name in misfit if not _inside(name, heads))
    if wrong or len(fresh) > MAX_FRESH_MODULES:
        example = (wrong or sorted(lacking))[0]
        raise DpfedError(
            f"the weights in {weights!r} do not fit {type(model).__name__}: "
            f"{len(wrong) or len(lacking)} tensors are missing or of another shape, "
            f"such as {example}"
        )
    notes = (f"the weights lack {', '.join(fresh)}: trained like the head",) if fresh else ()
    return model.eval(), (*heads, *fresh), (*notes, *_public_statistics(model))


def _public_statistics(model: nn.Module) -> tuple[str, ...]:
    """Return a note for the user if the weights contain statistics of public records, else ()."""
    from dpfed.model.shipped.modeling_layers import LayersClassifier

    if not isinstance(model, LayersClassifier):
        return ()
    return (
        "the weights contain the mean and the spread of features of public records, which privacy "
        "does not protect",
    )


def _refuse_random(
    weights: str | None, classes: int | None, keep_head: bool, quantize: Quantize
) -> None:
    """Raise DpfedError if the weights are random and an option needs pretrained weights."""
    if keep_head and (weights is None or classes is None):
        raise DpfedError(
            'model.head = "kept" needs model.weights with a classifier in them: leave it out'
        )
    if weights is None and quantize != "none":
        raise DpfedError(
            f"model.quantize = {quantize!r} needs model.weights with weights to quantise: leave it "
            "out for random ones"
        )


def _inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == m or name.startswith(f"{m}.") for m in modules)


def _shaped(auto: Any, config: Any, weights: str | None) -> nn.Module:
    try:
        model: nn.Module = auto.from_config(config, trust_remote_code=False).float()
    except Exception as error:
        # Models raise errors of many classes if their sizes do not fit together: catch them all.
        what = "of this shape" if weights is None else f"of {weights!r}"
        raise DpfedError(f"a model {what} cannot be built: {reason(error)}") from None
    return model


def _never_quantised(auto: Any, config: Any, weights: str, classes: int | None) -> tuple[str, ...]:
    """Return the names of modules that are not quantised: heads, or a language model's output."""
    with torch.device("meta"):
        model: Any = _shaped(auto, config, weights)
    output = model.get_output_embeddings() if classes is None else None
    outputs = [name for name, module in model.named_modules() if module is output]
    return (*outputs, *(() if classes is None else heads_of(model)))


def _load(
    auto: Any, config: Any, weights: str, quantised: Any
) -> tuple[nn.Module, set[str], set[str]]:
    """Return the loaded model and two sets of tensor names.

    The first set names tensors that the weights lack. The second set names tensors that have
    another shape in the weights.

    quantised  transformers' description of the quantisation; None to load weights unchanged
    """
    from transformers.utils import logging

    name, local = source_of(weights)
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    # Hide the warnings of transformers, because `model_of` reports missing tensors.
    logging.set_verbosity_error()
    try:
        model, info = auto.from_pretrained(
            name,
            config=config,
            local_files_only=local,
            trust_remote_code=False,
            dtype="float32",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **({} if quantised is None else _ON_CPU | {"quantization_config": quantised}),
        )
    except Exception as error:
        # Damaged files raise errors of many classes, so catch all of them.
        raise DpfedError(f"the weights in {weights!r} cannot be loaded: {reason(error)}") from None
    finally:
        logging.set_verbosity(before)
    misfit = {entry if isinstance(entry, str) else entry[0] for entry in info["mismatched_keys"]}
    return model, set(info["missing_keys"]), misfit


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """Return the name of a classifier's head, then of modules whose names end with this name.

    peft treats these modules as heads too, for example DistilBERT's pre_classifier.
    """
    children = dict(model.named_children())
    for name in HEADS:
        if name in children:
            return (name, *(other for other in children if other != name and other.endswith(name)))
    raise DpfedError(
        f"{type(model).__name__} has no head called {', '.join(HEADS)}; its parts are "
        f"{', '.join(children)}: it cannot be trained as a classifier here"
    )


def public_constants(weights: str | None) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return mean and standard deviation of each image channel, as used to pretrain the weights.

    Return None if `preprocessor_config.json` of the weights does not state them, or if only shapes
    are needed.
    """
    if weights is None or on_meta():
        return None
    found = json_beside(weights, "preprocessor_config.json")
    if found is None:
        return None
    path, public = found
    try:
        mean, std = (tuple(map(float, public[key])) for key in ("image_mean", "image_std"))
        finite = all(map(math.isfinite, (*mean, *std)))
        if len(mean) != len(std) or not finite or not all(s > 0 for s in std):
            raise ValueError(
                "image_mean and image_std must be numbers, one of each for a channel, "
                "and image_std above 0"
            )
    except KeyError:
        return None
    except (ValueError, TypeError, OverflowError) as error:
        raise DpfedError(f"{path} cannot be read: {reason(error)}") from None
    return mean, std


def load_tensors(model: nn.Module, weights: str, name: str, new_head: str | None = None) -> None:
    """Load weights from a safetensors file or a folder with model.safetensors into `model`.

    name      the model's name, for error messages
    new_head  a module that keeps its initial values; None loads all tensors
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
            initial = {k: v for k, v in model.state_dict().items() if k.startswith(start)}
            state = {k: v for k, v in state.items() if not k.startswith(start)} | initial
        model.load_state_dict(state)
    except Exception as error:
        # Missing files, damaged files and wrong shapes raise errors of many classes.
        raise DpfedError(
            f"model.weights = {weights!r} cannot be loaded into {name}: {reason(error)}"
        ) from None
