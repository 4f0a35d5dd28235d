"""Run kernels on a GPU if there is one, else in triton's interpreter (tests/conftest.py)."""

import pytest
import torch

from dpfed import accel


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "interpreted", not torch.cuda.is_available())
