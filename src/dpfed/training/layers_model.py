"""Write a model folder whose classifier reads the outputs of all layers of an encoder.

The outputs (features) are centred and scaled by statistics of the server's public records. The
folder contains these statistics, so it can be used as `model.weights` like any other folder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfed.config import Config
from dpfed.data.tables import Source
from dpfed.errors import DpfedError
from dpfed.model.export_files import Reading
from dpfed.model.shipped.modeling_layers import (
    LayersConfig,
    LayersForImageClassification,
    LayersForSequenceClassification,
    joined,
    pooled_layers,
)
from dpfed.model.zoo.built import DROPOUT, Built, set_dropout, zero
from dpfed.model.zoo.pooling import with_model_code
from dpfed.model.zoo.pretrained import PretrainedSection
from dpfed.training.budget.prior_spending import record_of
from dpfed.training.job.data import load_source, spec_of
from dpfed.training.job.job_cache import JobCache
from dpfed.training.run_folder.atomic_file import short_errors, write_file

# Largest number of public records that determine the statistics.
RECORDS = 2000
# Number of records in one forward pass of the encoder.
ROWS = 32
# Root mean square norm of the features of public records after scaling.
NORM = 10.0


@dataclass(frozen=True)
class LayersModel:
    """Facts about a written model: its layers' widths, and the number of public records read."""

    widths: tuple[int, ...]
    records: int


def write_layers_model(config: Config, out: Path, source: Source | None = None) -> LayersModel:
    """Write a classifier on all layers of the configured encoder to `out`, a new or empty folder.

    Only inputs of the server's public records (its test set) are read, without labels.

    source  data to use in place of the configured data; None for the configured data
    """
    section = config.model
    if not isinstance(section, PretrainedSection) or section.chosen() is None:
        raise DpfedError(
            f"model.name = {section.name!r} has no pretrained weights: give model.weights of an "
            "image or text encoder"
        )
    if section.quantize != "none" or section.adapter is not None:
        raise DpfedError("leave out model.quantize and model.adapter: whole weights are needed")
    if record_of(str(section.chosen())) is not None:
        raise DpfedError(
            f"model.weights = {section.chosen()!r} was trained on private records: give the "
            "weights from which that run started"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DpfedError(f"{out} is not empty: choose a new folder")
    source = load_source(config, source, JobCache())
    spec = spec_of(source, section)
    built: Built = section.build(spec)  # type: ignore[attr-defined]
    if not built.head or hasattr(built.model.config, "body_config"):
        raise DpfedError(
            f"model.weights = {section.weights!r} is no plain encoder: give weights of an image "
            "classifier, a text classifier or a sentence encoder"
        )
    chosen = _evenly(source.test.inputs)
    model = _model(built, chosen, spec.classes)
    _save(model, built, out)
    return LayersModel(tuple(model.config.widths), len(next(iter(chosen.values()))))


def _evenly(inputs: Any) -> dict[str, Tensor]:
    """Return the inputs of at most RECORDS records, spread evenly over the table."""
    count = len(next(iter(inputs.values())))
    rows = np.unique(np.linspace(0, count - 1, min(count, RECORDS)).astype(np.int64))
    return {name: torch.from_numpy(np.ascontiguousarray(x[rows])) for name, x in inputs.items()}


@torch.no_grad()
def _model(built: Built, records: dict[str, Tensor], classes: int) -> Any:
    """Return a classifier on all layers of the encoder in `built`.

    Its features are centred and scaled by statistics of `records`.
    """
    body: Any = built.model.base_model
    _without_randomness(body)
    first = built.prepare({name: x[:1] for name, x in records.items()})
    widths = [x.shape[1] for x in pooled_layers(body, **first)]
    is_text = "input_ids" in records
    kind = LayersForSequenceClassification if is_text else LayersForImageClassification
    model = kind(LayersConfig(body.config, widths, num_labels=classes))
    if getattr(body, "pooler", None) is not None:
        body.pooler = None
    model.body = body
    zero(model.classifier)
    model.eval()
    count = len(next(iter(records.values())))
    vectors = torch.cat(
        [
            joined(body, **built.prepare({n: x[i : i + ROWS] for n, x in records.items()})).double()
            for i in range(0, count, ROWS)
        ]
    )
    center = vectors.mean(0)
    spread = (vectors - center).square().sum(1).mean().sqrt().clamp_min(1e-6)
    model.center.copy_(center)
    model.scale.fill_(float(NORM / spread))
    return model


def _without_randomness(body: nn.Module) -> None:
    """Switch off dropout and stochastic depth, so that a record always has the same features."""
    set_dropout(body.config, 0.0)
    for name in ("drop_path_rate", *DROPOUT):
        if getattr(body.config, name, None) is not None:
            setattr(body.config, name, 0.0)


def _save(model: Any, built: Built, out: Path) -> None:
    companions = built.companions(Reading())
    own = {name: text for name, text in companions.files.items() if "modeling_" not in name}
    companions = with_model_code(model, replace(companions, files=own))
    model.config._name_or_path = ""
    model.config.body_config._name_or_path = ""
    for key, value in companions.config.items():
        setattr(model.config, key, value)
    with short_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(str(out))
        for saved in companions.saved:
            saved.save_pretrained(str(out))
        for name, text in companions.files.items():
            write_file(out / name, _writer(text), for_release=True)


def _writer(text: str) -> Any:
    return lambda file: file.write(text.encode())
