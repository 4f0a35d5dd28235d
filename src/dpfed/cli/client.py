"""`dpfed client`: take part in a federation under the rules of a client.toml."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpfed.cli.options import Debug, Insecure
from dpfed.errors import DpfedError

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

    from dpfed.federation.client_config import LinkSection
    from dpfed.federation.links import Address, Process
    from dpfed.training.interrupt import Stop

POLL_S = 0.1
# Give up after this many starts of Flower's SuperNode without an acceptance by the server.
TRIES = 5
LONGEST_WAIT_S = 30.0
# The SuperNode writes this text into its log as soon as the server has accepted it.
ACCEPTED = b"SuperNode ID"


def client(
    config: Annotated[Path, typer.Argument(help="this client's client.toml")],
    insecure: Insecure = False,
    debug: Debug = False,
) -> None:
    """Take part in a federation until stopped. Example: dpfed client client.toml"""
    from dpfed.federation.client_config import load_client
    from dpfed.federation.links import check_link, need_flower
    from dpfed.training.interrupt import on_signals

    need_flower()
    from dpfed.registry import registry

    with on_signals() as stop:
        settings, link = load_client(config, registry())
        address = check_link(link, insecure)
        from dpfed.federation.client.budget_left import budget_left
        from dpfed.federation.client.client import Client
        from dpfed.federation.flower.apps import client_app

        name = settings.client.name
        own = Client(settings, insecure=insecure, log=say)
        app = client_app(own.answer, name, say, greets=insecure, debug=debug)
        say(str(budget_left(settings)))
        say(f"{name} takes part with {', '.join(settings.client.servers)} at {address}")
        if own.on_gpu and settings.policy.isolation == "exact":
            say(
                "note: exact isolation was measured on CPUs; "
                "on a GPU it rests on the test of places before training"
            )
        if insecure:
            say("INSECURE: no TLS and no keys, for tests on this machine only")
        stop.gently = True
        home = Path(settings.client.state) / "flower"
        keep_going(address, home, None if insecure else link, app, stop)


def keep_going(
    address: Address, home: Path, link: LinkSection | None, app: ClientApp, stop: Stop
) -> None:
    """Start the SuperNode, and start it again each time that it ends.

    Raise DpfedError if the SuperNode was started `TRIES` times and the server never accepted it.
    """
    from dpfed.federation.links import last_line, supernode

    log = home / "supernode.log"
    ever_accepted = False
    failures = 0
    while True:
        written = log.stat().st_size if log.exists() else 0
        process, own, secret = supernode(address, home, link)
        try:
            work(process, own, secret, app, stop)
        finally:
            process.end()
        if ACCEPTED in log.read_bytes()[written:]:
            ever_accepted = True
            failures = 0
        else:
            failures += 1
        why = last_line(log, written)
        if failures >= TRIES and not ever_accepted:
            raise DpfedError(
                f"{address} does not take this client ({why}): "
                "check link.address, link.ca and link.key"
            )
        wait = min(LONGEST_WAIT_S, 2.0 ** min(failures + 1, 6))
        say(f"the connection has ended ({why}); trying again in {wait:g} s")
        end = time.monotonic() + wait
        while time.monotonic() < end:
            stop()
            time.sleep(POLL_S)


def work(process: Process, own: Address, secret: str, app: ClientApp, stop: Stop) -> None:
    """Answer the server's messages until the SuperNode ends."""
    import httpx

    from dpfed.federation.flower.node import Tasks
    from dpfed.federation.links import is_own, wait_open

    wait_open(own, process)
    if not is_own(own):
        say(f"port {own.port} was taken by another user's process: connecting anew")
        return
    tasks = Tasks(own, secret, app)
    try:
        while process.popen.poll() is None:
            stop()
            try:
                if tasks.next():
                    continue
            except httpx.HTTPError as error:
                if process.popen.poll() is None and not isinstance(error, httpx.ConnectError):
                    say(f"the SuperNode did not take an answer: {error}")
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                # Flower raises these errors for a malformed message. Close the connection, because
                # the SuperNode would otherwise wait for an answer for ever.
                say(
                    f"what came in is no message of Flower's ({type(error).__name__}): "
                    "connecting anew"
                )
                return
            time.sleep(POLL_S)
    finally:
        tasks.close()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
