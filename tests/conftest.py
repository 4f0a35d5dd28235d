"""One thread for each worker, no downloads, and Hypothesis without a stopwatch."""

import os
import tempfile
from importlib import metadata

import pytest
import torch
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
# transformers copies code that comes with models into this folder: each worker has its own.
MODULES = tempfile.TemporaryDirectory(prefix="dpfed-modules-")
os.environ["HF_MODULES_CACHE"] = MODULES.name
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # is read by triton itself: kernels are tried without a GPU
    )
torch.set_num_threads(1)
settings.register_profile("dpfed", deadline=None, max_examples=20)
settings.load_profile("dpfed")


@pytest.fixture
def from_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """dpfed is there but not installed: it has no metadata."""
    version = metadata.version

    def elsewhere(name: str) -> str:
        if name == "dpfed":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", elsewhere)
