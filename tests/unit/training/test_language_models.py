"""Runs of causal language models on texts, completions and chats."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import dpfed as command
from language_case import NO_SYSTEM, WORDS, chat, chat_model, ids_of, tokenizer_in
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import dpfed
from dpfed.api import configuring
from dpfed.cli.run import closing
from dpfed.config import Config, build
from dpfed.data.sources.in_memory import source_of
from dpfed.data.tables import Source
from dpfed.errors import DpfedError
from dpfed.privacy.published import show_perplexity
from dpfed.registry import registry
from dpfed.training.callbacks.public_figures import public_result
from dpfed.training.evaluation import evaluate, language_metrics, perplexity
from dpfed.training.job.job import Job, prepare

PAGE = Path(__file__).parents[3] / "docs" / "models" / "language.md"
CHATS = [{"messages": chat("a b", "c")}, {"messages": chat("d", "e f", "g", "h")}] * 6
TEST = [{"messages": chat("a", "c")}, {"messages": chat("b", "c d")}]
COMPLETIONS = [{"prompt": "a b", "completion": "c"}, {"prompt": "d", "completion": "e f"}] * 6
LABELLED = [{"text": "a b", "label": "good"}, {"text": "c", "label": "bad"}] * 6
QUICK = {
    "run.rounds": 1,
    "run.local_steps": 1,
    "privacy.batch": 4.0,
    "model.max_length": 14,
    "model.liveness": False,
    "model.lora.r": 2,
}


def config_of(folder: str, **model: Any) -> Config:
    tables = {
        "data": {"clients": 2, "partition": "iid"},
        "model": {"name": "auto-text", "weights": folder, "max_length": 14, **model},
        "privacy": {"batch": 4.0, "sigma": 1.0},
        "run": {"rounds": 1, "local_steps": 1, "participation": 1.0, "device": "cpu"},
    }
    return build(tables, registry())


def job_of(folder: str, records: list[dict[str, Any]], **model: Any) -> Job:
    return prepare(config_of(folder, **model), source(records))


def source(records: list[dict[str, Any]]) -> Source:
    return source_of(records, records[:2])


def fine_tune(folder: Any, out: Path, train: Any = CHATS, **keys: Any) -> dpfed.TrainedModel:
    chosen = {**QUICK, **keys.pop("settings", {})}
    test = keys.pop("test", TEST)
    given = {"clients": 2, "epsilon": 4, "out": out, "progress": False, **keys}
    return dpfed.fine_tune(folder, train, test, **given, settings=chosen)


@pytest.mark.parametrize("task", [None, "causal"])
def test_chats_are_scored_by_the_assistants_tokens(task: str | None, tmp_path: Path) -> None:
    folder = chat_model(tmp_path)
    job = job_of(folder, CHATS, **({"task": task} if task else {}))
    assert job.model.task.causal
    assert (job.public.classes, job.public.spec.classes) == ((), 0)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    losses: list[list[float]] = []
    right: list[list[bool]] = []
    for words, targets in (
        ("<user> a b <end> <assistant> c <end>", [5, 6]),
        (
            "<user> d <end> <assistant> e f <end> <user> g <end> <assistant> h <end>",
            [4, 5, 6, 11, 12],
        ),
    ):
        ids = torch.tensor(ids_of(words))
        with torch.no_grad():
            logp = model(input_ids=ids.unsqueeze(0)).logits[0].log_softmax(-1)
        losses.append([-float(logp[i - 1, ids[i]]) for i in targets])
        right.append([bool(logp[i - 1].argmax() == ids[i]) for i in targets])
    accuracy, loss = evaluate(job, job.theta)
    by_token = np.concatenate(losses).mean()
    assert loss == pytest.approx(by_token, rel=1e-5)
    assert accuracy == pytest.approx(np.concatenate(right).mean())
    assert language_metrics(job, job.theta) == {
        "perplexity": pytest.approx(np.exp(by_token), rel=1e-5),
        "token_accuracy": pytest.approx(accuracy),
        "record_loss": pytest.approx(np.mean([np.mean(x) for x in losses]), rel=1e-5),
        "exact_match": pytest.approx(np.mean([all(x) for x in right])),
    }


@pytest.mark.parametrize("records", [COMPLETIONS, [{"text": "a b c"}, {"text": "d e"}] * 6])
def test_completions_and_texts_run(records: list[dict[str, Any]], tmp_path: Path) -> None:
    trained = fine_tune(chat_model(tmp_path / "m"), tmp_path / "out", records, test=records[:2])
    assert trained.classes == ()
    assert trained.result["task"] == "causal"
    assert trained.result["test_loss"] > 0


def test_fine_tune_reads_messages(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "model")
    trained = fine_tune(folder, tmp_path / "out")
    assert 0 < trained.epsilon["server_worst"] <= 4.0
    assert dpfed.load(tmp_path / "out").classes == ()
    settings = (tmp_path / "out" / "config.toml").read_text()
    for line in ('partition = "iid"', "beta1 = 0.0", 'bc_level = "block"'):
        assert line in settings
    with pytest.raises(DpfedError, match="no classes to predict"):
        trained.predict(["a"])
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), None
    with pytest.raises(DpfedError, match="needs its tokenizer"):
        fine_tune(model, tmp_path / "more", tokenizer=tokenizer)


def test_the_lines_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines run as shown, with a small model, few rounds and short records."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    (block,) = (block for block in blocks if "my-chat-model" in block)
    monkeypatch.chdir(tmp_path)
    chat_model(tmp_path / "my-chat-model")
    usual = configuring.defaults

    def fewer(*args: Any) -> dict[str, Any]:
        made = usual(*args)
        few = {"rounds": 1, "local_steps": 1}
        return {**made, "run": {**made["run"], **few}, "model": {"max_length": 8}}

    monkeypatch.setattr(configuring, "defaults", fewer)
    place: dict[str, Any] = {}
    exec(block, place)
    assert 0 < place["trained"].epsilon["server_worst"] <= 4.0
    assert place["trained"].result["clients"] == 8


# ---- scores


def test_exact_match_is_that_of_greedy_generation(tmp_path: Path) -> None:
    """Completions that the model itself generates match; others do not."""
    folder = chat_model(tmp_path)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        # Larger logits, so that no two of them are equal up to rounding.
        model.lm_head.weight.mul_(10)
        model.save_pretrained(folder)

    def written(prompt: str, tokens: int) -> str:
        ids = torch.tensor([ids_of(prompt)])
        out = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
        return " ".join(WORDS[i] for i in out[0, ids.shape[1] :].tolist())

    # Without an end token, a completion is what it says.
    tokenizer_in(tmp_path, special={"pad_token": "<pad>"})
    prompts = ["a b", "c", "d e f", "g"]
    records = [{"prompt": p, "completion": written(p, 3)} for p in prompts]
    wrong = next(w for w in "abc" if not records[0]["completion"].endswith(w))
    records[0]["completion"] = f"{records[0]['completion'].rsplit(' ', 1)[0]} {wrong}"
    job = prepare(config_of(folder), source_of(records * 2, records))
    found = language_metrics(job, job.theta)
    assert found["exact_match"] == 0.75
    assert found["token_accuracy"] == pytest.approx(11 / 12)


def test_test_records_without_targets_do_not_count(tmp_path: Path) -> None:
    folder = chat_model(tmp_path)
    kept = {"prompt": "a", "completion": "b"}
    lost = {"prompt": "a b c d e f", "completion": "g"}
    jobs = [
        prepare(config_of(folder, max_length=5), source_of([kept] * 8, test))
        for test in ([kept], [kept, lost, lost])
    ]
    assert evaluate(jobs[0], jobs[0].theta) == pytest.approx(evaluate(jobs[1], jobs[1].theta))
    alone, more = (language_metrics(job, job.theta) for job in jobs)
    assert alone == pytest.approx(more)


def test_a_test_set_without_targets_is_refused(tmp_path: Path) -> None:
    lost = [{"prompt": "a b c d e f", "completion": "g"}] * 8
    with pytest.raises(DpfedError, match="no test record has a target within"):
        job_of(chat_model(tmp_path), lost, max_length=5)


def test_every_output_names_the_perplexity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = fine_tune(chat_model(tmp_path / "m"), tmp_path / "out", progress=True)
    said = capsys.readouterr().err
    shown = show_perplexity(trained.perplexity)
    assert f"round 1/1  perplexity {shown}  epsilon " in said
    assert "accuracy" not in said
    assert trained.perplexity == pytest.approx(math.exp(trained.result["test_loss"]))
    assert trained.result["metrics"]["perplexity"] == pytest.approx(trained.perplexity)
    assert trained.history["perplexity"].tolist() == pytest.approx(
        [trained.result["start_perplexity"], trained.perplexity]
    )
    assert f"perplexity {shown}" in repr(trained)
    assert "accuracy" not in repr(trained)
    assert trained.plot()[0].get_ylabel() == "perplexity on the test set"
    assert closing(dict(trained.result))[0].startswith("perplexity ")
    card = trained.export(tmp_path / "export") / "README.md"
    assert f"- perplexity {shown} (before training " in card.read_text()
    assert "- token accuracy " in card.read_text()
    page = trained.report(tmp_path / "page.html").read_text()
    assert ">Perplexity<" in page
    assert public_result(trained.result)["test_perplexity"] == trained.perplexity


def test_a_trained_model_writes_what_its_export_writes(tmp_path: Path) -> None:
    """The card's lines load the adapter with plain peft, and it gives the same text."""
    folder = chat_model(tmp_path / "m")
    model = LlamaForCausalLM.from_pretrained(folder)
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    plain = {"privacy.enabled": False, "algorithm.lr": 0.3, "run.local_steps": 20}
    trained = fine_tune(folder, tmp_path / "out", epsilon=None, settings=plain)
    prompts = [[{"role": "user", "content": "a b"}], [{"role": "user", "content": "d"}]]
    written = trained.generate(prompts, max_new_tokens=4)
    assert written == trained.generate(prompts, max_new_tokens=4)
    texts = trained.generate(["a b", "c"], max_new_tokens=3)
    assert all(set(text.split()) <= set(WORDS) for text in [*written, *texts])

    out = trained.export(tmp_path / "adapter")
    joined = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    for prompt, text in zip(prompts, written, strict=True):
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        found = joined.generate(**ids, max_new_tokens=4, do_sample=False)
        new = found[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(new, skip_special_tokens=True) == text
    # Training has changed what the model writes.
    before = model.eval().generate(
        torch.tensor([ids_of("<user> a b <end> <assistant>")]), max_new_tokens=4, do_sample=False
    )
    assert tokenizer.decode(before[0, 5:], skip_special_tokens=True) != written[0]


def test_prompts_that_cannot_be_continued(tmp_path: Path) -> None:
    trained = fine_tune(chat_model(tmp_path / "m", template=NO_SYSTEM), tmp_path / "out")
    system = [{"role": "system", "content": "a"}]
    for prompts, tokens, words in (
        ("a", 4, "prompts must be a list of texts"),
        ([{"role": "user", "content": "a"}], 4, "prompts must be a list of texts"),
        ([system], 4, r"refuses the messages of prompt 0 \(no system\)"),
        (["a b c"], 14, "prompt 0 has 3 tokens and max_new_tokens = 14, together more than the 16"),
        (["a", ""], 4, "prompt 1 has no tokens"),
        (["a"], 0, "max_new_tokens = 0 must be a whole number of at least 1"),
    ):
        with pytest.raises(DpfedError, match=words):
            trained.generate(prompts, max_new_tokens=tokens)


def test_perplexities() -> None:
    assert perplexity(math.log(5)) == pytest.approx(5)
    assert math.isfinite(perplexity(1e6) or math.inf)
    assert perplexity(None) is None
    assert perplexity(math.nan) is None
    assert [show_perplexity(x) for x in (1.0, 12.345678, 1234.6, 1e9)] == [
        "1", "12.35", "1235", "1e+09",
    ]  # fmt: skip


def test_a_classifier_has_no_perplexity(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "m")
    settings = {"model.task": "classify"}
    test = LABELLED[:2]
    trained = fine_tune(folder, tmp_path / "out", LABELLED, test=test, settings=settings)
    assert trained.result["task"] == "classify"
    assert "perplexity" not in trained.history
    with pytest.raises(DpfedError, match="has no perplexity"):
        _ = trained.perplexity
    with pytest.raises(DpfedError, match="writes no text"):
        trained.generate(["a"])


# ---- records whose targets are cut away


def test_a_record_without_targets_has_no_gradient(tmp_path: Path) -> None:
    """The second prompt fills the whole length, so its completion is cut away."""
    records = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a b c d e f", "completion": "g"},
    ] * 4
    job = job_of(chat_model(tmp_path), records, max_length=5)
    client = torch.zeros(8, dtype=torch.int64)
    inputs, labels = job.private.records.take(torch.arange(8))
    assert inputs["target_mask"].sum(1).tolist() == [2, 0] * 4
    theta = job.theta + 0.1 * torch.randn(1, len(job.theta))
    grads = torch.cat(job.model.grads(theta, client, inputs, labels), 1)
    assert grads.isfinite().all()
    assert (grads[1::2] == 0).all()
    assert (grads[::2] != 0).any(1).all()


