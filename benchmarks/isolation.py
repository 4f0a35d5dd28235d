"""Measure exact isolation against the fast private step, in one run and in turn.

    OMP_NUM_THREADS=1 python benchmarks/isolation.py [--model NAME ...] [--batch B ...]

One client draws Poisson batches of B expected records; a step is a call of the oracle. The ways:

fast     passes of as many records as a batch has
exact    passes with places that each record draws
single   exact isolation with one place, that is, one record at a time

All ways draw the same batches. Figures are processor time (on a GPU the clock), summed over the
steps, and its ratio to `fast`. The models are the digits model, a ViT of 6 layers on images of
32 pixels, and MiniLM with LoRA on texts of 64 tokens.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.bench.cases import CPU, MIN_RECORDS
from dpfed.config import LoraSection, ModelSection
from dpfed.data.partition import shards_of
from dpfed.model.build import assemble
from dpfed.model.per_sample.forward_check import faithful_model, plain_outputs
from dpfed.model.per_sample.gradients import PerSample, trainable
from dpfed.model.per_sample.isolation_check import RECORDS
from dpfed.model.per_sample.places import settle_places
from dpfed.model.task import InputSpec
from dpfed.model.zoo import REGISTRY
from dpfed.privacy.noise import Streams
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms
from dpfed.privacy.plan import Plan
from dpfed.privacy.record_batch import PrivateData, Records

SMALL = {case.model: case for case in CPU}
MINILM = InputSpec("text", "input_ids", (64,), 2, vocabulary=30522)
MODELS = (*SMALL, "minilm")
RATE = 0.25
CLIP = 0.1


def parts_of(name: str) -> tuple[Any, InputSpec]:
    if name in SMALL:
        return SMALL[name].build(), SMALL[name].spec
    keys: dict[str, Any] = {"train": "lora", "lora": LoraSection(r=8, alpha=16.0), "max_length": 64}
    section: ModelSection = REGISTRY[name](**keys)
    return assemble(section, MINILM), MINILM


def model_of(name: str, device: torch.device) -> tuple[PerSample, Tensor, InputSpec]:
    """Return the model after the test of its places, its first theta, and its inputs' spec."""
    parts, spec = parts_of(name)
    generator = torch.Generator().manual_seed(0)
    model, space = parts.adapted.model.to(device), parts.space.to(device)
    theta = space.flatten(trainable(model)).detach()
    records = {n: x.to(device) for n, x in spec.synthetic(RECORDS, generator).items()}
    plain = plain_outputs(model, space, theta, records, parts.built.prepare)
    ready, _ = faithful_model(parts.built, model, space, plain)
    if device.type == "cuda":
        ready.to(torch.bfloat16)
    settle_places(ready, theta, spec, 1, 512, generator)
    return ready, theta, spec


class Ways:
    """The oracles of one model and one batch size."""

    def __init__(self, name: str, batch: int, device: torch.device) -> None:
        self.model, self.theta, spec = model_of(name, device)
        self._device = device
        units = max(int(batch / RATE), MIN_RECORDS)
        inputs = spec.synthetic(units, torch.Generator().manual_seed(0))
        labels = (torch.arange(units) % spec.classes).to(device)
        records = Records({n: x.to(device) for n, x in inputs.items()}, labels)
        shards = shards_of(np.zeros(units, dtype=np.int64), 1)
        self._data = PrivateData(self.model, records, shards)
        self._plan = Plan(
            "poisson", CLIP, np.array([units]), np.array([batch / units]),
            np.array([float(batch)]), np.ones(1),
        )  # fmt: skip
        self.places = {"exact": self.model.places, "single": 1}

    def oracle(self, way: str, round: int) -> FleetOracle:
        isolation: Any = "fast" if way == "fast" else "exact"
        terms = RoundTerms(self._plan, Streams(0), round, [0], 1, isolation=isolation)
        return FleetOracle(self._data, terms, PassLimits(places=self.places.get(way, 1)))

    def seconds(self, way: str, round: int) -> float:
        """Return the time of one step."""
        oracle = self.oracle(way, round)
        cuda = self._device.type == "cuda"
        clock = time.perf_counter if cuda else time.process_time
        start = clock()
        oracle(self.theta.unsqueeze(0))
        if cuda:
            torch.cuda.synchronize()
        return clock() - start


def measure(name: str, batch: int, steps: int, device: torch.device, names: list[str]) -> None:
    ways = Ways(name, batch, device)
    total = dict.fromkeys(names, 0.0)
    for round in range(steps + 1):
        for i in range(len(names)):
            way = names[(round + i) % len(names)]
            seconds = ways.seconds(way, round)
            # The first turn warms up.
            total[way] += seconds if round else 0.0
    for way in names:
        each = 1e3 * total[way] / steps
        ratio = total[way] / total["fast"]
        places = ways.places.get(way, "-")
        print(f"{name:12} {batch:5d} {way:8} {places!s:>6} {each:10.1f} {ratio:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", nargs="*", type=int, default=[16, 256])
    parser.add_argument("--way", nargs="*", default=["fast", "exact", "single"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    print(f"{'model':12} {'batch':>5} {'way':8} {'places':>6} {'ms':>10} {'ratio':>6}")
    for name in given.model:
        for batch in given.batch:
            measure(name, batch, given.steps, torch.device(given.device), given.way)


if __name__ == "__main__":
    main()
