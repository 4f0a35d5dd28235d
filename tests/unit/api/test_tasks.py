"""`fine_tune` for numbers and for several labels of a record, from data to report."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import dpfed
from dpfed.errors import DpfedError
from dpfed.studies.outcomes import blind_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 4)).astype(np.float32)
NUMBERS = 100 + 20 * X[:, 0]
FLAGS = pandas.DataFrame(X[:, :3] > 0, columns=["a", "b", "c"]).astype(int)
PUBLIC = slice(80, None)


def train(out: Path, y: Any, task: Any, model: Any = "linear", **keys: Any) -> dpfed.TrainedModel:
    settings = {"run.local_steps": 2, "privacy.sigma": 0.5, "privacy.batch": 8.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dpfed.fine_tune(
            model,
            (X[:80], y[:80]),
            (X[PUBLIC], y[PUBLIC]),
            task=task,
            clients=2,
            rounds=keys.pop("rounds", 6),
            epsilon=None,
            settings={**settings, **keys.pop("settings", {})},
            out=out,
            progress=False,
            **{"lr": 0.1, **keys},
        )


@pytest.fixture(scope="module")
def number(tmp_path_factory: pytest.TempPathFactory) -> dpfed.TrainedModel:
    return train(tmp_path_factory.mktemp("number") / "run", NUMBERS, "regress")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dpfed.TrainedModel:
    return train(tmp_path_factory.mktemp("several") / "run", FLAGS, "multilabel")


def test_numbers_are_predicted_in_their_unit(number: dpfed.TrainedModel) -> None:
    found = number.predict(X[PUBLIC])
    assert found.shape == (40,)
    assert np.abs(found - NUMBERS[PUBLIC]).mean() == pytest.approx(number.metrics["mae"], rel=1e-5)
    assert number.metrics["r2"] > 0.5
    assert "R2 0." in repr(number)
    assert "R2" in number._repr_html_()
    again = dpfed.load(number.out)
    assert np.array_equal(again.predict(X[PUBLIC]), found)
    with pytest.raises(DpfedError, match="no probabilities, because it predicts numbers"):
        number.predict_proba(X)
    with pytest.raises(DpfedError, match="has no accuracy: see metrics"):
        _ = number.accuracy


def test_several_labels_are_predicted_as_0_and_1(several: dpfed.TrainedModel) -> None:
    found = several.predict(X[PUBLIC])
    assert several.classes == ("a", "b", "c")
    assert set(np.unique(found)) == {0, 1}
    chances = several.predict_proba(X[PUBLIC])
    assert ((chances > 0.5) == found).all()
    assert not np.allclose(chances.sum(1), 1)
    assert float((found == FLAGS[PUBLIC].to_numpy()).mean()) == pytest.approx(several.accuracy)
    assert several.accuracy > 0.7


def test_the_history_and_the_plot_have_the_main_score(
    number: dpfed.TrainedModel, several: dpfed.TrainedModel
) -> None:
    history = number.history
    assert "accuracy" not in history
    assert history["r2"].iloc[-1] == number.result["test_r2"]
    assert number.plot()[0].get_ylabel() == "r2 on the test set"
    assert several.history["accuracy"].iloc[-1] == several.accuracy


def test_report_card_and_statement(
    number: dpfed.TrainedModel, several: dpfed.TrainedModel, tmp_path: Path
) -> None:
    page = number.report(tmp_path / "number.html").read_text()
    assert "R2 over rounds" in page
    assert "Nothing has been scored yet" not in page
    assert "Accuracy over rounds" in several.report(tmp_path / "several.html").read_text()
    card = (number.export(tmp_path / "number") / "README.md").read_text()
    assert f"- R2 {number.metrics['r2']:.4f}" in card
    assert f"A predicted number is {number.result['input']['scale']} * output + " in card
    card = (several.export(tmp_path / "several") / "README.md").read_text()
    assert f"- right answers over all labels {several.accuracy:.4f}" in card
    assert "| a |" in card
    assert number.privacy.guarantee.observers


def test_the_best_round_by_the_users_own_function(tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    def score(true: np.ndarray, found: np.ndarray) -> float:
        seen.append((true.shape, found.shape))
        return -float(len(seen))

    run = train(tmp_path / "run", NUMBERS, "regress", metric=score, keep="best", early_stopping=2)
    assert seen[0] == ((40,), (40,))
    assert run.result["kept_round"] == 0
    assert run.result["rounds"] == 2


def test_mean_error_chooses_the_round_with_the_smallest(tmp_path: Path) -> None:
    run = train(tmp_path / "run", NUMBERS, "regress", metric="mae", keep="best", lr=0.5, rounds=8)
    errors = run.history["mae"]
    assert run.result["kept_round"] == errors.idxmin()
    assert run.result["metric"] == {"name": "mae", "value": errors.min()}
    assert run.metrics["mae"] == pytest.approx(errors.min(), rel=1e-5)


class Column(nn.Module):
    """A regressor that returns one number for each record, without a column."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found[:, 0] if self.flat else found

    flat = True