def test_records_without_targets_train_to_finite_weights(tmp_path: Path) -> None:
    lost = [{"prompt": "a b c d e f g h", "completion": "c"}] * 8
    folder = chat_model(tmp_path / "m")
    short = {"model.max_length": 5}
    trained = fine_tune(folder, tmp_path / "out", lost, test=COMPLETIONS[:2], settings=short)
    weights = torch.cat([p.detach().flatten() for p in trained.model.parameters()])
    assert weights.isfinite().all()


def describe(tmp_path: Path, rows: list[dict[str, Any]], *more: str) -> list[str]:
    for name in ("train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    keys = {
        "data.name": "text-table",
        "data.path": tmp_path / "train.jsonl",
        "data.test_path": tmp_path / "test.jsonl",
        "data.clients": 2,
        "model.name": "auto-text",
        "model.weights": tmp_path / "model",
        "model.max_length": 5,
    }
    options = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    return ["data", "describe", *options, *more]


def test_describe_counts_lost_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat_model(tmp_path / "model")
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a b c", "completion": "d e"},
        {"prompt": "a b c d e", "completion": "f"},
    ]
    assert command(*describe(tmp_path, rows)) == 0
    out = capsys.readouterr().out
    for words in (
        "no labels",
        "train: 4 target tokens in records of 5 tokens (longest before the cut: 7); "
        "1 record cut inside the targets, 1 without any target",
        "warning: 1 of 3 train records have no target within model.max_length = 5",
        "counts of private records",
    ):
        assert words in out
    assert "client  " not in out
    assert command(*describe(tmp_path, rows, "--json")) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert found["targets"]["train"] == {
        "records": 3, "targets": 4, "shortened": 1, "lost": 1, "longest": 7,
    }  # fmt: skip
    assert found["classes"] == []
    assert found["table"] == [[], []]
    assert command(*describe(tmp_path, rows, "--plot", str(tmp_path / "a.png"))) == 2
    assert "--plot draws the labels" in capsys.readouterr().err


