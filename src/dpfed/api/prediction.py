"""Use the trained model of a run: score new records, or continue prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.config import Config
from dpfed.errors import DpfedError
from dpfed.model.blocks import inner_config
from dpfed.model.generation import written
from dpfed.model.per_sample.gradients import PerSample
from dpfed.model.task import InputSpec
from dpfed.privacy.noise import Streams
from dpfed.training.export import run_settings, trained_tensors
from dpfed.training.job.device import device_of
from dpfed.training.job.model import build_model


@dataclass(frozen=True)
class Predictor:
    """A trained model that is ready to score records.

    spec   kind and shape of the records
    model  computes the scores of records from `theta`
    theta  the trained parameters as one vector, `[P]` for P trainable numbers
    """

    config: Config
    spec: InputSpec
    model: PerSample
    theta: Tensor

    @classmethod
    def of_run(cls, folder: Path) -> Predictor:
        """Return the predictor with the trained model of a finished run."""
        config, _, spec = run_settings(folder)
        # Do not check and do not compile the model again. The run has checked it already, and
        # compilation takes longer than a few predictions.
        model = replace(config.model, liveness=False)
        config = replace(config, model=model, run=replace(config.run, compile=False))
        device = device_of(config.run.device)
        ready = build_model(config, spec, Streams(config.run.seed), device)
        tensors = trained_tensors(folder, ready.model.space)
        return cls(config, spec, ready.model, ready.model.space.flatten(tensors).to(device))

    def scores(self, inputs: Mapping[str, np.ndarray], kind: str) -> Tensor:
        """Return the scores of each record on the CPU, `[n, scores]`.

        inputs  arrays with one row per record, by the name of the model's argument
        kind    "text", "image" or "features"
        """
        if kind != self.spec.kind:
            raise DpfedError(f"the model was trained on {self.spec.kind}, the records are {kind}")
        coder: Any = self.config.model
        arrays = coder.encode(inputs) if kind == "text" else inputs
        if kind != "text":
            self._refuse_shape(arrays[self.spec.name])
        device = self.theta.device
        tensors = {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}
        return self.model.scores(self.theta, tensors).float().cpu()

    def _refuse_shape(self, records: np.ndarray) -> None:
        if records.shape[1:] != self.spec.shape:
            raise DpfedError(
                f"a record has shape {records.shape[1:]}, and the model was trained on records of "
                f"shape {self.spec.shape}"
            )
        fractions = self.spec.kind == "image" and records.dtype == np.float32
        if self.spec.kind == "image" and fractions != (self.spec.white == 1.0):
            raise DpfedError(
                f"pixels of these records have the type {records.dtype}, and the model was trained "
                f"on pixels from 0 to {self.spec.white:g}"
            )


def continued(
    model: Any, section: Any, prompts: Sequence[str | Sequence[Mapping[str, Any]]], new_tokens: int
) -> list[str]:
    """Return, for each prompt, the text with which the language model continues it.

    model       the trained model, of peft or transformers
    section     the configuration section [model], which loads the tokenizer
    prompts     texts, or chats: lists of messages with `role` and `content`
    new_tokens  largest number of tokens to write; an end token ends a text earlier
    """
    if isinstance(prompts, str) or any(not isinstance(p, str | list | tuple) for p in prompts):
        raise DpfedError("prompts must be a list of texts, or a list of chats: lists of messages")
    if type(new_tokens) is not int or new_tokens < 1:
        raise DpfedError(f"max_new_tokens = {new_tokens!r} must be a whole number of at least 1")
    limit = getattr(inner_config(model), "max_position_embeddings", None)
    tokens = section.prompt_ids(prompts)
    for i, ids in enumerate(tokens):
        if not ids:
            raise DpfedError(f"prompt {i} has no tokens: give it at least one word")
        if limit and len(ids) + new_tokens > limit:
            raise DpfedError(
                f"prompt {i} has {len(ids)} tokens and max_new_tokens = {new_tokens}, together "
                f"more than the {limit} positions of the model: shorten one of them"
            )
    ends = section.ends(model)
    device = next(model.parameters()).device
    return [
        section.decoded(written(model.generate, ids, new_tokens, ends, device)) for ids in tokens
    ]
