"""Runs that learn numbers or several labels: exports, networks and scores."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_case import base, images, own_logits, settings, texts
from federation_case import federated, section_of, server_of, simulated
from peft import PeftModel
from PIL import Image
from pooled_encoder_case import encoder
from sklearn.metrics import f1_score, mean_absolute_error, r2_score, roc_auc_score

from dpfed.config import build
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError
from dpfed.federation import client_config as client_toml
from dpfed.federation.client.client import Client
from dpfed.registry import registry
from dpfed.report.model_card import write_export
from dpfed.training.job.job import Job, prepare, prepare_server
from dpfed.training.job.public_score import predictions
from dpfed.training.run import run

TASKS = ("regress", "multilabel")
CLINICS = {f"clinic-{i}": 30 for i in range(3)}
PUBLIC = {"target_mean": 20.0, "target_scale": 5.0}


def relabelled(source: Source, task: Any) -> Source:
    """Return the records with labels of the task that depend on their classes."""

    def table(part: Table) -> Table:
        flags = np.stack([part.labels > 0, part.labels == 0, part.labels != 1], 1)
        rows = 10.0 * part.labels + 15 if task == "regress" else flags.astype(np.uint8)
        return Table(part.inputs, rows)

    classes = ("price",) if task == "regress" else ("warm", "cold", "wet")
    return replace(
        source, train=table(source.train), test=table(source.test), classes=classes, task=task
    )


def trained(tmp: Path, model: dict[str, Any], source: Source, **more: Any) -> torch.Tensor:
    """Train without privacy, and return the run's own predictions of the test records."""
    plain = {"privacy": {"enabled": False}, "algorithm": {"lr": 0.05}, **more}
    section = {"task": source.task, "liveness": True, **model}
    run(settings(section, **plain), tmp / "run", source=source)
    _, scores = own_logits(tmp / "run", source)
    job = prepare(settings(section, **plain), source)
    predicted: torch.Tensor = job.model.task.predict(scores)
    # The predictions differ by more than the tolerance of the tests.
    assert float(predicted.std(0).min()) > 1e-4
    return predicted


