"""Continue prompts with the trained language model of a run, by greedy generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpfed.errors import DpfedError
from dpfed.model.blocks import inner_config
from dpfed.model.generation import written


def continued(
    model: Any, section: Any, prompts: Sequence[str | Sequence[Mapping[str, Any]]], new_tokens: int
) -> list[str]:
    """Return for each prompt the text that the model writes after it.

    model       the trained model, of peft or transformers
    section     the [model] section, which has the tokenizer
    prompts     texts, or chats in the form of `messages`
    new_tokens  largest number of tokens to write; an end token ends a text earlier
    """
    if isinstance(prompts, str) or any(not isinstance(p, str | list | tuple) for p in prompts):
        raise DpfedError("prompts must be a list of texts, or a list of chats: lists of messages")
    if new_tokens < 1:
        raise DpfedError(f"max_new_tokens = {new_tokens} must be at least 1")
    limit = getattr(inner_config(model), "max_position_embeddings", None)
    tokens = section.prompt_ids(prompts)
    for i, ids in enumerate(tokens):
        if not ids:
            raise DpfedError(f"prompt {i} has no tokens: give it at least one word")
        if limit and len(ids) + new_tokens > limit:
            raise DpfedError(
                f"prompt {i} has {len(ids)} tokens and max_new_tokens = {new_tokens}, together "
                f"more than the {limit} positions of the model: shorten one of them"
            )
    ends = section.ends(model)
    device = next(model.parameters()).device
    return [
        section.decoded(written(model.generate, ids, new_tokens, ends, device)) for ids in tokens
    ]
