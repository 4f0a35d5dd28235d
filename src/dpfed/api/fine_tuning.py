"""`dpfed.fine_tune`: fine-tune a model across simulated clients with differential privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from dpfed.api.configuring import as_begun, is_plain_module, prepared
from dpfed.api.memory_model import (
    base_folder,
    identity_of,
    model_beside,
    refuse_other_records,
    write_identity,
)
from dpfed.api.options import Options, listing
from dpfed.api.settings import tables_of
from dpfed.api.trained_model import TrainedModel
from dpfed.api.words import in_python, python_words, refuse_arguments
from dpfed.config import Config
from dpfed.data.tables import Source
from dpfed.errors import warn_user
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
        model: The folder or hub name of a Hugging Face model, a loaded Hugging Face model, a torch
            module, or a name from `dpfed list models`. Of a sentence encoder, only the head (last
            layer) is trained by default.
        train: Private records: a dictionary of columns, a data frame or a Hugging Face dataset with
            the columns `label` and `text` (and `text_pair`), `image` or `features`; a pair
            `(X, y)`; or a torch Dataset. A list or dictionary has one data set for each client.
            A language model reads `text`, `prompt` and `completion`, or `messages`, without labels.
        test: Public records of the server, with the same columns.
        out: Folder of the run; default: a new one under runs/.
        resume: True to continue the run in `out` if there is one.
        callbacks: Objects of subclasses of `dpfed.Callback`, which are called during the run.
        progress: True to show notes, and a progress bar for the rounds.
        options: Other keywords, such as clients, epsilon and rounds; see `Options`.

    Wrong arguments raise `dpfed.DpfedError`; warnings are issued as `dpfed.DpfedWarning`.
    """
    with python_words(options, model):
        refuse_arguments(out, callbacks, progress, resume)
        source, config = prepared(model, train, test, options)
        folder = fresh_folder(config) if out is None else Path(out)
        if resume:
            config = as_begun(config, tables_of(options), folder)
        resume = resume and _has_begun(folder, model)
        if not resume:
            refuse_occupied(folder, force=False)
        module = model if is_plain_module(model) else None
        metric = options.get("metric")
        with (
            model_beside(model, options.get("tokenizer"), folder, config, CONFIG, resume) as config,
            given_metric(metric if callable(metric) else None),
            given_module(module),
        ):
            result = _trained(config, folder, source, resume, callbacks, progress)
        return TrainedModel(folder, result, module)


def _has_begun(folder: Path, model: Any) -> bool:
    """Return True if `folder` has a run that can be resumed.

    If the program passed a model object, its weights must also be saved beside the folder.
    """
    has_weights = isinstance(model, str | Path) or base_folder(folder).is_dir()
    return (folder / CONFIG).is_file() and has_weights


def _trained(
    config: Config,
    folder: Path,
    source: Source,
    resume: bool,
    callbacks: Sequence[Callback],
    progress: bool,
) -> Mapping[str, Any]:
    """Train, and return the result of the run. With `resume`, continue the run in `folder`."""
    mode: Mode = "resume" if resume else "new"
    identity = identity_of(None, source)
    if resume:
        refuse_other_records(folder, identity)
        stored = read_result(folder)
        if stored.get("state") == "finished" and not changes(folder, config):
            return stored
    with ExitStack() as stack:
        watchers = [*callbacks, OnStart(lambda job: warn_user(in_python(job.warnings)))]
        # A hash confirms a guess of the records. A folder whose model may be released has none.
        if config.run.noise != "os":
            watchers.append(OnStart(lambda job: write_identity(folder, identity)))
        if progress:
            display = ProgressDisplay(config.run.rounds, show_warnings=False)
            watchers.insert(0, stack.enter_context(display))
        result = run(config, folder, mode, source, watchers)
    warn_user(in_python(result_warnings(result)))
    return result