# ---- mistakes


def test_labels_and_a_language_model_ask_which_is_meant(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "m")
    words = r'and the data have labels: set task to "causal" .* or to "classify"'
    with pytest.raises(DpfedError, match=words):
        fine_tune(folder, tmp_path / "out", LABELLED, test=LABELLED[:2])
    assert not (tmp_path / "out").exists()
    for task, classes in (("causal", False), ("classify", True)):
        job = job_of(folder, LABELLED, task=task)
        assert job.model.task.causal is not classes
        # Only the classes of a classifier shape its model.
        assert any("read off the labels" in note for note in job.notes) is classes
    assert job_of(folder, LABELLED, name="auto-causal").model.task.causal


@pytest.mark.parametrize(
    ("records", "model", "words"),
    [
        (CHATS, {"task": "classify"}, "learns labels, and the data have none"),
        (
            [{**record, "label": i % 2} for i, record in enumerate(CHATS)],
            {"task": "classify"},
            "a classifier reads a column of texts, and the data have messages",
        ),
        (CHATS, {"name": "roberta-base"}, "learns labels, and the data have none"),
        (CHATS, {"max_length": 17}, "model.max_length = 17 is more than the 16 positions"),
    ],
)
def test_models_that_do_not_fit_the_data(
    records: list[dict[str, Any]], model: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DpfedError, match=words):
        job_of(chat_model(tmp_path), records, **model)


