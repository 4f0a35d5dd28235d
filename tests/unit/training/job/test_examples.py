"""Texts that language models write after public test prompts, before and after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_case import chat, chat_model
from transformers import AutoTokenizer, LlamaForCausalLM

import dpfed
from dpfed.model.per_sample.gradients import PerSample
from dpfed.training.job.examples import EXAMPLES, NEW_TOKENS
from dpfed.training.run_folder.files import read_result

CHATS = [{"messages": chat("a b", "c")}, {"messages": chat("d", "e f", "g", "h")}] * 6
COMPLETIONS = [{"prompt": "a b", "completion": "c"}, {"prompt": "d", "completion": "e f"}] * 6
TEXTS = [{"text": "a b c d e f g h a b c"}, {"text": "d e"}] * 6
LEARNS: dict[str, Any] = {
    "run.rounds": 1,
    "run.local_steps": 10,
    "run.features": False,
    "privacy.enabled": False,
    "privacy.batch": 4.0,
    "algorithm.lr": 0.3,
    "model.max_length": 14,
    "model.liveness": False,
    "model.lora.r": 2,
}


def trained_on(
    records: list[dict[str, Any]], place: Path, folder: str, test: Any = None, **keys: Any
) -> dpfed.TrainedModel:
    test = records[:2] if test is None else test
    return dpfed.fine_tune(
        folder, records, test, clients=2, out=place / "out", progress=False, **keys
    )


@pytest.mark.parametrize("train", ["lora", "full"])
def test_examples_are_what_base_and_trained_model_write(train: str, tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "m", positions=60)
    trained = trained_on(CHATS, tmp_path, folder, settings={**LEARNS, "model.train": train})
    first, second = trained.result["examples"]
    assert (first["prompt"], first["expected"]) == ("<user> a b <assistant>", "c")
    # A chat with two answers: the first is written.
    assert (second["prompt"], second["expected"]) == ("<user> d <assistant>", "e f")
    prompts = [chat("a b"), chat("d")]
    after = trained.generate(prompts, max_new_tokens=NEW_TOKENS)
    assert [first["after"], second["after"]] == after
    base = LlamaForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, example in zip(prompts, (first, second), strict=True):
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = base.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        new = out[0, ids["input_ids"].shape[1] :]
        assert example["before"] == tokenizer.decode(new, skip_special_tokens=True)
        assert example["before"] != example["after"]
    assert read_result(trained.out)["examples"] == trained.result["examples"]


def test_prompts_are_those_of_completions_and_beginnings_of_texts(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "m")
    settings = {**LEARNS, "run.local_steps": 1}
    lost = {"prompt": "a b c d e f g h a b c d e f", "completion": "g"}
    trained = trained_on(
        COMPLETIONS, tmp_path / "a", folder, [lost, *COMPLETIONS], settings=settings
    )
    found = trained.result["examples"]
    assert [(text["prompt"], text["expected"]) for text in found] == [
        ("a b", "c"),
        ("d", "e f"),
        ("a b", "c"),
    ]
    assert len(found) == EXAMPLES
    trained = trained_on(TEXTS, tmp_path / "b", folder, settings=settings)
    found = trained.result["examples"]
    assert [(text["prompt"], text["expected"]) for text in found] == [
        ("a b c d e", "f g h a b c"),
        ("d", "e"),
    ]
    # The model has 16 positions.
    assert len(found[0]["after"].split()) <= 11


def test_a_classifier_has_no_examples(tmp_path: Path) -> None:
    records = [{"text": "a b", "label": "good"}, {"text": "c", "label": "bad"}] * 6
    settings = {**LEARNS, "model.task": "classify"}
    trained = trained_on(records, tmp_path, chat_model(tmp_path / "m"), settings=settings)
    assert "examples" not in trained.result
    assert "Greedy" not in (trained.export(tmp_path / "e") / "README.md").read_text()


def test_a_model_that_cannot_write_keeps_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: PerSample, vector: torch.Tensor, **arguments: Any) -> torch.Tensor:
        raise RuntimeError("no cache")

    monkeypatch.setattr(PerSample, "generate", failing)
    trained = trained_on(COMPLETIONS, tmp_path, chat_model(tmp_path / "m"), settings=LEARNS)
    assert "examples" not in trained.result
    assert trained.perplexity > 1
    assert "the model wrote no examples: no cache" in trained.notes


def test_the_page_and_the_card_show_examples(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "m", positions=60)
    trained = trained_on(CHATS, tmp_path, folder, settings=LEARNS)
    first = trained.result["examples"][0]
    card = (trained.export(tmp_path / "export") / "README.md").read_text()
    page = trained.report(tmp_path / "page.html", public=True).read_text()
    assert "Greedy generation after public test prompts, before and after training" in card
    for name in ("prompt", "expected", "before", "after"):
        assert f"\n{name + ':':<10}{first[name]}" in card
        shown = first[name].replace("<", "&lt;").replace(">", "&gt;")
        assert f"<td>{shown}</td>" in page
    assert "Generated texts" in page
