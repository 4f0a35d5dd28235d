"""`dpfed server`: train by a configuration with clients on a network."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.cli.options import AsJson, Debug, Insecure, Overrides, show
from dpfed.errors import DpfedError

if TYPE_CHECKING:
    from dpfed.config import Config
    from dpfed.federation.links import Address
    from dpfed.training.interrupt import Stop


def server(
    config: Annotated[
        str | None, typer.Argument(help="TOML file with [federation.clients]")
    ] = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="resume the run in --out")] = False,
    keys: Annotated[Path | None, typer.Option(help="folder that `dpfed keys` has made")] = None,
    listen: Annotated[
        str,
        typer.Option(
            help="host:port that clients connect to; "
            "0.0.0.0:PORT for all of this machine's addresses"
        ),
    ] = "127.0.0.1:8000",
    wait: Annotated[
        float, typer.Option(min=0, help="seconds until enough clients must be connected")
    ] = 600.0,
    insecure: Insecure = False,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Train with clients on a network.

    Example: dpfed server cfg.toml --out runs/first --keys keys
    """
    from dpfed.cli.run import closing
    from dpfed.federation.links import address_of, need_flower, refuse_insecure
    from dpfed.training.interrupt import on_signals

    need_flower()
    if out is None:
        raise DpfedError("give the folder of the run: --out DIR")
    if insecure == (keys is not None):
        raise DpfedError(
            "give --keys DIR (`dpfed keys` makes it), "
            "or --insecure for a test on this machine, not both"
        )
    address = address_of(listen)
    if insecure:
        refuse_insecure(address)
    with on_signals() as stop:
        settings = _settings(config, overrides or [], out, resume, insecure)
        result = _serve(settings, out, resume, address, keys, wait, stop)
    show(closing(result), result, as_json)


def _settings(
    config: str | None, overrides: list[str], out: Path, resume: bool, insecure: bool
) -> Config:
    """Return the configuration. Noise is repeatable only with --insecure and run.noise="seeded"."""
    from dpfed.federation.server.serving import config_for, wants_seeded

    config_for(config, overrides, out, resume, seeded=False)
    seeded = insecure and wants_seeded(config, overrides, out)
    return config_for(config, overrides, out, resume, seeded=seeded)


def _serve(
    settings: Config,
    out: Path,
    resume: bool,
    listen: Address,
    keys: Path | None,
    wait: float,
    stop: Stop,
) -> dict[str, Any]:
    from dpfed.federation.flower.processes import superlink
    from dpfed.federation.flower.session import opened_run
    from dpfed.federation.flower.transport import PostTransport
    from dpfed.federation.links import client_keys
    from dpfed.federation.server.serving import Network, serve_over
    from dpfed.training.callbacks.base import OnStart
    from dpfed.training.callbacks.progress import ProgressDisplay
    from dpfed.training.job.job import Job
    from dpfed.training.job.plan import client_names
    from dpfed.training.run_folder.folder import refuse_occupied

    names = client_names(settings)
    known = client_keys(keys, names) if keys else None
    if not resume:
        refuse_occupied(out, force=False)
    # Put Flower's files beside the run's folder, because that folder has only files of the run.
    home = out.parent / f".{out.name}.flower"
    with ExitStack() as stack:
        display = stack.enter_context(ProgressDisplay(settings.run.rounds))
        process = stack.enter_context(superlink(listen, home, keys))
        display.say(f"clients connect to {listen}; Flower's log is {process.log}")
        display.say(*warnings(settings, keys is None))
        post = stack.enter_context(opened_run(process, keys, names, stop))

        def on_start(job: Job) -> None:
            stop.gently = True

        transport = PostTransport(post, known, stop=stop, alive=process.alive)
        network = Network(transport, display.say, stop, wait)
        return serve_over(settings, out, resume, network, [OnStart(on_start), display])


def warnings(settings: Config, insecure: bool) -> list[str]:
    lines = ["INSECURE: no TLS and no keys, for tests on this machine only"] if insecure else []
    if settings.run.noise == "seeded":
        lines.append(
            "TEST MODE: noise is repeatable and protects nothing; "
            "clients need client.allow_seeded = true"
        )
    return lines
