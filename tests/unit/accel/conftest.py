"""Kernels are tried on a GPU where there is one, else by triton's interpreter (tests/conftest.py)."""

import pytest
import torch

from dpfed import accel


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "interpreted", not torch.cuda.is_available())
