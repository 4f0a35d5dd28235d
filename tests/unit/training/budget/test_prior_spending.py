"""Every start of a run is counted; a cost that cannot be counted is refused or reported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from callback_case import Watcher
from export_case import images, settings, vit_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dpfed.api.memory_model import _spending_record, save_model
from dpfed.cli.main import app
from dpfed.config import Config
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError, StoppedError
from dpfed.privacy.accounting.guarantee import UNCOUNTED, Planned, PriorSpending
from dpfed.privacy.accounting.observers import Rounds, third_party_epsilon
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.plan import Plan, Schedule
from dpfed.report.model_card import write_export
from dpfed.training.budget.prior_spending import SPENDING, prior_spending_of, spending_of
from dpfed.training.budget.recorded_spending import read_recorded_spending
from dpfed.training.budget.release import NO_PRIVACY
from dpfed.training.budget.spending import Spending, budget_of
from dpfed.training.job.plan import plan_of
from dpfed.training.result import RELEASABLE, SIMULATION
from dpfed.training.run import run
from dpfed.training.run_folder.embedded_record import METADATA, embed

DELTA = 1e-5
# The mechanism of the runs below, with batches of 6 of 12 records.
FIRST = Mechanism("poisson", 0.5, 1.0)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a base and the adapter of a first run: 2 rounds, each with one of 2 clients."""
    tmp = tmp_path_factory.mktemp("start")
    write_export(vit_run(tmp, "first"), tmp / "adapter")
    return tmp


def go_on(
    start: Path, out: Path, adapter: str | Path = "adapter", source: Any = None, **changes: Any
) -> dict[str, Any]:
    result: dict[str, Any] = run(
        config_of(start, adapter, **changes), out, source=source or images()
    )
    return result


def config_of(start: Path, adapter: str | Path = "adapter", **changes: Any) -> Config:
    model = {"name": "auto-image", "weights": str(start / "base"), "adapter": str(start / adapter)}
    changes.setdefault("privacy", {})
    changes["privacy"] = {"sigma": 2.0, **changes["privacy"]}
    return settings(model, **changes)


def copied(start: Path, to: Path, content: str | None) -> Path:
    """Copy the adapter without embedded metadata, with `content` as its record, if any."""
    to.mkdir()
    (to / "adapter_config.json").write_bytes(
        (start / "adapter" / "adapter_config.json").read_bytes()
    )
    save_file(
        load_file(start / "adapter" / "adapter_model.safetensors"), to / "adapter_model.safetensors"
    )
    if content is not None:
        (to / SPENDING).write_text(content)
    return to


def test_the_record_is_the_cost_of_a_client_in_every_round(start: Path) -> None:
    stored = json.loads((start / "adapter" / SPENDING).read_text())
    # 2 rounds of 2 steps, although each client took part in one round.
    assert stored["history"] == [["poisson", 0.5, 1.0, 1, 1, 4]]
    assert (stored["delta"], stored["unit"]) == (DELTA, "record")
    assert prior_spending_of(config_of(start)).prior == ((FIRST, 4),)


