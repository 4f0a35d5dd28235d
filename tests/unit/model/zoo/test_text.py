"""Language models: tokens, padding, per-sample gradients, causal loss, and MiniLM's package."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_case import SMALL, bert, distilbert, gpt2, llama, mistral, roberta
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertModel,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
)
from zoo_case import ZooCase, alone_causal, alone_text, lora, save, text_spec, tokens_of, with_train

from dpfed.config import ModelSection
from dpfed.errors import DpfedError
from dpfed.model.build import block_sizes, describe_space
from dpfed.model.per_sample.head_features import HeadSplit, split
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import refuse_other_dropout
from dpfed.model.zoo.text import (
    PACKAGE,
    AutoCausal,
    AutoText,
    MiniLM,
    RobertaBase,
)
from dpfed.model.zoo.text_inputs import additive, tokens

# ---- gradients: the padded batch against each record alone, unpadded


@pytest.mark.parametrize("train", ["lora", "full", "head"])
@pytest.mark.parametrize(("build", "pad"), [(bert, 0), (roberta, 1), (distilbert, 0)])
def test_classifiers_equal_the_unpadded_loop(
    build: Any, pad: int, train: str, tmp_path: Path
) -> None:
    case = ZooCase(
        with_train(AutoText(weights=save(build(), tmp_path), max_length=8), train), text_spec()
    )
    for count in (1, 4):
        case.check(tokens_of(count, 8, 20, pad), torch.arange(count) % 3, alone_text)
    case.alive()


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("build", [gpt2, llama, mistral])
def test_language_models_equal_the_unpadded_loop(build: Any, train: str, tmp_path: Path) -> None:
    """The reference is transformers' own loss of the unpadded record; GPT-2 ties embeddings."""
    case = ZooCase(
        with_train(AutoCausal(weights=save(build(), tmp_path), max_length=8), train),
        text_spec(classes=1),
    )
    for count in (1, 4):
        case.check(tokens_of(count, 8, 20, 0), torch.zeros(count, dtype=torch.int64), alone_causal)
    case.alive()


def test_a_causal_body_with_a_head(tmp_path: Path) -> None:
    """GPT-2 as a classifier reads its last real token, and looks at no later one."""
    case = ZooCase(
        with_train(
            AutoText(weights=save(gpt2(GPT2ForSequenceClassification), tmp_path), max_length=8),
            "lora",
        ),
        text_spec(),
    )
    case.check(tokens_of(4, 8, 20, 0), torch.tensor([0, 1, 2, 0]), alone_text)


def test_token_types_of_pairs_reach_bert(tmp_path: Path) -> None:
    case = ZooCase(
        with_train(AutoText(weights=save(bert(), tmp_path), max_length=8), "lora"), text_spec()
    )
    inputs = tokens_of(3, 8, 20, 0)
    inputs["token_type_ids"] = (torch.arange(8) > 1).expand(3, 8).to(torch.uint8) * inputs[
        "attention_mask"
    ]
    got = case.check(inputs, torch.tensor([0, 1, 2]), alone_text)
    without = {k: v for k, v in inputs.items() if k != "token_type_ids"}
    assert not torch.equal(case.check(without, torch.tensor([0, 1, 2]), alone_text), got)


@pytest.mark.parametrize(("build", "pad"), [(bert, 0), (roberta, 1)])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_prepared_inputs_are_right_under_vmap(build: Any, pad: int, attention: str) -> None:
    """A record mapped by vmap over the whole model gives what it gives alone and unpadded."""
    torch.manual_seed(0)
    model = build().eval()
    model.set_attn_implementation(attention)
    inputs = tokens_of(3, 8, 20, pad)
    batch = {k: x.unsqueeze(1) for k, x in tokens(model, False, 8)[0](inputs).items()}
    weights = dict(model.named_parameters())

    def one(record: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (), record).logits[0]

    got = torch.vmap(one)(batch)
    for j in range(3):
        n = int(inputs["attention_mask"][j].sum())
        want = model(input_ids=inputs["input_ids"][j : j + 1, :n].long()).logits[0]
        torch.testing.assert_close(got[j], want, rtol=1e-4, atol=1e-5)


def test_masks() -> None:
    real = torch.tensor([[True, True, False]])
    low = torch.finfo(torch.float32).min
    assert additive(real, ahead=False).tolist() == [[[[0.0, 0.0, low]]]]
    assert additive(real, ahead=True).tolist() == [
        [[[0.0, low, low], [0.0, 0.0, low], [0.0, 0.0, low]]]
    ]


