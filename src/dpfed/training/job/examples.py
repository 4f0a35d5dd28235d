"""Example texts that a language model writes after test prompts, before and after training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from dpfed.errors import reason
from dpfed.model.blocks import inner_config
from dpfed.model.generation import written
from dpfed.training.job.job import Job

EXAMPLES = 3
NEW_TOKENS = 32
# Number of first tokens that serve as the prompt of a plain-text record, which has no prompt of its
# own.
TOKENS_OF_PROMPT = 8


class Prompt(NamedTuple):
    """A prompt from a test record: its tokens `ids`, and the `expected` tokens that follow them."""

    ids: list[int]
    expected: list[int]


class Examples(NamedTuple):
    """Generated example texts, and notes for the user.

    texts  for each example a text by the names `prompt`, `expected`, `before` and `after`
    """

    texts: list[dict[str, str]]
    notes: list[str]


def examples_of(job: Job, theta: Tensor) -> Examples:
    """Return what the model writes after the first test prompts, before and after training.

    theta  the trainable vector `[P]` after training
    """
    can_write = hasattr(job.model.model, "generate") and "input_ids" in job.public.test.inputs
    if not (job.model.task.causal and can_write):
        return Examples([], [])
    try:
        return Examples([_example(job, prompt, theta) for prompt in prompts_of(job)], [])
    except Exception as error:
        # A model from the Hugging Face hub may raise any error here. The run must not fail after
        # training because of an example.
        return Examples([], [f"the model wrote no examples: {reason(error)}"])


def prompts_of(job: Job) -> list[Prompt]:
    """Return up to EXAMPLES prompts from the test set that are short enough to be continued."""
    found: list[Prompt] = []
    for prompt in _prompts(job):
        if len(found) == EXAMPLES:
            break
        if prompt.ids and prompt.expected and _room(job, prompt) > 0:
            found.append(prompt)
    return found


def _prompts(job: Job) -> Iterator[Prompt]:
    inputs = {name: x.cpu() for name, x in job.public.test.inputs.items()}
    for i in range(len(job.public.test.labels)):
        length = int(inputs["attention_mask"][i].sum())
        ids = inputs["input_ids"][i, :length].tolist()
        if "target_mask" not in inputs:
            first = min(TOKENS_OF_PROMPT, length // 2)
            yield Prompt(ids[:first], ids[first:])
            continue
        targets = inputs["target_mask"][i, :length].tolist()
        first = targets.index(1) if 1 in targets else length
        last = targets.index(0, first) if 0 in targets[first:] else length
        yield Prompt(ids[:first], ids[first:last])


def _room(job: Job, prompt: Prompt) -> int:
    """Return the largest number of tokens that the model may generate after this prompt."""
    limit = getattr(inner_config(job.model.model), "max_position_embeddings", None)
    return NEW_TOKENS if limit is None else min(NEW_TOKENS, limit - len(prompt.ids))


def _example(job: Job, prompt: Prompt, theta: Tensor) -> dict[str, str]:
    section: Any = job.config.model
    ends = section.ends(job.model.model)
    texts = {"prompt": prompt.ids, "expected": prompt.expected}
    for name, vector in (("before", job.theta), ("after", theta)):
        generate = partial(job.model.generate, vector)
        texts[name] = written(generate, prompt.ids, _room(job, prompt), ends, job.device)
    return {name: section.decoded(ids) for name, ids in texts.items()}
