"""Run a whole training as the server, with clients that connect through Flower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfed.config import Config, load
from dpfed.errors import DpfedError
from dpfed.federation.links import client_keys
from dpfed.federation.server.server import Log, federation_of, served
from dpfed.registry import registry
from dpfed.training.backends.base import RemoteBackend
from dpfed.training.backends.execution import Served, Stop, never_stop
from dpfed.training.callbacks.base import Callback, OnStart
from dpfed.training.callbacks.progress import round_score
from dpfed.training.job.job import Job
from dpfed.training.job.plan import client_names
from dpfed.training.open_run import Mode
from dpfed.training.rounds import Round
from dpfed.training.run import run

if TYPE_CHECKING:
    from dpfed.federation.flower.post import Post
    from dpfed.federation.flower.transport import PostTransport


@dataclass(frozen=True)
class Network:
    """A server's connection to its clients.

    transport  sends requests to clients and returns their replies
    say        writes a line to the log
    stop       called again and again while the server waits; raises an error to end the run
    wait       seconds within which enough clients must connect at the start
    """

    transport: PostTransport
    say: Log
    stop: Stop = never_stop
    wait: float = 600.0


def config_for(
    config: str | None, overrides: Sequence[str], out: Path, resume: bool, seeded: bool
) -> Config:
    """Return the configuration of a server, read from the file `config`.

    If `config` is None, the run in the folder `out` is resumed with its own configuration.
    """
    if resume and not (out / "config.toml").exists():
        raise DpfedError(
            f"{out} is not the folder of a run: --resume needs one that `dpfed server` has made"
        )
    if config is None and not resume:
        raise DpfedError(
            "a server needs a configuration with [federation.clients]: "
            "dpfed server cfg.toml --out DIR"
        )
    return served(_load(config, overrides, out), seeded)


def wants_seeded(config: str | None, overrides: Sequence[str], out: Path) -> bool:
    """Return True if the configuration asks for repeatable noise, as simulations do by default."""
    return _load(config, overrides, out).run.noise == "seeded"


def _load(config: str | None, overrides: Sequence[str], out: Path) -> Config:
    return load(config or str(out / "config.toml"), list(overrides), registry())


def serve_over(
    config: Config, out: Path, resume: bool, network: Network, callbacks: Sequence[Callback]
) -> dict[str, Any]:
    """Run a training whose clients are reached over `network`, and return the run's result."""

    def backend(job: Job, name: str) -> RemoteBackend:
        return federation_of(job, name, network.transport, network.say, out)

    def wait_for_clients(job: Job) -> None:
        enough = job.config.run.min_clients or job.schedule.cohort
        network.transport.wait_for(client_names(config), enough, network.wait, network.say)

    watchers = [*callbacks, OnStart(wait_for_clients)]
    mode: Mode = "resume" if resume else "new"
    return run(config, out, mode, callbacks=watchers, execution=Served(backend, network.stop))


class RoundLines(Callback):
    """Callback that writes one log line about each round, by calling `say`."""

    def __init__(self, rounds: int, say: Log) -> None:
        self._rounds = rounds
        self._say = say
        self._task_name = "classify"

    def on_start(self, job: Job) -> None:
        self._task_name = job.model.task.name

    def on_round(self, round: Round) -> None:
        score = round_score(round, self._task_name)
        self._say(f"round {round.t}/{self._rounds}  {score}  {round.seconds:.1f} s")


def serve(config: str, out: Path, post: Post, keys: Path, say: Log) -> dict[str, Any]:
    """Run a server that Flower's own commands have started, and return the run's result.

    The clients' noise is secret. The public keys in the folder `keys` identify the clients. If
    `out` has a run, it is resumed.

    post  delivers messages to the clients
    say   writes a line to the log
    """
    from dpfed.federation.flower.transport import PostTransport

    resume = (out / "config.toml").exists()
    settings = config_for(config, [], out, resume, seeded=False)
    transport = PostTransport(post, client_keys(keys, client_names(settings)))
    lines = RoundLines(settings.run.rounds, say)
    return serve_over(settings, out, resume, Network(transport, say), [lines])
