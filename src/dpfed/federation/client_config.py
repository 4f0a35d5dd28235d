"""Read and check client.toml, the configuration of one real (not simulated) client.

[client]  the client's name, its state folder and the servers that it answers
[policy]  the client's privacy budget, and the limits that a request must keep
[data]    the client's records, described as in any configuration
[model]   the client's model; a request must name the hash of the model's frozen weights
[link]    the server's address and the keys for the connection
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MinLen

from dpfed.config import DataSection, ModelSection, Registry, nearest, parse, refuse_unknown
from dpfed.errors import DpfedError
from dpfed.federation.site_files import DEFAULT_PORT
from dpfed.privacy.accounting.guarantee import refuse_large_delta
from dpfed.privacy.accounting.history import check_delta
from dpfed.privacy.ledger.storage import nameable
from dpfed.privacy.oracle import Isolation

# These keys of [data] divide records among simulated clients. A real client must not set them.
SIMULATION_KEYS = {"clients", "partition", "alpha", "client_column"}


@dataclass(frozen=True)
class ClientSection:
    name: Annotated[str, MinLen(1), "this client's name, which its ledger belongs to"]
    state: Annotated[
        str,
        MinLen(1),
        "folder of the ledger and of stored messages; back it up, never put back an old copy",
    ]
    servers: Annotated[tuple[str, ...], MinLen(1), "servers whose requests are answered"]
    allow_seeded: Annotated[
        bool, "test mode: answer with repeatable noise, which protects nothing"
    ] = False
    device: Annotated[str, "auto, cpu, cuda or cuda:N"] = "auto"
    held_out_share: Annotated[
        float, Ge(0), Lt(1), "share of the records that is never trained on, to be scored"
    ] = 0.0
    held_out_column: Annotated[
        str | None, "column of the data that is true or 1 for held-out records, or no share"
    ] = None
    max_slots: Annotated[
        int, Ge(1), 'records in one forward pass, with policy.isolation = "fast"'
    ] = 512
    max_message: Annotated[int, Ge(1), "MiB of the largest request that is read"] = 4096


@dataclass(frozen=True)
class Policy:
    records: Annotated[
        int, Ge(1), "declared number of protected units R_i, public; may be rounded down"
    ]
    max_epsilon: Annotated[
        float, Gt(0), "epsilon this client will ever spend, over all runs of its ledger"
    ]
    delta: Annotated[float, Gt(0), Lt(1), "δ of max_epsilon"] = 1e-5
    allow_large_delta: Annotated[bool, "accept a delta of 1 / records or more"] = False
    min_sigma: Annotated[float, Gt(0), "smallest noise multiplier of a release"] = 0.5
    max_clip: Annotated[float, Gt(0), "largest clip norm C"] = 10.0
    max_rate: Annotated[float, Gt(0), Le(1), "largest sampling rate q"] = 0.1
    max_local_steps: Annotated[int, Ge(1), "most local steps K of a round"] = 100
    max_lr: Annotated[float, Gt(0), "largest learning rate"] = 100.0
    # Limit on the distance of theta from its start. 2,000 Adam steps at learning rate 0.001 move a
    # million weights by about 50, at most by 2,000 (Euclidean norm).
    max_distance: Annotated[
        float,
        Gt(0),
        Le(1e6),
        "largest Euclidean distance of theta from the initial vector, also inside a round",
    ] = 1e4
    isolation: Annotated[
        Isolation,
        "exact: records at drawn places, so that a server cannot choose a theta at which one "
        "record changes the gradients of others; fast: for servers you trust",
    ] = "exact"
    evaluate: Annotated[
        bool, "answer with noised counts of right answers on held-out records, which are charged"
    ] = False
    held_out: Annotated[
        int, Ge(0), "declared number of held-out units, public; may be rounded down"
    ] = 0
    min_evaluate_sigma: Annotated[float, Gt(0), "smallest noise on such a count"] = 5.0
    require_grid: Annotated[
        bool, "answer only requests with privacy.grid, which hides the last bits of sums"
    ] = True
    algorithms: Annotated[tuple[str, ...], "algorithms it takes part in; empty: all there are"] = ()
    models: Annotated[
        tuple[str, ...], "hashes of frozen weights it takes part with; empty: those of its [model]"
    ] = ()


@dataclass(frozen=True)
class LinkSection:
    """[link]: the server's address, and the files by which both sides recognise each other."""

    address: Annotated[str, MinLen(1), "host:port of the server"] = f"127.0.0.1:{DEFAULT_PORT}"
    ca: Annotated[str, "certificate of the authority that has signed the server's"] = ""
    key: Annotated[str, "this client's private key"] = ""


