"""The trained model of a finished run: predict, show the training history, export, save, load."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from dpfed.api.configuring import is_plain_module
from dpfed.api.history import history_of
from dpfed.api.memory_model import SPENT, copy_run
from dpfed.api.prediction import Predictor, continued
from dpfed.api.words import in_python, python_words
from dpfed.data.memory_inputs import unlabelled_inputs
from dpfed.errors import DpfedError, counted, phrase
from dpfed.model.given_module import given_module
from dpfed.privacy.published import show_loss, show_perplexity, show_score
from dpfed.report.figures.run_plot import run_plot
from dpfed.report.model_card import write_export
from dpfed.report.page import write_page
from dpfed.report.statement.build import Statement, statement_of_run
from dpfed.report.statement.text import page
from dpfed.studies.study_reader import read_study
from dpfed.training.budget.recorded_spending import is_run
from dpfed.training.export import Trained, configure, read_run
from dpfed.training.result import is_causal, task_name
from dpfed.training.run_folder.files import read_result, read_settings

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class TrainedModel:
    """The trained model of a finished run, as `dpfed.fine_tune` and `dpfed.load` return it.

    Attributes:
        out: The run folder.
        result: The result of the run, in the form that `dpfed run --json` prints.
        module: The torch module that was given to `fine_tune` or `load`; None for other models.
    """

    out: Path
    result: Mapping[str, Any]
    module: nn.Module | None = field(default=None, repr=False)

    @property
    def accuracy(self) -> float:
        """Accuracy on the test set, from 0 to 1.

        For a language model, it is the share of target tokens that are predicted correctly. With
        several classes per record, it is the share of right yes-or-no answers over all classes.
        """
        found = self.result["test_accuracy"]
        if found is None:
            raise DpfedError("this model has no accuracy: see metrics, or give a test set")
        return float(found)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """All scores on the test set, such as macro_f1, per_class, mae or r2."""
        return dict(self.result.get("metrics") or {})

    @property
    def perplexity(self) -> float:
        """Perplexity of a language model's target tokens on the test set."""
        found = self.result.get("test_perplexity")
        if found is None:
            raise DpfedError("this model has no perplexity: it is a classifier or has no test set")
        return float(found)

    @property
    def epsilon(self) -> Mapping[str, float | None]:
        """Epsilon for each observer: server_worst, server_max and third_party.

        `server_worst` bounds every client against the server; `server_max` is the most that a
        client has spent. `third_party` is against an observer who sees only the global models.
        The values are None if the run was not private.
        """
        figures: Mapping[str, float | None] = self.result["epsilon"]
        return figures

    @cached_property
    def privacy(self) -> Statement:
        """The privacy statement of the run: guarantee, mu, attack rates and conditions.

        `print(trained.privacy_page)` shows it as one page; `trained.privacy.as_dict()` is its JSON.
        """
        with python_words():
            return statement_of_run(self.out)

    @property
    def privacy_page(self) -> str:
        """The privacy statement as one page of plain text."""
        return page(self.privacy)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the columns of `predict_proba`."""
        return tuple(self.result["classes"])

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about the run, such as how the data were read."""
        return tuple(self.result["notes"])

    @property
    def warnings(self) -> Sequence[str]:
        """Sentences about what to change, or what to know before using the result."""
        return in_python(self.result["warnings"])

    @cached_property
    def model(self) -> Any:
        """The trained model: a peft model, a model of transformers, or the torch module.

        The model keeps a record of the privacy that its training has spent. Therefore,
        `fine_tune(trained.model, ...)` counts this privacy loss, too.
        """
        trained = self._run
        configure(trained)
        adapted = trained.parts.adapted
        for holder in (adapted.peft, adapted.model):
            if holder is not None:
                setattr(holder, SPENT, trained.spending_record)
        return (adapted.peft if adapted.peft is not None else adapted.model).eval()

    def predict(self, records: Any) -> np.ndarray:
        """Return the predicted class of each record, in the form of the training labels.

        For regression, return numbers. With several classes per record, return 0 or 1 for each
        class, `[records, classes]`, in the order of `classes`.

        records  data in a form that `fine_tune` accepts, with or without labels
        """
        task = task_name(self._run.config, self.result)
        if task == "regress":
            return self._predicted(records)
        probabilities = self.predict_proba(records)
        if task == "multilabel":
            return (probabilities > 0.5).astype(np.int64)
        found: np.ndarray = np.asarray(self.classes)[probabilities.argmax(1)]
        numbered = self.classes == tuple(map(str, range(len(self.classes))))
        return found.astype(np.int64) if numbered else found

    def predict_proba(self, records: Any) -> np.ndarray:
        """Return the probability of each class for each record, `[records, classes]`."""
        if task_name(self._run.config, self.result) == "regress":
            raise DpfedError("this model has no probabilities, because it predicts numbers")
        return self._predicted(records)

    def _predicted(self, records: Any) -> np.ndarray:
        """Return the probabilities `[records, classes]`; for regression the numbers `[records]`."""
        with python_words(), given_module(self.module):
            predictor = self._predictor
            task = predictor.model.task
            if task.causal:
                raise DpfedError("this model has no classes to predict: it is a language model")
            found: np.ndarray = task.predict(predictor.scores(*unlabelled_inputs(records))).numpy()
            return found

    def generate(self, prompts: Sequence[Any], max_new_tokens: int = 64) -> list[str]:
        """Return, for each prompt, the text that the language model writes after the prompt.

        Each token is the most likely one (greedy decoding).

        prompts         texts, or chats: lists of messages with `role` and `content`
        max_new_tokens  largest number of tokens to write
        """
        with python_words(), given_module(self.module):
            if not is_causal(self._run.config, self.result):
                raise DpfedError("this model writes no text: it is a classifier")
            return continued(self.model, self._run.config.model, prompts, max_new_tokens)

    @property
    def history(self) -> pandas.DataFrame:
        """One row per round, with scores, epsilons against two observers, and seconds.

        Round 0 is the model before training. `epsilon_server_worst` and `epsilon_third_party` are
        planned values; `epsilon_server_max` is the largest epsilon that a client has spent.
        """
        return history_of(self.out, self.result, task_name(self._run.config, self.result))

    def plot(self) -> Any:
        """Draw accuracy or perplexity, and epsilon, over the rounds; return matplotlib's axes."""
        return run_plot(self.history, self.result.get("delta"))

    def report(self, path: str | Path, public: bool = False) -> Path:
        """Write the run as one HTML page that needs no network, and return its path.

        public  True to leave out values that a published page must not show, such as which clients
                took part in a round
        """
        with python_words():
            write_page([self.out], Path(path), public, read_study)
        return Path(path)

    def export(self, folder: str | Path, merge: bool = False) -> Path:
        """Write the peft adapter with a model card to a new folder, and return the folder.

        A torch module is written as a state dict, and its model card says how to load it.

        merge  True to write a whole model instead, with the adapter merged into the base model
        """
        with python_words(), given_module(self.module):
            write_export(self.out, Path(folder), merge)
        return Path(folder)

    def save(self, folder: str | Path) -> Path:
        """Copy the run folder to a new folder, which `dpfed.load` can read, and return the folder.

        The copy contains private files. To give the model to others, use `export`.
        """
        with python_words():
            copy_run(self.out, Path(folder))
        return Path(folder)

    @cached_property
    def _run(self) -> Trained:
        with python_words(), given_module(self.module):
            return read_run(self.out)

    @cached_property
    def _predictor(self) -> Predictor:
        return Predictor.of_run(self.out)

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"TrainedModel({str(self.out)!r}: {facts})"

    def _repr_html_(self) -> str:
        """Return the main results as an HTML table, which notebooks show."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in {**self._facts(), "folder": str(self.out)}.items()
        )
        return f"<table>{rows}</table>"

    def _facts(self) -> dict[str, str]:
        """Return the main results of the run as strings, by name."""
        result = self.result
        facts = {
            "algorithm": str(result["algorithm"]),
            "clients": str(result["clients"]),
            "rounds": str(result["rounds"]),
            "trained": counted(result["parameters"], "number"),
        }
        if result.get("test_perplexity") is not None:
            facts["perplexity"] = show_perplexity(result["test_perplexity"])
        elif result.get("test_r2") is not None:
            facts["R2"] = show_score(result["test_r2"])
        elif result["test_accuracy"] is not None:
            facts["accuracy"] = show_score(result["test_accuracy"])
        server, third_party = self.epsilon["server_worst"], self.epsilon["third_party"]
        if server is None or third_party is None:
            return {**facts, "privacy": "none"}
        shown = f"{show_loss(server)} against the server, {show_loss(third_party)} against others"
        return {**facts, "epsilon": shown, "release": str(result["release"])}


def load(folder: str | Path, model: nn.Module | None = None) -> TrainedModel:
    """Return the trained model of a run folder, as written by `fine_tune`, `save` or `dpfed run`.

    model  for a run that trained a torch module: a module of this architecture, with any weights
    """
    path = Path(folder)
    with python_words():
        if not is_run(path):
            raise DpfedError(f"{path} is not the folder of a run: {phrase('a run folder')}")
        if model is not None and not is_plain_module(model):
            raise DpfedError(
                f"model must be the torch module that the run trained, not {type(model).__name__}: "
                "leave it out for other models"
            )
        section = (read_settings(path) or {}).get("model", {})
        if model is not None and section.get("name") != "given":
            raise DpfedError(f"the run in {path} trained no torch module: leave model out")
        result = read_result(path)
        if "input" not in result:
            raise DpfedError(
                f"the run in {path} has no result yet: let it finish, or "
                f"{phrase('resume').format(path)}"
            )
    return TrainedModel(path, result, model)