@pytest.mark.parametrize("flat", [True, False])
def test_a_torch_module_for_numbers(flat: bool, tmp_path: Path) -> None:
    net = Column()
    net.flat = flat
    run = train(tmp_path / "run", NUMBERS, "regress", net)
    spec = run.result["input"]
    with torch.no_grad():
        outputs = run.model(torch.from_numpy(X[:5])).reshape(-1).numpy()
    wanted = spec["scale"] * outputs + spec["center"]
    assert run.predict(X[:5]) == pytest.approx(wanted, rel=1e-5)


def test_a_torch_module_for_several_labels(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    run = train(tmp_path / "run", FLAGS, "multilabel", net, class_weights=[1.0, 2.0, 1.0])
    assert run.predict(X).shape == (120, 3)
    with pytest.raises(DpfedError, match=r"gives \(2, 2\) for 2 records, and the data have 3"):
        train(tmp_path / "other", FLAGS, "multilabel", nn.Sequential(nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("y", "task", "keys", "sentence"),
    [
        (NUMBERS, None, {}, r'such as [\d.]+, which are no classes: set task = "regress"'),
        (FLAGS.to_numpy(), None, {}, 'for a record, set task = "multilabel"'),
        (NUMBERS, "regress", {"classes": 3}, "classes has no effect with numbers"),
        (NUMBERS, "regression", {}, "task = 'regression' must be one of auto, classify"),
        (NUMBERS, "regress", {"class_weights": [1.0]}, "is for classes"),
        (NUMBERS, "regress", {"settings": {"model.task": "classify"}}, "differ: give one of them"),
    ],
)
def test_mistakes_are_one_sentence(
    y: Any, task: Any, keys: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(DpfedError, match=sentence) as error:
        train(tmp_path / "run", y, task, **keys)
    assert "\n" not in str(error.value)
    assert "--" not in str(error.value)


def test_tune_finds_the_best_score_of_numbers(tmp_path: Path) -> None:
    found = dpfed.tune(
        "linear", (X[:80], NUMBERS[:80]), (X[PUBLIC], NUMBERS[PUBLIC]), space={"lr": [1e-5, 0.1]},
        task="regress", clients=2, rounds=4, epsilon=8.0, out=tmp_path / "search", progress=False,
        settings={"run.local_steps": 2, "privacy.batch": 8.0},
    )  # fmt: skip
    assert found.settings == {"lr": 0.1}
    assert found.trials["score"].max() == found.best.result["test_r2"]


def test_lists_of_names_are_several_labels_without_a_task(tmp_path: Path) -> None:
    """Lists of 0 and 1 could also be one class of a record, so they need `task`."""
    names = np.array(["a", "b", "c"])
    lists = [names[row > 0].tolist() for row in FLAGS.to_numpy()]
    assert [] in lists
    run, stated = (
        train(tmp_path / str(task), lists, task, rounds=1) for task in (None, "multilabel")
    )
    assert run.result["task"] == "multilabel"
    assert run.classes == ("a", "b", "c")
    assert run.metrics == stated.metrics
    with pytest.raises(DpfedError, match='for a record, set task = "multilabel"'):
        train(tmp_path / "other", lists, "classify")


def compared(out: Path, y: Any, task: Any, algorithms: list[str], **keys: Any) -> dpfed.Comparison:
    settings = {"run.local_steps": 2, "privacy.sigma": 0.5, "privacy.batch": 8.0}
    return dpfed.compare(
        "linear", (X[:80], y[:80]), (X[PUBLIC], y[PUBLIC]), task=task, algorithms=algorithms,
        clients=2, rounds=2, out=out, progress=False, epsilon=None,
        settings={**settings, **keys.pop("settings", {})}, **keys,
    )  # fmt: skip


def test_compare_ranks_methods_of_several_labels(tmp_path: Path) -> None:
    found = compared(tmp_path / "study", FLAGS, "multilabel", ["dp-fedavg:lr=0.3"], seeds=2)
    runs = [dpfed.load(path.parent) for path in found.out.glob("runs/*/run.json")]
    for name in ("accuracy", "macro_f1", "exact_match"):
        mean = np.mean([run.metrics[name] for run in runs])
        assert found.table[name].iloc[0] == pytest.approx(mean)


def test_compare_ranks_methods_of_numbers_by_r2(tmp_path: Path) -> None:
    """The lowest loss chooses the rate. A run that diverged has no score, not the score 0."""
    methods = ["dp-fedavg", "dp-fedavg:lr=1e30"]
    rates = {"dp-fedavg": [0.1, 0.5]}
    found = compared(tmp_path / "study", NUMBERS, "regress", methods, rates=rates, seeds=2)
    table, search = found.table, found.search
    assert "accuracy" not in table
    good, wild = table.loc["dp-fedavg"], table.loc["dp-fedavg:lr=1e30"]
    assert good["r2"] == pytest.approx(np.mean([float(x) for x in good["r2_values"].split()]))
    assert good["r2"] > 0.5
    assert good["mae"] < good["rmse"] < NUMBERS.std()
    assert wild["diverged"] == 2
    assert wild[["r2", "mae", "rmse", "difference"]].isna().all()
    chosen = search[search["chosen"] == "yes"]
    assert chosen["validation_loss"].item() == search["validation_loss"].min()
    assert chosen["validation_r2"].item() == search["validation_r2"].max()
    assert found.plot().axes[0].get_ylabel() == "R2 on the test half"
    markdown = (found.out / "table.md").read_text()
    assert "| R2 |" in markdown
    assert "has runs that diverged, so it has no mean R2" in markdown
    page = found.report(tmp_path / "page.html").read_text()
    assert ">mae<" in page
    assert ">R2<" in page


def test_compare_needs_test_numbers_that_differ(tmp_path: Path) -> None:
    """Without variance in a half of the test numbers, no method has an R2."""
    equal = np.where(np.arange(120) < 80, NUMBERS, 100.0)
    methods = ["dp-fedavg:lr=0.1"]
    with pytest.raises(DpfedError, match=r"of the test set are 100\.0: set model\.target"):
        compared(tmp_path / "study", equal, "regress", methods)
    scale = {"model.target_mean": 100.0, "model.target_scale": 20.0}
    with pytest.raises(DpfedError, match="all numbers in one half of the test set are equal"):
        compared(tmp_path / "other", equal, "regress", methods, settings=scale)


def test_methods_of_a_study_have_one_task(tmp_path: Path) -> None:
    with pytest.raises(DpfedError, match=r"^dp-fedavg:model\.task=.*must be the same for all meth"):
        compared(tmp_path / "study", NUMBERS, "regress", ["dp-fedavg:model.task=classify"])


def test_the_best_answer_without_inputs_to_several_labels() -> None:
    """Among 4 records, 1 has label a and 2 have label b: 3/4 and 2/4 are right without inputs."""
    per_class = {"a": {"support": 1}, "b": {"support": 2}}
    result = {"task": "multilabel", "test_records": 4, "metrics": {"per_class": per_class}}
    accuracy, loss = blind_of(result)
    assert accuracy == pytest.approx((0.75 + 0.5) / 2)
    entropies = [-0.25 * math.log(0.25) - 0.75 * math.log(0.75), math.log(2)]
    assert loss == pytest.approx(sum(entropies) / 2)


def test_the_loss_of_numbers_without_inputs() -> None:
    """A loss of 0.5 with R2 0.75 belongs to numbers of variance 2."""
    result = {"task": "regress", "test_loss": 0.5, "test_r2": 0.75}
    assert blind_of(result) == (0.0, 2.0)
    assert blind_of({"task": "regress", "test_loss": None, "test_r2": None}) == (0.0, 0.0)
    assert blind_of({"task": "regress", "test_loss": 0.0, "test_r2": 1.0}) == (0.0, 0.0)
