"""Frozen features: equal results, reuse by other runs, memory limits and refusals."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from export_case import SIZES, TEXT, base, images, settings, texts
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from dpfed.config import Config
from dpfed.data.tables import Source
from dpfed.errors import DpfedError
from dpfed.model.per_sample.gradients import PerSample
from dpfed.report.model_card import write_export
from dpfed.training.backends.batched_runs import BatchedRun, run_batched
from dpfed.training.backends.execution import InProcess
from dpfed.training.backends.torchrun import fingerprint
from dpfed.training.evaluation import evaluate
from dpfed.training.export import read_run
from dpfed.training.job import frozen_features
from dpfed.training.job.frozen_features import NOTE
from dpfed.training.job.job import prepare
from dpfed.training.job.job_cache import Identity, JobCache
from dpfed.training.run import run

torch.set_num_threads(1)
NONE = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def weights(kind: str, folder: Path) -> dict[str, Any]:
    """Return a section of a small model; text models have no dropout before the head."""
    found = base(kind, folder)
    torch.manual_seed(0)
    if kind == "bert":
        BertForSequenceClassification(
            BertConfig(num_labels=5, **TEXT, **SIZES, **NONE)
        ).save_pretrained(folder)
    if kind == "roberta":
        config = RobertaConfig(num_labels=5, classifier_dropout=0.4, **TEXT, **SIZES, **NONE)
        RobertaForSequenceClassification(config).save_pretrained(folder)
    if kind == "vit":
        return {"name": "auto-image", "weights": found, "train": "head"}
    return {"name": "auto-text", "weights": found, "max_length": 5, "train": "head"}


def config_of(kind: str, folder: Path, asked: Any = True, **changes: dict[str, Any]) -> Config:
    changes["run"] = {"features": asked, **changes.get("run", {})}
    return settings({**weights(kind, folder), **changes.pop("model", {})}, **changes)


def source_of(kind: str) -> Source:
    return images() if kind == "vit" else texts()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of records of every frozen pass."""
    made: list[int] = []
    original = frozen_features._records

    def records(frozen: PerSample, theta: Tensor, table: Any, *more: Any) -> Any:
        made.append(len(table))
        return original(frozen, theta, table, *more)

    monkeypatch.setattr(frozen_features, "_records", records)
    return made


@pytest.mark.parametrize("kind", ["vit", "bert", "roberta"])
def test_results_are_equal_with_and_without_features(kind: str, tmp_path: Path) -> None:
    source = source_of(kind)
    once = run(config_of(kind, tmp_path / "base"), tmp_path / "once", source=source)
    whole = run(config_of(kind, tmp_path / "base", False), tmp_path / "whole", source=source)
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "whole"))
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-6)
    assert any(x.abs().max() > 0.01 for x in mine.values())
    assert once["test_accuracy"] == whole["test_accuracy"]
    assert once["test_loss"] == pytest.approx(whole["test_loss"], abs=1e-6)
    same = ("epsilon", "input", "parameters", "blocks", "classes", "test_records", "start_accuracy")
    assert {key: once[key] for key in same} == {key: whole[key] for key in same}
    assert [
        NOTE in prepare(config_of(kind, tmp_path / "base", a), source).notes for a in (True, False)
    ] == [
        True,
        False,
    ]