# ---- what a language model trains


def test_a_language_model_has_no_head(tmp_path: Path) -> None:
    section = AutoCausal(weights=save(gpt2(), tmp_path), max_length=8)
    names = ZooCase(with_train(section, "lora"), text_spec(classes=1)).space.names
    assert all(".lora_" in n for n in names)
    assert ZooCase(with_train(section, "lora"), text_spec(classes=1)).ready.task.causal
    assert not any("lm_head" in n for n in names)
    with pytest.raises(DpfedError, match="a language model has no head"):
        ZooCase(with_train(section, "head"), text_spec(classes=1))


def test_scores_in_pieces_are_the_same(tmp_path: Path) -> None:
    case = ZooCase(
        with_train(AutoText(weights=save(bert(), tmp_path), max_length=8), "lora"), text_spec()
    )
    inputs, theta = tokens_of(5, 8, 20, 0), case.rows(1)[0]
    whole = case.ready.scores(theta, inputs)
    case.ready.rows = 2
    torch.testing.assert_close(case.ready.scores(theta, inputs), whole)


# ---- blocks


def test_gpt2_heads_are_columns(tmp_path: Path) -> None:
    space = describe_space(
        AutoCausal(weights=save(gpt2(), tmp_path), train="full"), text_spec(classes=1)
    ).space
    at = space.names.index("transformer.h.0.attn.c_attn.weight")
    index = space.blocks[space.slices()[at]].view(8, 24)
    assert (index == index[0]).all()  # every input row of Conv1D has the same columns
    labels = [space.block_names[b] for b in index[0].tolist()]
    assert labels == [
        f"transformer.h.0.attn.c_attn.{p}.head{h}" for p in "qkv" for h in (0, 1) for _ in range(4)
    ]
    sizes = block_sizes(space)
    assert sizes["transformer.h.0.attn.c_attn.k.head1"] == 8 * 4 + 4  # with its part of the bias
    assert sizes["transformer.h.0.mlp.c_fc"] == 8 * 32 + 32


def test_gpt2_columns_feed_the_head_that_they_are_said_to(tmp_path: Path) -> None:
    """Shown by the model: with its value columns at zero a head gives nothing to the projection."""
    model = gpt2().eval()
    folder = save(model, tmp_path)
    space = describe_space(AutoCausal(weights=folder, train="full"), text_spec(classes=1)).space
    attention = model.transformer.h[0].attn
    seen: list[torch.Tensor] = []
    attention.c_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    layout = space.unflatten(space.blocks)
    for h in (0, 1):
        block = space.block_names.index(f"transformer.h.0.attn.c_attn.v.head{h}")
        keep = [attention.c_attn.weight.detach().clone(), attention.c_attn.bias.detach().clone()]
        attention.c_attn.weight.data[layout["transformer.h.0.attn.c_attn.weight"] == block] = 0
        attention.c_attn.bias.data[layout["transformer.h.0.attn.c_attn.bias"] == block] = 0
        model(input_ids=torch.tensor([[3, 4, 5]]))
        out = seen[-1].view(3, 2, 4)
        assert not out[:, h].any()
        assert out[:, 1 - h].all()
        attention.c_attn.weight.data.copy_(keep[0])
        attention.c_attn.bias.data.copy_(keep[1])


def test_gpt2_adapters_follow_the_output_rows(tmp_path: Path) -> None:
    section = with_train(AutoCausal(weights=save(gpt2(), tmp_path)), "lora", targets=("c_attn",))
    space = describe_space(section, text_spec(classes=1)).space
    assert space.num_blocks == 2 * (1 + 6)  # per layer: A, and B by part and head
    at = space.names.index("transformer.h.1.attn.c_attn.lora_B.default.weight")
    assert space.shapes[at] == (24, 2)


def test_grouped_keys_have_fewer_heads(tmp_path: Path) -> None:
    folder = save(llama(), tmp_path)
    full = block_sizes(
        describe_space(AutoCausal(weights=folder, train="full"), text_spec(classes=1)).space
    )
    for part, heads in (("q", 4), ("k", 2), ("v", 2)):
        names = [n for n in full if n.startswith(f"model.layers.0.self_attn.{part}_proj.head")]
        assert len(names) == heads
        assert {full[n] for n in names} == {4 * 16}
    assert full["model.layers.0.input_layernorm"] == 16
    section = with_train(AutoCausal(weights=folder), "lora", targets=("q_proj", "k_proj", "v_proj"))
    assert describe_space(section, text_spec(classes=1)).space.num_blocks == 2 * (3 + 4 + 2 + 2)


