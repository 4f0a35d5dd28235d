"""The app folder for Flower's command `flwr run`.

The folder has the names of functions but no code: server and clients each run these functions from
their own installed dpfed. Write the folder with `python -m dpfed.federation.flower.app_folder DIR`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dpfed.errors import DpfedError

# Keys of Flower's run configuration. Only the server reads their values.
CONFIG = "dpfed-config"
OUT = "dpfed-out"
KEYS = "dpfed-keys"
# Key of Flower's run configuration (at the server) and `--node-config` (at a client). Its value is
# the path of the socket through which an app reaches `dpfed server` or `dpfed client`.
RELAY = "dpfed-relay"
# Key of `--node-config` if the user starts the SuperNode (Flower's process at a client) with
# Flower's command. Its value is the path of client.toml.
CLIENT = "dpfed-client"

PROJECT = f"""\
[project]
name = "dpfed-federation"
version = "1.0.0"
description = "A differentially private federation run by dpfed"
license = {{ file = "LICENSE" }}
dependencies = ["dpfed", "flwr>=1.41,<2"]

[tool.flwr.app]
publisher = "dpfed"

[tool.flwr.app.components]
serverapp = "dpfed.federation.flower.apps:server"
clientapp = "dpfed.federation.flower.apps:client"

[tool.flwr.app.config]
{CONFIG} = ""
{OUT} = ""
{KEYS} = ""
{RELAY} = ""
"""


def app_files() -> dict[str, bytes]:
    """Return the contents of the files in the app folder, by file name."""
    return {
        "pyproject.toml": PROJECT.encode(),
        "LICENSE": b"No rights are needed for this folder: it holds names only.\n",
        "README.md": b"# A federation run by dpfed\n",
    }


def write_app(folder: Path) -> None:
    """Write the app files to a new folder; raise DpfedError if the folder exists."""
    if folder.exists():
        raise DpfedError(f"{folder} is there already: choose another folder")
    folder.mkdir(parents=True)
    for name, data in app_files().items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    write_app(Path(sys.argv[1]))
