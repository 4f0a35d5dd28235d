"""`dpfed server`: train by a configuration with clients on a network."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.cli.options import AsJson, Debug, Insecure, LogJson, Overrides, show
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
    status: Annotated[
        bool, typer.Option("--status", help="show the status of the server of --out, and end")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, help="seconds until enough clients must be connected")
    ] = 600.0,
    insecure: Insecure = False,
    log_json: LogJson = False,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Train with clients on a network.

    Example: dpfed server cfg.toml --out runs/first --keys keys
    """
    from dpfed.cli.run import closing
    from dpfed.federation.links import need_flower
    from dpfed.training.interrupt import on_signals

    if out is None:
        raise DpfedError("give the folder of the run: --out DIR")
    if status:
        return show_status(out, as_json)
    need_flower()
    address = _address(listen, keys, insecure)
    with on_signals() as stop:
        settings = _settings(config, overrides or [], out, resume, insecure)
        place = Place(out, resume, address, keys, wait, log_json)
        result = _serve(settings, place, stop)
    show(closing(result), result, as_json)


def _settings(
    config: str | None, overrides: list[str], out: Path, resume: bool, insecure: bool
) -> Config:
    """Return the configuration of the run.

    Its noise is repeatable, for tests, only with both --insecure and run.noise = "seeded".
    """
    from dpfed.federation.server.serving import config_for, wants_seeded

    config_for(config, overrides, out, resume, seeded=False)
    seeded = insecure and wants_seeded(config, overrides, out)
    return config_for(config, overrides, out, resume, seeded=seeded)


def _address(listen: str, keys: Path | None, insecure: bool) -> Address:
    """Return the address of --listen; with --insecure it must belong to this machine."""
    from dpfed.federation.links import address_of, refuse_insecure

    if insecure == (keys is not None):
        raise DpfedError(
            "give --keys DIR (`dpfed keys` makes it), "
            "or --insecure for a test on this machine, not both"
        )
    address = address_of(listen)
    if insecure:
        refuse_insecure(address)
    return address


def show_status(out: Path, as_json: bool) -> None:
    from dpfed.federation.server.status import lines, read_status

    found = read_status(out)
    if found is None:
        raise DpfedError(f"{out} is not the folder of a run that `dpfed server` has started")
    show(list(lines(found)), found, as_json)


@dataclass(frozen=True)
class Place:
    """The places that a server uses (folders and address), and how it waits and logs.

    out       folder of the run
    resume    True to resume the run in this folder
    listen    address that clients connect to
    keys      folder of `dpfed keys`; None for an insecure test
    wait      seconds until enough clients must be connected
    log_json  True to log lines of JSON
    """

    out: Path
    resume: bool
    listen: Address
    keys: Path | None
    wait: float
    log_json: bool


def _serve(settings: Config, place: Place, stop: Stop) -> dict[str, Any]:
    from dpfed.federation.certificates import check_server
    from dpfed.federation.flower.processes import Notes, superlink
    from dpfed.federation.flower.session import opened_run
    from dpfed.federation.flower.transport import PostTransport
    from dpfed.federation.links import client_keys
    from dpfed.federation.server.log_display import display_for
    from dpfed.federation.server.serving import Network, serve_over
    from dpfed.federation.server.status import Status, flower_home, status_file
    from dpfed.training.callbacks.base import OnStart
    from dpfed.training.job.job import Job
    from dpfed.training.job.plan import client_names
    from dpfed.training.run_folder.folder import refuse_occupied

    names = client_names(settings)
    out, keys = place.out, place.keys
    known = None
    if keys is not None:
        known = client_keys(keys, names)
        check_server(keys)
    if not place.resume:
        refuse_occupied(out, force=False)
    # Put Flower's files beside the folder of the run, which must contain only files of the run.
    home = flower_home(out)
    with ExitStack() as stack:
        display = display_for(settings.run.rounds, place.log_json)
        stack.enter_context(display)
        process = stack.enter_context(superlink(place.listen, home, keys))
        display.say(f"clients connect to {place.listen}; Flower's log is {process.log}")
        display.say(*warnings(settings, keys is None))
        status = Status(status_file(out), names, display.say, Notes(process.log).new)
        stack.callback(status.close)
        post = stack.enter_context(opened_run(process, keys, names, stop))

        def on_start(job: Job) -> None:
            stop.gently = True

        transport = PostTransport(post, known, stop=stop, alive=process.alive, seen=status.seen)
        network = Network(transport, status.say, stop, place.wait)
        callbacks = [OnStart(on_start), display, status]
        return serve_over(settings, out, place.resume, network, callbacks)


def warnings(settings: Config, insecure: bool) -> list[str]:
    lines = ["INSECURE: no TLS and no keys, for tests on this machine only"] if insecure else []
    if settings.run.noise == "seeded":
        lines.append(
            "TEST MODE: noise is repeatable and protects nothing; "
            "clients need client.allow_seeded = true"
        )
    return lines
