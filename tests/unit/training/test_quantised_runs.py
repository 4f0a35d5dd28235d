"""Runs on a quantised base: training, resuming, export for plain peft. Needs the extra `quant`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_case import chat, chat_model
from peft import PeftModel
from quantised_case import need
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import dpfed
from dpfed.errors import DpfedError

CHATS = [{"messages": chat("a b", "c")}, {"messages": chat("d", "e f", "g", "h")}] * 6
QUICK: dict[str, Any] = {
    "run.rounds": 2,
    "run.local_steps": 2,
    "privacy.batch": 4.0,
    "model.max_length": 14,
    "model.lora.r": 2,
    "algorithm.lr": 0.05,
}
IDS = torch.arange(3, 11).unsqueeze(0)


def tuned(folder: str, out: Path, how: str, **more: Any) -> dpfed.TrainedModel:
    chosen = {**QUICK, "model.quantize": how, **more}
    return dpfed.fine_tune(
        folder, CHATS, CHATS[:2], clients=2, epsilon=4, out=out, progress=False, settings=chosen
    )


def quantised_base(folder: str, how: str) -> Any:
    """Return the base as a user of transformers loads it."""
    if how == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        config: Any = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype="float32", device_map={"": "cpu"}
    )


@pytest.mark.parametrize("how", ["int8", "4bit"])
def test_an_export_loads_with_plain_peft_on_the_same_base(how: str, tmp_path: Path) -> None:
    need(how)
    folder = chat_model(tmp_path / "base", width=64)
    trained = tuned(folder, tmp_path / "run", how)
    trained.export(tmp_path / "adapter")
    trained.export(tmp_path / "merged", merge=True)
    # The products of bitsandbytes differ between training and evaluation, so compare in training.
    base = quantised_base(folder, how).train()
    with torch.enable_grad():
        before = base(IDS).logits
        with_adapter = PeftModel.from_pretrained(base, tmp_path / "adapter")
        theirs = with_adapter.train()(input_ids=IDS).logits
    model: Any = trained.model
    with torch.no_grad():
        ours = model(input_ids=IDS).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=2e-4)
    assert (theirs - before).abs().max() > 1e-2, "the adapter changes the outputs"
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter"
    )
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, plain(IDS).logits, rtol=1e-3, atol=1e-4)
    assert not hasattr(merged.config, "quantization_config")


@pytest.mark.parametrize("how", ["int8", "4bit"])
def test_one_record_in_a_pass_gives_the_same_run(how: str, tmp_path: Path) -> None:
    need(how)
    folder = chat_model(tmp_path / "base", width=64)
    one = tuned(folder, tmp_path / "one", how)
    two = tuned(folder, tmp_path / "two", how, **{"privacy.isolation": "exact"})
    assert two.result["test_loss"] == pytest.approx(one.result["test_loss"], rel=1e-4)


def test_a_base_that_came_quantised_is_not_merged(tmp_path: Path) -> None:
    need("4bit")
    folder = chat_model(tmp_path / "base", width=64)
    small = tmp_path / "small"
    quantised_base(folder, "4bit").save_pretrained(small)
    chat_model(tmp_path / "tokenizer", width=64)
    more = {"model.tokenizer": str(tmp_path / "tokenizer")}
    trained = tuned(str(small), tmp_path / "run", "none", **more)
    with pytest.raises(DpfedError, match="export the adapter alone"):
        trained.export(tmp_path / "merged", merge=True)
    trained.export(tmp_path / "adapter")
