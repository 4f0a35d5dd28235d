"""Quantised bases: per-record gradients, isolation, memory, refusals. Needs the extra `quant`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_case import need, saved_llama
from text_case import QUIET, SMALL
from torch import Tensor
from transformers import AutoModelForCausalLM, RobertaConfig, RobertaForSequenceClassification
from zoo_case import (
    RECORDS,
    ZooCase,
    alone_causal,
    alone_text,
    save,
    text_spec,
    tokens_of,
    with_train,
)

from dpfed.bench.peak_memory import peak_bytes
from dpfed.errors import DpfedError
from dpfed.model.build import describe_space
from dpfed.model.frozen.model_hash import model_hash
from dpfed.model.frozen.quantised import Quantize, has_quantised, is_quantised
from dpfed.model.per_sample.isolation_check import records_mix
from dpfed.model.zoo.text import AutoCausal, AutoText

LABELS = torch.zeros(4, dtype=torch.int64)
BOTH: tuple[Quantize, ...] = ("int8", "4bit")


def section_of(folder: Path, how: Quantize, train: str = "lora") -> AutoCausal:
    section: Any = AutoCausal(weights=saved_llama(folder), max_length=8, quantize=need(how))  # type: ignore[arg-type]
    return with_train(section, train)  # type: ignore[return-value]


def case_of(folder: Path, how: Quantize) -> ZooCase:
    return ZooCase(section_of(folder, how), text_spec(classes=1))


def mixes(case: ZooCase) -> bool:
    generator = torch.Generator().manual_seed(0)
    records = case.spec.synthetic(RECORDS, generator)
    return records_mix(case.ready, case.theta, records, case.spec.classes, generator)


@pytest.mark.parametrize("how", BOTH)
def test_gradients_equal_the_loop_over_the_quantised_model(how: Quantize, tmp_path: Path) -> None:
    case = case_of(tmp_path, how)
    frozen = [p for name, p in case.plain.named_parameters() if "layers" in name and p.dim() == 2]
    assert sum(map(is_quantised, frozen)) == 14
    for count in (1, 4):
        case.check(tokens_of(count, 8, 20, 0), LABELS[:count], alone_causal)
    case.alive()
    case.ready.checkpoint()
    case.check(tokens_of(4, 8, 20, 0), LABELS, alone_causal)


@pytest.mark.parametrize("how", BOTH)
def test_the_head_of_a_classifier_is_never_quantised(how: Quantize, tmp_path: Path) -> None:
    """RoBERTa's head has two layers, and both are trained."""
    need(how)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = RobertaConfig(**{**SMALL, **sizes}, **QUIET, max_position_embeddings=10)
    folder = save(RobertaForSequenceClassification(config), tmp_path)
    section: Any = AutoText(weights=folder, max_length=8, quantize=how)
    case = ZooCase(with_train(section, "lora"), text_spec(classes=3))
    case.check(tokens_of(4, 8, 20, 1), torch.tensor([0, 1, 2, 0]), alone_text)
    assert any(name.startswith("classifier.") for name in case.space.names)
    assert sum(map(is_quantised, case.ready.model.parameters())) == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", BOTH)
def test_records_do_not_mix(how: Quantize, dtype: torch.dtype, tmp_path: Path) -> None:
    case = case_of(tmp_path, how)
    case.ready.to(dtype)
    assert not mixes(case)


@pytest.mark.parametrize("how", BOTH)
def test_half_precision_agrees_and_keeps_the_stored_numbers(how: Quantize, tmp_path: Path) -> None:
    case = case_of(tmp_path, how)
    inputs, client = tokens_of(4, 8, 20, 0), torch.tensor([0, 1, 1, 0])
    before = model_hash_of_quantised(case)
    want = torch.cat(case.ready.grads(case.rows(2), client, inputs, LABELS), 1)
    case.ready.to(torch.bfloat16)
    raw = case.ready.grads(case.rows(2), client, inputs, LABELS)
    assert {g.dtype for g in raw} == {torch.bfloat16}
    got = torch.cat(raw, 1).float()
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=1)
    assert (cosine > 0.98).all()
    assert model_hash_of_quantised(case) == before


def model_hash_of_quantised(case: ZooCase) -> str:
    layers = case.ready.model.get_submodule("model.layers.0.mlp.gate_proj.base_layer")
    return model_hash(layers, case.space)


def test_the_8_bit_layer_keeps_no_plain_weights(tmp_path: Path) -> None:
    case = case_of(tmp_path, "int8")
    layer = case.ready.model.get_submodule("model.layers.0.mlp.gate_proj.base_layer")
    x = torch.randn(1, 64, requires_grad=True)
    y = layer(x)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert sum(t.numel() for t in saved) < layer.weight.numel()
    # One plain copy of the weights, alive for the product only.
    peak = peak_bytes(lambda: layer(x))
    assert peak < 3 * 4 * layer.weight.numel()
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, layer.weight.dequantize().sum(0, keepdim=True))


