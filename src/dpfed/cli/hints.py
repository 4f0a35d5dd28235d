"""Error messages for unknown options, with a hint if a configuration key has the option's name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import click


def no_such_option(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """Return the error message for an unknown option.

    If a configuration key has a similar name, the message shows how to set this key by `--set`.

    words  the words of the command line
    """
    parameters = error.ctx.command.params if error.ctx else []
    options = [name for parameter in parameters for name in parameter.opts]
    if "--set" not in options:
        return error.format_message()
    from dpfed.config import SYNONYMS, all_keys
    from dpfed.registry import registry

    keys = all_keys(registry())
    word = error.option_name.lstrip("-").replace("-", "_")
    word = SYNONYMS.get(word, word)
    known = [*keys, *(option.lstrip("-").replace("-", "_") for option in options)]
    close = difflib.get_close_matches(word, known, n=1)
    if not close or close[0] not in keys:
        return error.format_message()
    value = value_of(error.option_name, words)
    meant = " or ".join(f"`--set {key}={value}`" for key in keys[close[0]])
    return f"there is no option {error.option_name}: write {meant}"


def value_of(option: str, words: Sequence[str]) -> str:
    """Return the value that follows an option on the command line, or "VALUE" if none follows."""
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
        if word == option and not following.startswith("-"):
            return following
    return "VALUE"