@dataclass(frozen=True)
class ClientConfig:
    client: ClientSection
    policy: Policy
    data: DataSection
    model: ModelSection


def unit_of(config: ClientConfig) -> str:
    """Return the name of the unit that epsilon protects: the data's unit column, or "record"."""
    return config.data.unit_column or "record"


def load_client(path: Path, registry: Registry) -> tuple[ClientConfig, LinkSection]:
    """Return the configuration in a client.toml, and its [link] section.

    Relative paths of the state folder and of the keys start at the folder of client.toml.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise DpfedError(f"{path} is not valid TOML: {error}") from None
    # A ValueError means that the text is not UTF-8 or has a number with thousands of digits.
    except (OSError, ValueError, RecursionError) as error:
        raise DpfedError(f"{path} cannot be read: {error}") from None
    table = raw.pop("link", {})
    if not isinstance(table, dict):
        raise DpfedError(f"link = {table!r} must be a table, [link]")
    link: LinkSection = parse("link", LinkSection, table)
    config = build(raw, registry)

    def resolved(text: str) -> str:
        return str(path.parent / Path(text).expanduser()) if text else ""

    config = replace(config, client=replace(config.client, state=resolved(config.client.state)))
    return config, replace(link, ca=resolved(link.ca), key=resolved(link.key))


def build(raw: Mapping[str, Any], registry: Registry) -> ClientConfig:
    sections = [f.name for f in fields(ClientConfig)]
    for key, value in raw.items():
        if key not in sections:
            raise DpfedError(f"[{key}] is not a section of client.toml{nearest(key, sections)}")
        if not isinstance(value, Mapping):
            raise DpfedError(f"{key} = {value!r} must be a table, [{key}]")
    config = ClientConfig(
        client=_complete("client", ClientSection, raw.get("client", {})),
        policy=_complete("policy", Policy, raw.get("policy", {})),
        data=_named("data", raw.get("data", {}), registry.data),
        model=_named("model", raw.get("model", {}), registry.model),
    )
    policy = config.policy
    check_delta(policy.delta)
    refuse_large_delta(
        policy.delta, policy.records, unit_of(config), policy.allow_large_delta, "policy"
    )
    dealt = sorted(SIMULATION_KEYS & set(raw.get("data", {})))
    if dealt:
        raise DpfedError(
            f"data.{dealt[0]} deals records to simulated clients: "
            "a real one holds its own, leave it out"
        )
    if not nameable(config.client.name):
        raise DpfedError(
            f"client.name = {config.client.name!r} must be up to 200 printable characters"
        )
    _check_held_out(config)
    for name in policy.algorithms:
        if name not in registry.algorithm:
            raise DpfedError(
                f"policy.algorithms: {name!r} is not known{nearest(name, registry.algorithm)}"
            )
    return config


def _check_held_out(config: ClientConfig) -> None:
    client, policy = config.client, config.policy
    if client.held_out_share and client.held_out_column is not None:
        raise DpfedError("give one of client.held_out_share and client.held_out_column, not both")
    chosen = client.held_out_share or client.held_out_column
    if policy.evaluate and not (policy.held_out and chosen):
        raise DpfedError(
            "policy.evaluate = true scores held-out records: give client.held_out_share or "
            "client.held_out_column, and policy.held_out, how many there are"
        )


def _complete(section: str, cls: type[Any], table: Mapping[str, Any]) -> Any:
    """Return the parsed section; raise DpfedError if a key without a default is missing."""
    known = fields(cls)
    # Report unknown keys before missing keys, because the user may have misspelt a required key.
    refuse_unknown(section, table, [f.name for f in known])
    for f in known:
        if f.default is MISSING and f.name not in table:
            raise DpfedError(f"client.toml lacks {section}.{f.name}: a client has to say it")
    return parse(section, cls, table)


def _named(section: str, table: Mapping[str, Any], known: Mapping[str, type[Any]]) -> Any:
    name = table.get("name")
    if not isinstance(name, str) or name not in known:
        raise DpfedError(f"{section}.name = {name!r} is not known{nearest(str(name), known)}")
    return parse(section, known[name], table)
