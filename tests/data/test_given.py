"""Data that a program hands over."""

from __future__ import annotations

import numpy as np
import pytest

from dpfed.data.sources.given import source_of
from dpfed.errors import DpfedError


def test_private_records_are_not_the_public_test_set() -> None:
    """Scores on the test set are printed on the model card."""
    table = {"features": np.zeros((3, 2), dtype=np.float32), "label": [0, 1, 0]}
    with pytest.raises(DpfedError, match="must be other records"):
        source_of(table, table)
    assert len(source_of(table, dict(table)).test) == 3
