"""Registry of the names in a configuration: data sources, models, algorithms and presets."""

from __future__ import annotations

from pathlib import Path

from dpfed.algorithms import REGISTRY as ALGORITHMS
from dpfed.algorithms.base import Algorithm, Releases
from dpfed.config import ModelSection, Registry, nearest
from dpfed.data.sources import REGISTRY as DATASETS
from dpfed.errors import DpfedError
from dpfed.model.given_module import GivenModule
from dpfed.model.zoo import REGISTRY as MODELS
from dpfed.plugins import with_plugins

CONFIGS = Path(__file__).parent / "config" / "presets"
DEFAULT = "digits"


def registry() -> Registry:
    # Leave out files whose names begin with an underscore. Presets extend these files, but users do
    # not name them.
    found = (p for p in sorted(CONFIGS.rglob("*.toml")) if not p.name.startswith("_"))
    presets = {str(p.relative_to(CONFIGS).with_suffix("")): p for p in found}
    models = with_plugins("model", ModelSection, {**MODELS, GivenModule.name: GivenModule})
    return Registry(data=DATASETS, model=models, algorithm=algorithms(), presets=presets)


def algorithms() -> dict[str, type[Algorithm]]:
    """Return all algorithms by name: those of dpfed, and those of installed plugin packages."""
    return with_plugins("algorithm", Algorithm, ALGORITHMS)


def releases_of(algorithm: str) -> Releases:
    """Return the number of batches and noised gradients in one local step of an algorithm.

    The algorithm has the default values of its keys.
    """
    known = algorithms()
    if algorithm not in known:
        raise DpfedError(f"the algorithm {algorithm} is not known{nearest(algorithm, known)}")
    releases: Releases = known[algorithm]().releases  # type: ignore[call-arg]
    return releases