def test_roberta_base_of_the_paper() -> None:
    """124,647,170 by formula; LoRA r=16 on q, k, v: 468 blocks and the head's two."""
    d, layer = 768, 4 * (768 * 768 + 768) + (2 * 768 * 3072 + 3072 + 768) + 4 * 768
    formula = (50265 + 514 + 1 + 2) * d + 12 * layer + (d * d + d) + (2 * d + 2)
    section = RobertaBase(
        weights="random", lora=lora(r=16, alpha=32.0, targets=("query", "key", "value"))
    )
    described = describe_space(section, text_spec(128, 2))
    assert described.total == formula == 124_647_170
    assert described.space.num_blocks == 468 + 2
    assert described.space.size == 12 * 3 * 2 * 16 * 768 + (d * d + d) + (2 * d + 2)
    assert "".join(described.notes).startswith("dropout inside attention is off")


# ---- tokens


def tokenizer(folder: Path, pairs: bool = True, pad: bool = True) -> str:
    """A word-level tokenizer with BERT's form of one and two texts."""
    folder.mkdir(exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "bad", "film", "good", "so"]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = (
        ["input_ids", "token_type_ids", "attention_mask"]
        if pairs
        else ["input_ids", "attention_mask"]
    )
    special = {
        "unk_token": "[UNK]",
        "eos_token": "[SEP]",
        **({"pad_token": "[PAD]"} if pad else {}),
    }
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, model_input_names=names, **special)
    fast.save_pretrained(folder)
    return str(folder)


def strings(*values: str) -> np.ndarray:
    return np.array(values, dtype=object)


def section(folder: str, **keys: Any) -> AutoText:
    return AutoText(weights="random", tokenizer=folder, max_length=6, **keys)


def test_encode_by_hand(tmp_path: Path) -> None:
    out = section(tokenizer(tmp_path)).encode(
        {"text": strings("a good film", "bad", "so so so so so so", "")}
    )
    assert out["input_ids"].tolist() == [
        [2, 4, 7, 6, 3, 0], [2, 5, 3, 0, 0, 0], [2, 8, 8, 8, 8, 3], [2, 3, 0, 0, 0, 0]
    ]  # fmt: skip
    assert out["attention_mask"].tolist() == [
        [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]
    ]  # fmt: skip
    assert out["input_ids"].dtype == np.int32
    assert out["attention_mask"].dtype == np.uint8
    assert set(out) == {"input_ids", "attention_mask"}


def test_encode_pairs(tmp_path: Path) -> None:
    texts = {"text": strings("good", "a bad bad film"), "text_pair": strings("bad", "so good")}
    out = section(tokenizer(tmp_path)).encode(texts)
    assert out["input_ids"][0].tolist() == [2, 7, 3, 5, 3, 0]
    assert out["token_type_ids"][0].tolist() == [0, 0, 0, 1, 1, 0]
    assert out["input_ids"].shape == (2, 6)
    assert "token_type_ids" not in section(tokenizer(tmp_path / "plain", pairs=False)).encode(texts)


def test_encode_in_chunks_and_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = section(tokenizer(tmp_path))
    texts = {"text": strings("a", "good", "bad film", "so", "a film")}
    whole = model.encode(texts)
    monkeypatch.setattr("dpfed.model.zoo.text_inputs.TEXTS_PER_CALL", 2)
    again = model.encode(texts)
    assert all(np.array_equal(whole[k], again[k]) for k in whole)
    assert {k: v.shape for k, v in model.encode({"text": strings()}).items()} == {
        "input_ids": (0, 6),
        "attention_mask": (0, 6),
    }


