"""Open a run on the SuperLink of `dpfed server`, with Flower's documented commands.

flwr supernode register   for each client's public key
flwr run                  starts the ServerApp, which passes messages on (`post.py`)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from dpfed.federation import keys
from dpfed.federation.flower import relay
from dpfed.federation.flower.app_folder import RELAY, write_app
from dpfed.federation.flower.post import RelayPost
from dpfed.federation.flower.processes import LINK_NAME, Process, flwr, wait_open
from dpfed.privacy.ledger.private_files import open_private

# Largest number of Flower's commands that run at the same time.
PARALLEL = 4


@contextmanager
def opened_run(
    process: Process, folder: Path | None, names: Sequence[str], stop: Callable[[], None]
) -> Iterator[RelayPost]:
    """Register the clients' public keys, start Flower's ServerApp, and yield a RelayPost to it.

    From then on, no other app can start on this SuperLink.

    process  the running SuperLink
    folder   folder of the keys; None for a trial without keys
    stop     called again and again while waiting; raises an error to end the run
    """
    home = process.log.parent
    wait_open(process)
    write_link(home, process, folder)
    with relay.private_path() as path:
        app = Path(path).parent / "app"
        write_app(app)
        if folder is not None:
            _register(home, [folder / keys.CLIENTS / f"{name}.pub" for name in names], stop)
        flwr(home, "run", str(app), LINK_NAME, "--run-config", f'{RELAY}="{path}"')
        process.order("executor")
        post = RelayPost(path, process.alive)
        try:
            post.wait(stop)
            process.order("freeze")
            shutil.rmtree(app, ignore_errors=True)
            yield post
        finally:
            post.end()


def write_link(home: Path, process: Process, folder: Path | None) -> None:
    """Write Flower's configuration file, which has the address of the SuperLink."""
    link: dict[str, str | bool] = {"address": str(process.address)}
    if folder is None:
        link["insecure"] = True
    else:
        link["root-certificates"] = str((folder / keys.AUTHORITY).resolve())
    table = {"superlink": {"default": LINK_NAME, LINK_NAME: link}}
    with open_private(home / "config.toml", "w") as file:
        file.write(tomli_w.dumps(table))


def _register(home: Path, files: Sequence[Path], stop: Callable[[], None]) -> None:
    with ThreadPoolExecutor(PARALLEL) as pool:
        tasks = [
            pool.submit(flwr, home, "supernode", "register", str(file), LINK_NAME) for file in files
        ]
        for task in tasks:
            task.result()
            stop()
