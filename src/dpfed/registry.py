"""Registry of the names in a configuration: data sources, models, algorithms and presets."""

from __future__ import annotations

from pathlib import Path

from dpfed.algorithms import REGISTRY as ALGORITHMS
from dpfed.algorithms.base import Releases
from dpfed.config import Registry, nearest
from dpfed.data.sources import REGISTRY as DATASETS
from dpfed.errors import DpfedError
from dpfed.model.given_module import GivenModule
from dpfed.model.zoo import REGISTRY as MODELS

CONFIGS = Path(__file__).parent / "config" / "presets"
DEFAULT = "digits"


def registry() -> Registry:
    # Leave out files whose name begins with an underscore: they are bases that presets extend.
    found = (p for p in sorted(CONFIGS.rglob("*.toml")) if not p.name.startswith("_"))
    presets = {str(p.relative_to(CONFIGS).with_suffix("")): p for p in found}
    models = {**MODELS, GivenModule.name: GivenModule}
    return Registry(data=DATASETS, model=models, algorithm=ALGORITHMS, presets=presets)


def releases_of(algorithm: str) -> Releases:
    """Return how often one local step of the algorithm uses the oracle, with its defaults."""
    if algorithm not in ALGORITHMS:
        raise DpfedError(f"the algorithm {algorithm} is not known{nearest(algorithm, ALGORITHMS)}")
    releases: Releases = ALGORITHMS[algorithm]().releases  # type: ignore[call-arg]
    return releases
