"""Messages: packing and unpacking are inverse, and bad bytes raise a MessageError only."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import dpfed.federation
from dpfed.federation.messages import (
    FORMAT,
    HEADER_LIMIT,
    ClippingTerms,
    MessageError,
    Receipt,
    Reply,
    Request,
    Terms,
    digest,
    pack,
    read_fields,
    unpack_reply,
    unpack_request,
)
from dpfed.training.messages.message_format import SCALE, Field, encode

TERMS = Terms(
    run="run-1", server="hub", client="clinic-0", index=0, seed=7, seeded=False, round=2,
    rounds=3, local_steps=2, clients=3, cohort=3, lr=0.01,
    algorithm={"name": "dp-fedavg", "lr": 0.1}, model="ab", rate=0.1, expected=4.0, sigma=1.0,
    clip=0.5, clipping=ClippingTerms("flat", 0.01, 0.5, 0.2, 10.0), grid=True, equal_phi=True,
    rows=1, head="cd", used=1, max_rounds=0, upload="float32",
    download="float32",
)  # fmt: skip
REQUEST = pack(Request(TERMS, {"theta": torch.arange(5.0), "v": torch.zeros(0)}))
LAYOUT = {"delta": Field(4), "v": Field(2)}
LIMIT = 1 << 20
FORBIDDEN = (
    "import pickle",
    "pickle.",
    "torch.load",
    "torch.save",
    "np.load",
    "marshal",
    "eval(",
    "exec(",
)


def reply(
    delta: list[float] | None = None, fields: dict[str, torch.Tensor] | None = None, **changed: Any
) -> bytes:
    receipt = Receipt("run-1", "clinic-0", 2, digest(REQUEST), 2, "ef")
    given = fields or {"delta": torch.tensor(delta or [3.0, 0.0, 0.0, 4.0]), "v": torch.ones(2)}
    return pack(Reply(dataclasses.replace(receipt, **changed), given))


def opened(data: bytes, norm: float = 5.0) -> Reply:
    return unpack_reply(data, LAYOUT, TERMS, digest(REQUEST), norm)


def with_terms(kind: str = "request", **changed: Any) -> bytes:
    """Return a message with any terms, also with terms that `pack` never writes."""
    table = {"format": FORMAT, "kind": kind, **dataclasses.asdict(TERMS), **changed}
    return save({"theta": torch.arange(5.0)}, metadata={"dpfed": json.dumps(table)})


def test_what_is_packed_comes_back_and_equal_messages_have_equal_bytes() -> None:
    found = unpack_request(REQUEST, LIMIT)
    assert found.terms == TERMS
    assert found.fields["theta"].tolist() == [0, 1, 2, 3, 4]
    assert pack(found) == REQUEST
    answer = opened(reply())
    assert answer.fields["delta"].tolist() == [3, 0, 0, 4]
    assert answer.receipt.rows == 2


def test_a_header_of_two_gigabytes_is_refused_unread() -> None:
    with pytest.raises(MessageError, match="claims a header of 2147483648"):
        unpack_request((2**31).to_bytes(8, "little") + b"{}" * 100, LIMIT)
    with pytest.raises(MessageError, match="claims a header"):
        unpack_request(
            (HEADER_LIMIT + 1).to_bytes(8, "little") + b" " * (HEADER_LIMIT + 1), 2 * HEADER_LIMIT
        )
    with pytest.raises(MessageError, match="at most 100 are read"):
        unpack_request(REQUEST, 100)
    with pytest.raises(MessageError, match="at most"):
        opened(bytes(8 + HEADER_LIMIT + 25))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("round", 0, "round"),
        ("round", True, "round"),
        ("round", 10**30, "round"),
        ("sigma", 0.0, "sigma"),
        ("sigma", "1", "sigma"),
        ("sigma", 1e999, "safetensors"),
        ("lr", float("nan"), "safetensors"),
        ("rate", 1.5, "rate"),
        ("clip", 1e13, "clip"),
        ("run", "", "run"),
        ("run", "a\nb", "printable"),
        ("run", "x" * 201, "run"),
        (
            "clipping",
            {"mode": "batch_tensor", "stability": 1, "quantile": 0.5, "rate": 1, "count_noise": 2},
            "mode",
        ),
        ("clipping", {**dataclasses.asdict(TERMS.clipping), "count_noise": 1.0}, "count_noise"),
        ("clipping", {"mode": "flat"}, "does not say"),
        ("clipping", 3, "clipping"),
        ("extra", 1, "extra"),
        ("algorithm", [1], "algorithm"),
        ("format", 1, "has format '1' and this dpfed reads format 2"),
        ("format", [0] * 99, "has format"),
        ("upload", "int4", "upload"),
        ("download", None, "download"),
        ("kind", "reply", "request"),
    ],
)
def test_terms_outside_their_range_are_refused(key: str, value: Any, what: str) -> None:
    with pytest.raises(MessageError, match=what):
        unpack_request(with_terms(**{key: value}), LIMIT)


def test_infinity_written_as_a_large_number_is_refused() -> None:
    algorithm = {"name": "dp-fedavg", "lr": 123.25}
    for data in (with_terms(lr=123.25), with_terms(algorithm=algorithm)):
        # The new number has the same length, so that the header's length stays right.
        text = data.replace(b"123.25", b"9e9999")[8:]
        with pytest.raises(MessageError, match=r"finite|inf"):
            unpack_request(data[:8] + text, LIMIT)


def test_a_missing_term_and_another_dtype_are_refused() -> None:
    table = {"format": FORMAT, "kind": "request", **dataclasses.asdict(TERMS)}
    del table["sigma"]
    with pytest.raises(MessageError, match="does not say sigma"):
        unpack_request(save({"theta": torch.ones(1)}, metadata={"dpfed": json.dumps(table)}), LIMIT)
    table["sigma"] = 1.0
    for odd in (
        torch.ones(1, dtype=torch.float64),
        torch.ones(1, 1),
        torch.ones(1, dtype=torch.int64),
    ):
        with pytest.raises(MessageError, match="not safetensors bytes as dpfed writes them"):
            unpack_request(save({"theta": odd}, metadata={"dpfed": json.dumps(table)}), LIMIT)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (reply(round=1), "round 1, not 2"),
        (reply(run="run-2"), "run 'run-2'"),
        (reply(client="clinic-1"), "client 'clinic-1'"),
        (reply(request="00"), "request '00'"),
        (reply([3.0, 0.0, 0.0, 4.001]), "norm"),
        (reply([3.0, 0.0, 0.0, float("nan")]), "not finite"),
        (reply([3.0, 0.0, 0.0, float("inf")]), "not finite"),
        (reply([1.0]), "shape"),
        (reply(fields={"delta": torch.zeros(4)}), "holds"),
        (
            reply(fields={"delta": torch.zeros(4), "v": torch.zeros(2), "more": torch.zeros(1)}),
            "holds",
        ),
        (REQUEST, "not a reply"),
    ],
)
def test_a_reply_is_held_against_what_was_asked(data: bytes, what: str) -> None:
    with pytest.raises(MessageError, match=what):
        opened(data)


def test_fields_are_held_against_the_receivers_own_shapes() -> None:
    assert read_fields({"theta": torch.ones(3)}, {"theta": Field(3)})["theta"].tolist() == [1] * 3
    with pytest.raises(MessageError, match="shape"):
        read_fields({"theta": torch.ones(3)}, {"theta": Field(4)})
    with pytest.raises(MessageError, match="beyond 1e\\+10"):
        read_fields({"dg": torch.tensor([-1.1e10])}, {"dg": Field(1)})
    assert read_fields({"v": torch.zeros(0)}, {"v": Field(0)})["v"].tolist() == []


INT8 = {"delta": Field(4, "int8"), "v": Field(2)}


def small_reply(**changed: Any) -> bytes:
    """Return an int8 reply with these tensors in place of its own; None leaves a tensor out."""
    sent = {
        "delta": torch.tensor([127, 0, -1, 2], dtype=torch.int8),
        "delta" + SCALE: torch.tensor([0.03]),
        "v": torch.ones(2),
    }
    sent |= {name.replace("__", "."): value for name, value in changed.items()}
    return reply(fields={name: value for name, value in sent.items() if value is not None})


def test_an_int8_reply_comes_back_as_float32() -> None:
    found = unpack_reply(small_reply(), INT8, TERMS, digest(REQUEST), 5.0).fields
    assert found["delta"].tolist() == pytest.approx([3.81, 0.0, -0.03, 0.06])
    assert found["delta"].dtype == torch.float32
    assert found.keys() == {"delta", "v"}


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"delta__scale": torch.tensor([float("nan")])}, "delta.scale holds scales that are not"),
        ({"delta__scale": torch.tensor([float("inf")])}, "delta.scale holds scales that are not"),
        ({"delta__scale": torch.tensor([-0.03])}, "delta.scale holds negative scales"),
        ({"delta__scale": torch.tensor([0.04])}, "norm"),
        ({"delta__scale": torch.tensor([3e38])}, "delta holds numbers that are not finite"),
        ({"delta__scale": torch.tensor([1e9])}, "beyond 1e\\+10"),
        ({"delta__scale": torch.tensor([0.03, 0.03])}, r"delta.scale has shape \(2,\), not \(1,\)"),
        ({"delta__scale": torch.ones(1, dtype=torch.bfloat16)}, "delta.scale is not in float32"),
        ({"delta__scale": None}, "holds"),
        ({"delta": torch.zeros(3, dtype=torch.int8)}, r"delta has shape \(3,\), not \(4,\)"),
        ({"delta": torch.zeros(5, dtype=torch.int8)}, "at most|shape"),
        ({"delta": torch.zeros(4)}, "delta is in float32, and int8 was asked for"),
        ({"delta": torch.zeros(4, dtype=torch.bfloat16)}, "delta is in bf16, and int8 was asked"),
        ({"v": torch.zeros(2, dtype=torch.int8)}, "v is in int8, and float32 was asked for"),
        ({"v__scale": torch.ones(1)}, "holds"),
    ],
)
def test_a_wrong_int8_reply_is_refused_by_name(changed: dict[str, Any], what: str) -> None:
    with pytest.raises(MessageError, match=what):
        unpack_reply(small_reply(**changed), INT8, TERMS, digest(REQUEST), 5.0)


def test_no_reply_is_read_in_a_format_that_was_not_asked_for() -> None:
    with pytest.raises(MessageError, match="delta is in int8, and float32 was asked for"):
        opened(small_reply())


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40),
    st.sampled_from(["float32", "bf16", "int8"]),
)
def test_messages_of_any_format_are_packed_and_read_back(numbers: list[float], kind: Any) -> None:
    layout = {"delta": Field(len(numbers), kind)}
    value = torch.tensor(numbers)
    sent = encode({"delta": value}, layout, torch.rand)
    data = reply(fields=sent)
    found = unpack_reply(data, layout, TERMS, digest(REQUEST), 1e4).fields["delta"]
    step = {"float32": 0.0, "bf16": 2**-8, "int8": 1 / 127}[kind]
    limit = step * float(value.abs().max()) * 1.0001 + 1e-35
    assert float((found - value).abs().max()) <= limit
    assert len(data) < 8 + HEADER_LIMIT + layout["delta"].bytes


def survives(data: bytes) -> None:
    with suppress(MessageError):
        unpack_reply(data, INT8, TERMS, digest(REQUEST), 5.0)
    for read in (lambda: unpack_request(data, LIMIT), lambda: opened(data)):
        with suppress(MessageError):
            read()


@given(st.binary(max_size=300))
def test_random_bytes_give_an_error_and_nothing_else(data: bytes) -> None:
    survives(data)
    survives(len(data).to_bytes(8, "little") + data)


@settings(max_examples=150)
@given(st.data())
def test_mutated_messages_give_a_message_or_an_error_and_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(data.draw(st.sampled_from([REQUEST, reply(), small_reply()])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        piece = data.draw(
            st.binary(max_size=6)
            | st.sampled_from([b'"', b"{", b"]", b"null", b"-1", b"1e99", b"\\ud800"])
        )
        cut = data.draw(st.integers(0, 6))
        whole[at : at + cut] = piece
        if not whole:
            return
    # Keep the header's length right, so that the JSON behind it is read.
    if data.draw(st.booleans()):
        end = bytes(whole).find(b"}}") + 2
        whole[:8] = max(end - 8, 0).to_bytes(8, "little")
    survives(bytes(whole))


@settings(max_examples=40)
@given(
    st.sampled_from([f.name for f in dataclasses.fields(Terms)]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)
def test_any_value_of_any_term_gives_a_message_or_an_error(key: str, value: Any) -> None:
    survives(with_terms(**{key: value}))


def test_deep_nesting_is_an_error_and_no_overflow() -> None:
    text = b'{"a":' * 50_000
    survives(len(text).to_bytes(8, "little") + text)
    table = '{"algorithm":' + "[" * 100_000
    survives(save({}, metadata={"dpfed": table}))


def test_no_module_of_the_federation_can_unpickle() -> None:
    (root,) = dpfed.federation.__path__
    files = list(Path(root).rglob("*.py"))
    assert len(files) > 5
    for path in files:
        text = path.read_text(encoding="utf-8")
        for word in FORBIDDEN:
            assert word not in text, f"{path.name} has {word}"


def test_a_pickle_is_only_bytes_that_are_no_message() -> None:
    hostile = (
        b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system"
        b"\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
    )
    with pytest.raises(MessageError):
        unpack_request(hostile, LIMIT)
