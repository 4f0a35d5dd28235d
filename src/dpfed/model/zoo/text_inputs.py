"""Prepare texts for a model: load its tokenizer, encode texts, and build its attention mask."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpfed.errors import DpfedError, reason
from dpfed.model.blocks import inner_config
from dpfed.model.zoo.built import Prepare
from dpfed.model.zoo.hub import source_of

TEXTS_PER_CALL = 10_000


@lru_cache(maxsize=4)
def tokenizer_of(name: str, key: str, must_pad: bool = True) -> Any:
    """Return a fast tokenizer, changed by `padded_right` to pad and cut texts on the right.

    name      folder or hub name of the tokenizer
    key       the configuration key that sets the name, for error messages
    must_pad  False: accept a tokenizer without any token for padding
    """
    return padded_right(plain_tokenizer(name, key), name, key, must_pad)


def padded_right(tokenizer: Any, name: str, key: str, must_pad: bool = True) -> Any:
    """Change the tokenizer so that it pads and cuts texts on the right, and return it.

    A tokenizer without a padding token then pads with its end token.
    """
    if tokenizer.pad_token is None and (must_pad or tokenizer.eos_token is not None):
        if tokenizer.eos_token is None:
            raise DpfedError(
                f"the tokenizer of {key} = {name!r} has neither a padding nor an end token: add one"
            )
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    return tokenizer


def plain_tokenizer(name: str, key: str) -> Any:
    """Return a new fast tokenizer with the settings in its files."""
    from transformers import AutoTokenizer

    source, local = source_of(name, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, local_files_only=local, trust_remote_code=False
        )
        # If files are missing, transformers returns an empty tokenizer. For a damaged tokenizer,
        # this line raises an error.
        made_up = len(tokenizer) <= len(tokenizer.all_special_ids)
    except Exception as error:
        # Missing, damaged or unknown files raise errors of many classes: catch them all.
        raise DpfedError(
            f"{key} = {name!r} has no tokenizer that can be loaded ({reason(error)}): "
            "set model.tokenizer to a folder with tokenizer.json"
        ) from None
    if made_up:
        raise DpfedError(
            f"{key} = {name!r} has no tokenizer: set model.tokenizer to a folder with "
            "tokenizer.json"
        )
    if not tokenizer.is_fast:
        raise DpfedError(
            f"{key} = {name!r} has only a slow tokenizer: convert it to one with tokenizer.json"
        )
    return tokenizer


def encoded_texts(
    tokenizer: Any, text: np.ndarray, pair: np.ndarray | None, length: int
) -> dict[str, np.ndarray]:
    """Return the model's inputs for texts, or for pairs of texts, `[records, length]` each.

    pair    the second text of each pair; None for single texts
    length  texts are cut or padded to this number of tokens
    """
    dtypes: dict[str, type] = {"input_ids": np.int32, "attention_mask": np.uint8}
    fills = {"input_ids": tokenizer.pad_token_id or 0, "attention_mask": 0}
    if pair is not None and "token_type_ids" in tokenizer.model_input_names:
        dtypes["token_type_ids"] = np.uint8
        fills["token_type_ids"] = tokenizer.pad_token_type_id
    parts: dict[str, list[np.ndarray]] = {
        name: [np.zeros((0, length), dtype)] for name, dtype in dtypes.items()
    }
    for first in range(0, len(text), TEXTS_PER_CALL):
        rows = slice(first, first + TEXTS_PER_CALL)
        out = tokenizer(
            [str(t) for t in text[rows]],
            None if pair is None else [str(t) for t in pair[rows]],
            truncation=True,
            max_length=length,
            return_attention_mask=True,
            return_token_type_ids="token_type_ids" in parts,
        )
        for name, chunks in parts.items():
            chunks.append(padded(out[name], length, fills[name]).astype(dtypes[name]))
    return {name: np.concatenate(chunks) for name, chunks in parts.items()}


def padded(rows: Sequence[Sequence[int]], length: int, fill: int) -> np.ndarray:
    """Return rows of numbers as one array `[rows, length]`, each cut or filled on the right."""
    out = np.full((len(rows), length), fill, dtype=np.int64)
    for filled, row in zip(out, rows, strict=True):
        cut = row[:length]
        filled[: len(cut)] = cut
    return out


def tokens(model: nn.Module, causal: bool, length: int) -> tuple[Prepare, ...]:
    """Return functions that turn token records into the model's arguments, the preferred one first.

    The first function makes an additive 4-D attention mask, so that the model runs no `if` on
    values of records. The last function passes the plain 2-D mask, from which a model with sliding
    attention windows builds its own mask. Only the last function is returned if records are longer
    than this window, or if no module of the model has the attribute `is_causal`.
    No function passes position ids: the model computes them.

    causal  True for a causal language model
    length  number of tokens of a record
    """
    config: Any = inner_config(model)
    flags = [bool(m.is_causal) for m in model.modules() if hasattr(m, "is_causal")]
    kinds = getattr(config, "layer_types", None) or ()
    window = getattr(config, "sliding_window", None)
    if window is None:
        window = 0 if "sliding_attention" in kinds else length
    plain = _form(model, None)
    if not flags or window < length:
        return (plain,)
    return _form(model, causal or any(flags)), plain


def _form(model: nn.Module, ahead: bool | None) -> Prepare:
    """Return a function that turns token records into the model's arguments.

    ahead  True: the attention mask is 4-D and hides later tokens; False: it is 4-D and hides only
           padding; None: it is the plain 2-D mask
    """
    takes_types = "token_type_ids" in _arguments(model)
    padding = getattr(inner_config(model), "pad_token_id", None)

    def prepare(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = inputs["input_ids"].long()
        real = inputs["attention_mask"].bool()
        if padding is not None and padding >= 0:
            # The tokenizer may pad with another token than the model expects: set the expected one.
            ids = ids.masked_fill(~real, padding)
        mask = real.long() if ahead is None else additive(real, ahead)
        out = {"input_ids": ids, "attention_mask": mask}
        if takes_types and "token_type_ids" in inputs:
            out["token_type_ids"] = inputs["token_type_ids"].long()
        return out

    return prepare


def _arguments(model: nn.Module) -> set[str]:
    """Return the names of the arguments that the model's forward pass accepts.

    A model that accepts `kwargs` passes them on to its body. The names of the body's arguments are
    then included.
    """
    found = set(inspect.signature(model.forward).parameters)
    body = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    if "kwargs" in found and isinstance(body, nn.Module):
        found |= set(inspect.signature(body.forward).parameters)
    return found


def additive(real: Tensor, ahead: bool) -> Tensor:
    """Return a mask that is added to attention scores, `[M, 1, 1 or L, L]`.

    M is the number of records and L the number of tokens of each record. The mask is 0 for visible
    tokens and the lowest float32 number for hidden tokens.

    real   True for tokens that are not padding, `[M, L]`
    ahead  True: hide later tokens too; False: hide only padding
    """
    seen = real[:, None, None, :]
    length = real.shape[1]
    if ahead:
        seen = seen & torch.ones(length, length, dtype=torch.bool, device=real.device).tril()
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(seen.shape, device=real.device).masked_fill(~seen, lowest)


def position_offset(model: nn.Module) -> int:
    """Return the index of the row before the first position in the table of position embeddings.

    This row belongs to padding, as in RoBERTa. The result is -1 if the table has no such row.
    """
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        if isinstance(padding, int):
            return padding
    return -1
