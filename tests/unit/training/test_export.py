"""Exports: adapters that plain peft loads, whole models, the card and the spending record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_case import base, images, own_logits, settings, texts, vit_run
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from dpfed.cli.main import app
from dpfed.config import load
from dpfed.errors import DpfedError, StoppedError
from dpfed.model.build import assemble
from dpfed.model.zoo.glyph_vit import WEIGHTS as GLYPHS
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.published import show_loss
from dpfed.registry import registry
from dpfed.report.model_card import write_export
from dpfed.training.export import base_of, export, read_run
from dpfed.training.job.job import prepare
from dpfed.training.run import run


def logits_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out = model.eval()(**inputs)
    found: Tensor = getattr(out, "logits", out)
    return found


@pytest.mark.parametrize("freeze_a", [False, True])
def test_a_vision_adapter_loads_with_plain_peft(tmp_path: Path, freeze_a: bool) -> None:
    """A frozen A is in no file of the run, so the export draws it from the seed."""
    folder = vit_run(tmp_path, model={"lora": {"r": 2, "freeze_a": freeze_a}}, run={"seed": 7})
    assert any("lora_A" in n for n in load_file(folder / "model.safetensors")) is not freeze_a
    assert write_export(folder, tmp_path / "out") == "adapter"
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "dpfed.json",
        "model_config.json",
        "preprocessor_config.json",
        "statement.json",
    }
    plain = AutoModelForImageClassification.from_pretrained(
        tmp_path / "base", num_labels=3, ignore_mismatched_sizes=True
    )
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "out"))
    inputs, scores = own_logits(folder, images())
    pixels = read_run(folder).parts.built.prepare(dict(inputs))
    torch.testing.assert_close(logits_of(loaded, pixels), scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_language_adapter_loads_with_plain_peft(tmp_path: Path, kind: str) -> None:
    """The plain model gets plain token ids and a plain mask."""
    folder = tmp_path / "run"
    model = {"name": "auto-text", "weights": base(kind, tmp_path / "base"), "max_length": 5}
    run(settings(model), folder, source=texts())
    write_export(folder, tmp_path / "out")
    plain = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", num_labels=2, ignore_mismatched_sizes=True
    )
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "out"))
    inputs, scores = own_logits(folder, texts())
    given = {k: inputs[k].long() for k in ("input_ids", "attention_mask")}
    torch.testing.assert_close(logits_of(loaded, given), scores, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "run"
    keys = [
        "run.rounds=4",
        "run.local_steps=1",
        "privacy.sigma=1.0",
        "run.participation=0.2",
        "run.seed=987654321",
    ]
    run(load("digits", keys, registry()), folder)
    return folder


def test_the_demo_run_as_adapter_and_merged(demonstration: Path, tmp_path: Path) -> None:
    assert write_export(demonstration, tmp_path / "adapter") == "adapter"
    assert write_export(demonstration, tmp_path / "merged", merge=True) == "model"
    plain = AutoModelForImageClassification.from_pretrained(
        GLYPHS, num_labels=10, ignore_mismatched_sizes=True
    )
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    inputs, scores = own_logits(demonstration)
    pixels = read_run(demonstration).parts.built.prepare(dict(inputs))
    torch.testing.assert_close(logits_of(loaded, pixels), scores, atol=1e-5, rtol=1e-5)
    whole = AutoModelForImageClassification.from_pretrained(tmp_path / "merged")
    assert whole.config.num_labels == 10
    assert whole.config.id2label[3] == "3"
    torch.testing.assert_close(logits_of(whole, pixels), scores, atol=1e-4, rtol=1e-4)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()


def test_the_adapters_of_a_cnn_are_exported(tmp_path: Path) -> None:
    """The export draws the random base of a convolutional LoRA model from its seed."""
    model = {"name": "gn-resnet18", "train": "lora", "width": 4, "groups": 2, "weights": "random"}
    folder = tmp_path / "run"
    run(settings(model, run={"seed": 3}), folder, source=images())
    inputs, scores = own_logits(folder, images())
    trained = read_run(folder)
    pixels = trained.parts.built.prepare(dict(inputs))
    torch.testing.assert_close(
        logits_of(trained.parts.adapted.model, pixels), scores, atol=1e-5, rtol=1e-5
    )
    assert write_export(folder, tmp_path / "adapter") == "adapter"
    assert "only `--merge` exports" in (tmp_path / "adapter" / "README.md").read_text()
    assert write_export(folder, tmp_path / "whole", merge=True) == "model"
    whole = load(folder / "config.toml", ["model.train=full", "run.seed=99"], registry()).model
    fresh = assemble(
        whole, trained.parts.built.spec or prepare(trained.config, images()).public.spec
    ).built.model
    fresh.load_state_dict(load_file(tmp_path / "whole" / "model.safetensors"))
    torch.testing.assert_close(logits_of(fresh, pixels), scores, atol=1e-4, rtol=1e-4)
    assert "`model.safetensors`" in (tmp_path / "whole" / "README.md").read_text()


@pytest.mark.parametrize("train", ["head", "full"])
def test_without_an_adapter_the_whole_model_is_written(tmp_path: Path, train: str) -> None:
    folder = vit_run(tmp_path, model={"train": train})
    assert write_export(folder, tmp_path / "out") == "model"
    whole = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert whole.config.id2label == {0: "red", 1: "green", 2: "blue"}
    inputs, scores = own_logits(folder, images())
    pixels = read_run(folder).parts.built.prepare(dict(inputs))
    torch.testing.assert_close(logits_of(whole, pixels), scores, atol=1e-5, rtol=1e-5)
    with pytest.raises(DpfedError, match=f"--merge.*train = '{train}'"):
        write_export(folder, tmp_path / "other", merge=True)
    assert not (tmp_path / "other").exists()


def test_training_continues_from_an_exported_adapter(demonstration: Path, tmp_path: Path) -> None:
    write_export(demonstration, tmp_path / "adapter")
    keys = [
        "privacy.sigma=1.0",
        f"model.adapter={tmp_path / 'adapter'}",
        "run.rounds=1",
        "run.local_steps=1",
    ]
    job = prepare(load("digits", keys, registry()))
    stored = load_file(demonstration / "model.safetensors")
    begun = job.space.unflatten(job.theta)
    assert set(begun) == set(stored)
    assert all(torch.equal(begun[name], stored[name]) for name in stored)


# ---- runs and target folders that are refused


def test_a_stopped_run_can_be_exported(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        vit_run(
            tmp_path, run={"rounds": 6, "eval_every": 4, "min_clients": 2}, privacy={"budget": 8.0}
        )
    result = json.loads((tmp_path / "run" / "run.json").read_text())
    assert 0 < result["rounds"] < 6
    write_export(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{result['rounds']} of 6 rounds" in card
    assert result["test_accuracy"] is None
    assert f"accuracy {result['metrics']['accuracy']:.4f}" in card


def test_a_run_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match="not the folder of a run"):
        write_export(tmp_path, tmp_path / "out")
    folder = vit_run(tmp_path)
    whole = json.loads((folder / "run.json").read_text())
    begun = {"run": whole["run"], "state": "running", "release": whole["release"]}
    for text in (
        json.dumps(begun),
        "[]",
        "{",
        json.dumps({k: v for k, v in whole.items() if k != "release"}),
    ):
        (folder / "run.json").write_text(text)
        with pytest.raises(DpfedError, match="has no result yet"):
            write_export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_weights_are_never_exported(tmp_path: Path) -> None:
    folder = vit_run(tmp_path)
    path = folder / "model.safetensors"
    good, tensors = path.read_bytes(), load_file(path)
    first = next(iter(tensors))
    for blob in (good[: len(good) // 2], b"", b"x" * 100):
        path.write_bytes(blob)
        with pytest.raises(DpfedError, match="missing or damaged"):
            read_run(folder)
    for wrong in (
        # Without a tensor the rest would stay random.
        {n: t for n, t in tensors.items() if n != first},
        {**tensors, first: torch.zeros(1)},
        {**tensors, "stranger": torch.zeros(1)},
    ):
        save_file(wrong, path)
        with pytest.raises(
            DpfedError, match=r"does not fit the model of its own configuration: see"
        ):
            read_run(folder)
    path.unlink()
    with pytest.raises(DpfedError, match="missing or damaged"):
        read_run(folder)


def test_a_target_folder_with_files_is_refused(tmp_path: Path) -> None:
    folder = vit_run(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for target in ("mine", "file", "run"):
        with pytest.raises(DpfedError, match="is not empty: choose a new folder"):
            write_export(folder, tmp_path / target)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    with pytest.raises(DpfedError, match="cannot be written"):
        write_export(folder, tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    write_export(folder, tmp_path / "empty")


def test_the_spending_record_is_written_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An incomplete export already has the spending record."""
    trained = read_run(vit_run(tmp_path))

    def fail(*args: object, **keys: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trained.parts.adapted.peft, "save_pretrained", fail)
    with pytest.raises(DpfedError, match="No space left"):
        export(trained, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["dpfed.json"]


# ---- the card


def exported_text(folder: Path, out: Path) -> str:
    """Return all text that an export publishes."""
    write_export(folder, out)
    return "\n".join(p.read_text() for p in sorted(out.iterdir()) if p.suffix in (".md", ".json"))


def test_the_card_explains_its_epsilon(demonstration: Path, tmp_path: Path) -> None:
    write_export(demonstration, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    result = json.loads((demonstration / "run.json").read_text())
    figures = result["epsilon"]
    assert figures["third_party"] < figures["server_worst"]
    assert f"every message, and who took part | {show_loss(figures['server_worst'])} |" in card
    assert f"the global models only | {show_loss(figures['third_party'])} |" in card
    for words in (
        "one record of one client; adjacency: add/remove one record",
        "delta = 1e-05",
        "**Accountant**: PLD",
        "Poisson sampling, each unit by an independent draw, at rate",
        "Gaussian noise of multiplier 1",
        "clip norm 1 (flat)",
        "nobody outside knows who took part",
        "digits, 10 clients",
        "excludes any choice of settings",
        f"accuracy {result['test_accuracy']:.4f}",
        f"macro F1 {result['metrics']['macro_f1']:.4f}",
        "**Not for release.**",
        "glyph-vit as it comes with dpfed",
    ):
        assert words in card
    # The base is not on a hub.
    assert "base_model:" not in card


def test_an_export_does_not_reveal_participants(demonstration: Path, tmp_path: Path) -> None:
    """A seed, a cohort or a client's epsilon would void the third party's figure."""
    text = exported_text(demonstration, tmp_path / "out")
    result = json.loads((demonstration / "run.json").read_text())
    most = result["epsilon"]["server_max"]
    for secret in (
        "987654321",
        "cohort",
        "server_max",
        "epsilon_server_max",
        show_loss(most),
        f"{most:.4g}",
        result["run"],
    ):
        assert secret not in text
    # The run stores these values, so the search above can fail.
    assert most != result["epsilon"]["server_worst"]
    for path in (tmp_path / "out").iterdir():
        assert b"987654321" not in path.read_bytes()


def test_real_noise_may_be_released(tmp_path: Path) -> None:
    folder = vit_run(tmp_path, run={"noise": "os", "seed": 987654321})
    text = exported_text(folder, tmp_path / "out")
    assert "Not for release" not in text
    assert "seed" not in text
    assert "simulation" not in text
    # The card names the one place that has the path of the base; a reader needs the path.
    named = json.loads((tmp_path / "out" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    assert named == str(tmp_path / "base")
    assert text.count(str(tmp_path)) == 1
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "`base_model_name_or_path` in `adapter_config.json` is the path of that folder on the "
        "machine that trained" in card
    )
    assert "change it before you publish this folder" in card
    assert (
        "clients are simulated by partition = iid: the guarantee speaks of each client's records "
        "as dealt" in text
    )
    write_export(folder, tmp_path / "whole", merge=True)
    assert all(
        str(tmp_path).encode() not in path.read_bytes() for path in (tmp_path / "whole").iterdir()
    )


def test_the_base_is_named_as_the_user_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name without a path could mean a repository on the hub."""
    base("vit", tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    run(settings({"name": "auto-image", "weights": "base"}), tmp_path / "run", source=images())
    write_export(tmp_path / "run", tmp_path / "out")
    assert base_named(tmp_path / "out") == str(tmp_path / "base")
    plain = AutoModelForImageClassification.from_pretrained(
        base_named(tmp_path / "out"), num_labels=3, ignore_mismatched_sizes=True
    )
    PeftModel.from_pretrained(plain, str(tmp_path / "out"))


def base_named(folder: Path) -> str | None:
    found: str | None = json.loads((folder / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    return found


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ({"name": "auto-image", "weights": "google/some-model"}, "google/some-model"),
        ({"name": "auto-image", "weights": "gpt2"}, "gpt2"),
        ({"name": "vit-base", "weights": "random"}, None),
        ({"name": "gn-resnet18", "train": "lora"}, None),
        ({"name": "glyph-vit"}, str(GLYPHS)),
    ],
)
def test_the_name_of_a_base(model: dict[str, Any], wanted: str | None) -> None:
    assert base_of(settings(model)) == wanted


def test_random_bases_have_no_name(tmp_path: Path) -> None:
    model = {"name": "gn-resnet18", "train": "lora", "width": 4, "groups": 2, "weights": "random"}
    run(settings(model), tmp_path / "run", source=images())
    write_export(tmp_path / "run", tmp_path / "out")
    assert base_named(tmp_path / "out") is None
    assert "machine that trained" not in (tmp_path / "out" / "README.md").read_text()


def test_the_ledger_overrides_an_edited_result(tmp_path: Path) -> None:
    folder = vit_run(tmp_path)
    result = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**result, "release": "the model may be released"}))
    write_export(folder, tmp_path / "out")
    assert "**Not for release.**" in (tmp_path / "out" / "README.md").read_text()


def test_repeated_attempts_raise_epsilon_and_void_the_third_party_figure(tmp_path: Path) -> None:
    folder = vit_run(tmp_path, run={"noise": "os"})
    name = json.loads((folder / "run.json").read_text())["run"]
    with Ledger.open(folder / "ledger.sqlite", run=name) as ledger:
        first = next(iter(ledger.rows())).charge
        for _ in range(4):
            ledger.charge([Charge(first.client, 1, 2, first.mechanism, "os")])
        rounds = sum(row.charge.client == first.client for row in ledger.rows())
    accounts = read_run(folder).accounts
    assert accounts is not None
    write_export(folder, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count(f"| {show_loss(accounts.server_worst)} |") == 2
    assert accounts.server_worst > accounts.planned.server_worst
    assert "attempted more than once" in card
    assert "holds while nobody outside" not in card
    history = json.loads((tmp_path / "out" / "dpfed.json").read_text())["history"]
    assert [row[-1] for row in history] == [2 * rounds]


def test_a_run_without_privacy_says_so(tmp_path: Path) -> None:
    folder = vit_run(tmp_path, privacy={"enabled": False})
    text = exported_text(folder, tmp_path / "out")
    assert "**No privacy.**" in text
    assert "epsilon" not in text
    assert json.loads((tmp_path / "out" / "dpfed.json").read_text())["history"] == []


def test_two_classes_have_an_f1_and_many_have_no_table(tmp_path: Path) -> None:
    model = {"name": "auto-text", "weights": base("bert", tmp_path / "base"), "max_length": 5}
    run(settings(model), tmp_path / "run", source=texts())
    write_export(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    metrics = json.loads((tmp_path / "run" / "run.json").read_text())["metrics"]
    assert f"- F1 {metrics['per_class']['blame']['f1']:.4f}" in card
    assert "| blame |" in card
    many = Path(tmp_path / "run" / "run.json")
    stored = json.loads(many.read_text())
    stored["metrics"]["per_class"] = {str(i): metrics["per_class"]["blame"] for i in range(51)}
    many.write_text(json.dumps(stored))
    write_export(tmp_path / "run", tmp_path / "again")
    assert "| precision |" not in (tmp_path / "again" / "README.md").read_text()


def test_the_export_command(demonstration: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(
        app, ["export", str(demonstration), str(tmp_path / "out"), "--merge", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "out": str(tmp_path / "out"),
        "kind": "model",
    }
    assert np.isfinite(load_file(tmp_path / "out" / "model.safetensors")["classifier.weight"]).all()


def test_adapters_can_start_from_an_exported_head(tmp_path: Path) -> None:
    """A run with adapters starts from the export of a run of the head."""
    first = vit_run(tmp_path, "first", {"train": "head"}, algorithm={"lr": 0.5})
    assert write_export(first, tmp_path / "whole") == "model"
    second = vit_run(tmp_path, "second", {"weights": str(tmp_path / "whole"), "head": "kept"})
    alone = vit_run(tmp_path, "alone")
    one, three = (json.loads((folder / "run.json").read_text()) for folder in (first, alone))
    two = json.loads((second / "run.json").read_text())
    begun, new = (
        json.loads((f / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        for f in (second, alone)
    )
    assert begun == pytest.approx(one["test_loss"], rel=1e-5)
    assert abs(begun - new) > 1e-3
    assert two["epsilon"]["server_worst"] > three["epsilon"]["server_worst"] + 0.1


def test_the_card_describes_image_sharpening(tmp_path: Path) -> None:
    folder = vit_run(tmp_path, model={"resize": "bicubic", "sharpen": 1.5})
    write_export(folder, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "resized bicubically to the size of the model, then sharpened" in card
    assert "1.5 times" in card
