"""Measure the time that dpfed adds to a round of Flower.

    python benchmarks/federation_cost.py [--rounds 10]

A server and two clients on this machine train the model of the digits demonstration. Rounds of the
federation alternate with empty rounds: messages of equal size over the same SuperLink and
SuperNodes, which a client answers at once without dpfed. The script prints both medians and their
ratio, and the milliseconds of a client's round that are not training. TLS is off, since it costs
both alike.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
from loopback_trial import Trial

from dpfed.cli.client import keep_going
from dpfed.config import load
from dpfed.errors import InterruptedRunError
from dpfed.federation import links
from dpfed.federation.client.client import Client
from dpfed.federation.client_config import load_client
from dpfed.federation.flower.answering import Answerer
from dpfed.federation.flower.header import NONCE
from dpfed.federation.flower.processes import superlink
from dpfed.federation.flower.relay import Header, Listener, private_path
from dpfed.federation.flower.session import opened_run
from dpfed.federation.flower.transport import PostTransport
from dpfed.federation.messages import pack
from dpfed.federation.server.server import federation_of, served
from dpfed.registry import CONFIGS, registry
from dpfed.training.interrupt import on_signals
from dpfed.training.job.job import Job, prepare_server
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import aggregate

# The first bytes of a request of an empty round.
EMPTY = b"empty"


def client(path: Path, size: int) -> None:
    """Run a client as `dpfed client` does, which also answers empty rounds."""
    config, link = load_client(path, registry())
    own = Answerer(Client(config, insecure=True).answer, config.client.name, print, greets=True)

    def handler(header: Header, data: bytes) -> tuple[Header, bytes]:
        if not data.startswith(EMPTY):
            return own(header, data)
        return {"header": {NONCE: header["header"][NONCE]}, "has_data": True}, os.urandom(size)

    home = Path(config.client.state) / "flower"
    address = links.address_of(link.address)
    with on_signals() as stop, private_path() as way, suppress(InterruptedRunError):
        stop.gently = True
        keep_going(address, home, None, Listener(way), handler, stop, print)


def rounds(trial: Trial, job: Job, count: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each round of the federation, and of each empty round."""
    listen = links.Address("127.0.0.1", trial.port)
    full = []
    empty = []
    with ExitStack() as stack:
        process = stack.enter_context(superlink(listen, trial.folder / "link", None))
        post = stack.enter_context(opened_run(process, None, trial.names, lambda: None))
        transport = PostTransport(post, None, alive=process.alive)
        transport.wait_for(trial.names, len(trial.names), 120.0, print)
        federation = federation_of(job, "cost", transport, print)
        state = first_state(job)
        cohort = list(range(len(trial.names)))
        for t in range(1, count + 2):
            requests = {
                name: pack(federation.training_requests(t, state, [i])[i])
                for i, name in enumerate(trial.names)
            }
            began = time.perf_counter()
            mean, answered = federation.run_cohort(t, state, cohort)
            state = aggregate(job, t, state, cohort, mean, answered)
            between = time.perf_counter()
            empty_requests = {name: EMPTY + data for name, data in requests.items()}
            assert len(dict(transport.send_all(empty_requests, 60.0))) == len(cohort)
            end = time.perf_counter()
            # In the first round a client builds its model.
            if t > 1:
                full.append(between - began)
                empty.append(end - between)
    return full, empty


def guarding(path: Path, job: Job, trial: Trial, count: int) -> tuple[float, float]:
    """Return wall and processor seconds of a client's answer when training takes no time.

    Each is the smallest of five medians, since other work on the machine only adds time.
    """
    config, _ = load_client(path, registry())
    own: Any = Client(config, insecure=True)
    size = job.space.size
    own._compute = lambda request, built, plan, memory: (
        {"delta": torch.zeros(size), "v": torch.zeros(1)},
        {},
    )
    state = first_state(job)
    medians = []
    computing = []
    for attempt in range(5):
        federation = federation_of(job, f"guarding-{attempt}", links, print)  # type: ignore[arg-type]
        seconds = []
        busy = []
        for t in range(1, count + 2):
            number = trial.names.index(config.client.name)
            request = pack(federation.training_requests(t, state, [number])[number])
            began = time.perf_counter()
            worked = time.process_time()
            own.answer(request)
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - worked)
        medians.append(median(seconds[1:]))
        computing.append(median(busy[1:]))
    return min(medians), min(computing)


def configuration(rounds: int) -> dict[str, dict[str, Any]]:
    """Return the sections of the digits demonstration for a federation of so many rounds."""
    demo = tomllib.loads((CONFIGS / "digits.toml").read_text(encoding="utf-8"))
    return {
        "model": demo["model"],
        "algorithm": demo["algorithm"],
        "privacy": {"sigma": 1.0, "clip": 1.0, "batch": demo["privacy"]["batch"]},
        "run": {"rounds": rounds + 1, "local_steps": demo["run"]["local_steps"]},
    }


def with_clients(trial: Trial, job: Job, count: int) -> tuple[list[float], list[float]]:
    """Start the clients as processes and measure the rounds."""
    size = str(4 * job.space.size)
    children = []
    try:
        for name in trial.names:
            file = str(trial.folder / name / "client.toml")
            command = [sys.executable, __file__, "--client", file, "--size", size]
            children.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        return rounds(trial, job, count)
    finally:
        for child in children:
            child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--client", type=Path)
    parser.add_argument("--size", type=int, default=0)
    given = parser.parse_args()
    if given.client:
        client(given.client, given.size)
        return
    sections = configuration(given.rounds)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trial = stack.enter_context(Trial(Path(folder), clients=2, secure=False, **sections))
        config = load(str(trial.folder / "cfg.toml"), [], registry())
        job = prepare_server(served(config, seeded=True))
        full, empty = with_clients(trial, job, given.rounds)
        first = trial.folder / trial.names[0] / "client.toml"
        guard, busy = guarding(first, job, trial, given.rounds)
    print(
        f"{job.config.model.name}, {job.space.size:,} trainable numbers, "
        f"{sections['run']['local_steps']} local steps"
    )
    print(
        f"a round of 2 clients: {median(full):.2f} s; "
        f"an empty round of Flower: {median(empty):.2f} s"
    )
    print(f"ratio {median(full) / median(empty):.2f}")
    print(
        f"message, policy, ledger and storing at a client: {1000 * guard:.0f} ms, "
        f"{1000 * busy:.0f} of it computing"
    )


if __name__ == "__main__":
    main()
