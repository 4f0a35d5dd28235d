"""What all peers share: the same model, the same records in the same hands, the same round, and one way to time it.

It runs in every peer's own environment, so it imports of dpfed only what builds models and deals records. A round is
5 clients of 10, 20 local steps of AdamW each, Poisson batches of 16 expected records, the digits model of dpfed's default run.
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

CLIENTS, COHORT, STEPS, BATCH = 10, 5, 20, 16
CLIP, SIGMA, LR, WEIGHT_DECAY = 1.0, 1.0, 0.015, 0.01
WARM, ROUNDS = 2, 10


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
    """Times rounds. `tick` is called between them, and before the first; in turn with others it waits there for a line.

    Libraries may print what they like: their stdout becomes stderr, and what belongs to the measurement goes to the real one.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.in_turn, self.warm, self.total = given.in_turn, given.warm, given.warm + given.rounds
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._begun: tuple[float, float, float] | None = None
        self.seen: list[tuple[float, float]] = []

    def tick(self) -> None:
        if self._begun is not None:
            clock, own = time.perf_counter(), time.process_time()
            others, mine, start = self._begun
            self.seen.append((clock - start, own - mine + children_seconds() - others))
        if self.in_turn and len(self.seen) < self.total:
            self._say({"ready": len(self.seen)})
            if not sys.stdin.readline():
                sys.exit(0)  # who asked for rounds is gone
        self._begun = (
            children_seconds(),
            time.process_time(),
            time.perf_counter(),
        )  # looking around takes time: first

    def end(self, tool: str, packages: tuple[str, ...], does: str, parameters: int) -> None:
        """The one line that a script prints. `parameters`: trained numbers, which must be the same for all."""
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
    """Processor time of all that descend from this process. os.times knows of those that have ended, /proc of the others."""
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
    """Parent and ticks of a process, with those of its own children that have ended."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return None
    return int(fields[1]), sum(map(int, fields[11:15]))


@dataclass(frozen=True)
class Digits:
    """The model with its adapters, and every client's records, made ready for the model once."""

    model: nn.Module
    clients: list[tuple[Tensor, Tensor]]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.trained.values())


def digits() -> Digits:
    """As `dpfed run` builds and deals them: its own code and the sections of its own preset."""
    import dpfed
    from dpfed.config import LoraSection
    from dpfed.data.partition import partition
    from dpfed.data.sources.digits import Digits as Source
    from dpfed.model.build import assemble
    from dpfed.model.task import InputSpec
    from dpfed.model.zoo.glyph_vit import GlyphViT

    preset = tomllib.loads(
        (Path(dpfed.__file__).parent / "config" / "presets" / "digits.toml").read_text(
            encoding="utf-8"
        )
    )
    lora, deal = preset["model"]["lora"], preset["data"]
    spec = InputSpec("image", "pixel_values", (1, 8, 8), 10, white=16.0)
    parts = assemble(
        GlyphViT(lora=LoraSection(**{**lora, "targets": tuple(lora["targets"])})), spec
    )
    source = Source(clients=CLIENTS, partition=deal["partition"], alpha=deal["alpha"])
    table = source.load().train
    shards = partition(source, table, np.random.default_rng(0))
    pixels = parts.built.prepare({"pixel_values": torch.from_numpy(table.inputs["pixel_values"])})[
        "pixel_values"
    ]
    labels = torch.from_numpy(table.labels)
    hands = [torch.from_numpy(shards.of(client)) for client in range(CLIENTS)]
    return Digits(parts.adapted.model, [(pixels[rows], labels[rows]) for rows in hands])


def poisson(records: int, generator: torch.Generator | None = None) -> Tensor:
    """Every record by itself with the same chance; 16 are expected. An empty batch is once in twenty million."""
    return (torch.rand(records, generator=generator) < BATCH / records).nonzero().squeeze(1)


class PrivateClient:
    """A client's local training with Opacus: 20 steps of DP-AdamW, each record's gradient clipped, noised, and counted.

    Wrapped once and used again for every client, which spares Opacus the building that a fresh engine would cost each time.
    """

    def __init__(self, at: Digits) -> None:
        from opacus import GradSampleModule

        warnings.filterwarnings(
            "ignore", message="Full backward hook is firing"
        )  # of every frozen first layer
        at.model.train()
        self.at, self.tensors = at, list(at.trained.values())
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
