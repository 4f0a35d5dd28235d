"""A server's whole run with clients in this process, which can be killed between two messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from federation_case import RAW, Loopback, client_of

from dpfed.config import Config, build
from dpfed.federation.server.server import federation_of, served
from dpfed.registry import registry
from dpfed.training.backends.execution import Served
from dpfed.training.job.job import Job
from dpfed.training.run import run


class KilledError(BaseException):
    """No code in the program catches this exception, like a kill."""


def config_of(job: Job, **sections: dict[str, Any]) -> Config:
    """Return the simulation's configuration with its clients in [federation]."""
    raw: dict[str, Any] = {name: {**table, **sections.get(name, {})} for name, table in RAW.items()}
    if "name" in sections.get("algorithm", {}):
        raw["algorithm"] = dict(sections["algorithm"])
    declared = {f"clinic-{i}": int(size) for i, size in enumerate(job.plan.sizes)}
    raw["federation"] = {
        "server": "hub",
        "clients": declared,
        "timeout": 5.0,
        **sections.get("federation", {}),
    }
    return build(raw, registry())


class Net(Loopback):
    """Clients with files. The server dies in call number `kill_before` or `kill_within`.

    It dies before it sends the requests of that call, or after the clients have replied.
    """

    def __init__(self, job: Job, folder: Path, seeded: bool = True) -> None:
        super().__init__(
            {f"clinic-{i}": client_of(job, i, folder, allow_seeded=seeded).answer for i in range(3)}
        )
        self.sent: list[Mapping[str, bytes]] = []
        self.kill_before, self.kill_within = 0, 0

    def send_all(
        self, requests: Mapping[str, bytes], timeout: float
    ) -> Iterator[tuple[str, bytes | Exception]]:
        self.sent.append(dict(requests))
        if len(self.sent) == self.kill_before:
            raise KilledError
        yield from super().send_all(requests, timeout)
        if len(self.sent) == self.kill_within:
            raise KilledError


def serve(
    config: Config, out: Path, net: Loopback, seeded: bool = True, **keys: Any
) -> dict[str, Any]:
    logged: list[str] = []
    backend = lambda job, name: federation_of(job, name, net, logged.append)  # noqa: E731
    return run(served(config, seeded), out, execution=Served(backend), **keys) | {"log": logged}