def test_a_refused_role_names_the_record(tmp_path: Path) -> None:
    bad = {"messages": [{"role": "system", "content": "a"}, *chat("b", "c")]}
    folder = chat_model(tmp_path / "m", template=NO_SYSTEM)
    words = r"messages of record 2 of the train set \(no system\)"
    with pytest.raises(DpfedError, match=words):
        fine_tune(folder, tmp_path / "out", [*CHATS[:2], bad])


# ---- other ways to compute the same


@pytest.mark.parametrize("settings", [{"run.slots": 4}, {"privacy.isolation": "exact"}])
def test_passes_of_other_shapes_give_the_same_weights(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Target masks reach passes of a fixed size and passes of one record."""
    folder = chat_model(tmp_path / "m")
    lost = {"prompt": "a b c d e f", "completion": "g"}
    short = {"model.max_length": 5, "privacy.sigma": 0.01, "run.local_steps": 2}
    runs = [
        fine_tune(
            folder,
            tmp_path / name,
            [*COMPLETIONS, lost, lost],
            test=COMPLETIONS[:2],
            epsilon=None,
            settings={**short, **more},
        )
        for name, more in (("usual", {}), ("other", settings))
    ]
    weights = [load_file(run.out / "model.safetensors") for run in runs]
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-5)
        assert value.isfinite().all()


def test_a_model_in_memory_reads_messages(tmp_path: Path) -> None:
    folder = chat_model(tmp_path / "m")
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = fine_tune(model, tmp_path / "out", tokenizer=tokenizer)
    assert trained.perplexity > 1
    assert len(trained.generate(["a"], max_new_tokens=2)) == 1
