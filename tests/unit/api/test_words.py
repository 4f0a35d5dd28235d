"""Bad input: errors use the keywords of Python, and no mistake ends in another exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import dpfed
from dpfed.api.words import in_keywords
from dpfed.errors import DpfedError

X = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
Y = (X[:, 0] > 0).astype(int)
TEST = (X[:10] + 1, Y[:10])


def train(
    folder: Path, model: Any = "linear", data: Any = (X, Y), **keys: Any
) -> dpfed.TrainedModel:
    settings = {"run.local_steps": 1, "privacy.batch": 4.0, **keys.pop("settings", {})}
    keys = {"clients": 2, "rounds": 1, "out": folder / "run", "progress": False, **keys}
    return dpfed.fine_tune(model, data, TEST, settings=settings, **keys)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"clients": 0}, "clients = 0 is not allowed: it must be >= 1"),
        ({"rounds": 2.5}, "rounds = 2.5 is not allowed: it must be a whole number"),
        ({"settings": {"run.rounds": 0}, "rounds": None}, "run.rounds = 0 is not allowed"),
        ({"epsilon": -1.0}, "epsilon = -1.0 is not allowed: it must be > 0"),
        ({"epsilon": None}, 'epsilon = None needs settings={"privacy.sigma": 1.0}'),
        ({"delta": 1.0}, "delta = 1.0 is not allowed: it must be < 1"),
        ({"lr": "fast"}, "lr = 'fast' is not allowed: it must be a number or one of 'auto'"),
        ({"agg": "median"}, "agg = 'median' is not allowed: it must be one of 'mean', "),
        (
            {"algorithm": "dp-fedavq"},
            "algorithm = 'dp-fedavq' is not known, did you mean ",
        ),
        (
            {"algorithm": "dp-fedavg", "gamma": 0.5},
            "gamma is no switch of dp-fedavg: its switches are lr, weight_decay",
        ),
        (
            {"settings": {"algorithm.name": "dp-fedavg"}, "gamma": 0.5},
            "gamma is no switch of dp-fedavg",
        ),
        ({"trainable": "heads"}, "trainable = 'heads' is not allowed: it must be one of 'full', "),
        ({"trainable": []}, 'trainable names nothing: give "lora", "head", "full" or a list'),
        ({"keep": "first"}, "keep = 'first' must be one of last, best"),
        ({"early_stopping": 0}, "early_stopping = 0 is not allowed: it must be >= 1"),
        ({"class_weights": [1.0]}, "class_weights has 1 numbers, and the data have 2 classes"),
        ({"metric": "r2"}, "metric = 'r2' does not fit this task: give accuracy, loss, macro_f1, "),
        ({"metric": lambda labels, found: float("nan")}, "metric failed on the test set: it must"),
        ({"epochs": 3}, "epochs is no keyword of fine_tune and no switch of an algorithm: give "),
        ({"seed": 3}, "seed is no keyword of fine_tune and no switch of an algorithm: give sett"),
        ({"callbacks": dpfed.Callback()}, "callbacks must be a list of callbacks, not Callback"),
        ({"callbacks": None}, "callbacks must be a list of callbacks, not NoneType"),
        ({"callbacks": [dpfed.Callback]}, "callbacks must be objects of subclasses of dpfed.Callb"),
        ({"callbacks": [print]}, "callbacks must be objects of subclasses of dpfed.Callback, not "),
        ({"out": 3}, "out must be the path of a folder, not int"),
        ({"resume": "my-run"}, "resume = 'my-run' must be True or False"),
        ({"model": "linaer"}, "model = 'linaer' is not a file or folder, and no name of "),
        ({"model": nn.Sequential(nn.Linear(4, 2)), "tokenizer": 3}, "tokenizer is for a language"),
        ({"data": [(X, Y), X]}, "client 1 of the list has ndarray, and others have a data set"),
        ({"data": [(X, Y), (X[:, :3], Y)]}, "x of a record of train['client 1'] has shape (3,), "),
        ({"data": [(X, Y), (X[:0], Y[:0])]}, "train['client 1'] has no records: leave this cli"),
        (
            {"data": {"train": (X, Y), "test": (X, Y)}},
            "train has the splits train, test, which are no clients: give one of them",
        ),
        ({"data": [[{"role": "user", "content": "a"}]]}, 'not list of chats: give {"messages": '),
        ({"data": pandas.DataFrame(X).assign(label=Y)}, "or give a pair (X, y); it has: 0, 1, 2"),
    ],
)
def test_mistakes_are_sentences_in_words_of_python(
    tmp_path: Path, keys: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DpfedError) as error:
        train(tmp_path, **keys)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)
    assert "--" not in str(error.value)


@pytest.mark.parametrize(
    ("sentence", "options", "model", "shown"),
    [
        ('set model.train = "head" or "full"', {}, None, 'set trainable = "head" or "full"'),
        ("run.rounds = 0", {"settings": {"run.rounds": 0}}, None, "run.rounds = 0"),
        ("settings['run.rounds'] = 0", {}, None, "settings['run.rounds'] = 0"),
        ("try another algorithm.lr, or", {}, None, "try another lr, or"),
        ("model.weights = 'x' is no", {}, "x", "model = 'x' is no"),
        ("model.weights = 'x' is no", {}, nn.Linear(1, 1), "model.weights = 'x' is no"),
        ("privacy.enabled = false, run.rounds.", {}, None, "privacy.enabled = False, rounds."),
        ("/x/algorithm.toml has", {}, None, "/x/algorithm.toml has"),
        ("model.train_more and data.clients_x", {}, None, "model.train_more and data.clients_x"),
    ],
)
def test_keys_become_keywords(
    sentence: str, options: dict[str, Any], model: Any, shown: str
) -> None:
    assert in_keywords(sentence, options, model) == shown


def test_arrays_are_class_weights_and_columns_of_a_frame(tmp_path: Path) -> None:
    """A tensor of weights is a list of numbers. Columns may be rows, or labels of shape (n, 1)."""
    frame = pandas.DataFrame({"features": list(X), "label": Y})
    column = Y[:, None]
    weights = (np.array([1.0, 3.0]), torch.tensor([1.0, 3.0]), [1.0, 3.0])
    for number, data in enumerate((frame, (X, Y), (X, column))):
        run = train(tmp_path / str(number), data=data, class_weights=weights[number])
        if number == 0:
            first = run
        assert run.result["test_loss"] == first.result["test_loss"]


def test_a_run_does_not_resume_with_other_records(tmp_path: Path) -> None:
    first = train(tmp_path)
    assert train(tmp_path, resume=True).result["seconds"] == first.result["seconds"]
    with pytest.raises(DpfedError, match="began with other records: give it train and test as"):
        train(tmp_path, data=(X + 1, Y), resume=True)
    with pytest.raises(DpfedError, match=r"^lr was .* when the run began and is 0\.5 now"):
        train(tmp_path, lr=0.5, resume=True)


def test_a_model_is_for_runs_of_torch_modules(tmp_path: Path) -> None:
    run = train(tmp_path)
    with pytest.raises(DpfedError, match="trained no torch module: leave model out"):
        dpfed.load(run.out, model=nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(DpfedError, match=r"not TrainedModel: give its \.model$"):
        train(tmp_path / "again", run)


@pytest.mark.parametrize(
    ("records", "keys", "sentence"),
    [
        ("100", {"clients": 3}, "records must be a whole number or a list of them, not '100'"),
        (100, {"clients": 3, "plot": "x.jpg"}, "plot x.jpg must end in .png or .svg"),
    ],
)
def test_mistakes_in_a_plan_are_sentences(records: Any, keys: Any, sentence: str) -> None:
    with pytest.raises(DpfedError) as error:
        dpfed.plan(records, 8.0, rounds=1, local_steps=1, **keys)
    assert str(error.value) == sentence


def test_numbers_of_numpy_are_records(tmp_path: Path) -> None:
    plan = dpfed.plan(np.int64(100), 8.0, clients=2, rounds=1, local_steps=1)
    assert plan.federation.records == (100, 100)
