"""A record is computed as the plain model computes it alone and unpadded, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sizes_case import SIZES
from text_case import bert, gpt2, llama, roberta
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    FNetConfig,
    FNetForSequenceClassification,
    IBertConfig,
    IBertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    LongformerConfig,
    LongformerForSequenceClassification,
    LukeConfig,
    LukeForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
)
from vision_case import tiny_vit
from zoo_case import (
    ZooCase,
    alone_causal,
    alone_text,
    save,
    spread_weights,
    text_spec,
    tokens_of,
    with_train,
)

from dpfed.errors import DpfedError
from dpfed.model.build import assemble
from dpfed.model.parameter_vector import space_of
from dpfed.model.per_sample.forward_check import (
    PlainOutputs,
    faithful_form,
    faithful_model,
    plain_outputs,
)
from dpfed.model.per_sample.gradients import trainable
from dpfed.model.per_sample.isolation_check import RECORDS, check_isolation
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built
from dpfed.model.zoo.text import AutoCausal, AutoText
from dpfed.model.zoo.text_inputs import tokens
from dpfed.model.zoo.vision import AutoImage

Build = Callable[[], nn.Module]


def mpnet() -> nn.Module:
    return MPNetForSequenceClassification(MPNetConfig(**SIZES))


def luke() -> nn.Module:
    config = LukeConfig(**SIZES, entity_vocab_size=10, entity_emb_size=4)
    return LukeForSequenceClassification(config)


def ibert() -> nn.Module:
    return IBertForSequenceClassification(IBertConfig(**SIZES))


def longformer() -> nn.Module:
    return LongformerForSequenceClassification(LongformerConfig(**SIZES, attention_window=4))


def opt() -> nn.Module:
    """A model that counts positions by the mask."""
    config = OPTConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, ffn_dim=12,
        max_position_embeddings=24, word_embed_proj_dim=8, dropout=0.0, pad_token_id=1,
    )  # fmt: skip
    return OPTForCausalLM(config)


# ---- architectures that count positions from behind the padding token


@pytest.mark.parametrize("train", ["head", "lora", "full"])
@pytest.mark.parametrize("build", [mpnet, luke, ibert, longformer])
def test_positions_are_the_models_own(build: Build, train: str, tmp_path: Path) -> None:
    section = with_train(AutoText(weights=save(build(), tmp_path), max_length=8), train)
    if build is ibert and train == "lora":
        with pytest.raises(DpfedError, match=r"no layer that LoRA can adapt.*model.train"):
            ZooCase(section, text_spec())
        return
    case = ZooCase(section, text_spec())
    case.check(tokens_of(4, 8, 20, 1), torch.tensor([0, 1, 2, 0]), alone_text)
    case.alive()


def test_a_model_that_counts_positions_by_the_mask_gets_the_plain_mask(tmp_path: Path) -> None:
    section = with_train(AutoCausal(weights=save(opt(), tmp_path), max_length=8), "full")
    case = ZooCase(section, text_spec(classes=1))
    assert case.form is case.built.forms[1]
    case.check(tokens_of(4, 8, 20, 1), torch.zeros(4, dtype=torch.int64), alone_causal)


def test_the_usual_models_take_the_mask_that_no_branch_depends_on(tmp_path: Path) -> None:
    for name, build in (("bert", bert), ("roberta", roberta)):
        case = ZooCase(AutoText(weights=save(build(), tmp_path / name), max_length=8), text_spec())
        assert case.form is case.built.prepare
    for name, build in (("gpt2", gpt2), ("llama", llama)):
        section = AutoCausal(weights=save(build(), tmp_path / name), max_length=8)
        case = ZooCase(section, text_spec(classes=1))
        assert case.form is case.built.prepare


@pytest.mark.parametrize("build", [mpnet, longformer, roberta])
def test_texts_longer_than_the_positions_are_refused(build: Build, tmp_path: Path) -> None:
    model = build()
    most = model.config.max_position_embeddings - 2
    weights = save(model, tmp_path)
    with pytest.raises(DpfedError, match=rf"max_length = {most + 1} is more than the {most} pos"):
        ZooCase(AutoText(weights=weights, max_length=most + 1), text_spec(most + 1))
    ZooCase(AutoText(weights=weights, max_length=most, train="head"), text_spec(most))


def test_padding_by_another_token_than_the_models_own(tmp_path: Path) -> None:
    """A classifier finds the last token by the model's own padding token."""
    sizes = {key: size for key, size in SIZES.items() if "dropout" not in key}
    config = LlamaConfig(**sizes, pad_token_id=0, num_key_value_heads=1)
    weights = save(LlamaForSequenceClassification(config), tmp_path)
    case = ZooCase(with_train(AutoText(weights=weights, max_length=8), "lora"), text_spec())
    case.check(tokens_of(4, 8, 20, pad=17), torch.tensor([0, 1, 2, 0]), alone_text)


# ---- what is refused


class PaddedPositions(BertForSequenceClassification):
    """A model that counts positions from the end, so that padding moves every token."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Any:
        length = input_ids.shape[1]
        positions = torch.arange(length, device=input_ids.device).flip(0).expand(input_ids.shape)
        return super().forward(input_ids, attention_mask, position_ids=positions)


class NextRecord(BertForSequenceClassification):
    """A model that adds a part of the next record's scores."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Any:
        out = super().forward(input_ids, attention_mask)
        out.logits = out.logits + 0.1 * out.logits.roll(1, 0)
        return out


