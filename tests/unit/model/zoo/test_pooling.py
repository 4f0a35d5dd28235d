"""Sentence encoders: the stated pooling, compared with each record alone and unpadded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pooling_case import MEAN, state_pooling
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
)
from zoo_case import Inputs, ZooCase, save, text_spec, tokens_of, unpadded, with_train

from dpfed.errors import DpfedError
from dpfed.model.build import block_sizes, describe_space
from dpfed.model.per_sample.head_features import FEATURES, HeadSplit, split
from dpfed.model.shipped.modeling_pooled import PooledForSequenceClassification
from dpfed.model.zoo.pooling import Pooling, pooling_of
from dpfed.model.zoo.text import AutoText, is_pooled

SMALL: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 12, "max_position_embeddings": 10, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
CLS = {"embedding_dimension": 8, "pooling_mode": "cls"}


def bert() -> nn.Module:
    return BertModel(BertConfig(**SMALL))


def roberta() -> nn.Module:
    return RobertaModel(RobertaConfig(**SMALL))


def distilbert() -> nn.Module:
    config = DistilBertConfig(
        vocab_size=20, dim=8, n_layers=2, n_heads=2, hidden_dim=12, max_position_embeddings=10,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return DistilBertModel(config)


def encoder(folder: Path, build: Any = bert, pooling: Any = None, *more: str) -> str:
    save(build(), folder)
    return state_pooling(folder, pooling, *more)


def alone(way: str, normalize: bool) -> Any:
    """Return the loss of one unpadded record, by the plain encoder and torch alone."""

    def loss(model: Any, one: Inputs, label: Tensor) -> Tensor:
        tokens = model.body(**unpadded(one)).last_hidden_state
        pooled = tokens.mean(1) if way == "mean" else tokens[:, 0]
        if normalize:
            pooled = pooled / pooled.norm(dim=1, keepdim=True) * 8**0.5
        return F.cross_entropy(model.classifier(pooled)[0], label)

    return loss


# ---- gradients: the padded batch against each record alone, unpadded


@pytest.mark.parametrize("train", ["head", "lora", "full"])
@pytest.mark.parametrize(
    ("build", "pad"),
    [(bert, 0), (roberta, 1), (distilbert, 0)],
    ids=["bert", "roberta", "distilbert"],
)
@pytest.mark.parametrize("way", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
def test_gradients_equal_the_unpadded_loop(
    build: Any, pad: int, way: str, normalize: bool, train: str, tmp_path: Path
) -> None:
    more = ["Normalize"] if normalize else []
    folder = encoder(tmp_path, build, MEAN if way == "mean" else CLS, *more)
    case = ZooCase(with_train(AutoText(weights=folder, max_length=8), train), text_spec())
    assert isinstance(case.plain, PooledForSequenceClassification)
    for count in (1, 4):
        inputs = tokens_of(count, 8, 20, pad)
        case.check(inputs, torch.arange(count) % 3, alone(way, normalize))
    case.alive()


@pytest.mark.parametrize("normalize", [True, False], ids=["normalized", "plain"])
def test_a_head_on_features_equals_the_unpadded_loop(normalize: bool, tmp_path: Path) -> None:
    folder = encoder(tmp_path, bert, MEAN, *(["Normalize"] if normalize else []))
    case = ZooCase(with_train(AutoText(weights=folder, max_length=8), "head"), text_spec())
    inputs, labels = tokens_of(4, 8, 20, 0), torch.tensor([0, 1, 2, 0])
    want = case.check(inputs, labels, alone("mean", normalize))
    parts = split(case.ready, case.theta, inputs)
    assert isinstance(parts, HeadSplit)
    features = parts.frozen.scores(case.theta, inputs)
    if normalize:
        torch.testing.assert_close(features.norm(dim=1), torch.full((4,), 8**0.5))
    client = torch.arange(4).flip(0) % 2
    got = torch.cat(parts.head.grads(case.rows(2), client, {FEATURES: features}, labels), 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_blocks_are_those_of_the_encoder(tmp_path: Path) -> None:
    section = AutoText(weights=encoder(tmp_path), max_length=8, train="full")
    sizes = block_sizes(describe_space(section, text_spec()).space)
    assert sizes["body.encoder.layer.0.attention.self.query.head1"] == 4 * 8 + 4
    assert sizes["classifier"] == 3 * 8 + 3
    assert not any("pooler" in name for name in sizes)


def test_dropout_reaches_the_encoder(tmp_path: Path) -> None:
    noisy = BertModel(BertConfig(**{**SMALL, "hidden_dropout_prob": 0.1}))
    section = AutoText(weights=encoder(tmp_path, lambda: noisy), max_length=8)

    def rates(**keys: Any) -> set[float]:
        model = replace(section, **keys).build(text_spec()).model
        return {layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)}

    assert rates() == {0.1, 0.0}
    assert rates(dropout=0.3) == {0.3, 0.0}
    assert rates(train="head") == {0.0}
    assert rates(train="head", dropout=0.2) == {0.2, 0.0}


# ---- what the folder states


@pytest.mark.parametrize(
    ("stated", "more", "want"),
    [
        (MEAN, (), Pooling("mean", False)),
        (MEAN, ("Normalize",), Pooling("mean", True)),
        ({**MEAN, "pooling_mode_mean_tokens": False}, (), Pooling("mean", False)),
        ({"pooling_mode_cls_token": True}, (), Pooling("cls", False)),
        ({"embedding_dimension": 8, "pooling_mode": "mean"}, (), Pooling("mean", False)),
        ({"pooling_mode": ["cls"]}, (), Pooling("cls", False)),
        ({"word_embedding_dimension": 8}, (), Pooling("mean", False)),
    ],
)
def test_the_folder_states_the_pooling(
    stated: dict[str, Any], more: tuple[str, ...], want: Pooling, tmp_path: Path
) -> None:
    assert pooling_of(encoder(tmp_path, bert, stated, *more)) == want


def test_without_modules_the_model_keeps_its_own_head(tmp_path: Path) -> None:
    section = AutoText(weights=save(bert(), tmp_path), max_length=8)
    assert pooling_of(str(tmp_path)) is None
    assert not is_pooled(section)
    assert type(section.build(text_spec()).model).__name__ == "BertForSequenceClassification"
    state_pooling(tmp_path)
    assert is_pooled(section)
    own = replace(section, pooling="none")
    assert not is_pooled(own)
    assert type(own.build(text_spec()).model).__name__ == "BertForSequenceClassification"


@pytest.mark.parametrize(
    ("stated", "more", "sentence"),
    [
        ({"pooling_mode_max_tokens": True}, (), "asks for pooling max, and only mean or cls"),
        ({"pooling_mode": ["cls", "mean"]}, (), r"asks for pooling cls \+ mean"),
        ({"pooling_mode": "lasttoken"}, (), "asks for pooling lasttoken"),
        (MEAN, ("Dense",), "has a module Dense, which is not supported"),
    ],
)
def test_other_poolings_are_refused(
    stated: dict[str, Any], more: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    section = AutoText(weights=encoder(tmp_path, bert, stated, *more), max_length=8)
    with pytest.raises(DpfedError, match=rf'{sentence}.*set model\.pooling = "none"'):
        section.build(text_spec())
    assert replace(section, pooling="none").build(text_spec())


def test_damaged_statements_are_one_sentence(tmp_path: Path) -> None:
    section = AutoText(weights=encoder(tmp_path), max_length=8)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(DpfedError, match=r"names 1_Pooling/config\.json, which is missing"):
        section.build(text_spec())
    (tmp_path / "modules.json").write_text('[{"kind": 1}]')
    with pytest.raises(DpfedError, match=r"is not a list with type and path"):
        section.build(text_spec())
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(DpfedError, match=r"modules\.json cannot be read"):
        section.build(text_spec())


# ---- what was trained before


def test_an_adapter_of_the_models_own_head_still_loads(tmp_path: Path) -> None:
    """Its tensors are named after the model that it was trained on."""
    from peft import LoraConfig, get_peft_model

    section = with_train(AutoText(weights=encoder(tmp_path / "base"), max_length=8), "lora")
    for pooling in ("none", "auto"):
        made = replace(section, pooling=pooling).build(text_spec())
        config = LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
        get_peft_model(made.model, config).save_pretrained(tmp_path / pooling)
        case = ZooCase(replace(section, adapter=str(tmp_path / pooling)), text_spec())
        pooled = isinstance(case.plain, PooledForSequenceClassification)
        assert pooled is (pooling == "auto")


def test_a_saved_pooled_model_is_built_again(tmp_path: Path) -> None:
    """Its own configuration states the pooling; there is no modules.json."""
    section = AutoText(weights=encoder(tmp_path / "base", bert, MEAN, "Normalize"), max_length=8)
    first = section.build(text_spec()).model
    first.classifier.weight.data.normal_()
    first.save_pretrained(tmp_path / "saved")
    again = replace(section, weights=str(tmp_path / "saved"), head="kept")
    assert is_pooled(again)
    second = again.build(text_spec())
    inputs = second.prepare(tokens_of(4, 8, 20, 0))
    torch.testing.assert_close(second.model(**inputs).logits, first(**inputs).logits)
    assert str(tmp_path) not in (tmp_path / "saved" / "config.json").read_text()


def test_mpnet_gets_pooled(tmp_path: Path) -> None:
    """all-mpnet-base-v2 is the most used sentence encoder of another architecture."""
    sizes = {k: v for k, v in SMALL.items() if k != "max_position_embeddings"}
    model = MPNetModel(MPNetConfig(**sizes, max_position_embeddings=12))
    folder = encoder(tmp_path, lambda: model, MEAN, "Normalize")
    assert is_pooled(AutoText(weights=folder, max_length=8))
