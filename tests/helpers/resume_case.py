"""Short runs that are stopped and resumed, with an algorithm whose clients remember something."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from callback_case import Watcher
from safetensors.torch import load_file
from torch import Tensor

from dpfed.algorithms.base import (
    Algorithm,
    Averaging,
    ClientState,
    Context,
    Message,
    Oracle,
    spread,
)
from dpfed.config import Config, Registry, build
from dpfed.data.tables import Source, Table
from dpfed.registry import registry
from dpfed.training.rounds import Round
from dpfed.training.run import run

ROUNDS = 4


@dataclass(frozen=True)
class Server:
    theta: Tensor
    before: Tensor


@dataclass(frozen=True)
class Local:
    theta: Tensor
    c: Tensor
    total: Tensor
    seen: Tensor


@dataclass(frozen=True)
class Remembering(Averaging):
    """An algorithm with client memory; two fields of the server start as one tensor."""

    name = "remembering"
    lr_grid = (0.1,)
    summary = "for tests"

    lr: float = 0.1
    weight_decay: float = 0.0

    @property
    def remembers(self) -> tuple[str, ...]:
        return ("c",)

    def init(self, ctx: Context, theta: Tensor) -> Any:
        return Server(theta, theta)

    def start(self, ctx: Context, server: Any, memory: ClientState) -> Any:
        zero = torch.zeros_like(memory["c"])
        return Local(spread(server.theta, ctx.S), memory["c"], zero, memory["seen"])

    def step(self, ctx: Context, local: Local, oracle: Oracle, k: Tensor) -> Local:
        g, _ = oracle(local.theta)
        step = g - torch.where(local.seen.unsqueeze(1), 0.5 * local.c, 0.0)
        return dataclasses.replace(local, theta=local.theta - ctx.lr * step, total=local.total + g)

    def finish(self, ctx: Context, server: Any, local: Local) -> tuple[Message, ClientState]:
        return {"delta": local.theta - server.theta}, {"c": local.total / ctx.K}

    def aggregate(self, ctx: Context, server: Any, mean: Message) -> Any:
        theta = server.theta + mean["delta"]
        return Server(theta, theta if int(ctx.t) % 2 else server.theta)


def known() -> Registry:
    found = registry()
    algorithms: dict[str, type[Algorithm]] = {**found.algorithm, "remembering": Remembering}
    return dataclasses.replace(found, algorithm=algorithms)


def config_of(name: str = "dp-fedadamw", **sections: dict[str, Any]) -> Config:
    raw: dict[str, dict[str, Any]] = {
        "data": {"clients": 5, "partition": "iid"},
        "model": {"name": "linear", "liveness": sections.get("run", {}).get("noise") == "os"},
        "algorithm": {"name": name, "lr": 0.05},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 8},
        "run": {"rounds": ROUNDS, "local_steps": 2, "participation": 0.4, "device": "cpu"},
    }
    return build(
        {section: {**table, **sections.get(section, {})} for section, table in raw.items()}, known()
    )


def features() -> Source:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(140, 4)).astype(np.float32)
    y = (x @ rng.normal(size=(4, 3))).argmax(1)
    return Source(
        Table({"features": x[:100]}, y[:100]),
        Table({"features": x[100:]}, y[100:]),
        ("a", "b", "c"),
        "features",
    )


SOURCE = features()


class CrashError(Exception):
    """A simulated power cut."""


def stop_after(t: int) -> Callable[[Round], None]:
    """Return an observer that stops the run between the metrics and the checkpoint of round t."""

    def observe(round: Round) -> None:
        if round.t == t:
            raise CrashError

    return observe


def crashed(config: Config, out: Path, t: int) -> Path:
    with pytest.raises(CrashError):
        run(config, out, source=SOURCE, callbacks=[Watcher(on_round=stop_after(t))])
    return out


def resumed(config: Config, out: Path, **more: Any) -> dict[str, Any]:
    return run(config, out, source=SOURCE, mode="resume", **more)


def metrics(out: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def taken_in(out: Path) -> dict[str, int]:
    newest = max(
        (out / "checkpoint").glob("round-*.json"), key=lambda p: int(p.stem.removeprefix("round-"))
    )
    taken: dict[str, int] = json.loads(newest.read_text())["taken"]
    return taken


def same(one: Path, two: Path) -> None:
    a, b = (load_file(out / "model.safetensors") for out in (one, two))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert metrics(one) == metrics(two)
    assert taken_in(one) == taken_in(two)


KINDS: dict[str, dict[str, Any]] = {
    "dp-fedadamw": {},
    "dp-fedavg": {"privacy": {"clip_mode": "quantile"}},
    "remembering": {"run": {"participation": 0.6, "average": 0.7}},
}
