"""Build, from a request, a client's model, privacy plan and random number streams for a round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Algorithm
from dpfed.config import Config, FederationSection, PrivacySection, RunSection, parse
from dpfed.errors import DpfedError
from dpfed.federation.client_config import ClientConfig
from dpfed.federation.messages import AnyTerms, Terms
from dpfed.federation.policy import RefusedError
from dpfed.model.frozen.model_hash import model_hash
from dpfed.model.per_sample.gradients import PerSample
from dpfed.model.task import InputSpec
from dpfed.privacy.noise import Purpose, Streams
from dpfed.privacy.plan import Plan
from dpfed.registry import algorithms
from dpfed.training.job.model import build_model
from dpfed.training.messages.message_format import Layout
from dpfed.training.messages.message_size import layouts
from dpfed.training.round_context import RoundFigures


@dataclass(frozen=True)
class RequestModel:
    """The model and the algorithm that a request asks for.

    model   computes per-record gradients and scores
    start   initial values of the trained parameters, `[P]`; policy.max_distance is measured from it
    hash    hash of the frozen weights (`model.model_hash`)
    """

    algorithm: Algorithm
    model: PerSample
    start: Tensor
    hash: str


class ModelBuilder:
    """Builds the model that a request asks for, and reuses it for later requests of the run."""

    def __init__(self, config: ClientConfig, spec: InputSpec, device: torch.device) -> None:
        self._config = config
        self._spec = spec
        self._device = device
        self._cached: tuple[tuple[Algorithm, int], RequestModel] | None = None

    def build(self, terms: AnyTerms, algorithm: Algorithm) -> RequestModel:
        key = (algorithm, terms.seed)
        if self._cached is None or self._cached[0] != key:
            config = run_config(self._config, algorithm, "seeded")
            # Draw the random inputs of the model check from a secret. The server chooses the seed,
            # so it could predict inputs that follow from the seed.
            streams = Streams(terms.seed, secret=True)
            model, adapted, start, _ = build_model(config, self._spec, streams, self._device)
            hash_ = model_hash(adapted.model, model.space)
            self._cached = (key, RequestModel(algorithm, model, start, hash_))
        return self._cached[1]


def layouts_of(terms: Terms, built: RequestModel) -> tuple[Layout, Layout]:
    """Return the layouts (formats and lengths of the tensors) of the reply and of the request."""
    section = FederationSection(upload=terms.upload, download=terms.download)
    varying_phi = terms.clipping.rule().counts
    return layouts(built.algorithm, built.model.space, section, varying_phi)


def run_config(config: ClientConfig, algorithm: Any, noise: Any) -> Config:
    """Return the configuration of a run from this client's data, model and isolation settings.

    algorithm, noise  values for the section [algorithm] and for `run.noise`
    """
    # Use the partition "natural", by which all records belong to this client. Other partitions
    # would divide them among simulated clients.
    data = replace(config.data, partition="natural")
    privacy = PrivacySection(isolation=config.policy.isolation)
    return Config(data, config.model, algorithm, privacy, RunSection(noise=noise))


def algorithm_of(terms: AnyTerms) -> Algorithm:
    keys = dict(terms.algorithm)
    cls = algorithms().get(str(keys.pop("name", "")))
    if cls is None:
        raise RefusedError(
            f"there is no algorithm {terms.algorithm.get('name')!r} here: "
            "both sides need the same dpfed, with the same packages of algorithms"
        )
    try:
        algorithm: Algorithm = parse("algorithm", cls, keys)
    except DpfedError as error:
        # The server may see this text, because the text depends only on the request.
        raise RefusedError(f"refused: {error}") from None
    return algorithm


@dataclass(frozen=True)
class OwnPlan(Plan):
    """The privacy plan (sampling, clipping, noise) of one client for its own round.

    A unit is one record, or all records of one person. `sizes` has the true number of units, and
    `expected`, the expected batch size, follows from the number that the client declares. If the
    client holds more units than it declares, each of them can still be sampled. If the client left
    some out, removing one unit would let another unit take part.
    """

    def __post_init__(self) -> None:
        if not (self.sampling == "poisson" and self.multipliers.all()):
            raise ValueError("a real client releases nothing without noise and accounting")


class IndexedStreams(Streams):
    """Repeatable random number streams for one client, equal to those of a simulation.

    In a client's process, the only client has the number 0. `key` replaces 0 by `index`, the
    client's number in the run.
    """

    def __init__(self, seed: int, index: int) -> None:
        super().__init__(seed)
        self._index = index

    def key(self, purpose: Purpose, round: int = 0, client: int = 0) -> bytes:
        return super().key(purpose, round, self._index)


def streams_of(terms: AnyTerms) -> Streams:
    """Return the random number streams of a round: secret, or repeatable in test mode (seeded)."""
    if terms.seeded:
        return IndexedStreams(terms.seed, terms.index)
    return Streams(terms.seed, secret=True)


def plan_of(terms: Terms, algorithm: Algorithm, units: int, unit: str) -> OwnPlan:
    """Return the privacy plan of a client for one round. Its settings come from the request.

    units  true number of units (records, or persons with all their records) that the client has
    unit   name of the unit, such as "record"
    """
    return OwnPlan(
        sampling="poisson",
        clip=terms.clip,
        sizes=np.array([units]),
        rates=np.array([terms.rate]),
        expected=np.array([terms.expected]),
        multipliers=np.array([terms.sigma]),
        batches=algorithm.releases.batches,
        releases=algorithm.releases.releases,
        unit=unit,
        clipping=terms.clipping.rule(),
    )


def figures_of(terms: Terms, algorithm: Algorithm) -> RoundFigures:
    return RoundFigures(
        terms.round,
        terms.rounds,
        terms.local_steps,
        terms.clients,
        terms.lr,
        algorithm.base_lr,
        terms.equal_phi,
    )
