"""Greedy generation with a causal language model of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

# A function that takes the arguments of `generate` and returns all tokens, prompts included.
Generate = Callable[..., torch.Tensor]


class Generation(nn.Module):
    """A module whose forward pass is the method `generate` of a model.

    `torch.func.functional_call` can only call a forward pass, so it needs this module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **arguments: Any) -> Any:
        generate: Any = self.model.generate
        return generate(**arguments)


def written(
    generate: Generate,
    prompt: Sequence[int],
    new_tokens: int,
    ends: Sequence[int],
    device: torch.device,
) -> list[int]:
    """Return the tokens that greedy generation writes after a prompt.

    new_tokens  largest number of tokens to write
    ends        tokens that end a text
    """
    from transformers import GenerationConfig

    given = torch.tensor([list(prompt)], device=device)
    # Pass a complete configuration, so that sampling options in the model's files have no effect.
    greedy = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
    )
    with torch.no_grad():
        out = generate(
            input_ids=given, attention_mask=torch.ones_like(given), generation_config=greedy
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found
