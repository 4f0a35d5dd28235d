"""What dpfed adds to a round of Flower: two clients and a server on this machine, the model of the digits demonstration.

Rounds of the federation are interleaved with empty ones: the same messages of the same sizes over the same SuperLink and
SuperNodes, answered at once with as many bytes and without dpfed. Medians of 10, and their ratio; and the milliseconds of a
client's round that are not training (message, policy, ledger, storing). TLS is off: it costs both alike.

    python benchmarks/federation_cost.py [--rounds 10]
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from loopback_trial import Trial

from dpfed.config import load
from dpfed.errors import InterruptedRunError
from dpfed.federation import links
from dpfed.federation.client.client import Client
from dpfed.federation.messages import pack
from dpfed.federation.server.server import federation_of, served
from dpfed.registry import CONFIGS, registry
from dpfed.training.job.job import Job, prepare_server
from dpfed.training.round_context import first_state
from dpfed.training.round_loop import aggregate

links.need_flower()
from flwr.app import Context, Message  # noqa: E402

from dpfed.cli.client import keep_going  # noqa: E402
from dpfed.federation.flower.apps import client_app  # noqa: E402
from dpfed.federation.flower.envelope import TICKET, parcel, slip  # noqa: E402
from dpfed.federation.flower.link import own_grid  # noqa: E402
from dpfed.federation.flower.transport import GridTransport  # noqa: E402
from dpfed.training.interrupt import on_signals  # noqa: E402

EMPTY = "evaluate"  # the message type of an empty round


def client(path: Path, size: int) -> None:
    """A client as `dpfed client` runs it, which also answers empty rounds."""
    config, link = links.load_client(path, registry())
    app = client_app(Client(config, insecure=True).answer, config.client.name, print, greets=True)

    @app.evaluate()
    def empty(message: Message, context: Context) -> Message:
        return Message(parcel(os.urandom(size), slip(message.content, TICKET)), reply_to=message)

    with on_signals() as stop, suppress(InterruptedRunError):
        stop.gently = True
        keep_going(
            links.address_of(link.address), Path(config.client.state) / "flower", None, app, stop
        )


def rounds(trial: Trial, job: Job, count: int) -> tuple[list[float], list[float]]:
    """Seconds of each round of the federation and of each empty one, in turn."""
    listen = links.Address("127.0.0.1", trial.port)
    full, empty = [], []
    with ExitStack() as stack:
        process, secret = stack.enter_context(links.superlink(listen, trial.folder / "link", None))
        grid = stack.enter_context(own_grid(listen, None, secret, {}))
        transport = GridTransport(grid, None, alive=process.alive)
        hollow = GridTransport(grid, None, alive=process.alive, kind=EMPTY)
        transport.wait_for(trial.names, len(trial.names), 120.0, print)
        hollow.wait_for(trial.names, len(trial.names), 120.0, print)
        federation = federation_of(job, "cost", transport, print)
        state, cohort = first_state(job), list(range(len(trial.names)))
        for t in range(1, count + 2):
            requests = {
                name: pack(federation._request(t, state, i)) for i, name in enumerate(trial.names)
            }
            began = time.perf_counter()
            mean, answered = federation.run_cohort(t, state, cohort)
            state = aggregate(job, t, state, cohort, mean, answered)
            between = time.perf_counter()
            assert len(hollow.send_all(requests, 60.0)) == len(cohort)
            end = time.perf_counter()
            if t > 1:  # in the first round a client builds its model
                full.append(between - began)
                empty.append(end - between)
    return full, empty


def guarding(path: Path, job: Job, trial: Trial, count: int) -> tuple[float, float]:
    """Seconds of a client's answer when training takes no time, and those of them that are computing.

    The best of five medians: other work on the machine only adds.
    """
    config, _ = links.load_client(path, registry())
    own: Any = Client(config, insecure=True)
    size = job.space.size
    own._compute = lambda request, built, plan, memory: (
        {"delta": torch.zeros(size), "v": torch.zeros(1)},
        {},
    )
    state, medians, computing = first_state(job), [], []
    for attempt in range(5):
        federation = federation_of(job, f"guarding-{attempt}", links, print)  # type: ignore[arg-type]
        seconds, busy = [], []
        for t in range(1, count + 2):
            request = pack(federation._request(t, state, trial.names.index(config.client.name)))
            began, worked = time.perf_counter(), time.process_time()
            own.answer(request)
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - worked)
        medians.append(median(seconds[1:]))
        computing.append(median(busy[1:]))
    return min(medians), min(computing)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--client", type=Path)
    parser.add_argument("--size", type=int, default=0)
    given = parser.parse_args()
    if given.client:
        client(given.client, given.size)
        return
    demo = tomllib.loads((CONFIGS / "digits.toml").read_text(encoding="utf-8"))
    steps = demo["run"]["local_steps"]
    sections = {
        "model": demo["model"],
        "algorithm": demo["algorithm"],
        "privacy": {"sigma": 1.0, "clip": 1.0, "batch": demo["privacy"]["batch"]},
        "run": {"rounds": given.rounds + 1, "local_steps": steps},
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trial = stack.enter_context(Trial(Path(folder), clients=2, secure=False, **sections))
        job = prepare_server(
            served(load(str(trial.folder / "cfg.toml"), [], registry()), seeded=True)
        )
        size = 4 * job.space.size
        children = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--client",
                    str(trial.folder / name / "client.toml"),
                    "--size",
                    str(size),
                ],
                stdout=subprocess.DEVNULL,
            )
            for name in trial.names
        ]
        try:
            full, empty = rounds(trial, job, given.rounds)
        finally:
            for child in children:
                child.send_signal(signal.SIGTERM)
            for child in children:
                child.wait()
        guard, busy = guarding(
            trial.folder / trial.names[0] / "client.toml", job, trial, given.rounds
        )
    print(f"{job.config.model.name}, {job.space.size:,} trainable numbers, {steps} local steps")
    print(
        f"a round of 2 clients: {median(full):.2f} s; an empty round of Flower: {median(empty):.2f} s"
    )
    print(f"ratio {median(full) / median(empty):.2f}")
    print(
        f"message, policy, ledger and storing at a client: {1000 * guard:.0f} ms, {1000 * busy:.0f} of it computing"
    )


if __name__ == "__main__":
    main()