def test_epsilon_is_that_of_the_joined_history(start: Path, tmp_path: Path) -> None:
    result = go_on(start, tmp_path / "r")
    second = replace(FIRST, noise_multiplier=2.0)
    joined = epsilon([(FIRST, 4), (second, 4)], DELTA)
    assert result["epsilon"]["server_worst"] == pytest.approx(joined, rel=1e-6)
    assert joined > epsilon([(FIRST, 4)], DELTA)
    mixed = third_party_epsilon([Rounds(FIRST, 4), Rounds(second, 2, 2, 0.5)], DELTA)
    assert result["epsilon"]["third_party"] == pytest.approx(mixed, rel=1e-6)
    assert mixed < joined
    assert "with 4 releases besides: spent before on what it started from" in result["guarantee"]
    accounts = read_recorded_spending(tmp_path / "r")
    assert accounts.server_worst == pytest.approx(joined, rel=1e-6)
    assert accounts.server_max == pytest.approx(result["epsilon"]["server_max"], rel=1e-6)
    taken = [
        2 * json.loads(line)["cohort"]
        for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum(taken) == 4
    # Clients that never took part have spent the cost of the first run.
    assert accounts.epsilons.min() >= epsilon([(FIRST, 4)], DELTA) - 1e-9


def test_clients_that_never_took_part_have_spent_the_earlier_cost(
    start: Path, tmp_path: Path
) -> None:
    go_on(start, tmp_path / "r", run={"rounds": 1})
    least, most = sorted(read_recorded_spending(tmp_path / "r").epsilons)
    assert least == pytest.approx(epsilon([(FIRST, 4)], DELTA))
    assert most == pytest.approx(
        epsilon([(FIRST, 4), (replace(FIRST, noise_multiplier=2.0), 2)], DELTA)
    )


@pytest.fixture
def digits() -> Config:
    return settings(
        {"name": "linear", "train": "full"}, data={"name": "digits"}, run={"noise": "os"}
    )


@pytest.mark.parametrize("key", ["adapter", "weights"])
def test_the_earlier_cost_counts_for_every_kind_of_start(
    key: str, start: Path, digits: Config
) -> None:
    past = prior_spending_of(settings({"name": "auto-image", key: str(start / "adapter")}))
    assert past.prior == ((FIRST, 4),)
    # The base of the first run is a folder without a record.
    assert past.uncounted
    plan, schedule = plan_of(digits)
    planned = budget_of(plan, schedule, DELTA, past=past).planned
    assert planned.server_worst == epsilon([(FIRST, 4), (plan.mechanism(0), 4)], DELTA)


def test_a_single_weights_file_has_its_record_in_the_same_folder(
    start: Path, tmp_path: Path
) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = settings({"name": "gn-resnet18", "weights": str(tmp_path / "model.safetensors")})
    assert prior_spending_of(config).uncounted
    (tmp_path / SPENDING).write_text(edited())
    assert prior_spending_of(config) == PriorSpending(
        ((FIRST, 4),), False, prior_spending_of(config).notes
    )
    (tmp_path / SPENDING).rename(tmp_path / "elsewhere")
    embed(tmp_path, edited())
    assert prior_spending_of(config).prior == ((FIRST, 4),)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(DpfedError, match="is damaged"):
        prior_spending_of(config)


def test_the_costs_of_base_and_adapter_are_added(start: Path) -> None:
    model = {
        "name": "auto-image",
        "weights": str(start / "adapter"),
        "adapter": str(start / "adapter"),
    }
    assert prior_spending_of(settings(model)).prior == ((FIRST, 4), (FIRST, 4))


def test_bundled_models_are_public_and_local_folders_are_not(start: Path, tmp_path: Path) -> None:
    """A local folder may contain anything, so its unknown cost is noted."""
    past = prior_spending_of(settings({"name": "auto-image", "weights": str(start / "base")}))
    assert past.uncounted
    assert past.prior == ()
    (note,) = past.notes
    assert (
        note == f"the model {start / 'base'} has no record of what was spent on it ({SPENDING}): "
        f"{UNCOUNTED}"
    )
    assert prior_spending_of(settings({"name": "glyph-vit"})) == PriorSpending()
    assert prior_spending_of(settings({"name": "vit-base", "weights": "random"})) == PriorSpending()
    assert (
        prior_spending_of(settings({"name": "auto-image", "weights": "google/some-model"}))
        == PriorSpending()
    )
    shutil.copytree(start / "base", tmp_path / "open")
    (tmp_path / "open" / SPENDING).write_text(edited(**OPEN))
    assert prior_spending_of(
        settings({"name": "auto-image", "weights": str(tmp_path / "open")})
    ).uncounted


def test_a_model_on_the_hub_has_its_record_in_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is a published export, given by its name."""
    version = tmp_path / "models--somebody--export" / "snapshots" / ("a" * 40)
    version.mkdir(parents=True)
    (tmp_path / "models--somebody--export" / "refs").mkdir()
    (tmp_path / "models--somebody--export" / "refs" / "main").write_text("a" * 40)
    (version / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = settings({"name": "auto-image", "weights": "somebody/export"})
    # Offline, the absence of a record cannot be proven.
    assert prior_spending_of(config).uncounted
    (version / SPENDING).write_text(edited())
    assert prior_spending_of(config).prior == ((FIRST, 4),)
    assert _spending_record(SimpleNamespace(name_or_path="somebody/export")) == edited()
    (version / SPENDING).unlink()
    save_file({"x": torch.zeros(1)}, version / "model.safetensors")
    embed(version, edited())
    assert prior_spending_of(config).prior == ((FIRST, 4),)
    assert _spending_record(SimpleNamespace(name_or_path="somebody/export")) == edited()
    assert _spending_record(SimpleNamespace(name_or_path="somebody/other")) is None


def test_the_record_on_the_hub_is_read_from_the_cached_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    (tmp_path / SPENDING).write_text(edited())

    def download(name: str, file: str, revision: str | None, etag_timeout: float) -> str:
        asked.append((name, file, revision))
        return str(tmp_path / file)

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("dpfed.model.zoo.hub.reach", lambda name, key: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    cached = {"config.json": "snapshots/abc/config.json"}
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, file: cached.get(file)
    )
    assert prior_spending_of(
        settings({"name": "auto-image", "weights": "somebody/export"})
    ).prior == ((FIRST, 4),)
    assert asked == [("somebody/export", SPENDING, "abc")]
    prior_spending_of(settings({"name": "vit-base", "weights": "random"}))
    assert len(asked) == 1


def test_headers_on_the_hub_are_read_without_a_cached_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headers = {"model.safetensors": SimpleNamespace(metadata={METADATA: edited()})}
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("dpfed.model.zoo.hub.reach", lambda name, key: None)
    monkeypatch.setattr("dpfed.training.budget.prior_spending.hub_file", lambda name, file: None)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    monkeypatch.setattr(
        "huggingface_hub.get_safetensors_metadata",
        lambda name, revision: SimpleNamespace(files_metadata=headers),
    )
    assert prior_spending_of(
        settings({"name": "auto-image", "weights": "somebody/export"})
    ).prior == ((FIRST, 4),)


def test_without_an_answer_of_the_hub_the_cost_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(*args: Any, **keys: Any) -> None:
        raise TimeoutError("timed out")

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("dpfed.model.zoo.hub.reach", lambda name, key: None)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: None)
    start = settings({"name": "auto-image", "weights": "somebody/export"})
    for call in ("hf_hub_download", "get_safetensors_metadata"):
        with monkeypatch.context() as one:
            one.setattr(
                "huggingface_hub.hf_hub_download", lambda *args, **keys: absent(*args, **keys)
            )
            one.setattr(
                "huggingface_hub.get_safetensors_metadata",
                lambda *args, **keys: SimpleNamespace(files_metadata={}),
            )
            assert prior_spending_of(start) == PriorSpending()
            one.setattr(f"huggingface_hub.{call}", no_answer)
            past = prior_spending_of(start)
        assert past.uncounted
        assert past.notes[0].endswith(UNCOUNTED)


def absent(*args: Any, **keys: Any) -> None:
    from huggingface_hub.errors import EntryNotFoundError

    raise EntryNotFoundError("there is no such file")


def test_a_kept_head_without_a_record_has_unknown_cost(start: Path, tmp_path: Path) -> None:
    """The head has the classes of the run, so it may have been trained on the same records."""
    model = {"name": "auto-image", "weights": str(start / "base"), "head": "kept"}
    past = prior_spending_of(settings(model))
    assert past.uncounted
    assert past.prior == ()
    assert past.notes[0].startswith(f"the kept head of {start / 'base'} has no record")
    assert past.notes[0].endswith(UNCOUNTED)
    folder = shutil.copytree(start / "base", tmp_path / "whole")
    (folder / SPENDING).write_text(edited())
    counted = prior_spending_of(settings({**model, "weights": str(folder)}))
    assert (counted.prior, counted.uncounted) == (((FIRST, 4),), False)
    assert prior_spending_of(settings({**model, "weights": "google/some-model"})).uncounted


def test_repeated_attempts_are_in_the_exported_record(digits: Config, tmp_path: Path) -> None:
    """A client was charged three times in a plan of two rounds; the record says three."""
    run(digits, tmp_path / "r")
    before = read_recorded_spending(tmp_path / "r")
    plan, _ = plan_of(digits)
    name = json.loads((tmp_path / "r" / "run.json").read_text())["run"]
    with Ledger.open(tmp_path / "r" / "ledger.sqlite", run=name) as ledger:
        taken = sum(row.charge.client == 1 for row in ledger.rows())
        for _ in range(3 - taken):
            ledger.charge([Charge(1, 1, 2, plan.mechanism(1), "os")])
    accounts = read_recorded_spending(tmp_path / "r")
    rate = float(plan.rates[0])
    assert spending_of(RELEASABLE, before.realised)["history"] == [["poisson", rate, 1.0, 1, 1, 4]]
    assert spending_of(RELEASABLE, accounts.realised)["history"] == [
        ["poisson", rate, 1.0, 1, 1, 6]
    ]
    assert accounts.realised.rdp_server_worst >= accounts.server_worst > before.server_worst
    assert accounts.realised.curve([1.0])[0][1] > before.planned.curve([1.0])[0][1]
    assert accounts.third_party == accounts.server_worst
    assert replace(accounts, most_rounds=2).realised is accounts.planned


def test_a_model_in_memory_has_the_record_of_its_folder(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import ViTForImageClassification

    folder = shutil.copytree(start / "base", tmp_path / "export")
    (folder / SPENDING).write_text(edited())
    config = settings({"name": "auto-image"})
    base = save_model(
        ViTForImageClassification.from_pretrained(folder), None, tmp_path / "run", config
    )
    assert prior_spending_of(settings({"name": "auto-image", "weights": str(base)})).prior == (
        (FIRST, 4),
    )
    (base / SPENDING).unlink()
    assert prior_spending_of(settings({"name": "auto-image", "weights": str(base)})).prior == (
        (FIRST, 4),
    )
    # A model without a source has no record, even if the working folder has one.
    monkeypatch.chdir(folder)
    fresh = ViTForImageClassification(
        ViTForImageClassification.from_pretrained(start / "base").config
    )
    new = save_model(fresh, None, tmp_path / "new", config)
    assert not (new / SPENDING).exists()
    assert prior_spending_of(settings({"name": "auto-image", "weights": str(new)})).uncounted
    damaged = ViTForImageClassification.from_pretrained(folder)
    (folder / SPENDING).write_text("{")
    with pytest.raises(DpfedError, match="is damaged"):
        save_model(damaged, None, tmp_path / "bad", config)
    assert not (tmp_path / "bad-base").exists()


def test_privacy_before_and_after_the_run_agree(start: Path, tmp_path: Path) -> None:
    source = images()
    np.savez(
        tmp_path / "data.npz",
        x_train=source.train.inputs["pixel_values"],
        y_train=source.train.labels,
        x_test=source.test.inputs["pixel_values"],
        y_test=source.test.labels,
    )
    config = config_of(
        start, data={"name": "npz", "path": str(tmp_path / "data.npz"), "classes": 3}
    )
    run(config, tmp_path / "r")
    printed = []
    for target in (tmp_path / "r", tmp_path / "r" / "config.toml"):
        result = CliRunner().invoke(app, ["privacy", str(target), "--json"])
        assert result.exit_code == 0, result.output
        printed.append(json.loads(result.stdout.splitlines()[-1]))
    for key in ("server_worst", "third_party", "rdp_server_worst", "guarantee", "delta", "sigma"):
        assert (
            printed[0][key] == pytest.approx(printed[1][key])
            if isinstance(printed[0][key], float)
            else printed[0][key] == printed[1][key]
        )
    assert printed[0]["server_worst"] == pytest.approx(
        epsilon([(FIRST, 4), (replace(FIRST, noise_multiplier=2.0), 4)], DELTA)
    )


def test_a_budget_includes_the_earlier_cost(start: Path, tmp_path: Path) -> None:
    spent = epsilon([(FIRST, 4)], DELTA)
    second = replace(FIRST, noise_multiplier=2.0)
    one = epsilon([(FIRST, 4), (second, 2)], DELTA)
    two = epsilon([(FIRST, 4), (second, 4)], DELTA)
    plenty = {"run": {"rounds": 5}, "privacy": {"budget": (one + two) / 2}}
    with pytest.raises(StoppedError, match="only 0 clients can stay within"):
        go_on(start, tmp_path / "r", **plenty)
    # Each client took part once.
    assert json.loads((tmp_path / "r" / "run.json").read_text())["rounds"] == 2
    assert read_recorded_spending(tmp_path / "r").server_max == pytest.approx(one)
    with pytest.raises(StoppedError, match="before round 1"):
        go_on(start, tmp_path / "none", privacy={"budget": spent * 0.9})


def test_a_target_epsilon_is_refused_before_anything_is_written(
    start: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        DpfedError, match=r"would exceed privacy\.target_epsilon: give privacy\.sigma"
    ):
        go_on(start, tmp_path / "r", privacy={"target_epsilon": 50.0, "sigma": None})
    assert not (tmp_path / "r").exists()


# ---- records that are damaged, missing or edited

GOOD = {
    "format": 1,
    "release": "released",
    "delta": 1e-5,
    "unit": "record",
    "history": [["poisson", 0.5, 1.0, 1, 1, 4]],
    "uncounted": False,
}
OPEN = {"release": NO_PRIVACY, "unit": None, "delta": None, "history": [], "uncounted": True}


def edited(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def row(**changes: Any) -> str:
    names = ("sampling", "rate", "noise", "batches", "releases", "steps")
    return edited(
        history=[[changes.get(n, v) for n, v in zip(names, GOOD["history"][0], strict=True)]]
    )


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        edited(format=2),
        edited(history=[]),
        edited(history=None),
        edited(history=[[]]),
        edited(history=[["poisson"]]),
        edited(release=None),
        edited(release=NO_PRIVACY),
        edited(**{**OPEN, "uncounted": False}),
        edited(uncounted=None),
        edited(uncounted=0),
        edited(unit=None),
        json.dumps({k: v for k, v in GOOD.items() if k != "unit"}),
        json.dumps({k: v for k, v in GOOD.items() if k != "uncounted"}),
        row(sampling="shuffle"),
        row(sampling=["poisson"]),
        row(rate=0),
        row(rate=1.5),
        row(rate="0.5"),
        row(rate=True),
        row(noise=True),
        row(rate=float("nan")),
        row(noise=0),
        row(noise=-1.0),
        row(noise=1e-300),
        row(noise=1e300),
        row(noise=float("inf")),
        row(batches=0),
        row(releases=1.5),
        row(steps=0),
        row(steps=-4),
        row(steps=3.9),
        row(steps="4"),
        row(steps=True),
        row(steps=10**30),
        edited(history=[["poisson", 0.5, 1.0, 1, 1, 4], ["fixed_wor", 0.5, 1.0, 1, 1, 4]]),
    ],
)
def test_an_invalid_record_is_refused(start: Path, tmp_path: Path, content: str) -> None:
    copied(start, tmp_path / "copy", content)
    with pytest.raises(DpfedError, match=r"dpfed\.json is damaged: without it nobody knows"):
        prior_spending_of(config_of(start, tmp_path / "copy"))


def test_an_unreadable_record_is_not_a_missing_one(start: Path, tmp_path: Path) -> None:
    one = copied(start, tmp_path / "folder", None)
    (one / SPENDING).mkdir()
    two = copied(start, tmp_path / "link", None)
    (two / SPENDING).symlink_to(tmp_path / "gone")
    for adapter in (one, two):
        with pytest.raises(DpfedError, match="damaged"):
            prior_spending_of(config_of(start, adapter))


@pytest.mark.parametrize("merge", [False, True])
def test_the_record_in_the_weights_survives_without_its_file(
    start: Path, tmp_path: Path, merge: bool
) -> None:
    out = tmp_path / "export"
    write_export(start / "first", out, merge)
    name = "model.safetensors" if merge else "adapter_model.safetensors"
    before = load_file(out / name)
    (out / SPENDING).unlink()
    assert all(torch.equal(value, before[key]) for key, value in load_file(out / name).items())
    with safe_open(out / name, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    model = (
        {"weights": str(out)} if merge else {"weights": str(start / "base"), "adapter": str(out)}
    )
    result = run(
        settings({"name": "auto-image", **model}, privacy={"sigma": 2.0}),
        tmp_path / "r",
        source=images(),
    )
    joined = epsilon([(FIRST, 4), (replace(FIRST, noise_multiplier=2.0), 4)], DELTA)
    assert result["epsilon"]["server_worst"] == pytest.approx(joined, rel=1e-6)


def test_every_shard_has_the_record(start: Path, tmp_path: Path) -> None:
    from transformers import ViTForImageClassification

    folder = tmp_path / "shards"
    ViTForImageClassification.from_pretrained(start / "base").save_pretrained(
        folder, max_shard_size="1KB"
    )
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    embed(folder, edited())
    model = ViTForImageClassification.from_pretrained(folder)
    assert torch.equal(
        model.classifier.weight,
        ViTForImageClassification.from_pretrained(start / "base").classifier.weight,
    )
    for shard in shards[1:]:
        save_file(load_file(shard), shard, metadata={"format": "pt"})
    assert prior_spending_of(settings({"name": "auto-image", "weights": str(folder)})).prior == (
        (FIRST, 4),
    )


def test_two_records_that_differ_are_refused(start: Path, tmp_path: Path) -> None:
    """The larger of two histories can depend on delta, so none is chosen."""
    adapter = copied(start, tmp_path / "copy", row(steps=1))
    embed(adapter, row(steps=4))
    with pytest.raises(
        DpfedError, match=r"dpfed\.json and the metadata of .* state different spending"
    ) as error:
        prior_spending_of(config_of(start, adapter))
    assert "\n" not in str(error.value)
    (adapter / SPENDING).write_text(json.dumps(json.loads(row(steps=4)), indent=3))
    assert prior_spending_of(config_of(start, adapter)).prior == ((FIRST, 4),)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000, '{"format": 2}', "\x00"])
def test_damaged_metadata_gives_a_one_sentence_error(
    start: Path, tmp_path: Path, content: str
) -> None:
    adapter = copied(start, tmp_path / "copy", None)
    embed(adapter, content)
    with pytest.raises(
        DpfedError, match=r"the metadata of .*adapter_model\.safetensors is damaged"
    ) as error:
        prior_spending_of(config_of(start, adapter))
    assert "\n" not in str(error.value)


def test_a_run_of_an_earlier_version_resumes(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old ledger has no entry about a base without a record."""
    model = {"name": "auto-image", "weights": str(start / "base")}
    keys = {"checkpoint_every": 1, "lr_schedule": "constant"}
    config = settings(model, run=keys)
    with monkeypatch.context() as earlier:
        earlier.setattr(
            "dpfed.training.backends.execution.prior_spending_of", lambda config: PriorSpending()
        )
        run(config, tmp_path / "r", source=images())
    longer = settings(model, run={**keys, "rounds": 3})
    assert UNCOUNTED in run(longer, tmp_path / "r", source=images(), mode="resume")["guarantee"]


def test_a_later_edit_of_the_record_does_not_change_the_ledger(start: Path, tmp_path: Path) -> None:
    """The ledger stores the history that the record had at the start."""
    adapter = copied(start, tmp_path / "copy", row(steps=40))
    go_on(start, tmp_path / "r", adapter)
    before = read_recorded_spending(tmp_path / "r").server_worst
    (adapter / SPENDING).write_text(row(steps=1))
    after = read_recorded_spending(tmp_path / "r")
    assert after.server_worst == before
    assert after.planned.prior == ((FIRST, 40),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no record of what was spent on it"),
        (edited(**OPEN), "was trained without privacy"),
        (edited(uncounted=True), "was trained without privacy"),
    ],
)
def test_a_start_of_unknown_cost_is_named_with_every_epsilon(
    start: Path, tmp_path: Path, content: str | None, words: str
) -> None:
    adapter = copied(start, tmp_path / "copy", content)
    notes: list[str] = []
    config = config_of(start, adapter, run={"noise": "os"})
    result = run(
        config,
        tmp_path / "r",
        source=images(),
        callbacks=[Watcher(lambda job: notes.extend(job.notes))],
    )
    assert any(words in note and note.endswith(UNCOUNTED) for note in notes)
    known = [(FIRST, 4)] if content is not None and json.loads(content)["history"] else []
    counted = epsilon([*known, (replace(FIRST, noise_multiplier=2.0), 4)], DELTA)
    assert result["epsilon"]["server_worst"] == pytest.approx(counted, rel=1e-3)
    write_export(tmp_path / "r", tmp_path / "out")
    for text in (
        result["guarantee"],
        (tmp_path / "out" / "README.md").read_text(),
        CliRunner().invoke(app, ["privacy", str(tmp_path / "r")]).stdout,
    ):
        assert UNCOUNTED in text
    assert read_recorded_spending(tmp_path / "r").planned.uncounted
    assert json.loads((tmp_path / "out" / SPENDING).read_text())["uncounted"]


