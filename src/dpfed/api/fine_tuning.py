"""`dpfed.fine_tune`: fine-tune a model across simulated clients with differential privacy."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from dpfed.api.memory_model import base_folder, refuse_tokenizer, save_model
from dpfed.api.options import Options, listing
from dpfed.api.settings import as_begun, configured, is_plain_module, task_of
from dpfed.api.trained_model import TrainedModel
from dpfed.config import Config
from dpfed.data.sources.in_memory import source_of
from dpfed.data.tables import Source
from dpfed.errors import DpfedError, python_phrases, warn_user
from dpfed.model.given_module import given_module
from dpfed.training.callbacks.base import Callback, OnStart
from dpfed.training.callbacks.progress import ProgressDisplay
from dpfed.training.job.notes import result_warnings
from dpfed.training.job.public_score import given_metric
from dpfed.training.open_run import Mode
from dpfed.training.run import run
from dpfed.training.run_folder.files import CONFIG, read_result
from dpfed.training.run_folder.folder import fresh_folder, refuse_occupied
from dpfed.training.run_folder.resume import changes


@listing(Options)
def fine_tune(
    model: Any,
    train: Any,
    test: Any,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **options: Unpack[Options],
) -> TrainedModel:
    """Fine-tune a model across simulated clients with differential privacy.

    Args:
        model: A folder or hub name of a Hugging Face model, such a model, a torch module, or a
            name of `dpfed list models`. By default only the head of a sentence encoder is trained.
        train: Private records: a dictionary of columns, a data frame or a Hugging Face dataset with
            the columns `label` and `text` (and `text_pair`), `image` or `features`; a pair
            `(X, y)`; or a torch Dataset. A list or dictionary has one data set for each client.
            A language model reads `text`, `prompt` and `completion`, or `messages`, without labels.
        test: Public records of the server, with the same columns.
        out: Folder of the run; default: a new one under runs/.
        resume: True to continue the run in `out` if there is one.
        callbacks: Objects that watch the run.
        progress: Show notes, rounds and the work inside a round.
        options: What is trained, on what terms; see `Options`.

    Mistakes raise `dpfed.DpfedError`; warnings are issued as `dpfed.DpfedWarning`.
    """
    with python_phrases():
        refuse_tokenizer(model, options.get("tokenizer"))
        source = source_of(train, test, options.get("classes"), task_of(options))
        config = configured(options, model, source)
        folder = _folder(out, resume, config)
        if resume:
            config = as_begun(config, options, folder)
        start = _Start(model, options.get("tokenizer"), source, folder, resume)
        metric = options.get("metric")
        with given_metric(metric if callable(metric) else None):
            return start.trained(config, callbacks, progress)


def _folder(out: str | Path | None, resume: bool, config: Config) -> Path:
    if out is None and resume:
        raise DpfedError("resume = True needs out, the folder of the run that goes on")
    return fresh_folder(config) if out is None else Path(out)


@dataclass(frozen=True)
class _Start:
    """Everything that a run begins with, besides its configuration.

    model, tokenizer  as they were given
    source            the data
    folder            the run folder
    resume            True to continue the run in the folder if there is one
    """

    model: Any
    tokenizer: Any
    source: Source
    folder: Path
    resume: bool

    def trained(
        self, config: Config, callbacks: Sequence[Callback], progress: bool
    ) -> TrainedModel:
        """Return the finished run; train it first, unless it is to be resumed and has finished."""
        if isinstance(self.model, str | Path):
            return self._run(config, callbacks, progress)
        base = base_folder(self.folder)
        begun = self._begun and base.is_dir()
        if not begun:
            refuse_occupied(self.folder, force=False)
            # The saved model makes it possible to repeat and to resume the run.
            base = save_model(self.model, self.tokenizer, self.folder, config)
        config = replace(config, model=replace(config.model, weights=str(base)))
        try:
            return self._run(config, callbacks, progress)
        finally:
            # Remove the saved model if an error stopped the run before it began.
            if not (self.folder / CONFIG).exists():
                shutil.rmtree(base)

    @property
    def _begun(self) -> bool:
        return self.resume and (self.folder / CONFIG).is_file()

    def _run(self, config: Config, callbacks: Sequence[Callback], progress: bool) -> TrainedModel:
        module = self.model if is_plain_module(self.model) else None
        mode: Mode = "resume" if self._begun else "new"
        if mode == "resume" and self._finished(config):
            return TrainedModel(self.folder, read_result(self.folder), module)
        with ExitStack() as stack:
            stack.enter_context(given_module(module))
            watchers = [*callbacks, OnStart(lambda job: warn_user(job.warnings))]
            if progress:
                display = ProgressDisplay(config.run.rounds, show_warnings=False)
                watchers.insert(0, stack.enter_context(display))
            result = run(config, self.folder, mode, self.source, watchers)
        warn_user(result_warnings(result))
        return TrainedModel(self.folder, result, module)

    def _finished(self, config: Config) -> bool:
        """Return True if the run in the folder has finished with this very configuration."""
        finished = read_result(self.folder).get("state") == "finished"
        return finished and not changes(self.folder, config)