def test_the_encoding_names_what_changes_it(tmp_path: Path) -> None:
    one = section(tokenizer(tmp_path / "one"))
    before = one.encoding
    one.encode({"text": strings("a good film")})
    assert one.encoding == before  # a call leaves no trace
    assert AutoText(weights="random", tokenizer=one.tokenizer, max_length=7).encoding != before
    other = tokenizer(tmp_path / "other", pad=False)
    assert section(other).encoding != before


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path: Path) -> None:
    out = section(tokenizer(tmp_path, pad=False)).encode({"text": strings("bad")})
    assert out["input_ids"].tolist() == [[2, 5, 3, 3, 3, 3]]
    assert out["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0]]


def test_missing_tokenizers_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"brings no tokenizer: set model.tokenizer"):
        RobertaBase(weights="random").encode({"text": strings("a")})
    with pytest.raises(DpfedError, match="has no tokenizer"):
        AutoText(weights=save(bert(), tmp_path / "m")).encode({"text": strings("a")})
    with pytest.raises(DpfedError, match=r"model\.tokenizer = .* is not a folder"):
        section(str(tmp_path / "nothing")).encode({"text": strings("a")})


def test_encoded_records_train(tmp_path: Path) -> None:
    """From strings to gradients, by one folder that has both weights and tokenizer."""
    folder = save(bert(), tmp_path)
    tokenizer(tmp_path)
    model = AutoText(weights=folder, max_length=6, lora=lora())
    inputs = {
        k: torch.from_numpy(v)
        for k, v in model.encode({"text": strings("a good film", "bad", "so")}).items()
    }
    ZooCase(model, text_spec(6)).check(inputs, torch.tensor([0, 1, 2]), alone_text)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    config = BertConfig(**{**SMALL, "vocab_size": 6})
    folder = save(BertForSequenceClassification(config), tmp_path / "model")
    model = AutoText(weights=folder, tokenizer=tokenizer(tmp_path / "tokenizer"), max_length=6)
    assert len(model.encode({"text": strings("a bad")})["input_ids"]) == 1
    with pytest.raises(DpfedError, match="gives token 7, auto-text knows 6"):
        model.encode({"text": strings("a good")})


def test_synthetic_text_has_different_lengths() -> None:
    spec = InputSpec("text", "input_ids", (10,), 2, vocabulary=7)
    out = spec.synthetic(3, torch.Generator().manual_seed(0))
    assert out["input_ids"].shape == (3, 10)
    assert int(out["input_ids"].max()) < 7
    assert out["attention_mask"].sum(1).tolist() == [10, 8, 5]


# ---- configuration


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (RobertaBase(), "needs model.weights"),
        (AutoText(), "needs model.weights"),
        (AutoText(weights="random"), "takes its shape from model.weights"),
        (AutoCausal(weights="random"), "takes its shape from model.weights"),
        (MiniLM(weights="random"), "comes with its weights"),
        (RobertaBase(weights="random", max_length=600), "more than the 512 positions"),
    ],
)
def test_mistakes_are_one_sentence(model: ModelSection, sentence: str) -> None:
    length = getattr(model, "max_length", 8)
    with torch.device("meta"), pytest.raises(DpfedError, match=sentence):
        model.build(text_spec(length))  # type: ignore[attr-defined]


@pytest.mark.parametrize("build", [bert, roberta, distilbert, gpt2])
def test_dropout_is_set_in_all_hidden_layers(build: Any, tmp_path: Path) -> None:
    model = build()
    folder = save(
        type(model)(type(model.config)(**{**model.config.to_dict(), **_default_dropout(model)})),
        tmp_path,
    )
    kind = AutoCausal if build is gpt2 else AutoText
    rates = lambda **keys: {  # noqa: E731
        layer.p
        for layer in kind(weights=folder, max_length=8, **keys).build(text_spec()).model.modules()
        if isinstance(layer, nn.Dropout)
    }
    assert rates() == {0.1, 0.2}
    assert rates(dropout=0.3) == {0.3, 0.0}  # 0 inside attention
    assert rates(dropout=0.0) == {0.0}


def _default_dropout(model: nn.Module) -> dict[str, float]:
    """Attention has a rate of its own."""
    return {
        name: 0.2 if "att" in name else 0.1
        for name in model.config.to_dict()
        if ("drop" in name or "pdrop" in name) and name != "classifier_dropout"
    }