def test_later_runs_report_training_without_privacy(start: Path, tmp_path: Path) -> None:
    vit_run(start, tmp_path / "open", privacy={"enabled": False})
    write_export(tmp_path / "open", tmp_path / "x")
    go_on(start, tmp_path / "private", tmp_path / "x", run={"noise": "os"})
    write_export(tmp_path / "private", tmp_path / "y")
    past = prior_spending_of(config_of(start, tmp_path / "y", run={"noise": "os"}))
    assert past.uncounted
    assert past.prior == ((replace(FIRST, noise_multiplier=2.0), 4),)


def test_a_wrong_adapter_path_is_refused(start: Path, tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"has no adapter_config\.json"):
        prior_spending_of(config_of(start, tmp_path / "adaptor"))
    assert prior_spending_of(settings({"name": "auto-image"})).prior == ()


# ---- what does not add up


def test_a_start_with_other_sampling_is_refused(start: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DpfedError, match=r'do not add up: set privacy\.sampling = "poisson"'
    ) as error:
        go_on(start, tmp_path / "r", privacy={"sampling": "fixed_wor"})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "r").exists()


def test_accounts_with_mixed_sampling_are_refused(digits: Config) -> None:
    plan, schedule = plan_of(digits)
    mixed = PriorSpending(((Mechanism("fixed_wor", 0.5, 4.0), 4),))
    with pytest.raises(DpfedError, match="mixes Poisson and fixed-size sampling"):
        budget_of(plan, schedule, DELTA, past=mixed).check()


