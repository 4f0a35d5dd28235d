"""A small federation in one process: the digits of a simulated run, dealt to clients that each hold only their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from callback_case import Watcher
from torch import Tensor

from dpfed.config import build
from dpfed.data.tables import Source, Table
from dpfed.federation import policy
from dpfed.federation.client.client import Client
from dpfed.federation.server.server import Federation, Loopback, spending_of
from dpfed.registry import registry
from dpfed.training.backends.fleet import Fleet
from dpfed.training.budget.spending import Spending
from dpfed.training.job.job import Job, prepare
from dpfed.training.round_loop import RoundLoop
from dpfed.training.rounds import Round

CLIENT_KEYS = ("servers", "allow_seeded", "max_message", "held_out_share", "held_out_column")
RAW: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "clients": 3},
    "model": {"name": "linear"},
    "algorithm": {"name": "dp-fedadamw", "lr": 0.01},
    "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 10},
    "run": {"rounds": 3, "local_steps": 2, "participation": 1.0, "device": "cpu", "eval_every": 3},
}


def job_of(**sections: dict[str, Any]) -> Job:
    raw = {name: {**table, **sections.get(name, {})} for name, table in RAW.items()}
    if "name" in sections.get("algorithm", {}):
        raw["algorithm"] = dict(sections["algorithm"])
    return prepare(build(raw, registry()))


def source_of(job: Job, client: int) -> Source:
    """What client i of the simulation holds, in the same order."""
    loader: Any = job.config.data
    whole: Source = loader.load()
    rows = job.shards.of(client)
    table = Table(
        {name: x[rows] for name, x in whole.train.inputs.items()}, whole.train.labels[rows]
    )
    return replace(whole, train=table)


def client_config(job: Job, i: int, folder: Path, **policy_keys: Any) -> policy.ClientConfig:
    client_keys = {k: policy_keys.pop(k) for k in CLIENT_KEYS if k in policy_keys}
    raw: dict[str, Any] = {
        "client": {
            "name": f"clinic-{i}",
            "state": str(folder / f"clinic-{i}"),
            "servers": ["hub"],
            "device": "cpu",
        }
        | client_keys,
        "policy": {"records": int(job.plan.sizes[i]), "max_epsilon": 50.0} | policy_keys,
        "data": {
            "name": "digits",
            "augment": job.config.data.augment,
            "views": job.config.data.views,
        },
        "model": {"name": "linear"},
    }
    return policy.build(raw, registry())


def client_of(job: Job, i: int, folder: Path, **policy_keys: Any) -> Client:
    return Client(client_config(job, i, folder, **policy_keys), source_of(job, i), insecure=True)


def names_of(job: Job) -> list[str]:
    return [f"clinic-{i}" for i in range(job.plan.clients)]


def federation_of(
    job: Job, folder: Path, seeded: bool = False, **policy_keys: Any
) -> tuple[Federation, Loopback, list[str]]:
    clients = {
        f"clinic-{i}": client_of(job, i, folder, allow_seeded=seeded, **policy_keys).answer
        for i in range(job.plan.clients)
    }
    log: list[str] = []
    transport = Loopback(clients)
    return (
        Federation(job, transport, "run-1", "hub", names_of(job), 5.0, seeded, log.append),
        transport,
        log,
    )


def simulated(job: Job) -> tuple[Tensor, list[Round]]:
    seen: list[Round] = []
    return RoundLoop(
        job, Fleet(job), Spending(job, None, None), Watcher(on_round=seen.append)
    ).run(), seen


def federated(job: Job, federation: Federation) -> tuple[Tensor, list[Round]]:
    seen: list[Round] = []
    return RoundLoop(job, federation, spending_of(job), Watcher(on_round=seen.append)).run(), seen
