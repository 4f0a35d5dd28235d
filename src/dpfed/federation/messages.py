"""Messages between a server and a client: safetensors bytes, checked before use.

    8 bytes    length of the header, little-endian
    header     JSON: name, dtype F32 and shape of each tensor; `__metadata__` contains the terms
    numbers    the tensors, one after another

The length is checked before the header is read. Nothing is unpickled, and bad bytes raise
`MessageError` only. The receiver derives the expected names and shapes from its own model and
algorithm (`training.job.message_size.meta_message`), never from the message.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
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
MAX_INTEGER = 2**62
# Largest number of rounds, steps or clients: products of them stay exact in double precision.
MAX_COUNT = 10**9
MAX_ALGORITHM_VALUE = 1e6
# Largest number in a tensor. Honest directions and second moments stay far below it; theta has a
# bound of its own in the client's policy, and deltas one at the server.
MAX_TENSOR_VALUE = 1e10

Shapes = Mapping[str, tuple[int, ...]]
Name = Annotated[str, MinLen(1), MaxLen(200)]
Hash = Annotated[str, MaxLen(64)]
Count = Annotated[int, Ge(1), Le(MAX_COUNT)]
OptionalCount = Annotated[int, Ge(0), Le(MAX_COUNT)]
Rows = Annotated[int, Ge(0), Le(MAX_INTEGER)]
Seed = Annotated[int, Ge(-MAX_INTEGER), Le(MAX_INTEGER)]
# The upper bound is there because accountants square the noise multiplier.
Noise = Annotated[float, Gt(0), Le(1e12)]


class MessageError(DpfedError):
    """Bytes that are not a valid message."""


@dataclass(frozen=True)
class ClippingTerms:
    """The fields of `privacy.clipping.Clipping`, restricted to ranges that protect records."""

    mode: Literal["flat", "automatic", "quantile"]
    stability: Annotated[float, Ge(1e-12), Le(1e6)]
    quantile: Annotated[float, Gt(0), Lt(1)]
    rate: Annotated[float, Gt(0), Le(100)]
    count_noise: Annotated[float, Gt(1), Le(1e6)]

    def rule(self) -> Clipping:
        return Clipping(**dataclasses.asdict(self))


@dataclass(frozen=True)
class AnyTerms:
    """The public part of every request: everything but its tensors.

    index       number of the client in the run
    seed        seed of the initial weights, and of every random stream in test mode
    seeded      test mode: repeatable noise, which protects nothing
    model       hash of the frozen weights
    rows, head  row count and hash of the client's ledger in its last reply; 0 and "" before
    """

    run: Name
    server: Name
    client: Name
    index: OptionalCount
    seed: Seed
    seeded: bool
    round: Count
    algorithm: dict[str, Any]
    model: Hash
    rows: Rows
    head: Hash


@dataclass(frozen=True)
class Terms(AnyTerms):
    """The public part of a request to train.

    rate, expected  sampling rate q_i and expected batch size B_i = q_i R_i
    sigma, clip     noise multiplier of one release, and clip norm C of this round
    grid            round gradients and noise to one grid (`privacy.grid_noise`)
    used            last round whose message from this client was used, 0 for none
    """

    rounds: Count
    local_steps: Count
    clients: Count
    cohort: Count
    lr: Annotated[float, Ge(1e-12), Le(1e6)]
    rate: Annotated[float, Ge(1e-12), Le(1)]
    expected: Annotated[float, Gt(0), Le(1e12)]
    sigma: Noise
    clip: Annotated[float, Ge(CLIPS[0]), Le(CLIPS[1])]
    clipping: ClippingTerms
    grid: bool
    equal_phi: bool
    used: OptionalCount


@dataclass(frozen=True)
class ScoringTerms(AnyTerms):
    """The public part of a request for noised counts on held-out units.

    held_out  declared number of the client's held-out units
    sigma     standard deviation of the noise; one unit changes the counts by at most 1
    """

    held_out: Count
    sigma: Noise


@dataclass(frozen=True)
class Receipt:
    """The public part of a reply: everything but its tensors.

    request     hash of the bytes of the request
    rows, head  row count and hash of the client's ledger after the charge
    """

    run: Name
    client: Name
    round: Count
    request: Hash
    rows: Annotated[int, Ge(1), Le(MAX_INTEGER)]
    head: Hash


@dataclass(frozen=True)
class Request:
    """A request to train."""

    terms: Terms
    fields: dict[str, Tensor]


@dataclass(frozen=True)
class ScoringRequest:
    """A request for noised counts of right and wrong answers."""

    terms: ScoringTerms
    fields: dict[str, Tensor]


@dataclass(frozen=True)
class Reply:
    receipt: Receipt
    fields: dict[str, Tensor]


# The kinds of messages by their name in the header.
KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "request": (Request, Terms),
    "scoring": (ScoringRequest, ScoringTerms),
    "reply": (Reply, Receipt),
}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pack(message: Request | ScoringRequest | Reply) -> bytes:
    """Return the bytes of a message; equal messages have equal bytes."""
    kind = next(name for name, (cls, _) in KINDS.items() if type(message) is cls)
    terms = message.receipt if isinstance(message, Reply) else message.terms
    table = {"format": FORMAT, "kind": kind, **dataclasses.asdict(terms)}
    text = json.dumps(table, sort_keys=True, allow_nan=False)
    tensors = {
        name: value.detach().to("cpu", torch.float32).contiguous().clone()
        for name, value in message.fields.items()
    }
    # One key only: safetensors does not keep the order of several.
    return save_tensors(tensors, metadata={"dpfed": text})


def unpack_request(data: bytes, limit: int) -> Request | ScoringRequest:
    """Return a request of at most `limit` bytes; check its tensors with `check_fields`."""
    request: Request | ScoringRequest = _unpack(data, limit, ("request", "scoring"))
    return request


def unpack_reply(
    data: bytes, shapes: Shapes, terms: AnyTerms, request: str, norm_limit: float
) -> Reply:
    """Return the checked reply to a request.

    request     hash of the bytes of that request
    norm_limit  largest allowed Euclidean norm of `delta`
    """
    limit = 8 + HEADER_LIMIT + 4 * sum(math.prod(shape) for shape in shapes.values())
    reply: Reply = _unpack(data, limit, ("reply",))
    expected = {
        "run": terms.run,
        "client": terms.client,
        "round": terms.round,
        "request": request,
    }
    for name, right in expected.items():
        found = getattr(reply.receipt, name)
        if found != right:
            raise MessageError(f"the reply is for {name} {found!r}, not {right!r}")
    check_fields(reply.fields, shapes)
    norm = float(reply.fields["delta"].double().norm()) if "delta" in reply.fields else 0.0
    if not norm <= norm_limit:
        raise MessageError(f"delta has norm {norm:g}, and no honest one passes {norm_limit:g}")
    return reply


def check_fields(fields: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Check names, shapes and values of tensors against the receiver's own `shapes`."""
    if fields.keys() != shapes.keys():
        raise MessageError(f"the message holds {sorted(fields)}, not {sorted(shapes)}")
    for name, value in fields.items():
        if tuple(value.shape) != tuple(shapes[name]):
            raise MessageError(f"{name} has shape {tuple(value.shape)}, not {tuple(shapes[name])}")
        if not bool(value.isfinite().all()):
            raise MessageError(f"{name} holds numbers that are not finite")
        if value.numel() and float(value.abs().max()) > MAX_TENSOR_VALUE:
            raise MessageError(f"{name} holds numbers beyond {MAX_TENSOR_VALUE:g}")