def test_another_protected_unit_is_refused(start: Path, tmp_path: Path) -> None:
    """The epsilon of one record is no bound for a patient with many records."""
    changes = {"data": {"unit_column": "patient"}}
    with pytest.raises(DpfedError, match=r"to protect each record, this run protects each patient"):
        go_on(start, tmp_path / "r", **changes)
    adapter = copied(start, tmp_path / "copy", edited(unit="patient"))
    with pytest.raises(DpfedError, match=r"to protect each patient, this run protects each record"):
        prior_spending_of(config_of(start, adapter))
    assert not (tmp_path / "r").exists()
    assert prior_spending_of(config_of(start, adapter, **changes)).prior == ((FIRST, 4),)
    prior_spending_of(config_of(start, adapter, privacy={"enabled": False}))


def test_a_run_without_privacy_may_start_from_any_model(start: Path, tmp_path: Path) -> None:
    result = go_on(start, tmp_path / "r", privacy={"enabled": False, "sampling": "fixed_wor"})
    assert result["release"] == "no privacy"
    assert result["epsilon"]["server_worst"] is None


def test_fixed_sampling_may_follow_fixed_sampling(start: Path, tmp_path: Path) -> None:
    content = row(sampling="fixed_wor", noise=4.0)
    adapter = copied(start, tmp_path / "copy", content)
    result = go_on(start, tmp_path / "r", adapter, privacy={"sampling": "fixed_wor", "sigma": 4.0})
    kind = Mechanism("fixed_wor", 0.5, 4.0)
    assert result["epsilon"]["server_worst"] == pytest.approx(epsilon([(kind, 8)], DELTA))


