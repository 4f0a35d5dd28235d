"""Turn texts, prompts with completions, and chats into tokens and a mask of the tokens to predict.

The tokens to predict are called targets: the loss covers only them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfed.errors import DpfedError, reason
from dpfed.model.zoo.text_inputs import padded

# This tag in a chat template marks the text that the assistant writes.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
Message = dict[str, Any]


@dataclass(frozen=True)
class TokenRow:
    """All tokens of one record, before they are cut to `model.max_length` tokens.

    ids      token ids
    targets  for each token True if the loss covers it
    """

    ids: list[int]
    targets: list[bool]

    def kept_targets(self, length: int) -> int:
        """Return how many of the first `length` tokens are targets, which the loss covers.

        The first token of a record follows no other token, so it is never predicted.
        """
        return sum(self.targets[1:length])


@dataclass(frozen=True)
class TargetCounts:
    """Numbers of targets (tokens that the loss covers) after all records of a table are cut.

    The numbers are exact, so they are private if the records are private.

    records    number of records
    targets    number of tokens that the loss covers, over all records
    shortened  number of records that lose some of their targets, but not all
    lost       number of records without any target, whose gradient is zero
    longest    tokens of the longest record before it is cut
    """

    records: int
    targets: int
    shortened: int
    lost: int
    longest: int


def count_targets(rows: Sequence[TokenRow], length: int) -> TargetCounts:
    """Count the targets (tokens that the loss covers) after records are cut to `length` tokens."""
    kept = [row.kept_targets(length) for row in rows]
    whole = [row.kept_targets(len(row.ids)) for row in rows]
    return TargetCounts(
        records=len(rows),
        targets=sum(kept),
        shortened=sum(0 < k < w for k, w in zip(kept, whole, strict=True)),
        lost=kept.count(0),
        longest=max((len(row.ids) for row in rows), default=0),
    )


def rows_of(tokenizer: Any, inputs: Mapping[str, np.ndarray], part: str = "") -> list[TokenRow]:
    """Return the tokens of each record, with True for each token that the loss covers (target).

    inputs  `text`, `prompt` and `completion`, or `messages`
    part    name of the table for error messages, such as "test"
    """
    if "messages" in inputs:
        return chat_rows(tokenizer, [json.loads(chat) for chat in inputs["messages"]], part)
    if "prompt" in inputs:
        return completion_rows(tokenizer, inputs["prompt"], inputs["completion"])
    rows = _ids(tokenizer, inputs["text"], add_special_tokens=True)
    return [TokenRow(ids, [True] * len(ids)) for ids in rows]


def encoded_rows(rows: Sequence[TokenRow], length: int, fill: int) -> dict[str, np.ndarray]:
    """Return token ids, attention masks and target masks of records, `[records, length]` each.

    A target mask is 1 for the tokens that the loss covers. Records are cut or padded to `length`.

    fill  token id of the padding
    """
    ids = padded([row.ids for row in rows], length, fill)
    attention = padded([[1] * len(row.ids) for row in rows], length, 0)
    targets = padded([row.targets for row in rows], length, 0)
    return {
        "input_ids": ids.astype(np.int32),
        "attention_mask": attention.astype(np.uint8),
        "target_mask": targets.astype(np.uint8),
    }


def _ids(tokenizer: Any, texts: Iterable[str], add_special_tokens: bool) -> list[list[int]]:
    listed = [str(text) for text in texts]
    if not listed:
        return []
    out = tokenizer(listed, add_special_tokens=add_special_tokens, verbose=False)
    found: list[list[int]] = out["input_ids"]
    return found


# ---- prompts and completions


def completion_rows(
    tokenizer: Any, prompts: Iterable[str], completions: Iterable[str]
) -> list[TokenRow]:
    """Return for each record its prompt, its completion and the end token.

    The loss covers the completion and the end token. Prompt and completion are tokenised
    separately, because generation also tokenises a prompt without its completion.
    """
    starts = [
        _before_end(full, bare)
        for full, bare in zip(
            _ids(tokenizer, prompts, add_special_tokens=True),
            _ids(tokenizer, prompts, add_special_tokens=False),
            strict=True,
        )
    ]
    end = tokenizer.eos_token_id
    rows = []
    answers = _ids(tokenizer, completions, add_special_tokens=False)
    for start, answer in zip(starts, answers, strict=True):
        if end is not None and answer[-1:] != [end]:
            answer = [*answer, end]
        rows.append(TokenRow([*start, *answer], [False] * len(start) + [True] * len(answer)))
    return rows


def _before_end(full: list[int], bare: list[int]) -> list[int]:
    """Return the tokens of a prompt without the special tokens that end a text.

    full  tokens with the special tokens at start and end
    bare  tokens without special tokens
    """
    for first in range(len(full) - len(bare) + 1):
        if full[first : first + len(bare)] == bare:
            return full[: first + len(bare)]
    return full


def prompt_ids(tokenizer: Any, prompt: str | Sequence[Message], place: str) -> list[int]:
    """Return the tokens of a prompt, which the model continues with an answer.

    A text gets no special tokens at its end. A chat ends with the tokens that start the
    assistant's turn.

    place  name of the prompt for error messages
    """
    if isinstance(prompt, str):
        full = _ids(tokenizer, [prompt], add_special_tokens=True)
        bare = _ids(tokenizer, [prompt], add_special_tokens=False)
        return _before_end(full[0], bare[0])
    _template(tokenizer)
    try:
        return _rendered(tokenizer, list(prompt), add_generation_prompt=True)
    except Exception as error:
        raise _refused(place, error) from None


# ---- chats


def chat_rows(tokenizer: Any, chats: Sequence[list[Message]], part: str = "") -> list[TokenRow]:
    """Return the tokens of each chat; the tokenizer's chat template turns a chat into one text.

    The loss covers the tokens that the assistant wrote.

    part  name of the table for error messages, such as "test"
    """
    marks = GENERATION.search(_template(tokenizer))
    row_of = _marked_row if marks else _row_of_prefixes
    where = f" of the {part} set" if part else ""
    return [row_of(tokenizer, chat, f"record {i}{where}") for i, chat in enumerate(chats)]


def _template(tokenizer: Any) -> str:
    """Return the tokenizer's chat template; raise DpfedError if it has none."""
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:
        raise DpfedError(
            "the tokenizer has no chat template, which the column 'messages' needs: set "
            "model.tokenizer to that of a chat model, or give 'prompt' and 'completion'"
        ) from None