@pytest.mark.parametrize("kind", ["vit", "bert", "roberta"])
def test_the_export_is_a_whole_model(kind: str, tmp_path: Path) -> None:
    """Plain transformers reproduces the logits of the run."""
    source = source_of(kind)
    config = config_of(kind, tmp_path / "base")
    result = run(config, tmp_path / "run", source=source)
    assert write_export(tmp_path / "run", tmp_path / "out") == "model"
    job = prepare(config, source)
    own = job.model.scores(
        job.space.flatten(load_file(tmp_path / "run" / "model.safetensors")), job.public.test.inputs
    )
    raw = prepare(config_of(kind, tmp_path / "base", False), source).public.test
    auto = AutoModelForImageClassification if kind == "vit" else AutoModelForSequenceClassification
    plain = auto.from_pretrained(tmp_path / "out").eval()
    if kind == "vit":
        given = read_run(tmp_path / "run").parts.built.prepare(dict(raw.inputs))
    else:
        given = {name: raw.inputs[name].long() for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        logits = plain(**given).logits
    torch.testing.assert_close(logits, own, atol=1e-5, rtol=1e-5)
    assert (logits.argmax(1) == raw.labels).float().mean().item() == pytest.approx(
        result["test_accuracy"]
    )


def test_bf16_features_are_bf16_and_give_the_same_numbers(tmp_path: Path) -> None:
    jobs = [
        prepare(config_of("vit", tmp_path, a, run={"precision": "bf16"}), images())
        for a in (True, False)
    ]
    assert jobs[0].private.records.inputs["features"].dtype == torch.bfloat16
    theta = torch.linspace(-1, 1, jobs[0].space.size)
    mine, theirs = (job.model.scores(theta, job.public.test.inputs) for job in jobs)
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


def test_every_record_goes_through_the_frozen_part_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = counted(monkeypatch)
    job = prepare(config_of("vit", tmp_path), images())
    assert made == [24, 6]
    assert job.private.records.inputs["features"].shape == (24, 8)
    assert job.private.records.labels.tolist() == images().train.labels.tolist()
    calls: list[int] = []
    job.adapted.model.get_submodule("vit").register_forward_hook(lambda *_: calls.append(1))
    evaluate(job, job.theta)
    job.model.grads(
        job.theta[None],
        torch.zeros(3, dtype=torch.int64),
        *job.private.records.take(torch.arange(3)),
    )
    assert not calls


def test_features_computed_in_pieces_are_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare(config_of("vit", tmp_path), images())
    original = frozen_features.split

    def narrow(*given: Any) -> Any:
        parts = original(*given)
        # Pieces of 16 records.
        parts.frozen.rows = 1
        return parts

    monkeypatch.setattr(frozen_features, "split", narrow)
    again = prepare(config_of("vit", tmp_path), images())
    torch.testing.assert_close(
        again.private.records.inputs["features"], job.private.records.inputs["features"]
    )


# ------------------------------------------------------------------ when features are used


def test_auto_uses_features_where_they_save_work(tmp_path: Path) -> None:
    """The run draws 24 records in all, as many as the data set has."""
    assert prepare(config_of("vit", tmp_path, "auto"), images()).private.raw_inputs is not None
    assert (
        prepare(config_of("vit", tmp_path, "auto", run={"rounds": 1}), images()).private.raw_inputs
        is None
    )
    assert (
        prepare(config_of("vit", tmp_path, True, run={"rounds": 1}), images()).private.raw_inputs
        is not None
    )
    assert (
        prepare(
            config_of("vit", tmp_path, "auto", model={"train": "lora"}), images()
        ).private.raw_inputs
        is None
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"train": "lora"}}, 'model.train = "lora" trains more than the head'),
        ({"data": {"augment": "flip"}}, 'data.augment = "flip" changes a record'),
    ],
    ids=["lora", "augment"],
)
def test_true_is_refused_where_features_are_impossible(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(
        DpfedError,
        match=f'^run.features = true cannot be done, as {reason}.*set run.features = "auto"$',
    ):
        prepare(config_of("vit", tmp_path, True, **changes), images())
    assert (
        prepare(config_of("vit", tmp_path, "auto", **changes), images()).private.raw_inputs is None
    )


def test_dropout_before_the_head_excludes_features(tmp_path: Path) -> None:
    section = {
        "name": "auto-text",
        "weights": base("bert", tmp_path),
        "max_length": 5,
        "train": "head",
    }
    job = prepare(settings(section), texts())
    assert job.private.raw_inputs is None
    assert any("computed at every step, as the model has dropout" in note for note in job.notes)
    with pytest.raises(DpfedError, match="depth before classifier"):
        prepare(settings(section, run={"features": True}), texts())


def test_features_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 30 records with features of one MiB each."""
    original = frozen_features.split

    def heavy(*given: Any) -> Any:
        parts = original(*given)
        object.__setattr__(parts, "size", 2**20)
        return parts

    monkeypatch.setattr(frozen_features, "split", heavy)
    assert (
        prepare(
            config_of("vit", tmp_path, True, run={"memory_limit": 30}), images()
        ).private.raw_inputs
        is not None
    )
    assert (
        prepare(
            config_of("vit", tmp_path, "auto", run={"memory_limit": 29}), images()
        ).private.raw_inputs
        is None
    )
    with pytest.raises(
        DpfedError, match=r"the features take 30 MiB and run\.memory_limit gives them 29"
    ):
        prepare(config_of("vit", tmp_path, True, run={"memory_limit": 29}), images())


def test_without_memory_for_features_the_whole_model_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(frozen_features, "_records", full)
    assert prepare(config_of("vit", tmp_path, "auto"), images()).private.raw_inputs is None
    with pytest.raises(DpfedError, match="no room for the features on cpu"):
        prepare(config_of("vit", tmp_path, True), images())


# ------------------------------------------------------------------ several runs, several processes


def test_jobs_share_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, shared, source = counted(monkeypatch), JobCache(), images()

    def job(**keys: Any) -> Any:
        return prepare(config_of("vit", tmp_path, run=keys), source, shared)

    first, other = job(), job(seed=3)
    assert made == [24, 6]
    assert first.model is other.model
    assert first.private.records is other.private.records
    assert first.public.test is other.public.test
    assert job(precision="bf16").private.records is not first.private.records
    assert made == [24, 6, 24, 6]
    job(precision="bf16", eval_on="test")
    # Another half of the test set, with the same training records.
    assert made == [24, 6, 24, 6, 3]


def test_shared_features_keep_their_data_alive(tmp_path: Path) -> None:
    """New data could get the `id` of deleted data, and then wrong features."""
    shared, config = JobCache(), config_of("bert", tmp_path)
    raw = texts()
    job = prepare(config, raw, shared)
    assert NOTE in job.notes
    source: Any = shared.get("source", (Identity(raw), config.model), lambda: None)
    named = weakref.ref(source)
    del job, raw, source
    shared.get("source", (Identity(texts()), config.model), lambda: None)
    gc.collect()
    assert named() is not None


def test_a_pack_on_features_equals_separate_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, source = counted(monkeypatch), images()
    configs = [
        config_of("vit", tmp_path / "base", run={"seed": seed, "slots": 16}) for seed in (0, 4)
    ]

    def task(number: int) -> Any:
        def work(place: BatchedRun | None) -> Any:
            out = tmp_path / f"packed-{number}"
            execution = InProcess(batch=place)
            return run(configs[number], out, source=source, execution=execution)

        return work

    run_batched([task(0), task(1)])
    assert made == [24, 6]
    for number, config in enumerate(configs):
        run(config, tmp_path / f"alone-{number}", source=source)
        mine, alone = (
            load_file(tmp_path / f"{way}-{number}" / "model.safetensors")
            for way in ("packed", "alone")
        )
        for name in alone:
            torch.testing.assert_close(mine[name], alone[name], rtol=0, atol=1e-6)


def test_processes_compare_the_records_and_not_their_features(tmp_path: Path) -> None:
    """Features differ in their last digits between processors."""
    job = prepare(config_of("vit", tmp_path), images())
    before = fingerprint(job)
    job.private.records.inputs["features"].mul_(1 + 1e-6)
    assert fingerprint(job) == before
    assert job.private.raw_inputs is not None
    changed = images()
    changed.train.inputs["pixel_values"][0, 0, 0, 0] += 1
    assert fingerprint(prepare(config_of("vit", tmp_path), changed)) != before