# ---- chains


def test_a_run_after_a_simulation_is_a_simulation(start: Path, tmp_path: Path) -> None:
    """Anyone can remove the seeded noise of the first run, so the second run cannot protect it."""
    real = {"run": {"noise": "os"}}
    for key in ("adapter", "weights"):
        first = settings(
            {"name": "auto-image", key: str(start / "adapter")}, privacy={"sigma": 2.0}, **real
        )
        with pytest.raises(
            DpfedError, match="trained with seeded noise, which can be removed again"
        ):
            run(first, tmp_path / "no", source=images())
    assert not (tmp_path / "no").exists()
    assert go_on(start, tmp_path / "r")["release"] == SIMULATION
    write_export(tmp_path / "r", tmp_path / "out")
    assert "**Not for release.**" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(DpfedError, match="trained with seeded noise"):
        prior_spending_of(config_of(start, tmp_path / "out", **real))
    clean = copied(start, tmp_path / "copy", edited())
    assert go_on(start, tmp_path / "s", clean, **real)["release"] == RELEASABLE
    assert not read_recorded_spending(tmp_path / "s").seeded


def test_the_ledger_or_the_result_can_make_a_run_a_simulation(start: Path, tmp_path: Path) -> None:
    """A run counts as a simulation if its ledger or its result says so."""
    go_on(start, tmp_path / "r", copied(start, tmp_path / "copy", edited()), run={"noise": "os"})
    result = json.loads((tmp_path / "r" / "run.json").read_text())
    (tmp_path / "r" / "run.json").write_text(json.dumps({**result, "release": SIMULATION}))
    assert read_recorded_spending(tmp_path / "r").seeded


