"""Differentially private federated fine-tuning of large models; start with `dpfed.fine_tune`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Editors and type checkers read these imports. At run time, names are loaded when first used.
    from dpfed.api import Comparison, TrainedModel, Tuning, compare, fine_tune, load, plan, tune
    from dpfed.errors import DpfedError, DpfedWarning
    from dpfed.training.callbacks.base import Callback

# Change the version only here: packaging, `dpfed --version` and the documentation read it.
__version__ = "0.1.0"
__all__ = [
    "Callback",
    "Comparison",
    "DpfedError",
    "DpfedWarning",
    "TrainedModel",
    "Tuning",
    "compare",
    "fine_tune",
    "load",
    "plan",
    "tune",
]
_HOMES = {
    "Callback": "dpfed.training.callbacks.base",
    "DpfedError": "dpfed.errors",
    "DpfedWarning": "dpfed.errors",
}


if not TYPE_CHECKING:
    # Hide this function from type checkers. Otherwise they would accept any name as an attribute of
    # the module.
    def __getattr__(name: str) -> Any:
        """Load a public name when it is first used, so that `import dpfed` is fast."""
        if name in __all__:
            return getattr(importlib.import_module(_HOMES.get(name, "dpfed.api")), name)
        raise AttributeError(f"module 'dpfed' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, also those that are not loaded yet."""
    return [*__all__, "__version__"]
