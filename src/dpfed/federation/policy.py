"""The client decides: `client.toml`, and what a request must be for anything to be computed at all.

[client]  who this is, which servers it listens to, where its ledger and its stored messages are
[policy]  the most it will ever spend, and what it takes part in
[data]    its own records, as in any configuration
[model]   the model it holds; a request must name the hash of its frozen weights
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from torch import Tensor

from dpfed.config import DataSection, ModelSection, Registry, nearest, parse, refuse_unknown
from dpfed.errors import DpfedError
from dpfed.federation.messages import MessageError, ScoringTerms, Terms
from dpfed.privacy.accounting.guarantee import refuse_large_delta
from dpfed.privacy.accounting.history import check_delta
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.accounting.rdp import rdp_epsilon
from dpfed.privacy.ledger.storage import nameable
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.oracle import Isolation
from dpfed.privacy.published import show_loss, show_setting

History = Sequence[tuple[Mechanism, int]]


class ToldError(DpfedError):
    """What a client tells the server: every word of it follows from requests, policy and ledger, none from records."""


class RefusedError(ToldError):
    """A request that this client does not answer. Nothing was computed and nothing was spent."""


def told(error: BaseException) -> str:
    """What the server may know of an error. Any other text could hold a piece of a record or a path: it stays here."""
    if isinstance(error, ToldError | MessageError):
        return str(error)
    return "it failed, and its own log says why"


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
    # 2,000 Adam steps of learning rate 0.001 move a million numbers by at most 2,000, usually by 50.
    max_distance: Annotated[
        float,
        Gt(0),
        Le(1e6),
        "largest Euclidean distance of theta from the initial vector, also inside a round",
    ] = 1e4
    isolation: Annotated[
        Isolation,
        "exact: one record in a pass, so that a server cannot choose a theta at which one record changes"
        " the gradients of others; fast: for servers you trust",
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
class ClientConfig:
    client: ClientSection
    policy: Policy
    data: DataSection
    model: ModelSection


def load(path: Path, registry: Registry) -> ClientConfig:
    """A client.toml, checked; a relative state folder is taken from where the file is."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DpfedError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise DpfedError(f"{path} is not valid TOML: {error}") from None
    config = build(raw, registry)
    client = dataclasses.replace(
        config.client, state=str(path.parent / Path(config.client.state).expanduser())
    )
    return dataclasses.replace(config, client=client)


def build(raw: Mapping[str, Any], registry: Registry) -> ClientConfig:
    sections = [f.name for f in dataclasses.fields(ClientConfig)]
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
    unit = config.data.unit_column or "record"
    refuse_large_delta(policy.delta, policy.records, unit, policy.allow_large_delta, "policy")
    dealt = sorted({"clients", "partition", "alpha", "client_column"} & set(raw.get("data", {})))
    if dealt:
        raise DpfedError(
            f"data.{dealt[0]} deals records to simulated clients: a real one holds its own, leave it out"
        )
    if not nameable(config.client.name):
        raise DpfedError(
            f"client.name = {config.client.name!r} must be up to 200 printable characters"
        )
    _check_held_out(config)
    for name in config.policy.algorithms:
        if name not in registry.algorithm:
            raise DpfedError(
                f"policy.algorithms: {name!r} is not known{nearest(name, registry.algorithm)}"
            )
    return config


def _check_held_out(config: ClientConfig) -> None:
    client, policy = config.client, config.policy
    if client.held_out_share and client.held_out_column is not None:
        raise DpfedError("give one of client.held_out_share and client.held_out_column, not both")
    if policy.evaluate and not (
        policy.held_out and (client.held_out_share or client.held_out_column)
    ):
        raise DpfedError(
            "policy.evaluate = true scores held-out records: give client.held_out_share or client.held_out_column, and "
            "policy.held_out, how many there are"
        )


def _complete(section: str, cls: type[Any], table: Mapping[str, Any]) -> Any:
    fields = dataclasses.fields(cls)
    refuse_unknown(
        section, table, [f.name for f in fields]
    )  # first: a key that is lacking may be one that was mistyped
    for f in fields:
        if f.default is dataclasses.MISSING and f.name not in table:
            raise DpfedError(f"client.toml lacks {section}.{f.name}: a client has to say it")
    return parse(section, cls, table)


def _named(section: str, table: Mapping[str, Any], known: Mapping[str, type[Any]]) -> Any:
    name = table.get("name")
    if not isinstance(name, str) or name not in known:
        raise DpfedError(f"{section}.name = {name!r} is not known{nearest(str(name), known)}")
    return parse(section, known[name], table)


Rule = tuple[bool, str]


def check_sender(terms: Terms | ScoringTerms, config: ClientConfig) -> str | None:
    """Why nothing at all is done for this sender, or None."""
    client = config.client
    return _first_broken(
        (
            terms.client == client.name,
            f"it is for client {terms.client!r}, and this is {client.name!r}",
        ),
        (
            terms.server in client.servers,
            f"the server {terms.server!r} is not one of client.servers",
        ),
        (
            not terms.seeded or client.allow_seeded,
            "it asks for repeatable noise, and client.allow_seeded is false",
        ),
    )