def test_a_chain_of_two_exports(start: Path, tmp_path: Path) -> None:
    go_on(start, tmp_path / "second")
    write_export(tmp_path / "second", tmp_path / "adapter2")
    third = go_on(start, tmp_path / "third", tmp_path / "adapter2", privacy={"sigma": 3.0})
    kinds = [(replace(FIRST, noise_multiplier=s), 4) for s in (1.0, 2.0, 3.0)]
    assert third["epsilon"]["server_worst"] == pytest.approx(epsilon(kinds, DELTA), rel=1e-6)
    write_export(tmp_path / "third", tmp_path / "adapter3")
    stored = json.loads((tmp_path / "adapter3" / SPENDING).read_text())
    assert [(r[2], r[5]) for r in stored["history"]] == [(1.0, 4), (2.0, 4), (3.0, 4)]


def test_the_exported_cost_is_a_bound_for_every_client() -> None:
    """The kind with the larger epsilon now has the smaller one after another run."""
    much, little = Mechanism("poisson", 0.5, 2.5), Mechanism("poisson", 0.05, 0.7)
    planned = Planned((much, little), 5, 1.0, ((1.0, 2),), DELTA)
    later = (Mechanism("poisson", 0.2, 1.0), 50)
    carried = epsilon([*planned.bound, later], DELTA)
    assert planned.worst_kind == little
    after = {kind: epsilon([(kind, 10), later], DELTA) for kind in planned.kinds}
    assert after[little] < after[much] <= carried
    assert Planned((replace(much, rate=0.1), much), 5, 1.0, ((1.0, 2),), DELTA).bound == [
        (much, 10)
    ]