class FirstExpertFull(BertForSequenceClassification):
    """An expert that takes at most a fixed number of tokens of a batch."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Any:
        out = super().forward(input_ids, attention_mask)
        room = torch.arange(len(input_ids), device=input_ids.device) < 1
        out.logits = out.logits * (1 + room.unsqueeze(1))
        return out


def ready(model: nn.Module, classes: int = 3) -> tuple[Any, PlainOutputs]:
    spread_weights(model)
    spec = InputSpec("text", "input_ids", (8,), classes, vocabulary=20)
    space = space_of(trainable(model))
    theta = space.flatten(trainable(model))
    forms = tokens(model, False, 8)
    built = Built(model, "classifier", forms[0], forms=forms)
    records = spec.synthetic(RECORDS, torch.Generator().manual_seed(0))
    plain = plain_outputs(model, space, theta, records, built.prepare)
    return faithful_model(built, model, space, plain)[0], plain


@pytest.mark.parametrize("cls", [PaddedPositions, NextRecord, FirstExpertFull])
def test_a_model_that_is_computed_differently_in_a_batch_is_refused(cls: type[nn.Module]) -> None:
    sentence = rf"{cls.__name__} computes a record differently .*% off.*: choose another model"
    with pytest.raises(DpfedError, match=sentence) as error:
        ready(cls(BertConfig(**SIZES, num_labels=3)))
    assert "\n" not in str(error.value)
    ready(BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)))


@pytest.mark.parametrize("train", ["head", "lora", "full"])
def test_a_model_without_a_mask_is_refused(train: str, tmp_path: Path) -> None:
    keep = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    config = FNetConfig(**{k: SIZES[k] for k in keep}, hidden_dropout_prob=0.0)
    weights = save(FNetForSequenceClassification(config), tmp_path)
    with pytest.raises(DpfedError, match="FNetForSequenceClassification computes a record diff"):
        ZooCase(with_train(AutoText(weights=weights, max_length=8), train), text_spec())


def test_what_the_plain_model_cannot_compute_is_refused() -> None:
    class Whole(BertForSequenceClassification):
        def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Any:
            if input_ids.shape[1] != 8:
                raise RuntimeError("eight tokens are needed\nand more lines")
            return super().forward(input_ids, attention_mask)

    sentence = "Whole cannot compute a single record without padding .eight tokens are needed.: "
    with pytest.raises(DpfedError, match=sentence):
        ready(Whole(BertConfig(**SIZES, num_labels=3)))


class SwappedLayer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.01


def test_the_comparison_is_with_the_layers_before_they_are_exchanged() -> None:
    """A layer that computes something else after the plain model was called."""
    model, plain = ready(BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)))
    forms = tokens(model.model, False, 8)
    assert faithful_form(model, plain, forms) is forms[0]
    model.model.classifier.__class__ = SwappedLayer
    with pytest.raises(DpfedError, match="computes a record differently"):
        faithful_form(model, plain, forms)


# ---- images, precision, random state


@pytest.mark.parametrize("train", ["head", "lora", "full"])
def test_images_are_compared_one_by_one(train: str, tmp_path: Path) -> None:
    spec = InputSpec("image", "pixel_values", (3, 8, 8), 3)
    case = ZooCase(with_train(AutoImage(weights=tiny_vit(tmp_path)), train), spec)
    case.alive()


@pytest.mark.parametrize("build", [bert, roberta, mpnet, longformer])
def test_short_precision_has_its_own_tolerance(build: Build, tmp_path: Path) -> None:
    section = with_train(AutoText(weights=save(build(), tmp_path), max_length=8), "lora")
    parts = assemble(section, text_spec())
    model, space = parts.adapted.model, parts.space
    theta = space.flatten(trainable(model))
    assert parts.built.spec is not None
    generator = torch.Generator().manual_seed(0)
    records = parts.built.spec.synthetic(RECORDS, generator)
    plain = plain_outputs(model, space, theta, records, parts.built.prepare)
    got, form = faithful_model(parts.built, model, space, plain)
    check_isolation(got, theta, records, 3, generator)
    got.to(torch.bfloat16)
    faithful_form(got, plain, (form,))
    check_isolation(got, theta, records, 3, generator)
    wrong = PlainOutputs(plain.vector, plain.inputs, [2 * out for out in plain.outputs])
    with pytest.raises(DpfedError, match="computes a record differently"):
        faithful_form(got, wrong, (form,))


def test_the_check_leaves_the_random_state_alone() -> None:
    class Drawing(BertForSequenceClassification):
        def forward(self, input_ids: Tensor, attention_mask: Any = None) -> Any:
            torch.rand(3)
            return super().forward(input_ids, attention_mask)

    model = Drawing(BertConfig(**SIZES, num_labels=3))
    space = space_of(trainable(model))
    records = InputSpec("text", "input_ids", (8,), 3, vocabulary=20).synthetic(
        RECORDS, torch.Generator().manual_seed(0)
    )
    forms = tokens(model, False, 8)
    built = Built(model, "classifier", forms[0], forms=forms)
    before = torch.get_rng_state()
    plain = plain_outputs(model, space, space.flatten(trainable(model)), records, forms[0])
    faithful_model(built, model, space, plain)
    assert torch.equal(torch.get_rng_state(), before)
