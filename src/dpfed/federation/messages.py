"""What travels between a server and a client: safetensors bytes with a declared schema, checked before use.

    8 bytes    length of the header, little-endian; read by hand first, so that a false one is refused unread
    header     JSON: name, dtype F32 and shape of every tensor, and the terms of the message in `__metadata__`
    numbers    the tensors, one after another

Nothing is unpickled, and nothing but a `WireError` comes out of bytes that are not a message. The names and shapes that
are right follow from the receiver's own model and algorithm (`engine.traffic.ghosts`), never from the message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from dpfed.config import parse
from dpfed.errors import DpfedError
from dpfed.privacy.clipping import CLIPS, Clipping

FORMAT = 1
HEADER_LIMIT = 1 << 20
MOST = 2**62
MANY = 10**9  # of rounds, steps or clients: products of them stay whole in double precision
LARGEST = 1e6  # of an algorithm's own numbers
# Largest number in a tensor. Honest directions and second moments stay far below it; theta has a
# bound of its own in the client's policy, and deltas one at the server.
FIELDS = 1e10

Shapes = Mapping[str, tuple[int, ...]]
Name = Annotated[str, MinLen(1), MaxLen(200)]
Hash = Annotated[str, MaxLen(64)]
Count = Annotated[int, Ge(1), Le(MANY)]
Rows = Annotated[int, Ge(0), Le(MOST)]
Seed = Annotated[int, Ge(-MOST), Le(MOST)]
Noise = Annotated[float, Gt(0), Le(1e12)]  # accountants square it


class MessageError(DpfedError):
    """Bytes that are not the message they should be."""


@dataclass(frozen=True)
class ClippingTerms:
    """`privacy.clipping.Clipping` with the ranges in which it protects anything."""

    mode: Literal["flat", "automatic", "quantile"]
    stability: Annotated[float, Ge(1e-12), Le(1e6)]
    quantile: Annotated[float, Gt(0), Lt(1)]
    rate: Annotated[float, Gt(0), Le(100)]
    count_noise: Annotated[float, Gt(1), Le(1e6)]

    def rule(self) -> Clipping:
        return Clipping(**dataclasses.asdict(self))


@dataclass(frozen=True)
class Terms:
    """All of a request but its tensors; every one of them is public.

    index, seed     the client's number and the run's seed: of the initial weights, and of every stream in test mode
    seeded          test mode: repeatable noise, which protects nothing
    sigma           noise multiplier of one release; rate, expected: q_i and B_i = q_i R_i; clip: C of this round
    grid            gradients and noise are rounded to one grid (`privacy.grid`)
    model           hash of the frozen weights (`federation.frozen.model_hash`)
    rows, head      row count and hash of the client's ledger as the server last heard of it; head "" where it never did
    used            the last round in which this client's message was used, 0 for none
    """

    run: Name
    server: Name
    client: Name
    index: Annotated[int, Ge(0), Le(MANY)]
    seed: Seed
    seeded: bool
    round: Count
    rounds: Count
    local_steps: Count
    clients: Count
    cohort: Count
    lr: Annotated[float, Ge(1e-12), Le(1e6)]
    algorithm: dict[str, Any]
    model: Hash
    rate: Annotated[float, Ge(1e-12), Le(1)]
    expected: Annotated[float, Gt(0), Le(1e12)]
    sigma: Noise
    clip: Annotated[float, Ge(CLIPS[0]), Le(CLIPS[1])]
    clipping: ClippingTerms
    grid: bool
    equal_phi: bool
    rows: Rows
    head: Hash
    used: Annotated[int, Ge(0), Le(MANY)]


@dataclass(frozen=True)
class ScoringTerms:
    """A request for the noised number of right answers on a client's held-out units; names as in `Terms`.

    held_out  declared number of those units; sigma: noise on their count, of which one unit moves it by 1 at most
    """

    run: Name
    server: Name
    client: Name
    index: Annotated[int, Ge(0), Le(MANY)]
    seed: Seed
    seeded: bool
    round: Count
    algorithm: dict[str, Any]
    model: Hash
    held_out: Count
    sigma: Noise
    rows: Rows
    head: Hash


@dataclass(frozen=True)
class Receipt:
    """All of a reply but its tensors. `request`: hash of the bytes it answers; rows, head: the ledger after its charge."""

    run: Name
    client: Name
    round: Count
    request: Hash
    rows: Annotated[int, Ge(1), Le(MOST)]
    head: Hash


@dataclass(frozen=True)
class Request:
    terms: Terms
    fields: dict[str, Tensor]


@dataclass(frozen=True)
class Scoring:
    terms: ScoringTerms
    fields: dict[str, Tensor]


@dataclass(frozen=True)
class Reply:
    receipt: Receipt
    fields: dict[str, Tensor]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pack(message: Request | Scoring | Reply) -> bytes:
    """The bytes of a message; equal messages have equal bytes."""
    kind = {Request: "request", Scoring: "scoring", Reply: "reply"}[type(message)]
    terms = message.receipt if isinstance(message, Reply) else message.terms
    text = json.dumps(
        {"format": FORMAT, "kind": kind, **dataclasses.asdict(terms)},
        sort_keys=True,
        allow_nan=False,
    )
    tensors = {
        name: value.detach().to("cpu", torch.float32).contiguous().clone()
        for name, value in message.fields.items()
    }
    # One key only: the order of several would not be the same each time.
    return save_tensors(tensors, metadata={"dpfed": text})


def unpack_any(data: bytes, limit: int) -> Request | Scoring:
    """What a client may be asked, of at most `limit` bytes. Its tensors still have to be held against the model."""
    kind, table, fields = _read(data, limit, ("request", "scoring"))
    if kind == "scoring":
        return Scoring(_terms(ScoringTerms, table), fields)
    return Request(_terms(Terms, table), fields)


def unpack_request(data: bytes, limit: int) -> Request:
    """A request to train."""
    _, table, fields = _read(data, limit, ("request",))
    return Request(_terms(Terms, table), fields)


def unpack_reply(
    data: bytes, shapes: Shapes, asked: Terms | ScoringTerms, request: str, norm_limit: float
) -> Reply:
    """The reply to the request with these terms and this hash; ‖delta‖ is at most `norm_limit`."""
    limit = 8 + HEADER_LIMIT + 4 * sum(math.prod(shape) for shape in shapes.values())
    _, table, fields = _read(data, limit, ("reply",))
    receipt = _terms(Receipt, table)
    for name, found, right in (
        ("run", receipt.run, asked.run),
        ("client", receipt.client, asked.client),
        ("round", receipt.round, asked.round),
        ("request", receipt.request, request),
    ):
        if found != right:
            raise MessageError(f"the reply is for {name} {found!r}, not {right!r}")
    check_fields(fields, shapes)
    norm = float(fields["delta"].double().norm()) if "delta" in fields else 0.0
    if not norm <= norm_limit:
        raise MessageError(f"delta has norm {norm:g}, and no honest one passes {norm_limit:g}")
    return Reply(receipt, fields)


def check_fields(fields: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Names, shapes and finiteness against what the receiver's own model and algorithm ask for."""
    if fields.keys() != shapes.keys():
        raise MessageError(f"the message holds {sorted(fields)}, not {sorted(shapes)}")
    for name, value in fields.items():
        if tuple(value.shape) != tuple(shapes[name]):
            raise MessageError(f"{name} has shape {tuple(value.shape)}, not {tuple(shapes[name])}")
        if not bool(value.isfinite().all()):
            raise MessageError(f"{name} holds numbers that are not finite")
        if value.numel() and float(value.abs().max()) > FIELDS:
            raise MessageError(f"{name} holds numbers beyond {FIELDS:g}")