def unequal(clients: int) -> Source:
    """Return clients of different sizes, so each has its own rate."""
    rng = np.random.default_rng(0)
    sizes = np.arange(12, 12 + clients)
    owners = np.repeat(np.arange(clients), sizes)
    labels = np.arange(len(owners)) % 3
    x = rng.integers(0, 255, (len(owners), 3, 8, 8)).astype(np.uint8)
    test = Table({"pixel_values": x[:6]}, labels[:6])
    return Source(
        Table({"pixel_values": x}, labels, {"owner": owners}), test, ("a", "b", "c"), "image"
    )


def test_figures_and_record_of_nine_kinds_of_clients(start: Path, tmp_path: Path) -> None:
    """The record replaces the nine mechanisms by one that costs at least as much as each."""
    changes = {
        "data": {"partition": "natural", "client_column": "owner"},
        "privacy": {"batch_per_client": True},
        "run": {"participation": 1.0, "rounds": 1},
    }
    result = go_on(start, tmp_path / "r", source=unequal(9), **changes)
    accounts = read_recorded_spending(tmp_path / "r")
    dearest = Mechanism("poisson", 6 / 12, 2.0)
    want = epsilon([(FIRST, 4), (dearest, 2)], DELTA)
    assert len(accounts.planned.kinds) == 9
    assert accounts.server_worst == pytest.approx(want)
    # The smallest client, which has the largest rate, took part.
    assert accounts.server_max == pytest.approx(want)
    assert result["epsilon"]["server_worst"] == pytest.approx(accounts.server_worst)
    assert result["epsilon"]["server_max"] == pytest.approx(accounts.server_max)
    least = epsilon([(FIRST, 4), (replace(dearest, rate=6 / 20), 2)], DELTA)
    assert accounts.epsilons.min() == pytest.approx(least)
    stored = spending_of("released", accounts.realised)
    assert stored["history"][1] == ["poisson", 0.5, 2.0, 1, 1, 2]


