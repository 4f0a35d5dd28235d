"""A small causal language model with a tokenizer of whole words and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<end>", "<unk>", "<start>", "<user>", "<assistant>", "<system>", *"abcdefgh"]
# Each message is its role, its words and the end token.
PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# The template marks what the assistant writes: its words and the end token.
MARKED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} <end>{% endgeneration %}{% else %}{{ m.content }} <end>"
    "{% endif %} {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% endfor %}" + PLAIN
)
# The last message looks different, so the beginning of a chat does not begin the whole chat.
LAST_DIFFERS = (
    "{% for m in messages %}{% if loop.last %}<system> {% endif %}"
    "<{{ m.role }}> {{ m.content }} {% endfor %}"
)


def ids_of(words: str) -> list[int]:
    return [WORDS.index(word) for word in words.split()]


def tokenizer_in(
    folder: Path,
    template: str | None = PLAIN,
    special: dict[str, str] | None = None,
    ends: bool = False,
) -> PreTrainedTokenizerFast:
    """Save a tokenizer of whole words and return it.

    special  special tokens; default: padding and end
    ends     True: texts begin with <start> and end with <end>
    """
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:
        raw.post_processor = processors.TemplateProcessing(
            single="<start> $A <end>", special_tokens=[("<start>", 3), ("<end>", 1)]
        )
    if special is None:
        special = {"pad_token": "<pad>", "eos_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return tokenizer


def chat_model(folder: Path, positions: int = 16, width: int = 8, **tokenizer: Any) -> str:
    """Save a small Llama for `positions` tokens and its tokenizer, and return the folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=width, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=width, max_position_embeddings=positions, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer_in(folder, **tokenizer)
    return str(folder)


def chat(*contents: str) -> list[dict[str, str]]:
    """Return messages that user and assistant write in turn."""
    return [
        {"role": "assistant" if i % 2 else "user", "content": content}
        for i, content in enumerate(contents)
    ]