def _read(
    data: bytes, limit: int, kinds: tuple[str, ...]
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """The kind, the terms and the tensors of a message, sizes first."""
    if len(data) > limit:
        raise MessageError(f"the message has {len(data)} bytes and at most {limit} are read")
    header = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header > min(HEADER_LIMIT, len(data) - 8):
        raise MessageError(f"the message has {len(data)} bytes and claims a header of {header}")
    try:
        entries = _json(data[8 : 8 + header])
        table = _json(entries.pop("__metadata__")["dpfed"])
        for name, entry in entries.items():
            if (
                entry["dtype"] != "F32"
                or len(entry["shape"]) != 1
                or not (name.isprintable() and len(name) <= 200)
            ):
                raise ValueError("not a field")
        fields = {name: value.clone() for name, value in load_tensors(data).items()}
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
        SafetensorError,
    ):
        raise MessageError("the message is not safetensors bytes as dpfed writes them") from None
    version, kind = table.pop("format", None), table.pop("kind", None)
    if version != FORMAT or kind not in kinds:
        raise MessageError(
            f"the message is not a {kinds[0]} of format {FORMAT}: both sides need the same dpfed"
        )
    return str(kind), table, fields


def _json(text: bytes | str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    found = json.loads(text, parse_constant=refuse)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _terms(cls: type[Any], table: dict[str, Any]) -> Any:
    missing = {f.name for f in dataclasses.fields(cls)} - table.keys()
    nested = table.get("clipping")
    if isinstance(nested, dict):
        missing |= {f.name for f in dataclasses.fields(ClippingTerms)} - nested.keys()
    if missing:
        raise MessageError(f"the message does not say {sorted(missing)[0]}")
    try:
        found = parse("message", cls, table)
    except MessageError:
        raise
    except (DpfedError, TypeError, ValueError) as error:
        raise MessageError(f"the message is refused: {error}") from None
    for name, value in _leaves(found):
        if isinstance(value, float) and not math.isfinite(value):
            raise MessageError(f"{name} = {value} is not a finite number")
        if isinstance(value, str) and not value.isprintable():
            raise MessageError(f"{name} is not printable")
    for name, value in getattr(found, "algorithm", {}).items():
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise MessageError(f"algorithm.{name[:50]} is beyond {LARGEST:g}")
    return found


def _leaves(terms: Any) -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for name, value in dataclasses.asdict(terms).items():
        out += list(value.items()) if isinstance(value, dict) else [(name, value)]
    return out
