"""Tokens and targets of completions and chats, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_case import base
from language_case import (
    LAST_DIFFERS,
    MARKED,
    NO_SYSTEM,
    PLAIN,
    chat,
    chat_model,
    ids_of,
    tokenizer_in,
)

from dpfed.errors import DpfedError
from dpfed.model.zoo.causal_records import (
    TokenRow,
    chat_rows,
    completion_rows,
    count_targets,
    encoded_rows,
)
from dpfed.model.zoo.text import AutoCausal, AutoText


def strings(*values: str) -> np.ndarray:
    return np.array(values, dtype=object)


def targets_of(row: TokenRow) -> list[int]:
    return [token for token, target in zip(row.ids, row.targets, strict=True) if target]


# ---- completions


def test_a_completion_ends_with_the_end_token(tmp_path: Path) -> None:
    one, two = completion_rows(tokenizer_in(tmp_path), ["a b", "c"], ["d", "e f <end>"])
    assert one == TokenRow(ids_of("a b d <end>"), [False, False, True, True])
    # The end token is not repeated.
    assert two == TokenRow(ids_of("c e f <end>"), [False, True, True, True])


def test_no_end_token_stands_between_prompt_and_completion(tmp_path: Path) -> None:
    (row,) = completion_rows(tokenizer_in(tmp_path, ends=True), ["a <end> b"], ["c"])
    assert row.ids == ids_of("<start> a <end> b c <end>")
    assert targets_of(row) == ids_of("c <end>")


def test_a_tokenizer_without_an_end_token(tmp_path: Path) -> None:
    (row,) = completion_rows(tokenizer_in(tmp_path, special={}), ["a"], ["b"])
    assert row == TokenRow(ids_of("a b"), [False, True])


# ---- chats


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_tokens_are_the_targets(template: str, tmp_path: Path) -> None:
    (row,) = chat_rows(tokenizer_in(tmp_path, template), [chat("a b", "c", "d", "e f")])
    assert row.ids == ids_of(
        "<user> a b <end> <assistant> c <end> <user> d <end> <assistant> e f <end>"
    )
    assert targets_of(row) == ids_of("c <end> e f <end>")


def test_the_last_turn_of_the_user_is_no_target(tmp_path: Path) -> None:
    (row,) = chat_rows(tokenizer_in(tmp_path), [chat("a", "b", "c")])
    assert targets_of(row) == ids_of("b <end>")


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (None, chat("a", "b"), "no chat template, which the column 'messages' needs"),
        (
            NO_SYSTEM,
            [{"role": "system", "content": "a"}, *chat("b", "c")],
            r"refuses the messages of record 0 of the train set \(no system\): mend or drop",
        ),
        (MARKED.replace("content", "text.words"), chat("a", "b"), "refuses the messages of record"),
        (LAST_DIFFERS, chat("a", "b"), "does not show which tokens of record 0 of the train set"),
        # The assistant begins, and nothing cannot be rendered.
        (PLAIN, [{"role": "assistant", "content": "a"}], "does not show which tokens"),
        # The tag is there, but no message of the assistant is inside.
        (MARKED.replace("'assistant'", "'robot'"), chat("a", "b"), "does not show which tokens"),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_used(
    template: str | None, messages: list[dict[str, str]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DpfedError, match=words):
        chat_rows(tokenizer_in(tmp_path, template), [messages], "train")


# ---- cutting and padding


ROWS = [
    TokenRow([5, 6, 7, 8], [False, False, True, True]),
    TokenRow([5, 6, 7, 8], [False, False, False, True]),
    TokenRow([7], [True]),
    TokenRow([5, 6], [False, True]),
]


def test_rows_are_cut_and_padded() -> None:
    out = encoded_rows(ROWS, 3, fill=9)
    assert out["input_ids"].tolist() == [[5, 6, 7], [5, 6, 7], [7, 9, 9], [5, 6, 9]]
    assert out["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert out["target_mask"].tolist() == [[0, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert {name: array.dtype for name, array in out.items()} == {
        "input_ids": np.int32, "attention_mask": np.uint8, "target_mask": np.uint8,
    }  # fmt: skip


def test_targets_that_are_cut_away_are_counted() -> None:
    found = count_targets(ROWS, 3)
    # Record 0 keeps one of two targets. Record 1 keeps none. Record 2 has only a first token.
    assert (found.records, found.targets, found.shortened, found.lost) == (4, 2, 1, 2)
    assert found.longest == 4
    assert count_targets(ROWS, 4).lost == 1
    assert count_targets([], 3).longest == 0


@pytest.mark.parametrize("special", [{"eos_token": "<end>"}, {}])
def test_padding_needs_no_token_of_its_own(special: dict[str, str], tmp_path: Path) -> None:
    folder = chat_model(tmp_path, special=special)
    model = AutoText(weights=folder, max_length=5)
    for inputs in (
        {"text": strings("a b c")},
        {"prompt": strings("a"), "completion": strings("b")},
    ):
        out = model.encode(inputs)
        real = out["attention_mask"].astype(bool)
        fill = 1 if special else 0
        assert (out["input_ids"][~real] == fill).all()
        assert not out.get("target_mask", out["attention_mask"])[~real].any()


def test_the_encoding_follows_the_template(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model")
    tokenizer_in(tmp_path / "other", MARKED)
    tokenizer_in(tmp_path / "same", PLAIN)
    encodings = [
        AutoText(weights=folder, tokenizer=str(tmp_path / name)).encoding
        for name in ("same", "other")
    ]
    assert AutoText(weights=folder).encoding == encodings[0] != encodings[1]


def test_chats_are_encoded_with_their_targets(tmp_path: Path) -> None:
    model = AutoText(weights=chat_model(tmp_path), max_length=8)
    chats = strings(json.dumps(chat("a", "b")), json.dumps(chat("a b c d e f", "g")))
    out = model.encode({"messages": chats})
    assert out["input_ids"][0].tolist() == ids_of("<user> a <end> <assistant> b <end> <pad> <pad>")
    assert out["target_mask"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0] * 8]
    found = model.target_counts({"messages": chats})
    assert (found.targets, found.lost, found.longest) == (2, 1, 11)


# ---- the task


@pytest.mark.parametrize(
    ("task", "classes", "causal"),
    [
        ("auto", 0, True),
        ("auto", 2, False),
        ("causal", 2, True),
        ("classify", 0, False),
    ],
)
def test_weights_and_data_name_the_task(
    task: Any, classes: int, causal: bool, tmp_path: Path
) -> None:
    assert AutoText(weights=chat_model(tmp_path), task=task).is_causal(classes) is causal
    assert AutoCausal(weights="nowhere").is_causal(classes)


def test_a_classifier_and_a_sentence_encoder_are_no_language_models(tmp_path: Path) -> None:
    assert not AutoText(weights=base("bert", tmp_path / "bert")).causal
    folder = chat_model(tmp_path / "encoder")
    (tmp_path / "encoder" / "modules.json").write_text("[]")
    assert not AutoText(weights=folder).causal
    with pytest.raises(DpfedError, match=r'set model\.name = "auto-text" for'):
        _ = AutoCausal(weights=folder, task="classify").causal
