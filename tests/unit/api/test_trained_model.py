"""Methods of a finished run: predict, show its history, report, export, store and load."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas
import pytest
import torch
from export_case import base
from torch import nn

import dpfed
from dpfed.errors import DpfedError

X = np.random.default_rng(0).normal(size=(120, 1, 4, 4)).astype(np.float32)
Y = (X.mean((1, 2, 3)) > 0).astype(int)
TEST = (X[:40].copy(), Y[:40])
SHORT = {"run.local_steps": 2, "privacy.sigma": 1.0, "privacy.batch": 8.0}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))


def train(out: Path, model: Any = None, data: Any = (X, Y), **keys: Any) -> dpfed.TrainedModel:
    keys.setdefault("clients", 3)
    settings = {**SHORT, **keys.pop("settings", {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dpfed.fine_tune(
            net() if model is None else model,
            data,
            TEST,
            epsilon=None,
            rounds=keys.pop("rounds", 3),
            lr=0.01,
            settings=settings,
            out=out,
            progress=False,
            **keys,
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dpfed.TrainedModel:
    return train(tmp_path_factory.mktemp("trained") / "run")


def test_predictions_are_those_of_the_evaluation(run: dpfed.TrainedModel) -> None:
    found = run.predict(TEST)
    assert found.dtype == np.int64
    assert float((found == TEST[1]).mean()) == pytest.approx(run.accuracy)
    chances = run.predict_proba(TEST[0])
    assert chances.shape == (40, 2)
    assert chances.sum(1) == pytest.approx(1.0)
    assert (chances.argmax(1) == found).all()


def test_the_model_gives_the_same_scores(run: dpfed.TrainedModel) -> None:
    with torch.no_grad():
        scores = run.model(torch.from_numpy(TEST[0])).softmax(1).numpy()
    assert scores == pytest.approx(run.predict_proba(TEST[0]), abs=1e-6)
    assert not run.model.training


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (["a text"], "trained on features, the records are text"),
        (X[:, :, :3], r"shape \(1, 3, 4\), and the model was trained on records of shape"),
    ],
)
def test_other_records_are_one_sentence(run: dpfed.TrainedModel, records: Any, words: str) -> None:
    with pytest.raises(DpfedError, match=words):
        run.predict(records)


def test_the_history_has_a_row_for_each_round(run: dpfed.TrainedModel) -> None:
    history = run.history
    assert isinstance(history, pandas.DataFrame)
    assert history.index.tolist() == [0, 1, 2, 3]
    assert history["accuracy"].iloc[-1] == run.accuracy
    worst = history["epsilon_server_worst"]
    assert math.isnan(worst[0])
    assert worst[3] == pytest.approx(run.epsilon["server_worst"])
    assert worst[1] < worst[2] < worst[3]
    assert history["epsilon_third_party"][3] == pytest.approx(run.epsilon["third_party"])
    assert history["epsilon_server_max"][3] == pytest.approx(run.epsilon["server_max"])
    assert history["seconds"].is_monotonic_increasing


def test_the_plot_shows_accuracy_and_epsilon(run: dpfed.TrainedModel) -> None:
    backend = matplotlib.get_backend()
    left, right = run.plot()
    assert left.lines[0].get_ydata() == pytest.approx(100 * run.history["accuracy"])
    assert [line.get_label() for line in right.lines] == [
        "server",
        "third party",
    ]
    assert matplotlib.get_backend() == backend


def test_the_report_and_the_export(run: dpfed.TrainedModel, tmp_path: Path) -> None:
    page = run.report(tmp_path / "page.html")
    assert "dp-fedadamw" in page.read_text(encoding="utf-8")
    folder = run.export(tmp_path / "export")
    from safetensors.torch import load_file

    restored = net()
    restored.load_state_dict(load_file(folder / "model.safetensors"))
    assert all(torch.equal(a, b) for a, b in zip(restored.parameters(), run.model.parameters(),
                                                 strict=True))  # fmt: skip
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "model.load_state_dict(load_file(" in card
    assert "from transformers" not in card


def test_a_copy_is_loaded_without_the_first_folder(tmp_path: Path) -> None:
    first = train(tmp_path / "a" / "run", trainable="head")
    expected = first.predict_proba(TEST)
    first.save(tmp_path / "b" / "copy")
    (tmp_path / "a").rename(tmp_path / "gone")
    loaded = dpfed.load(tmp_path / "b" / "copy", model=net())
    assert np.array_equal(loaded.predict_proba(TEST), expected)
    assert (loaded.accuracy, loaded.epsilon) == (first.accuracy, first.epsilon)
    assert len(loaded.history) == 4
    assert not (tmp_path / "b" / "copy" / "checkpoint").exists()
    with pytest.raises(DpfedError, match="already holds a run: choose another out"):
        loaded.save(tmp_path / "b" / "copy")
    with pytest.raises(DpfedError, match=r"call dpfed\.load\(folder, model=\.\.\.\) there"):
        dpfed.load(tmp_path / "b" / "copy").predict(TEST)
    with pytest.raises(DpfedError, match=r"is not the folder of a run: give one that dpfed\.fine_"):
        dpfed.load(tmp_path)


def test_what_training_spent_is_counted_again(run: dpfed.TrainedModel, tmp_path: Path) -> None:
    again = train(tmp_path / "again", run.model, rounds=3)
    assert any("is counted for every client" in note for note in again.notes)
    both = train(tmp_path / "both", rounds=6)
    assert again.epsilon["server_worst"] == pytest.approx(both.epsilon["server_worst"], rel=1e-3)


def test_class_names_are_predicted(tmp_path: Path) -> None:
    model = base("bert", tmp_path / "base")
    data = {"text": ["good film", "bad film"] * 12, "label": ["yes", "no"] * 12}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = dpfed.fine_tune(
            model,
            data,
            {**data, "text": data["text"][:]},
            clients=2,
            epsilon=None,
            rounds=1,
            settings={**SHORT, "model.max_length": 5, "model.liveness": False},
            out=tmp_path / "run",
            progress=False,
        )
    assert run.classes == ("no", "yes")
    assert set(run.predict(["good film", "bad film"])) <= {"no", "yes"}
    assert type(run.model).__name__ == "PeftModel"
    assert run.predict_proba(["good film"]) == pytest.approx(
        run.predict_proba([{"text": "good film"}])
    )


def test_the_text_and_the_table_state_the_main_figures(run: dpfed.TrainedModel) -> None:
    assert "\n" not in repr(run)
    for text in (repr(run), run._repr_html_()):
        for part in ("dp-fedadamw", f"{run.accuracy:.3f}", "against the server", str(run.out)):
            assert part in text
    assert "<script" not in dpfed.TrainedModel(Path("<script>"), run.result)._repr_html_()


def test_clients_have_their_own_data(tmp_path: Path) -> None:
    run = train(tmp_path / "run", data={"b": (X[:30], Y[:30]), "a": (X[30:], Y[30:])}, clients=None)
    assert run.result["client_names"] == ["a", "b"]
    for keys, words in (
        ({"clients": 3}, "clients = 3, but train has the data of 2: leave clients out"),
        ({"settings": {"data.partition": "iid"}}, r"'data\.partition'\] = 'iid' has no effect"),
    ):
        with pytest.raises(DpfedError, match=words):
            train(tmp_path / "no", data=[(X[:30], Y[:30]), (X[30:], Y[30:])],
                  **{"clients": None, **keys})  # fmt: skip


def test_an_unknown_keyword_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"clinets is no keyword .*, did you mean clients\?"):
        train(tmp_path / "run", clinets=3)


def test_frozen_tensors_of_a_module_stay(tmp_path: Path) -> None:
    """A tensor without a gradient is not trained, unless `trainable` names it."""
    model = net()
    model[0].requires_grad_(False)
    run = train(tmp_path / "run", model, rounds=1)
    assert run.result["parameters"] == 12 * 2 + 2
    assert torch.equal(run.model[0].weight, net()[0].weight)
    assert not torch.equal(run.model[3].weight, net()[3].weight)
    whole = train(tmp_path / "whole", model, rounds=1, trainable="full")
    assert not torch.equal(whole.model[0].weight, net()[0].weight)


def test_layers_that_mix_records_are_named(tmp_path: Path) -> None:
    mixing = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(DpfedError, match=r"^1 is a BatchNorm2d that mixes .* GroupNorm"):
        train(tmp_path / "run", mixing)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x.squeeze(1))[0][:, -1])


def test_a_layer_without_gradients_per_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"cannot be computed in cells \(LSTM\)"):
        train(tmp_path / "run", Recurrent())


class Stop(dpfed.Callback):
    def on_checkpoint(self, progress: Any) -> None:
        if progress.t == 2:
            raise KeyboardInterrupt


def test_a_stopped_run_resumes_with_the_same_result(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", rounds=4)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", rounds=4, callbacks=[Stop()])
    changed = net()
    nn.init.zeros_(changed[0].weight)
    resumed = train(tmp_path / "run", changed, rounds=4, resume=True)
    assert resumed.result["test_loss"] == whole.result["test_loss"]
    assert resumed.history["loss"].tolist() == whole.history["loss"].tolist()
    again = train(tmp_path / "run", rounds=4, resume=True)
    assert again.result["run"] == dpfed.load(tmp_path / "run").result["run"]
    with pytest.raises(DpfedError, match="resume = True needs out"):
        dpfed.fine_tune(net(), (X, Y), TEST, resume=True)


def test_new_runs_choose_balanced_cohorts(tmp_path: Path) -> None:
    share = {"run.participation": 0.4}
    trained = train(tmp_path / "run", rounds=3, settings=share)
    assert trained.result["max_rounds_per_client"] == 1
    assert trained.epsilon["third_party"] == trained.epsilon["server_worst"]
    assert "each client in at most 1 round" in trained.result["guarantee"]
    uniform = {**share, "run.cohort_choice": "uniform"}
    assert "max_rounds_per_client" not in train(tmp_path / "u", settings=uniform).result


def test_the_run_of_an_earlier_version_resumes_with_uniform_cohorts(tmp_path: Path) -> None:
    share = {"run.participation": 0.7}
    uniform = {**share, "run.cohort_choice": "uniform"}
    whole = train(tmp_path / "whole", rounds=4, settings=uniform)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", rounds=4, settings=uniform, callbacks=[Stop()])
    path = tmp_path / "run" / "config.toml"
    lines = path.read_text().splitlines(keepends=True)
    added = ("cohort_choice", "max_rounds_per_client")
    path.write_text("".join(line for line in lines if not line.startswith(added)))
    assert len(path.read_text().splitlines()) == len(lines) - 2
    balanced = {**share, "run.cohort_choice": "balanced"}
    with pytest.raises(DpfedError, match=r"run\.cohort_choice was"):
        train(tmp_path / "run", rounds=4, settings=balanced, resume=True)
    resumed = train(tmp_path / "run", rounds=4, settings=share, resume=True)
    assert resumed.result["test_loss"] == whole.result["test_loss"]
    assert resumed.epsilon == whole.epsilon
