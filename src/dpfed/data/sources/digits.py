"""The data source "digits": 1,797 handwritten digits of 8x8 pixels from scikit-learn.

The data are by Alpaydin and Kaynak, 1998.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpfed.config import DataSection
from dpfed.data.tables import Source, Table


@dataclass(frozen=True)
class Digits(DataSection):
    """Handwritten digits, without a download. Every fifth record of a class is for testing."""

    name: str = "digits"

    def load(self) -> Source:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = bunch.images.astype(np.uint8)[:, None]
        labels = bunch.target.astype(np.int64)
        test = np.zeros(len(labels), dtype=bool)
        for c in range(10):
            test[np.flatnonzero(labels == c)[::5]] = True
        return Source(
            train=Table({"pixel_values": images[~test]}, labels[~test]),
            test=Table({"pixel_values": images[test]}, labels[test]),
            classes=tuple("0123456789"),
            kind="image",
            white=16.0,
        )
