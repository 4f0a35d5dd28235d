"""A small federation in one process: each client has its records of a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from callback_case import Watcher
from torch import Tensor

from dpfed.config import FederationSection, build
from dpfed.data.tables import Source, Table
from dpfed.federation import client_config as client_toml
from dpfed.federation import messages
from dpfed.federation.client.client import Client
from dpfed.federation.messages import Reply
from dpfed.federation.policy import RefusedError, public_text
from dpfed.federation.server.server import Federation, RunPlace
from dpfed.privacy.ledger.charge import Row
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.registry import registry
from dpfed.training.backends.fleet import Fleet
from dpfed.training.budget.spending import Spending, budget_of
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
# Everyone for whom a federation may send a reply in time.
TIMEOUT_S = 5.0


class Loopback:
    """A transport to clients in this process, one after another."""

    def __init__(self, clients: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self.clients = dict(clients)

    def send_all(
        self, requests: Mapping[str, bytes], timeout: float
    ) -> Iterator[tuple[str, bytes | Exception]]:
        for name in requests:
            if name in self.clients:
                yield name, self._reply(name, requests[name])

    def _reply(self, name: str, data: bytes) -> bytes | Exception:
        try:
            return self.clients[name](data)
        except Exception as error:
            return RefusedError(public_text(error))


def job_of(**sections: dict[str, Any]) -> Job:
    raw = {name: {**RAW.get(name, {}), **sections.get(name, {})} for name in {**RAW, **sections}}
    if "name" in sections.get("algorithm", {}):
        raw["algorithm"] = dict(sections["algorithm"])
    return prepare(build(raw, registry()))


def source_of(job: Job, client: int) -> Source:
    """Return the records of client i of the simulation, in the same order."""
    loader: Any = job.config.data
    whole: Source = loader.load()
    rows = job.private.shards.of(client)
    inputs = {name: x[rows] for name, x in whole.train.inputs.items()}
    return replace(whole, train=Table(inputs, whole.train.labels[rows]))


def client_config(job: Job, i: int, folder: Path, **policy_keys: Any) -> client_toml.ClientConfig:
    client_keys = {k: policy_keys.pop(k) for k in CLIENT_KEYS if k in policy_keys}
    own = {
        "name": f"clinic-{i}",
        "state": str(folder / f"clinic-{i}"),
        "servers": ["hub"],
        "device": "cpu",
    }
    data = job.config.data
    raw: dict[str, Any] = {
        "client": own | client_keys,
        "policy": {"records": int(job.plan.sizes[i]), "max_epsilon": 50.0} | policy_keys,
        "data": {"name": "digits", "augment": data.augment, "views": data.views},
        "model": {"name": "linear"},
    }
    return client_toml.build(raw, registry())


def client_of(job: Job, i: int, folder: Path, **policy_keys: Any) -> Client:
    return Client(client_config(job, i, folder, **policy_keys), source_of(job, i), insecure=True)


def names_of(job: Job) -> list[str]:
    return [f"clinic-{i}" for i in range(job.plan.clients)]


def section_of(job: Job, **keys: Any) -> FederationSection:
    """Return [federation] with the job's formats of messages, and these keys."""
    own = job.config.federation or FederationSection()
    clients = dict.fromkeys(names_of(job), 1)
    return FederationSection(
        **{
            "server": "hub",
            "clients": clients,
            "timeout": TIMEOUT_S,
            "retries": 0,
            "patience": 1,
            "upload": own.upload,
            "download": own.download,
            **keys,
        }
    )


def server_of(
    job: Job,
    clients: Mapping[str, Callable[[bytes], bytes]] | Loopback,
    log: Callable[[str], None] = lambda line: None,
    seeded: bool = False,
    /,
    **section: Any,
) -> Federation:
    """Return the server of run-1, with these keys of [federation]."""
    transport = clients if isinstance(clients, Loopback) else Loopback(clients)
    return Federation(job, transport, RunPlace("run-1"), section_of(job, **section), seeded, log)


def federation_of(
    job: Job, folder: Path, seeded: bool = False, **policy_keys: Any
) -> tuple[Federation, Loopback, list[str]]:
    """Return a server, its transport to one client for each of the job's, and the server's log."""
    clients = {
        f"clinic-{i}": client_of(job, i, folder, allow_seeded=seeded, **policy_keys).answer
        for i in range(job.plan.clients)
    }
    log: list[str] = []
    transport = Loopback(clients)
    return server_of(job, transport, log.append, seeded), transport, log


def simulated(job: Job) -> tuple[Tensor, list[Round]]:
    seen: list[Round] = []
    watcher = Watcher(on_round=seen.append)
    return RoundLoop(job, Fleet(job), Spending(job, None, None), watcher).run(), seen


def federated(job: Job, federation: Federation) -> tuple[Tensor, list[Round]]:
    seen: list[Round] = []
    watcher = Watcher(on_round=seen.append)
    return RoundLoop(job, federation, spending_of(job), watcher).run(), seen


def spending_of(job: Job) -> Spending:
    """Return the spending of a server, whose clients charge their own ledgers."""
    privacy = job.config.privacy
    budget = budget_of(job.plan, job.schedule, privacy.delta, privacy.budget, past=job.past)
    return Spending(job, budget, None, by_choice=True)


def reply_of(data: bytes) -> Reply:
    """Return a reply without comparing it with a request."""
    reply: Reply = messages._unpack(data, 1 << 30, ("reply",))
    return reply


def rows_of(folder: Path, client: int = 0) -> list[Row]:
    """Return the rows of a client's ledger, after a check of its hash chain."""
    name = f"clinic-{client}"
    path = folder / name / "ledger.db"
    if not path.exists():
        return []
    with Ledger.open(path, client=name, readonly=True) as ledger:
        ledger.verify()
        return list(ledger.rows())
