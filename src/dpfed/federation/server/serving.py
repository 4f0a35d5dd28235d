"""A server's whole run: the round loop with clients that Flower's Grid reaches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfed.config import Config, load
from dpfed.errors import DpfedError
from dpfed.federation.links import client_keys
from dpfed.federation.server.server import Log, federation_of, served
from dpfed.privacy.published import show_score
from dpfed.registry import registry
from dpfed.training.callbacks.activity import OnActivity, ignore
from dpfed.training.job.job import Job, client_names
from dpfed.training.round_loop import RemoteBackend, Round
from dpfed.training.run import run

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from dpfed.federation.flower.transport import GridTransport


@dataclass(frozen=True)
class Hooks:
    """Functions that a server's run calls.

    say          with a line for the log
    stop         while waiting; it may raise to end the run
    begin        with the job, before the first round
    observe      after each round
    on_activity  with progress inside a round
    """

    say: Log
    stop: Callable[[], None] = lambda: None
    begin: Callable[[Job], None] = lambda job: None
    observe: Callable[[Round], None] = lambda round: None
    on_activity: OnActivity = ignore


def config_for(
    config: str | None, overrides: Sequence[str], out: Path, resume: bool, seeded: bool
) -> Config:
    """Return the configuration of a server; a resumed run has it in its folder."""
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
    """Return True if the configuration asks for repeatable noise, the default of a simulation."""
    return _load(config, overrides, out).run.noise == "seeded"


def _load(config: str | None, overrides: Sequence[str], out: Path) -> Config:
    return load(config or str(out / "config.toml"), list(overrides), registry())


def serve_over(
    config: Config,
    out: Path,
    resume: bool,
    transport: GridTransport,
    hooks: Hooks,
    wait: float = 600.0,
) -> dict[str, Any]:
    """Train with the clients that the transport reaches; return the run's result.

    Enough of them must connect within `wait` seconds.
    """

    def backend(job: Job, name: str) -> RemoteBackend:
        return federation_of(job, name, transport, hooks.say)

    def begin(job: Job) -> None:
        hooks.begin(job)
        enough = job.config.run.min_clients or job.schedule.cohort
        transport.wait_for(client_names(config), enough, wait, hooks.say)

    watchers: dict[str, Any] = {
        "begin": begin,
        "observe": hooks.observe,
        "on_activity": hooks.on_activity,
    }
    return run(config, out, resume=resume, stop=hooks.stop, serve=backend, **watchers)


def serve(config: str, out: Path, grid: Grid, keys: Path, say: Log) -> dict[str, Any]:
    """Run a server under Flower's own commands: real noise, and clients identified by keys.

    A run that exists in `out` is resumed.
    """
    from dpfed.federation.flower.transport import GridTransport

    resume = (out / "config.toml").exists()
    settings = config_for(config, [], out, resume, seeded=False)

    def observe(round: Round) -> None:
        accuracy = "-" if round.accuracy is None else show_score(round.accuracy)
        say(f"round {round.t}/{settings.run.rounds}  accuracy {accuracy}  {round.seconds:.1f} s")

    transport = GridTransport(grid, client_keys(keys, client_names(settings)))
    return serve_over(settings, out, resume, transport, Hooks(say, observe=observe))
