"""The model that a request refers to, built from the client's own [model] and data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpfed.algorithms import REGISTRY as ALGORITHMS
from dpfed.algorithms.base import Algorithm
from dpfed.config import Config, PrivacySection, RunSection, parse
from dpfed.errors import DpfedError
from dpfed.federation.client_config import ClientConfig
from dpfed.federation.messages import AnyTerms, Terms
from dpfed.federation.model_hash import model_hash
from dpfed.federation.policy import RefusedError
from dpfed.model.per_sample.gradients import PerSample
from dpfed.model.task import InputSpec
from dpfed.privacy.noise import Streams
from dpfed.training.job.job import build_model
from dpfed.training.job.message_size import meta_message


@dataclass(frozen=True)
class RequestModel:
    """A built model.

    start   initial vector `[P]`, from which `policy.max_distance` is measured
    hash    hash of the frozen weights (`federation.model_hash`)
    shapes  shapes of the tensors in a request to train
    """

    algorithm: Algorithm
    model: PerSample
    start: Tensor
    hash: str
    shapes: dict[str, tuple[int, ...]]


class ModelBuilder:
    """Builds the model of a request and caches it, as all rounds of a run use the same one."""

    def __init__(self, config: ClientConfig, spec: InputSpec, device: torch.device) -> None:
        self._config = config
        self._spec = spec
        self._device = device
        self._cached: tuple[tuple[Algorithm, int, bool], RequestModel] | None = None

    def build(self, terms: AnyTerms, algorithm: Algorithm) -> RequestModel:
        varying_phi = isinstance(terms, Terms) and terms.clipping.rule().counts
        key = (algorithm, terms.seed, varying_phi)
        if self._cached is None or self._cached[0] != key:
            config = run_config(self._config, algorithm, "seeded")
            streams = Streams(terms.seed)
            model, adapted, start = build_model(config, self._spec, streams, self._device, [])
            _, broadcast = meta_message(algorithm, model.space, varying_phi=varying_phi)
            shapes = {name: tuple(value.shape) for name, value in broadcast.items()}
            hash_ = model_hash(adapted.model, model.space)
            self._cached = (key, RequestModel(algorithm, model, start, hash_, shapes))
        return self._cached[1]


def run_config(config: ClientConfig, algorithm: Any, noise: Any) -> Config:
    """Return this client's sections as the configuration of a run."""
    # All records are this client's own, so none are dealt.
    data = replace(config.data, partition="natural")
    privacy = PrivacySection(isolation=config.policy.isolation)
    return Config(data, config.model, algorithm, privacy, RunSection(noise=noise))


def algorithm_of(terms: AnyTerms) -> Algorithm:
    keys = dict(terms.algorithm)
    cls = ALGORITHMS.get(str(keys.pop("name", "")))
    if cls is None:
        raise RefusedError(
            f"there is no algorithm {terms.algorithm.get('name')!r} here: "
            "both sides need the same dpfed"
        )
    try:
        algorithm: Algorithm = parse("algorithm", cls, keys)
    except DpfedError as error:
        # The text depends on the request alone.
        raise RefusedError(f"refused: {error}") from None
    return algorithm
