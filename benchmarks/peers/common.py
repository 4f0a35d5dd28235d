"""The model, the records, the round and the clock that all peers share.

This file runs in the environment of each peer, so it imports only the parts of dpfed that build
models and partition records. A round has 5 of 10 clients, 20 local steps of AdamW each, Poisson
batches of 16 expected records, and the digits model of dpfed's default run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import tomllib
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CLIENTS = 10
COHORT = 5
STEPS = 20
BATCH = 16
CLIP = 1.0
SIGMA = 1.0
LR = 0.015
WEIGHT_DECAY = 0.01
WARM = 2
ROUNDS = 10


def arguments(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; Flower: actors of one thread each"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="timed rounds, of which the median counts"
    )
    parser.add_argument("--warm", type=int, default=WARM, help="rounds before those that are timed")
    parser.add_argument(
        "--in-turn", action="store_true", help="wait for a line on stdin before each round"
    )
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    return given


class Rounds:
    """The clock: `tick` is called before the first round and after each.

    With --in-turn, `tick` waits for a line on stdin. Stdout of libraries becomes stderr, so that
    only the measurement is on the real stdout.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.in_turn = given.in_turn
        self.warm = given.warm
        self.total = given.warm + given.rounds
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._begun: tuple[float, float, float] | None = None
        self.seen: list[tuple[float, float]] = []

    def tick(self) -> None:
        if self._begun is not None:
            clock = time.perf_counter()
            own = time.process_time()
            others, mine, start = self._begun
            self.seen.append((clock - start, own - mine + children_seconds() - others))
        if self.in_turn and len(self.seen) < self.total:
            self._say({"ready": len(self.seen)})
            # An empty line means that the driver has ended.
            if not sys.stdin.readline():
                sys.exit(0)
        # The clock comes last, because reading the children's time takes time.
        self._begun = (children_seconds(), time.process_time(), time.perf_counter())

    def end(self, tool: str, packages: tuple[str, ...], does: str, parameters: int) -> None:
        """Print the result as one line; `parameters` must be equal for all tools."""
        timed = self.seen[self.warm : self.total]
        clock, processor = zip(*timed, strict=True)
        self._say(
            {
                "tool": tool,
                "versions": {name: metadata.version(name) for name in packages},
                "does": does,
                "rounds": len(timed),
                "seconds": statistics.median(clock),
                "cpu_seconds": statistics.median(processor),
                "each": [[round(a, 4), round(b, 4)] for a, b in timed],
                "parameters": parameters,
            }
        )

    def _say(self, line: dict[str, Any]) -> None:
        print(json.dumps(line), file=self._out, flush=True)


def children_seconds() -> float:
    """Return the processor time of all descendants: os.times for ended ones, /proc for others."""
    ended = os.times()
    total = ended.children_user + ended.children_system
    if not Path("/proc/self/stat").exists():
        return total
    stats = {
        pid: figures
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if (figures := _stat(pid))
    }
    known = {os.getpid()}
    while more := {pid for pid, (parent, _) in stats.items() if parent in known} - known:
        known |= more
        total += sum(stats[pid][1] for pid in more) / os.sysconf("SC_CLK_TCK")
    return total


def _stat(pid: int) -> tuple[int, int] | None:
    """Return the parent and the ticks of a process and its ended children, None if it is gone."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), sum(map(int, fields[11:15]))


@dataclass(frozen=True)
class Digits:
    """The model with its adapters, and the prepared records of every client."""

    model: nn.Module
    clients: list[tuple[Tensor, Tensor]]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.trained.values())


def digits() -> Digits:
    """Build the model and partition the records as `dpfed run digits` does."""
    import dpfed
    from dpfed.config import LoraSection
    from dpfed.data.partition import partition
    from dpfed.data.sources.digits import Digits as Source
    from dpfed.model.build import assemble
    from dpfed.model.task import InputSpec
    from dpfed.model.zoo.glyph_vit import GlyphViT

    file = Path(dpfed.__file__).parent / "config" / "presets" / "digits.toml"
    preset = tomllib.loads(file.read_text(encoding="utf-8"))
    lora = preset["model"]["lora"]
    data = preset["data"]
    spec = InputSpec("image", "pixel_values", (1, 8, 8), 10, white=16.0)
    model = GlyphViT(lora=LoraSection(**{**lora, "targets": tuple(lora["targets"])}))
    parts = assemble(model, spec)
    source = Source(clients=CLIENTS, partition=data["partition"], alpha=data["alpha"])
    table = source.load().train
    shards = partition(source, table, np.random.default_rng(0))
    raw = torch.from_numpy(table.inputs["pixel_values"])
    pixels = parts.built.prepare({"pixel_values": raw})["pixel_values"]
    labels = torch.from_numpy(table.labels)
    owned = [torch.from_numpy(shards.of(client)) for client in range(CLIENTS)]
    return Digits(parts.adapted.model, [(pixels[rows], labels[rows]) for rows in owned])


def poisson(records: int, generator: torch.Generator | None = None) -> Tensor:
    """Return a Poisson batch of 16 expected records; it is empty once in twenty million."""
    return (torch.rand(records, generator=generator) < BATCH / records).nonzero().squeeze(1)


class PrivateClient:
    """Local training with Opacus: 20 steps of DP-AdamW with clipping, noise and an accountant.

    The model is wrapped once for all clients, which saves Opacus the cost of a new engine each
    time.
    """

    def __init__(self, at: Digits) -> None:
        from opacus import GradSampleModule

        # A frozen first layer causes this warning.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        at.model.train()
        self.at = at
        self.tensors = list(at.trained.values())
        self.wrapped = GradSampleModule(at.model, loss_reduction="mean")

    def train(self, client: int, start: list[Tensor]) -> list[Tensor]:
        from opacus.accountants import RDPAccountant
        from opacus.optimizers import DPOptimizer

        pixels, labels = self.at.clients[client]
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, start)
        adam = torch.optim.AdamW(self.tensors, lr=LR, weight_decay=WEIGHT_DECAY)
        optimizer = DPOptimizer(
            adam, noise_multiplier=SIGMA, max_grad_norm=CLIP, expected_batch_size=BATCH
        )
        accountant = RDPAccountant()
        optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(BATCH / len(labels)))
        for _ in range(STEPS):
            rows = poisson(len(labels))
            logits = self.wrapped(pixel_values=pixels[rows]).logits
            torch.autograd.backward(nn.functional.cross_entropy(logits, labels[rows]))
            optimizer.step()
            optimizer.zero_grad()
        return [t.detach().clone() for t in self.tensors]
