"""Sentences for options that do not exist: keys of the configuration are options of `--set`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import click


def no_such_option(error: click.NoSuchOption, words: Sequence[str]) -> str:
    """Return what to say about an unknown option; `words` are those of the command line.

    An option that is named like a key of the configuration is answered with its `--set`.
    """
    options = (
        [] if error.ctx is None else [name for p in error.ctx.command.params for name in p.opts]
    )
    if "--set" not in options:
        return error.format_message()
    from dpfed.config import SYNONYMS, all_keys
    from dpfed.registry import registry

    found = all_keys(registry())
    word = error.option_name.lstrip("-").replace("-", "_")
    word = SYNONYMS.get(word, word)
    known = [*found, *(option.lstrip("-").replace("-", "_") for option in options)]
    close = difflib.get_close_matches(word, known, n=1)
    if not close or close[0] not in found:
        return error.format_message()
    value = value_of(error.option_name, words)
    meant = " or ".join(f"`--set {key}={value}`" for key in found[close[0]])
    return f"there is no option {error.option_name}: write {meant}"


def value_of(option: str, words: Sequence[str]) -> str:
    """Return the value that stands beside or behind an option, VALUE if there is none."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != option:
            continue
        if equals:
            return value
        following = words[i + 1] if i + 1 < len(words) else "-"
        return "VALUE" if following.startswith("-") else following
    return "VALUE"