def _unpack(data: bytes, limit: int, kinds: tuple[str, ...]) -> Any:
    """Return a message of one of these kinds; all sizes are checked before anything is read."""
    if len(data) > limit:
        raise MessageError(f"the message has {len(data)} bytes and at most {limit} are read")
    header = int.from_bytes(data[:8], "little")
    if len(data) < 8 or header > min(HEADER_LIMIT, len(data) - 8):
        raise MessageError(f"the message has {len(data)} bytes and claims a header of {header}")
    try:
        entries = _json_object(data[8 : 8 + header])
        table = _json_object(entries.pop("__metadata__")["dpfed"])
        if not all(_is_vector(name, entry) for name, entry in entries.items()):
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
    version = table.pop("format", None)
    kind = table.pop("kind", None)
    if version != FORMAT or kind not in kinds:
        raise MessageError(
            f"the message is not a {kinds[0]} of format {FORMAT}: both sides need the same dpfed"
        )
    message_class, terms_class = KINDS[kind]
    return message_class(_parse_terms(terms_class, table), fields)


def _is_vector(name: str, entry: dict[str, Any]) -> bool:
    is_vector = entry["dtype"] == "F32" and len(entry["shape"]) == 1
    return is_vector and name.isprintable() and len(name) <= 200


def _json_object(text: bytes | str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    found = json.loads(text, parse_constant=refuse)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _parse_terms(cls: type[Any], table: dict[str, Any]) -> Any:
    missing = {f.name for f in dataclasses.fields(cls)} - table.keys()
    nested = table.get("clipping")
    if isinstance(nested, dict):
        missing |= {f.name for f in dataclasses.fields(ClippingTerms)} - nested.keys()
    if missing:
        raise MessageError(f"the message does not say {sorted(missing)[0]}")
    try:
        terms = parse("message", cls, table)
    except (DpfedError, TypeError, ValueError) as error:
        raise MessageError(f"the message is refused: {error}") from None
    for name, value in _leaves(terms):
        if isinstance(value, float) and not math.isfinite(value):
            raise MessageError(f"{name} = {value} is not a finite number")
        if isinstance(value, str) and not value.isprintable():
            raise MessageError(f"{name} is not printable")
    for name, value in getattr(terms, "algorithm", {}).items():
        if isinstance(value, int | float) and not abs(value) <= MAX_ALGORITHM_VALUE:
            raise MessageError(f"algorithm.{name[:50]} is beyond {MAX_ALGORITHM_VALUE:g}")
    return terms


def _leaves(terms: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of `terms`, and the items of those that are tables."""
    for name, value in dataclasses.asdict(terms).items():
        yield from value.items() if isinstance(value, dict) else [(name, value)]
