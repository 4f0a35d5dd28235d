"""`dpfed client`: take part in a federation under the rules of a client.toml."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpfed.cli.options import Debug, Insecure, LogJson
from dpfed.errors import DpfedError

if TYPE_CHECKING:
    from dpfed.federation.client_config import LinkSection
    from dpfed.federation.flower.processes import Process
    from dpfed.federation.flower.relay import Handler, Listener
    from dpfed.federation.links import Address
    from dpfed.federation.log_line import Log
    from dpfed.training.interrupt import Stop

POLL_S = 0.1
# Give up after this many starts of the SuperNode, Flower's client process, if the server has never
# accepted it.
TRIES = 5
LONGEST_WAIT_S = 30.0
# The SuperNode writes this text into its log as soon as the server has accepted it.
ACCEPTED = b"SuperNode ID"


def client(
    config: Annotated[Path, typer.Argument(help="this client's client.toml")],
    insecure: Insecure = False,
    log_json: LogJson = False,
    debug: Debug = False,
) -> None:
    """Take part in a federation until stopped. Example: dpfed client client.toml"""
    from dpfed.federation.client_config import load_client
    from dpfed.federation.links import check_link, need_flower
    from dpfed.training.interrupt import on_signals

    need_flower()
    from dpfed.federation.client.storage import claim
    from dpfed.federation.log_line import json_to_stderr, to_stderr
    from dpfed.registry import registry

    say = json_to_stderr if log_json else to_stderr
    with on_signals() as stop, ExitStack() as stack:
        settings, link = load_client(config, registry())
        address = check_link(link, insecure)
        stack.enter_context(claim(Path(settings.client.state)))
        from dpfed.federation.client.budget_left import budget_left
        from dpfed.federation.client.client import Client
        from dpfed.federation.flower.answering import Answerer
        from dpfed.federation.flower.relay import Listener, private_path

        name = settings.client.name
        own = Client(settings, insecure=insecure, log=say)
        handler = Answerer(own.answer, name, say, greets=insecure, debug=debug)
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
        limit = settings.client.max_message << 20
        home = Path(settings.client.state) / "flower"
        path = stack.enter_context(private_path())
        listener = stack.enter_context(closing(Listener(path, limit)))
        keep_going(address, home, None if insecure else link, listener, handler, stop, say)


def keep_going(
    address: Address,
    home: Path,
    link: LinkSection | None,
    listener: Listener,
    handler: Handler,
    stop: Stop,
    say: Log,
) -> None:
    """Start the SuperNode (Flower's client process), and start it again each time that it ends.

    Raise DpfedError if the SuperNode was started `TRIES` times and the server never accepted it.
    """
    from dpfed.federation.flower.processes import last_line, log_size, supernode

    log = home / "supernode.log"
    ever_accepted = False
    failures = 0
    while True:
        written = log_size(log)
        with supernode(address, home, link, listener.path) as process:
            work(process, listener, handler, stop, say)
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


def work(process: Process, listener: Listener, handler: Handler, stop: Stop, say: Log) -> None:
    """Answer the server's messages until the SuperNode (Flower's client process) ends.

    Meanwhile show the notes that the guard, the reverse proxy of the SuperNode, writes to a log.
    """
    from dpfed.federation.flower.processes import Notes

    notes = Notes(process.log)
    while process.popen.poll() is None:
        stop()
        found = listener.next(POLL_S)
        if found is not None:
            found.answer(handler)
        for line in notes.new():
            say(line)
