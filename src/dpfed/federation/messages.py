"""Messages between a server and a client: safetensors bytes, checked before use.

    8 bytes    length of the header, little-endian
    header     JSON: name, dtype and shape of each tensor; `__metadata__` has all other fields
    numbers    the tensors, one after another

The receiver checks the lengths before it reads the header. Pickle is not used, and invalid bytes
raise no other error than `MessageError`. `read_fields` checks the tensors against the layout: the
formats and lengths that they must have. The receiver derives the layout from its own model and
algorithm, never from the message.
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

from dpfed.config import MessageFormat, parse
from dpfed.errors import DpfedError
from dpfed.privacy.clipping import CLIPS, Clipping
from dpfed.training.messages.message_format import SCALE, Layout, decode

FORMAT = 2
HEADER_LIMIT = 1 << 20
MAX_INTEGER = 2**62
# Largest number of rounds, steps or clients. The product of two such numbers is below 2^63, so it
# does not overflow int64.
MAX_COUNT = 10**9
MAX_ALGORITHM_VALUE = 1e6
# Largest absolute value in a tensor of a message, far above honest values. The model and a client's
# change of it have stricter limits (`policy.max_distance`, `norm_limit`).
MAX_TENSOR_VALUE = 1e10

# Number types that a message may use: names in safetensors, with the types of torch.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8}
DTYPE_OF_FORMAT = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
Name = Annotated[str, MinLen(1), MaxLen(200)]
Hash = Annotated[str, MaxLen(64)]
Count = Annotated[int, Ge(1), Le(MAX_COUNT)]
OptionalCount = Annotated[int, Ge(0), Le(MAX_COUNT)]
Rows = Annotated[int, Ge(0), Le(MAX_INTEGER)]
Seed = Annotated[int, Ge(-MAX_INTEGER), Le(MAX_INTEGER)]
# The range of a noise multiplier in a message. Accountants square this number, and the upper limit
# keeps the square finite.
Noise = Annotated[float, Gt(0), Le(1e12)]


class MessageError(DpfedError):
    """Raised for bytes that are not a valid message."""


@dataclass(frozen=True)
class ClippingTerms:
    """The clipping rule in a request: the fields of `Clipping`, limited to safe values."""

    mode: Literal["flat", "automatic", "quantile"]
    stability: Annotated[float, Ge(1e-12), Le(1e6)]
    quantile: Annotated[float, Gt(0), Lt(1)]
    rate: Annotated[float, Gt(0), Le(100)]
    count_noise: Annotated[float, Gt(1), Le(1e6)]

    def rule(self) -> Clipping:
        return Clipping(**dataclasses.asdict(self))


@dataclass(frozen=True)
class AnyTerms:
    """The terms (all fields except tensors) that every request has. They are public.

    run, server, client  names of the run, of the server and of the client
    index       number of the client in the run's plan
    seed        seed of the initial weights, and in test mode of all random streams
    seeded      True in test mode: the noise is repeatable and protects nothing
    round       number of the round, from 1
    algorithm   name and options of the algorithm
    model       hash of the frozen weights
    rows, head  row count and last hash of the client's ledger (its record of spent privacy), as in
                the client's last reply; 0 and "" before the first reply
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
    """The terms (all fields except tensors) of a request to train.

    rounds, local_steps, clients, cohort  the schedule of the run; cohort is the number of clients
                    in a round
    lr              learning rate of this round
    rate            sampling rate q of this client
    expected        expected batch size: q times the client's declared number of units (records, or
                    persons with all their records)
    sigma, clip     noise multiplier of each noised sum, and clip norm of this round
    clipping        rule by which gradients are clipped
    grid            True to round gradients and noise to multiples of one number
                    (`privacy.grid_noise`)
    equal_phi       True if the noise of all clients has the same variance
    used            last round in which the server used a message of this client; 0 if none
    max_rounds      largest number of rounds of this client in the run; 0 for no limit
    upload, download  formats of the vectors in the reply and in this request
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
    max_rounds: OptionalCount
    upload: MessageFormat
    download: MessageFormat


@dataclass(frozen=True)
class ScoringTerms(AnyTerms):
    """The terms (all fields except tensors) of a request for counts of right and wrong answers.

    The client counts answers on held-out units (records, or persons with all their records), which
    it never trains on, and adds noise.

    held_out  number of held-out units that the client has declared
    sigma     standard deviation of the noise on each count; one unit changes both counts together
              by at most 1 in Euclidean norm
    """

    held_out: Count
    sigma: Noise


@dataclass(frozen=True)
class Receipt:
    """The receipt of a request: all fields of a reply except tensors.

    request     SHA-256 hash of the request's bytes
    rows, head  row count and last hash of the client's ledger (its record of spent privacy), after
                the entry for this reply
    """

    run: Name
    client: Name
    round: Count
    request: Hash
    rows: Annotated[int, Ge(1), Le(MAX_INTEGER)]
    head: Hash


@dataclass(frozen=True)
class Request:
    """A request to train. `fields` has the tensors that the server sends, such as the model."""

    terms: Terms
    fields: dict[str, Tensor]


@dataclass(frozen=True)
class ScoringRequest:
    """A request for noised counts of right and wrong answers of a model.

    fields  the trained parameters of the model as one vector, under the name "theta"
    """

    terms: ScoringTerms
    fields: dict[str, Tensor]


@dataclass(frozen=True)
class Reply:
    receipt: Receipt
    fields: dict[str, Tensor]


# For each kind of message: the class of the message, and the class of its fields except tensors.
KINDS: dict[str, tuple[type[Any], type[Any]]] = {
    "request": (Request, Terms),
    "scoring": (ScoringRequest, ScoringTerms),
    "reply": (Reply, Receipt),
}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pack(message: Request | ScoringRequest | Reply) -> bytes:
    """Return the bytes of a message. Equal messages give equal bytes."""
    kind = next(name for name, (cls, _) in KINDS.items() if type(message) is cls)
    terms = message.receipt if isinstance(message, Reply) else message.terms
    table = {"format": FORMAT, "kind": kind, **dataclasses.asdict(terms)}
    text = json.dumps(table, sort_keys=True, allow_nan=False)
    tensors = {
        name: value.detach().cpu().contiguous().clone() for name, value in message.fields.items()
    }
    # Store all fields except tensors as one JSON text under one key. safetensors does not keep the
    # order of several keys, and equal messages must have equal bytes.
    return save_tensors(tensors, metadata={"dpfed": text})


def unpack_request(data: bytes, limit: int) -> Request | ScoringRequest:
    """Return the request that `data` contains; `data` may have at most `limit` bytes.

    This function does not check the tensors. The caller has to do this with `read_fields`.
    """
    request: Request | ScoringRequest = _unpack(data, limit, ("request", "scoring"))
    return request


def unpack_reply(
    data: bytes, layout: Layout, terms: AnyTerms, request: str, norm_limit: float
) -> Reply:
    """Return the reply that `data` contains, after checking that it answers the request.

    The tensors of the returned reply are float32 vectors.

    layout      formats and lengths of the vectors that the reply must have, by name
    terms       terms of the request
    request     hash of the request's bytes
    norm_limit  largest allowed Euclidean norm of the tensor `delta`, the change of the model
    """
    limit = 8 + HEADER_LIMIT + sum(field.bytes for field in layout.values())
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
    reply = Reply(reply.receipt, read_fields(reply.fields, layout))
    norm = _norm(reply.fields["delta"]) if "delta" in reply.fields else 0.0
    if not norm <= norm_limit:
        raise MessageError(f"delta has norm {norm:g}, and no honest one passes {norm_limit:g}")
    return reply


def read_fields(sent: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Check the tensors `sent` in a message, and return them as float32 vectors.

    Raise MessageError if tensors have wrong names, formats, lengths or values.

    layout  expected formats and lengths by name, derived from the receiver's own model
    """
    for name, field in layout.items():
        found = sent[name].dtype if name in sent else DTYPE_OF_FORMAT[field.format]
        if found != DTYPE_OF_FORMAT[field.format]:
            was = next(f for f, dtype in DTYPE_OF_FORMAT.items() if dtype == found)
            raise MessageError(f"{name} is in {was}, and {field.format} was asked for")
    sizes = _sent_sizes(layout)
    if sent.keys() != sizes.keys():
        raise MessageError(f"the message holds {sorted(sent)}, not {sorted(sizes)}")
    for name, value in sent.items():
        if tuple(value.shape) != (sizes[name],):
            raise MessageError(f"{name} has shape {tuple(value.shape)}, not ({sizes[name]},)")
        if name not in layout:
            _check_scales(name, value)
    fields = decode(sent, layout)
    for name, value in fields.items():
        # The infinity norm is the largest absolute value, or NaN, and needs no copy of the vector.
        largest = float(torch.linalg.vector_norm(value, math.inf)) if len(value) else 0.0
        if not math.isfinite(largest):
            raise MessageError(f"{name} holds numbers that are not finite")
        if largest > MAX_TENSOR_VALUE:
            raise MessageError(f"{name} holds numbers beyond {MAX_TENSOR_VALUE:g}")
    return fields


