"""Choose and check the columns of language data: texts, prompts with completions, or chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from dpfed.data.cache import text_array
from dpfed.errors import DpfedError

# A form of language data: texts, prompts with completions, or chats. It is a tuple of the names of
# its inputs, which are also the default names of their columns.
Form = tuple[str, ...]
TEXT: Form = ("text",)
COMPLETION: Form = ("prompt", "completion")
CHAT: Form = ("messages",)
# Inputs that need a tokenizer. Exactly one of them belongs to each form of language data (texts,
# prompts with completions, or chats).
LANGUAGE_INPUTS = ("text", "prompt", "messages")
# Default name of the label column.
LABEL = "label"
Place = Callable[[int], str]


def input_columns(
    stated: Mapping[str, str | None], found: Collection[str], label: str
) -> dict[str, str]:
    """Return the column of each model input: the one that the user set, or else its default name.

    stated  columns that the user set, by input, such as {"prompt": "question"}; None if not set
    found   names of the table's columns
    label   name of the table in error messages
    """
    given = {name: column for name, column in stated.items() if column is not None}
    forms = [form for form in (TEXT, COMPLETION, CHAT) if not given.keys().isdisjoint(form)]
    if not forms and "text_pair" in given:
        forms = [TEXT]
    if not forms:
        forms = forms_in(found)
    if not forms:
        if LABEL not in found:
            refuse_half(found, label)
        forms = [TEXT]
    if len(forms) > 1:
        raise mixed(forms, label, "set only the keys of one of them, such as data.text")
    names = {name: given.get(name, name) for name in forms[0]}
    if "text_pair" in given:
        if forms[0] != TEXT:
            raise DpfedError(f"data.text_pair has no effect with {forms[0][0]}: leave it out")
        names["text_pair"] = given["text_pair"]
    return names


def stated_columns(section: Any) -> dict[str, str | None]:
    """Return the columns that the user's `[data]` section sets for language inputs, by input.

    A column that is not set is None.
    """
    inputs = (*TEXT, "text_pair", *COMPLETION, *CHAT)
    return {name: getattr(section, name) for name in inputs}


def label_column(section: Any, found: Collection[str]) -> Any:
    """Return the name of the label column, or of several, as set by the user or by default.

    Return None if the data have no labels.

    section  the user's `[data]` section
    found    names of the table's columns
    """
    if section.label is None:
        return LABEL if LABEL in found or section.classes is not None else None
    return section.label or None


def forms_in(columns: Collection[str]) -> list[Form]:
    """Return the forms of language data (texts, prompts, chats) that fit these columns.

    A form counts if each of its inputs has a column with its default name, such as "prompt" and
    "completion".
    """
    return [form for form in (TEXT, COMPLETION, CHAT) if set(form) <= set(columns)]


def refuse_half(columns: Collection[str], label: str) -> None:
    """Raise DpfedError if a table has only one of the columns for prompts and completions.

    label  name of the table in the error
    """
    found = [name for name in COMPLETION if name in columns]
    if len(found) == 1:
        (absent,) = set(COMPLETION) - set(found)
        raise DpfedError(
            f"{label} has the column {found[0]!r} without {absent!r}: a language model learns "
            "completions of prompts, so give both"
        )


def mixed(forms: Iterable[Form], label: str, remedy: str) -> DpfedError:
    """Return the error for a table with several forms of language data, such as texts and chats.

    A record has exactly one form. `label` names the table, and `remedy` says what to do.
    """
    names = " and ".join(form[-1] for form in forms)
    return DpfedError(f"{label} has the columns {names}, and a record is one of them: {remedy}")


def chats(values: Iterable[Any], place: Place) -> np.ndarray:
    """Check chats and return each one as a JSON text of its messages.

    values  for each record a list of messages with `role` and `content`, or the list's JSON text
    place   returns the name of record i for error messages
    """
    return text_array([json.dumps(_messages(value, place(i))) for i, value in enumerate(values)])


def refuse_empty(values: Iterable[str], name: str, place: Place) -> None:
    """Raise DpfedError for the first text that is empty or only white space.

    name   name of the texts' column, for the error
    place  returns the name of record i, for the error
    """
    for i, value in enumerate(values):
        if not value.strip():
            raise DpfedError(
                f"{place(i)} has an empty text in column {name!r}: mend or drop that row"
            )


def _messages(value: Any, place: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise DpfedError(f"the messages of {place} are not JSON: mend that row") from None
    if not isinstance(value, list | tuple | np.ndarray) or not len(value):
        raise DpfedError(f"the messages of {place} are not a list with at least one message")
    found = [_message(message, place) for message in value]
    if not any(message["role"] == "assistant" for message in found):
        raise DpfedError(
            f"the messages of {place} have none with role 'assistant', so there is nothing to "
            "learn: mend or drop that row"
        )
    return found


def _message(message: Any, place: str) -> dict[str, Any]:
    """Check one chat message and return it without fields that are None.

    Parquet files have such fields where other messages have a value.
    """
    if not isinstance(message, Mapping):
        raise DpfedError(
            f"a message of {place} is {type(message).__name__}: give 'role' and 'content'"
        )
    fields = {str(name): value for name, value in message.items() if value is not None}
    role, content = fields.get("role"), fields.setdefault("content", "")
    if not isinstance(role, str) or not isinstance(content, str):
        raise DpfedError(f"a message of {place} needs a text as 'role' and a text as 'content'")
    if role == "assistant" and not content.strip() and "tool_calls" not in fields:
        raise DpfedError(f"{place} has an empty message of the assistant: mend or drop that row")
    try:
        json.dumps(fields)
    except (TypeError, ValueError, RecursionError):
        raise DpfedError(f"a message of {place} has values that are no JSON") from None
    return fields