def _marked_row(tokenizer: Any, chat: list[Message], place: str) -> TokenRow:
    """Return the tokens and targets of a chat whose template marks the assistant's tokens.

    place  name of the record for error messages
    """
    try:
        out = tokenizer.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:
        raise _refused(place, error) from None
    targets = [bool(mark) for mark in out["assistant_masks"]]
    if not any(targets):
        raise _unknown_targets(place)
    return TokenRow(list(out["input_ids"]), targets)


def _row_of_prefixes(tokenizer: Any, chat: list[Message], place: str) -> TokenRow:
    """Return the tokens and targets of a chat whose template does not mark the assistant's tokens.

    For each message of the assistant, the chat is rendered twice: up to this message, and with it.
    The loss covers the tokens that the message adds. Raise DpfedError if one of the two renderings
    differs from the start of the whole chat.
    """
    try:
        whole = _rendered(tokenizer, chat)
    except Exception as error:
        raise _refused(place, error) from None
    targets = [False] * len(whole)
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        try:
            before = _rendered(tokenizer, chat[:i], add_generation_prompt=True)
            after = _rendered(tokenizer, chat[: i + 1])
        except Exception:
            # For a part of a chat, templates raise errors of many classes, so catch all of them.
            raise _unknown_targets(place) from None
        grows = len(before) < len(after)
        if not grows or whole[: len(before)] != before or whole[: len(after)] != after:
            raise _unknown_targets(place)
        targets[len(before) : len(after)] = [True] * (len(after) - len(before))
    return TokenRow(whole, targets)


def _rendered(
    tokenizer: Any, chat: list[Message], add_generation_prompt: bool = False
) -> list[int]:
    text = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return _ids(tokenizer, [text], add_special_tokens=False)[0]


def _refused(place: str, error: Exception) -> DpfedError:
    return DpfedError(
        f"the chat template refuses the messages of {place} ({reason(error)}): "
        "mend or drop that record"
    )


def _unknown_targets(place: str) -> DpfedError:
    return DpfedError(
        f"the chat template does not show which tokens of {place} the assistant wrote: set "
        "model.tokenizer to one whose template has {% generation %}"
    )