def check_model(model: str, terms: Terms | ScoringTerms, policy: Policy) -> str | None:
    """Why the model is refused, or None; `model` is the hash of what this client has built."""
    return _first_broken(
        (terms.model == model, "its model has other frozen weights than [model] of this client"),
        (
            not policy.models or terms.model in policy.models,
            f"its model {terms.model} is not in policy.models",
        ),
    )


def check(terms: Terms, policy: Policy, mechanism: Mechanism, history: History) -> str | None:
    """Why the round is refused, or None. `history`: all that the ledger holds; `mechanism`: what a step would release."""
    declared, algorithm = terms.rate * policy.records, terms.algorithm.get("name")
    sigma = show_setting(terms.sigma)
    reason = _first_broken(
        (
            not policy.algorithms or algorithm in policy.algorithms,
            f"{algorithm!r} is not in policy.algorithms",
        ),
        (
            terms.sigma >= policy.min_sigma,
            f"sigma {sigma} is below policy.min_sigma = {show_setting(policy.min_sigma)}",
        ),
        (
            terms.clip <= policy.max_clip,
            f"clip {terms.clip:g} is above policy.max_clip = {policy.max_clip:g}",
        ),
        (
            terms.rate <= policy.max_rate,
            f"rate {show_setting(terms.rate)} is above policy.max_rate = {show_setting(policy.max_rate)}",
        ),
        (
            terms.grid or not policy.require_grid,
            "it asks for sums off the grid, and policy.require_grid is true",
        ),
        (
            terms.local_steps <= policy.max_local_steps,
            f"{terms.local_steps} local steps are more than policy.max_local_steps = {policy.max_local_steps}",
        ),
        (terms.lr <= policy.max_lr, f"lr {terms.lr:g} is above policy.max_lr = {policy.max_lr:g}"),
        (terms.index < terms.clients, f"client {terms.index} is not one of {terms.clients}"),
        (
            terms.cohort <= terms.clients,
            f"a cohort of {terms.cohort} is more than {terms.clients} clients",
        ),
        (
            abs(terms.expected - declared) <= 1e-9 * declared,
            f"an expected batch of {terms.expected:g} is not its rate times policy.records = {policy.records}",
        ),
    )
    return (
        reason
        if reason is not None
        else check_spending(policy, mechanism, terms.local_steps, history)
    )


def check_base(terms: Terms, base: float, policy: Policy) -> str | None:
    """The base learning rate of the algorithm: no schedule goes above it."""
    return _first_broken(
        (
            base <= policy.max_lr,
            f"algorithm.lr {base:g} is above policy.max_lr = {policy.max_lr:g}",
        ),
        (terms.lr <= base * (1 + 1e-9), f"lr {terms.lr:g} is above algorithm.lr = {base:g}"),
    )


def check_distance(theta: Tensor, start: Tensor, policy: Policy) -> str | None:
    """Return why nothing is computed at `theta` `[P]` or `[1, P]`, or None.

    `start` is the initial vector that this client has built itself.
    """
    distance = float((theta.double() - start.double()).norm())
    limit = policy.max_distance
    # A distance that is not a number is refused too.
    return _first_broken(
        (
            distance <= limit,
            f"theta is {distance:.4g} away from its initial vector, above policy.max_distance = {limit:g}",
        )
    )


def check_scoring(
    terms: ScoringTerms, policy: Policy, mechanism: Mechanism, history: History
) -> str | None:
    """The same for a count of right answers; it is paid from the same epsilon."""
    least, sigma = policy.min_evaluate_sigma, show_setting(terms.sigma)
    reason = _first_broken(
        (policy.evaluate, "it asks for a count on held-out records, and policy.evaluate is false"),
        (
            terms.sigma >= least,
            f"sigma {sigma} is below policy.min_evaluate_sigma = {show_setting(least)}",
        ),
        (terms.sigma <= 1e6, f"sigma {sigma} leaves nothing of a count"),
        (
            terms.held_out == policy.held_out,
            f"{terms.held_out} is not policy.held_out = {policy.held_out}",
        ),
    )
    return reason if reason is not None else check_spending(policy, mechanism, 1, history)


def check_spending(
    policy: Policy, mechanism: Mechanism, steps: int, history: History
) -> str | None:
    """Why it would cost too much, or None."""
    spent = [*history, (mechanism, steps)]
    if rdp_epsilon(spent, policy.delta) <= policy.max_epsilon:
        return None  # the looser bound is a hundred times faster, and enough while there is room
    after = epsilon(spent, policy.delta).value
    if not after <= policy.max_epsilon:
        limit = show_setting(policy.max_epsilon)
        return f"epsilon would be {show_loss(after)} after this round, above policy.max_epsilon = {limit}"
    return None


def _first_broken(*rules: Rule) -> str | None:
    return next((reason for holds, reason in rules if not holds), None)
