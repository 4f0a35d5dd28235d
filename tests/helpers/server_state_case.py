"""A small configuration for tests of the round loop and the server's state."""

from __future__ import annotations

from typing import Any

from dpfed.config import Config, build
from dpfed.registry import registry


def config_of(**run: Any) -> Config:
    raw = {
        "data": {"name": "digits", "clients": 5, "partition": "iid"},
        "model": {"name": "linear", "liveness": False},
        "algorithm": {"name": "dp-fedavg", "lr": 3.0},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 8},
        "run": {"rounds": 4, "local_steps": 2, "participation": 0.4, "device": "cpu", **run},
    }
    return build(raw, registry())