@pytest.mark.parametrize("how", BOTH)
def test_a_folder_that_is_already_quantised(how: Quantize, tmp_path: Path) -> None:
    first = case_of(tmp_path / "plain", how)
    base: Any = first.built.model
    reloaded: Any = AutoCausal(weights=saved_llama(tmp_path / "plain"), quantize=how)
    base = reloaded.build(text_spec(classes=1)).model
    base.save_pretrained(tmp_path / "small")
    section: Any = AutoCausal(weights=str(tmp_path / "small"), max_length=8)
    second = ZooCase(with_train(section, "lora"), text_spec(classes=1))
    assert has_quantised(second.ready.model)
    assert model_hash(first.plain, first.space) == model_hash(second.plain, second.space)
    second.check(tokens_of(4, 8, 20, 0), LABELS, alone_causal)
    twice: Any = AutoCausal(weights=str(tmp_path / "small"), max_length=8, quantize=how)
    with pytest.raises(DpfedError, match="already, so leave it out"):
        ZooCase(with_train(twice, "lora"), text_spec(classes=1))


@pytest.mark.parametrize("how", BOTH)
def test_the_hash_covers_weights_and_scales(how: Quantize, tmp_path: Path) -> None:
    case = case_of(tmp_path, how)
    before = model_hash(case.plain, case.space)
    weight: Any = case.plain.get_parameter("model.layers.0.mlp.gate_proj.base_layer.weight")
    scale = weight.scale if how == "int8" else weight.quant_state.absmax
    scale.view(torch.uint8)[0] ^= 1
    assert model_hash(case.plain, case.space) != before


@pytest.mark.parametrize("how", BOTH)
def test_counts_all_numbers_and_describes_without_the_library(
    how: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpfed.model.build import assemble

    section = section_of(tmp_path, how)
    total = assemble(section, text_spec(classes=1)).total
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    described = describe_space(section, text_spec(classes=1))
    assert described.total == total


@pytest.mark.parametrize("how", BOTH)
def test_only_adapters_and_plain_modules_can_be_trained(how: Quantize, tmp_path: Path) -> None:
    for train in ("full", ("model.layers.1.mlp",)):
        section: Any = section_of(tmp_path, how, train)  # type: ignore[arg-type]
        with pytest.raises(DpfedError, match="would train quantised weights"):
            ZooCase(section, text_spec(classes=1))
    section = section_of(tmp_path, how, ("model.norm",))  # type: ignore[arg-type]
    case = ZooCase(section, text_spec(classes=1))
    case.check(tokens_of(4, 8, 20, 0), LABELS, alone_causal)


# ---- without the libraries


@pytest.mark.parametrize("how", BOTH)
def test_a_missing_library_is_one_sentence(
    how: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("torchao", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, library, None)
    section: Any = AutoCausal(weights=saved_llama(tmp_path), max_length=8, quantize=how)
    with pytest.raises(DpfedError, match=r"needs (torchao|bitsandbytes): pip install 'dpfed\["):
        section.build(text_spec(classes=1))


STATED: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "needs bitsandbytes: pip"),
    "8 bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "by bitsandbytes in 8 bits, which mixes the records of a pass: give",
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "quantised by gptq: give weights of 4 bits"),
    "activations": (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int8DynamicActivationInt8WeightConfig"}},
        },
        "by torchao in another form than 8-bit weights",
    ),
}


@pytest.mark.parametrize("name", STATED)
def test_other_quantised_folders_are_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    stated, sentence = STATED[name]
    path = Path(saved_llama(tmp_path)) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": stated}))
    with pytest.raises(DpfedError, match=sentence):
        AutoCausal(weights=str(tmp_path), max_length=8).build(text_spec(classes=1))


def test_random_weights_cannot_be_quantised() -> None:
    from dpfed.model.zoo.text import RobertaBase

    with pytest.raises(DpfedError, match="with weights to quantise: leave it"):
        RobertaBase(weights="random", quantize="int8").build(text_spec(classes=3))


def test_layers_that_look_for_outliers_mix_records(tmp_path: Path) -> None:
    """The 8-bit layers of bitsandbytes take each large column of a pass out of the product."""
    bitsandbytes = pytest.importorskip("bitsandbytes", exc_type=ImportError)
    from transformers import BitsAndBytesConfig

    case = case_of(tmp_path, "4bit")
    eight = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_8bit=True), dtype="float32"
    )
    for name, layer in eight.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear8bitLt):
            place = case.ready.model.get_submodule(name)
            place.base_layer = layer  # type: ignore[assignment]
    assert mixes(case)