def pipeline_of(folder: Path, weights: str) -> Any:
    """Run the code of the model card, and return its pipeline."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    names: dict[str, Any] = {"base_model": weights}
    exec(code.replace("this folder", str(folder)), names)
    return names["model"]


def answers_of(pipe: Any, given: Any, classes: tuple[str, ...], **more: Any) -> torch.Tensor:
    answers = [
        {answer["label"]: answer["score"] for answer in each}
        for each in pipe(given, top_k=len(classes), **more)
    ]
    return torch.tensor([[each[name] for name in classes] for each in answers]).double()


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", ["bert", "roberta", "encoder"])
def test_a_text_pipeline_repeats_the_predictions(
    kind: str, task: str, merge: bool, tmp_path: Path
) -> None:
    """The numbers of a regression are in the user's unit, and no function changes them."""
    folder = tmp_path / "base"
    weights = encoder(folder) if kind == "encoder" else base(kind, folder)
    source = relabelled(texts(), task)
    model = {"name": "auto-text", "weights": weights, "max_length": 8}
    predicted = trained(tmp_path, model, source).reshape(6, -1)
    write_export(tmp_path / "run", tmp_path / "out", merge)
    pipe = pipeline_of(tmp_path / "out", weights)
    given = [str(text) for text in source.test.inputs["text"]]
    found = answers_of(pipe, given, source.classes, truncation=True)
    torch.testing.assert_close(found, predicted, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_an_image_pipeline_repeats_the_predictions(task: str, tmp_path: Path) -> None:
    source = relabelled(images(), task)
    weights = base("vit", tmp_path / "base")
    predicted = trained(tmp_path, {"name": "auto-image", "weights": weights}, source)
    write_export(tmp_path / "run", tmp_path / "out", True)
    pixels = np.moveaxis(source.test.inputs["pixel_values"], 1, -1)
    given = [Image.fromarray(picture) for picture in pixels]
    found = answers_of(pipeline_of(tmp_path / "out", weights), given, source.classes)
    torch.testing.assert_close(found, predicted.reshape(6, -1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", ["head", "adapter"])
def test_a_second_run_starts_from_the_exported_head(way: str, tmp_path: Path) -> None:
    """The export gives numbers in the user's unit; the second run learns standardised ones."""
    source = relabelled(texts(), "regress")
    weights = base("bert", tmp_path / "base")
    model = {"name": "auto-text", "weights": weights, "max_length": 8, "task": "regress"}
    predicted = trained(tmp_path, model, source)
    write_export(tmp_path / "run", tmp_path / "out", way == "head")
    again = {**model, "weights": str(tmp_path / "out"), "head": "kept"}
    if way == "adapter":
        again = {**model, "adapter": str(tmp_path / "out")}
    job = prepare(settings({**again, "train": "lora"}), source)
    _, found = predictions(job, job.theta)
    assert found == pytest.approx(predicted.numpy(), rel=1e-4)


def test_a_head_without_bias_is_described(tmp_path: Path) -> None:
    source = relabelled(texts(), "regress")
    weights = base("gpt2", tmp_path / "base")
    form = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps({**form, "eos_token_id": 0}))
    model = {"name": "auto-text", "weights": weights, "max_length": 8, "train": "head", **PUBLIC}
    predicted = trained(tmp_path, model, source)
    write_export(tmp_path / "run", tmp_path / "out")
    assert "A predicted number is 5.0 * output + 20.0." in (tmp_path / "out/README.md").read_text()
    pipe = pipeline_of(tmp_path / "out", weights)
    given = [str(text) for text in source.test.inputs["text"]]
    outputs = answers_of(pipe, given, source.classes, truncation=True)[:, 0]
    torch.testing.assert_close(5.0 * outputs + 20.0, predicted, atol=2e-5, rtol=0)


# ---- scores


@pytest.mark.parametrize("metric", ["auto", "r2", "mae", "loss"])
def test_scores_of_numbers_equal_scikit_learn(metric: str, tmp_path: Path) -> None:
    source = relabelled(images(), "regress")
    config = settings(
        {"name": "linear", "train": "full", "task": "regress"}, run={"metric": metric}
    )
    result = run(config, tmp_path / "run", source=source)
    job = prepare(config, source)
    true, found = predictions(job, job.space.flatten(_stored(tmp_path / "run")))
    assert result["metrics"]["mae"] == pytest.approx(mean_absolute_error(true, found), rel=1e-5)
    assert result["metrics"]["r2"] == pytest.approx(r2_score(true, found), rel=1e-4)
    assert result["test_r2"] == pytest.approx(result["metrics"]["r2"], rel=1e-4)
    assert result["test_accuracy"] is None
    named = {"auto": "r2"}.get(metric, metric)
    values = {**result["metrics"], "loss": result["test_loss"]}
    assert result["metric"]["name"] == named
    assert result["metric"]["value"] == pytest.approx(values[named], rel=1e-5)


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    stored: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return stored


@pytest.mark.parametrize("metric", ["macro_f1", "auroc"])
def test_scores_of_several_labels_equal_scikit_learn(metric: str, tmp_path: Path) -> None:
    source = relabelled(images(), "multilabel")
    section = {"name": "linear", "train": "full", "task": "multilabel"}
    config = settings(section, run={"metric": metric})
    result = run(config, tmp_path / "run", source=source)
    job = prepare(config, source)
    true, found = predictions(job, job.space.flatten(_stored(tmp_path / "run")))
    answers = found > 0.5
    metrics = result["metrics"]
    assert result["test_accuracy"] == pytest.approx((answers == true).mean())
    assert metrics["accuracy"] == pytest.approx((answers == true).mean())
    assert metrics["exact_match"] == pytest.approx((answers == true).all(1).mean())
    f1 = f1_score(true, answers, average="macro", zero_division=0)
    assert metrics["macro_f1"] == pytest.approx(f1)
    area = roc_auc_score(true, found, average="macro")
    wanted = {"macro_f1": f1, "auroc": area}[metric]
    assert result["metric"] == {"name": metric, "value": pytest.approx(wanted)}
    assert list(metrics["per_class"]) == ["warm", "cold", "wet"]


@pytest.mark.parametrize(
    ("task", "metric", "sentence"),
    [
        ("regress", "accuracy", "does not fit this task: give r2, mae, loss or given"),
        ("multilabel", "r2", "does not fit this task: give accuracy, loss, macro_f1, auroc or"),
        ("regress", "perplexity", "does not fit this task"),
    ],
)
def test_a_metric_of_another_task_is_refused(
    task: str, metric: str, sentence: str, tmp_path: Path
) -> None:
    source = relabelled(images(), task)
    config = settings({"name": "linear", "train": "full", "task": task}, run={"metric": metric})
    with pytest.raises(DpfedError, match=sentence):
        run(config, tmp_path / "run", source=source)


def test_halves_and_parts_of_other_labels(tmp_path: Path) -> None:
    """Numbers are not classes: halves are every second record, and parts are random."""
    source = relabelled(images(), "regress")
    section = {"name": "linear", "train": "full", "task": "regress"}
    data = {"partition": "dirichlet_equal", "clients": 3}
    job = prepare(settings(section, data=data, run={"eval_on": "validation"}), source)
    assert job.public.test.labels.tolist() == source.test.labels[::2].tolist()
    assert job.plan.sizes.tolist() == [8, 8, 8]


def test_constants_come_from_the_public_records_or_are_stated() -> None:
    source = relabelled(images(), "regress")
    section = {"name": "linear", "train": "full", "task": "regress"}
    spec = prepare(settings(section), source).public.spec
    assert (spec.center, spec.scale) == (source.test.labels.mean(), source.test.labels.std())
    spec = prepare(settings({**section, **PUBLIC}), source).public.spec
    assert (spec.center, spec.scale) == (20.0, 5.0)
    flat = replace(source, test=Table(source.test.inputs, np.full(6, 3.0)))
    with pytest.raises(
        DpfedError, match=r"all numbers of the test set are 3\.0: set model\.target"
    ):
        prepare(settings(section), flat)


def test_a_source_with_classes_is_refused() -> None:
    config = settings({"name": "linear", "train": "full", "task": "regress"})
    with pytest.raises(DpfedError, match=r'data\.name = "digits" has classes: leave out model\.ta'):
        prepare(config)


# ---- networks


def npz(folder: Path, task: str) -> str:
    """Write 90 records, of which the labels of the task depend on the features."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4)).astype(np.float32)
    y = 20 + 5 * x[:, 0] if task == "regress" else (x[:, :3] > 0).astype(np.uint8)
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x[:30], y_test=y[:30])
    return str(folder / "data.npz")


def job_for(folder: Path, task: str, **model: Any) -> Job:
    tables: dict[str, Any] = {
        "data": {"name": "npz", "path": npz(folder, task), "clients": 3, "partition": "iid"},
        "model": {"name": "linear", "task": task, **model},
        "algorithm": {"name": "dp-fedadamw", "lr": 0.05},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 10},
        "run": {"rounds": 3, "local_steps": 2, "participation": 1.0, "device": "cpu"},
    }
    return prepare(build(tables, registry()))


def client(job: Job, i: int, folder: Path, **policy: Any) -> Client:
    model = job.config.model
    raw: dict[str, Any] = {
        "client": {
            "name": f"clinic-{i}",
            "state": str(folder / f"clinic-{i}"),
            "servers": ["hub"],
            "device": "cpu",
            "allow_seeded": True,
            **({"held_out_share": 0.2} if policy else {}),
        },
        "policy": {
            "records": int(job.plan.sizes[i]),
            "max_epsilon": 50.0,
            "max_rate": 0.5,
            **policy,
        },
        "data": {"name": "npz", "path": job.config.data.path},
        "model": {"name": "linear", "task": model.task, **_stated(model)},
    }
    whole: Source = job.config.data.load(model.task)  # type: ignore[attr-defined]
    rows = job.private.shards.of(i)
    inputs = {name: x[rows] for name, x in whole.train.inputs.items()}
    own = replace(whole, train=Table(inputs, whole.train.labels[rows]))
    return Client(client_toml.build(raw, registry()), own, insecure=True)


def _stated(model: Any) -> dict[str, float]:
    if model.target_mean is None:
        return {}
    return {"target_mean": model.target_mean, "target_scale": model.target_scale}


@pytest.mark.parametrize("task", TASKS)
def test_a_network_takes_the_way_of_the_simulation(task: str, tmp_path: Path) -> None:
    job = job_for(tmp_path, task, **(PUBLIC if task == "regress" else {}))
    expected, _ = simulated(job)
    clients = {f"clinic-{i}": client(job, i, tmp_path).answer for i in range(3)}
    found, rounds = federated(job, server_of(job, clients, print, True))
    assert float((found - expected).abs().max()) < 1e-5
    assert float((expected - job.theta).norm()) > 1e-2
    assert (rounds[-1].r2 is None) == (task == "multilabel")


def test_numbers_on_a_network_need_stated_constants(tmp_path: Path) -> None:
    job = job_for(tmp_path, "regress")
    served = replace(job.config, federation=section_of(job, clients=CLINICS))
    sentence = r"on a network needs model\.target_mean and model\.target_scale"
    with pytest.raises(DpfedError, match=sentence):
        prepare_server(served)
    with pytest.raises(DpfedError, match=sentence):
        client(job, 0, tmp_path)


def test_numbers_have_no_counts_of_right_answers(tmp_path: Path) -> None:
    job = job_for(tmp_path, "regress", **PUBLIC)
    section = section_of(job, clients=CLINICS, evaluate_every=1, held_out=CLINICS)
    with pytest.raises(DpfedError, match="noised counts on held-out records are of right answers"):
        prepare_server(replace(job.config, federation=section))
    with pytest.raises(DpfedError, match="noised counts on held-out records are of right answers"):
        client(job, 0, tmp_path, evaluate=True, held_out=5)


@pytest.mark.parametrize("task", TASKS)
def test_a_server_without_test_set(task: str, tmp_path: Path) -> None:
    job = job_for(tmp_path, task, **(PUBLIC if task == "regress" else {}))
    outputs = {"classes": 3} if task == "multilabel" else {}
    section = section_of(
        job, clients=CLINICS, test_set=False, kind="features", shape=(4,), **outputs
    )
    served = prepare_server(replace(job.config, federation=section))
    assert served.public.spec.task == task
    assert served.space.size == job.space.size


def test_peft_alone_loads_the_adapter(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    source = relabelled(texts(), "regress")
    weights = base("bert", tmp_path / "base")
    predicted = trained(
        tmp_path, {"name": "auto-text", "weights": weights, "max_length": 8}, source
    )
    write_export(tmp_path / "run", tmp_path / "out")
    plain = AutoModelForSequenceClassification.from_pretrained(
        weights, num_labels=1, ignore_mismatched_sizes=True
    )
    joined = PeftModel.from_pretrained(plain, tmp_path / "out").eval()
    coder = AutoTokenizer.from_pretrained(tmp_path / "out")
    given = [str(text) for text in source.test.inputs["text"]]
    with torch.no_grad():
        found = joined(**coder(given, padding=True, return_tensors="pt")).logits[:, 0]
    torch.testing.assert_close(found.double(), predicted, atol=2e-5, rtol=0)