def test_the_figure_of_many_kinds_is_an_upper_bound() -> None:
    sizes = np.linspace(100, 140, 12).round()
    plan = Plan("poisson", 1.0, sizes, 10 / sizes, np.full(12, 10.0), np.full(12, 2.0))
    prior = ((FIRST, 4),)
    budget = budget_of(plan, Schedule(12, 3, 40, 5), DELTA, past=PriorSpending(prior))
    job: Any = type("Job", (), {"plan": plan, "schedule": Schedule(12, 3, 40, 5)})()
    job.config = settings({"name": "auto-image"})
    spending = Spending(job, budget, None)
    spending.rounds_taken[[2, 5]] = (3, 7)
    shown = spending.server_max()
    assert shown is not None
    true = max(
        epsilon([*prior, (plan.mechanism(i), 5 * int(spending.rounds_taken[i]))], DELTA)
        for i in (2, 5)
    )
    assert true <= shown <= budget.planned.server_worst


def test_the_delta_of_an_epsilon_is_the_largest_of_all_kinds() -> None:
    """The second kind has the larger epsilon at delta 1e-5, the first the larger delta at 0.5."""
    much, little = Mechanism("poisson", 0.5, 2.5), Mechanism("poisson", 0.05, 0.7)
    planned = Planned((much, little), 5, 1.0, ((1.0, 2),), DELTA, prior=((FIRST, 1),))
    alone = [
        Planned((kind,), 5, 1.0, ((1.0, 2),), DELTA, prior=((FIRST, 1),)) for kind in planned.kinds
    ]
    deltas = [each.curve([0.5])[0][1] for each in alone]
    assert deltas[0] > deltas[1]
    assert planned.curve([0.5]) == [(0.5, max(deltas))]
    assert planned.histories == [each.histories[0] for each in alone]
    assert planned.tuned(3) == max(each.tuned(3) for each in alone)
