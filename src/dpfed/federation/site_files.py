"""The files that a client's site gets besides its keys: a client.toml to fill in, and a README."""

from __future__ import annotations

import tomli_w

DEFAULT_PORT = 8000
CLIENT_TOML = "client.toml"
README = "README"

POLICY = """
[policy]
# records = 470        # number of protected units, public: round it down
# max_epsilon = 8.0    # the most that this site ever spends

[data]
# name = "csv"         # the site's own records, described as in any configuration

[model]
# name = "glyph-vit"   # the model of the federation
"""
CLIENT_README = """\
Fill in client.toml; then run `dpfed doctor client.toml` and `dpfed client client.toml` here.
Keep this folder private and on one machine. Back up `state`, and never put back an old copy.
"""
SERVER_README = """\
Give each site its own folder only; then run `dpfed server cfg.toml --out DIR --keys .` here.
Keep ca.key and server.key private; `dpfed doctor --keys .` shows when certificates expire.
"""


def site_files(name: str, host: str, server: str, authority: str, key: str) -> dict[str, bytes]:
    """Return the contents of client.toml and README for a client, by file name.

    name       name of the client
    host       host name (DNS) of the machine on which the server runs
    server     name that the server gives itself in its requests, `federation.server`
    authority  file name of the CA certificate, by which the client verifies the server's
               certificate
    key        file name of the client's private key
    """
    address = f"[{host}]:{DEFAULT_PORT}" if ":" in host else f"{host}:{DEFAULT_PORT}"
    tables = {
        "client": {"name": name, "state": "state", "servers": [server]},
        "link": {"address": address, "ca": authority, "key": key},
    }
    return {
        CLIENT_TOML: (tomli_w.dumps(tables) + POLICY).encode(),
        README: CLIENT_README.encode(),
    }