def test_dropout_that_cannot_be_set_is_refused(tmp_path: Path) -> None:
    plain = AutoCausal(weights=save(llama(), tmp_path / "llama"), max_length=8, dropout=0.1)
    with pytest.raises(DpfedError, match=r"LlamaForCausalLM has no dropout"):
        plain.build(text_spec())
    assert replace(plain, dropout=0.0).build(text_spec())  # it is as asked
    folder = save(bert(), tmp_path / "bert")
    model = AutoText(weights=folder, max_length=8).build(text_spec()).model
    model.bert.encoder.layer[1].output.dropout.p = 0.4  # type: ignore[union-attr, index]
    with pytest.raises(
        DpfedError,
        match=r"model\.dropout = 0 does not reach bert\.encoder\.layer\.1\.output\.dropout",
    ):
        refuse_other_dropout(model, 0.0)


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_without_dropout_a_head_has_features(dropout: float | None, tmp_path: Path) -> None:
    noisy = BertForSequenceClassification(BertConfig(**SMALL, max_position_embeddings=10))
    model = with_train(
        AutoText(weights=save(noisy, tmp_path), max_length=8, dropout=dropout), "head"
    )
    case = ZooCase(model, text_spec())
    parts = split(case.ready, case.theta, tokens_of(2, 8, 20, 0))
    assert isinstance(parts, HeadSplit) is (dropout == 0)
    assert dropout == 0 or "model.dropout = 0" in str(parts)


def test_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="'auto-text' reads text, this data has image"):
        AutoText(weights=save(bert(), tmp_path)).build(InputSpec("image", "x", (1, 8, 8), 2))


def test_modules_that_the_weights_lack_are_trained(tmp_path: Path) -> None:
    """DistilBERT's body has no pre_classifier: frozen at random it would cripple the head."""
    folder = save(DistilBertModel(distilbert().config), tmp_path / "one")
    case = ZooCase(with_train(AutoText(weights=folder, max_length=8), "lora"), text_spec())
    assert any(n.startswith("pre_classifier.") for n in case.space.names)
    whole = AutoText(weights=save(BertModel(bert().config), tmp_path / "two"), max_length=8).build(
        text_spec()
    )
    assert (whole.head, whole.notes) == (("classifier",), ())
    folder = save(BertModel(bert().config, add_pooling_layer=False), tmp_path / "three")
    case = ZooCase(with_train(AutoText(weights=folder, max_length=8), "lora"), text_spec())
    assert "bert.pooler.dense.modules_to_save.default.weight" in case.space.names
    assert "the weights lack bert.pooler.dense: trained like the head" in case.notes
    case.check(tokens_of(3, 8, 20, 0), torch.tensor([0, 1, 2]), alone_text)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """Loaded leniently they would be a random model that says nothing."""
    folder = save(bert(), tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"hidden_size": 8', '"hidden_size": 16')
    )
    with pytest.raises(DpfedError, match="do not fit BertForSequenceClassification"):
        AutoText(weights=folder, max_length=8).build(text_spec())
    roberta_folder = save(roberta(), tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text((tmp_path / "config.json").read_text())
    with pytest.raises(DpfedError, match="do not fit"):
        AutoText(weights=roberta_folder, max_length=8).build(text_spec())


# ---- MiniLM


def fake_package(place: Path) -> None:
    folder = place / PACKAGE / "model"
    folder.mkdir(parents=True)
    (place / PACKAGE / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    save(BertModel(bert().config), folder)
    tokenizer(folder)


def test_minilm_is_found_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    model = MiniLM(max_length=8, lora=lora())
    inputs = {
        k: torch.from_numpy(v)
        for k, v in model.encode({"text": strings("a good film", "bad")}).items()
    }
    ZooCase(model, text_spec(8)).check(inputs, torch.tensor([0, 1]), alone_text)


def test_minilm_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DpfedError, match=r"pip install 'dpfed\[text\]'"):
        MiniLM().build(text_spec())


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="the extra `text` is not installed"
)
def test_the_real_minilm_tells_praise_from_blame_apart() -> None:
    model = MiniLM(max_length=16)
    texts = ["a wonderful film", "a great movie", "the stock market fell", "shares dropped today"]
    inputs = {k: torch.from_numpy(v) for k, v in model.encode({"text": strings(*texts)}).items()}
    built = model.build(text_spec(16, 2))
    with torch.no_grad():
        prepared = built.prepare(inputs)
        tokens = built.model.body(**prepared).last_hidden_state
        pooled = built.model.pool(tokens, prepared["attention_mask"])
    near = pooled @ pooled.T / pooled.shape[1]
    assert min(near[0, 1], near[2, 3]) > max(near[0, 2], near[0, 3], near[1, 2], near[1, 3]) + 0.2
