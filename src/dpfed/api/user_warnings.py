"""Warnings of the Python interface, which name the line of the user's code."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from types import FrameType

from dpfed.errors import DpfedWarning


def warn(sentences: Sequence[str]) -> None:
    """Issue the sentences as warnings. They name the line of the user's code that called dpfed."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("dpfed."):
        level += 1
        frame = frame.f_back
    for sentence in sentences:
        warnings.warn(sentence, DpfedWarning, stacklevel=level)
