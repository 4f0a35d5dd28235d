"""Differentially private federated fine-tuning of large models. `dpfed.fine_tune` is the Python interface (api.py)."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"  # the one place: packaging, `dpfed --version` and the documentation read it here
__all__ = ["Tuned", "fine_tune"]


def __getattr__(name: str) -> Any:
    """Only what is asked for is loaded, so that `import dpfed` is fast."""
    if name in __all__:
        return getattr(importlib.import_module("dpfed.api"), name)
    raise AttributeError(f"module 'dpfed' has no attribute {name!r}")
