"""A server's whole run over Flower's Grid: the one round loop, with clients on a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfed.config import Config, load
from dpfed.errors import DpfedError
from dpfed.federation.links import client_keys
from dpfed.federation.server.server import federation_of, served
from dpfed.privacy.published import show_score
from dpfed.registry import registry
from dpfed.training.backends.base import RemoteBackend
from dpfed.training.backends.execution import Served
from dpfed.training.callbacks.base import Callback, OnStart
from dpfed.training.job.job import Job
from dpfed.training.job.plan import client_names
from dpfed.training.open_run import Mode
from dpfed.training.rounds import Round
from dpfed.training.run import run

if TYPE_CHECKING:
    from flwr.serverapp import Grid

Say = Callable[[str], None]


def config_for(
    config: str | None, overrides: Sequence[str], out: Path, resume: bool, seeded: bool
) -> Config:
    """The configuration of a server; one that goes on has it in its folder."""
    if resume and not (out / "config.toml").exists():
        raise DpfedError(
            f"{out} is not the folder of a run: --resume needs one that `dpfed server` has made"
        )
    if config is None and not resume:
        raise DpfedError(
            "a server needs a configuration with [federation.clients]: dpfed server cfg.toml --out DIR"
        )
    return served(load(config or str(out / "config.toml"), list(overrides), registry()), seeded)


def wants_seeded(config: str | None, overrides: Sequence[str], out: Path) -> bool:
    """Whether the configuration asks for repeatable noise, as a simulation does by default."""
    return (
        load(config or str(out / "config.toml"), list(overrides), registry()).run.noise == "seeded"
    )


def serve_over(
    config: Config,
    out: Path,
    resume: bool,
    grid: Grid,
    keys: dict[str, bytes] | None,
    say: Say,
    *,
    wait: float = 600.0,
    stop: Callable[[], None] = lambda: None,
    alive: Callable[[], None] = lambda: None,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Trains with the clients that this Grid reaches. `wait`: seconds until enough of them must be connected."""
    from dpfed.federation.flower.transport import GridTransport

    transport = GridTransport(grid, keys, stop=stop, alive=alive)

    def backend(job: Job, name: str) -> RemoteBackend:
        return federation_of(job, name, transport, say)

    def wait_for_clients(job: Job) -> None:
        enough = job.config.run.min_clients or job.schedule.cohort
        transport.wait_for(client_names(config), enough, wait, say)

    watchers = [*callbacks, OnStart(wait_for_clients)]
    mode: Mode = "resume" if resume else "new"
    return run(config, out, mode, callbacks=watchers, execution=Served(backend, stop))


class RoundLines(Callback):
    """Write one line per round with `say`."""

    def __init__(self, rounds: int, say: Say) -> None:
        self._rounds = rounds
        self._say = say

    def on_round(self, round: Round) -> None:
        accuracy = "-" if round.accuracy is None else show_score(round.accuracy)
        self._say(f"round {round.t}/{self._rounds}  accuracy {accuracy}  {round.seconds:.1f} s")


def serve(
    config: str, overrides: Sequence[str], out: Path, resume: bool, grid: Grid, keys: Path, say: Say
) -> dict[str, Any]:
    """For Flower's own commands: real noise always, and clients known by their keys."""
    settings = config_for(config, overrides, out, resume, seeded=False)

    known = client_keys(keys, client_names(settings))
    lines = RoundLines(settings.run.rounds, say)
    return serve_over(settings, out, resume, grid, known, say, callbacks=[lines])