def _norm(value: Tensor) -> float:
    """Return the Euclidean norm in float64, without a float64 copy of the whole vector."""
    return math.hypot(*(float(piece.double().norm()) for piece in torch.split(value, 1 << 20)))


def _sent_sizes(layout: Layout) -> dict[str, int]:
    """Return the length of each tensor in a message, by name, with the scales of int8 vectors."""
    sizes = {name: field.size for name, field in layout.items()}
    scales = {name + SCALE: field.scales for name, field in layout.items() if field.scales}
    return sizes | scales


def _check_scales(name: str, scales: Tensor) -> None:
    if scales.dtype != torch.float32:
        raise MessageError(f"{name} is not in float32")
    if not bool(scales.isfinite().all()):
        raise MessageError(f"{name} holds scales that are not finite")
    if bool((scales < 0).any()):
        raise MessageError(f"{name} holds negative scales")


def _unpack(data: bytes, limit: int, kinds: tuple[str, ...]) -> Any:
    """Return the message in `data`; raise MessageError if its kind is not in `kinds`.

    All sizes are checked before anything is parsed.
    """
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
        fields = load_tensors(data)
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
    if version != FORMAT:
        raise MessageError(
            f"the message has format {str(version)[:20]!r} and this dpfed reads format {FORMAT}: "
            "both sides need the same dpfed"
        )
    if kind not in kinds:
        raise MessageError(f"the message is not a {kinds[0]}: both sides need the same dpfed")
    message_class, terms_class = KINDS[kind]
    return message_class(_parse_terms(terms_class, table), fields)


def _is_vector(name: str, entry: dict[str, Any]) -> bool:
    is_vector = entry["dtype"] in DTYPES and len(entry["shape"]) == 1
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
    """Yield (name, value) of each field; if a value is a table, yield its items instead."""
    for name, value in dataclasses.asdict(terms).items():
        yield from value.items() if isinstance(value, dict) else [(name, value)]
