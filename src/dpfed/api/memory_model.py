"""Store a model object that a program passed, and a hash of its records, beside a run folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from dpfed.api.configuring import is_plain_module
from dpfed.config import Config, load, to_toml
from dpfed.data.tables import Source
from dpfed.errors import DpfedError
from dpfed.model.zoo.hub import HubSilentError
from dpfed.privacy.ledger.private_files import restrict_tree
from dpfed.registry import registry
from dpfed.training.budget.prior_spending import checked, record_of, write_record
from dpfed.training.run_folder.atomic_file import short_errors, write_file
from dpfed.training.run_folder.files import CHECKPOINTS, CONFIG, read_object
from dpfed.training.run_folder.folder import LOCK, refuse_occupied

# Name of an attribute that is set on a model object. Its value is the record of the privacy that
# the model's training has spent so far.
SPENT = "dpfed_spending"
# File in a run folder. It has a hash of the records that a program has passed to `fine_tune`.
RECORDS = "records.json"


def refuse_tokenizer(model: Any, tokenizer: Any) -> None:
    """Raise DpfedError for a tokenizer together with a model that does not use it."""
    if tokenizer is not None and is_plain_module(model):
        raise DpfedError(
            "tokenizer is for a language model, and model is a torch module: leave it out"
        )
    if tokenizer is not None and isinstance(model, str | Path):
        raise DpfedError(
            f"tokenizer is for a model in memory, and model = {str(model)!r} has its own: "
            "leave it out, or give model.tokenizer in settings"
        )


def base_folder(out: Path) -> Path:
    """Return the folder beside the run folder `out` that holds the weights of a model object."""
    return out.with_name(out.name + "-base")


@contextmanager
def model_beside(
    model: Any, tokenizer: Any, folder: Path, config: Config, begun: str, resume: bool = True
) -> Iterator[Config]:
    """Save a model object beside the run folder; yield the configuration with the path of the copy.

    The saved model is needed to repeat or resume the run. It is removed if an error stops the run
    before it has begun. If the user gave the model by name or path, yield `config` unchanged.

    begun   name of a file that is in `folder` as soon as the run has begun
    resume  True to use the weights that an earlier call has saved
    """
    refuse_tokenizer(model, tokenizer)
    if isinstance(model, str | Path):
        yield config
        return
    base = base_folder(folder)
    if not (resume and (folder / begun).is_file() and base.is_dir()):
        save_model(model, tokenizer, folder, config)
    try:
        yield replace(config, model=replace(config.model, weights=str(base)))
    finally:
        if not (folder / begun).exists():
            shutil.rmtree(base, ignore_errors=True)


def save_model(model: Any, tokenizer: Any, folder: Path, config: Config) -> Path:
    """Save a model object in a new folder beside the run folder, and return the new folder.

    If earlier training of the model has spent privacy, save the record of this spending, too.
    """
    if not hasattr(model, "save_pretrained") and not is_plain_module(model):
        advice = ": give its .model" if hasattr(model, "model") else ""
        raise DpfedError(
            "model must be a name, a folder, a Hugging Face model or a torch module, "
            f"not {type(model).__name__}{advice}"
        )
    if hasattr(config.model, "tokenizer") and config.model.tokenizer is None and tokenizer is None:
        raise DpfedError(
            "a language model in memory needs its tokenizer: "
            "fine_tune(model, ..., tokenizer=tokenizer)"
        )
    base = base_folder(folder)
    if base.exists():
        raise DpfedError(f"{base} exists: choose another out")
    # Read the record of earlier privacy spending first. If it is damaged, nothing has been written
    # yet.
    record = _spending_record(model)
    # Write the record before the weights, so that no weights exist without it. The second call
    # below embeds the record in the file of the weights.
    if record is not None:
        write_record(base, record)
    _write_weights(model, base)
    if record is not None:
        write_record(base, record)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(base))
    return base


def _write_weights(model: Any, base: Path) -> None:
    if not is_plain_module(model):
        model.save_pretrained(str(base))
        return
    base.mkdir(parents=True, exist_ok=True)
    # Copy each tensor, because safetensors refuses tensors that share memory.
    state = {name: x.detach().cpu().contiguous().clone() for name, x in model.state_dict().items()}
    save_file(state, base / "model.safetensors")


def _spending_record(model: Any) -> str | None:
    """Return the record of the privacy that a model's training has spent; None if unknown.

    The record comes from the run that trained the model in this program, or from the files that
    the model was loaded from.
    """
    stored = getattr(model, SPENT, None)
    if stored is not None:
        return checked(stored, "the model in memory").text
    origin = str(getattr(model, "name_or_path", None) or "")
    try:
        record = record_of(origin) if origin else None
    except HubSilentError:
        # The Hugging Face hub does not answer, so it is unknown if the weights have a record. The
        # run then reports that its epsilons do not count earlier training.
        return None
    return record.text if record else None


def refuse_other_records(folder: Path, identity: str) -> None:
    """Raise DpfedError if the run in `folder` began with records of another hash."""
    stored = read_object(folder / RECORDS).get("identity", identity)
    if stored != identity:
        raise DpfedError(
            f"the run in {folder} began with other records: give it train and test as they were, "
            "or choose another out"
        )


def write_identity(folder: Path, identity: str) -> None:
    """Store the hash of the records that a run begins with."""
    text = json.dumps({"identity": identity})
    write_file(folder / RECORDS, lambda file: file.write(text.encode()))


def identity_of(model: Any, source: Source) -> str:
    """Return a hash of the records and the model.

    It changes with any record, label, class name or weight.
    """
    hash = hashlib.sha256(repr((source.kind, source.classes, source.white)).encode())
    for table in (source.train, source.test):
        arrays = {**table.inputs, "labels": table.labels, **table.columns}
        for name, array in sorted(arrays.items()):
            _add(hash, name, array)
    if isinstance(model, str | Path):
        hash.update(str(model).encode())
    elif hasattr(model, "state_dict"):
        hash.update(repr(model).encode())
        for name, tensor in model.state_dict().items():
            _add(hash, name, tensor.detach().cpu().float().numpy())
    return hash.hexdigest()[:16]


def _add(hash: Any, name: str, array: np.ndarray) -> None:
    hash.update(repr((name, array.dtype.str, array.shape)).encode())
    if array.dtype == object:
        # An array of Python objects has only pointers as bytes, so hash the text of its values.
        hash.update(repr(array.tolist()).encode())
    else:
        hash.update(np.ascontiguousarray(array).tobytes())


def copy_run(source: Path, out: Path) -> None:
    """Copy a run folder to the new folder `out`, without checkpoints.

    If the run began with a model object, its saved weights are copied to a folder beside `out`.
    """
    refuse_occupied(out, force=False)
    config = load(source / CONFIG, [], registry())
    base = base_folder(source)
    begins_here = config.model.weights is not None and Path(config.model.weights) == base
    leave_out = shutil.ignore_patterns(CHECKPOINTS, LOCK, RECORDS)
    with short_errors(out):
        shutil.copytree(source, out, ignore=leave_out, dirs_exist_ok=True)
        restrict_tree(out)
        if not begins_here:
            return
        shutil.copytree(base, base_folder(out))
    model = replace(config.model, weights=str(base_folder(out)))
    comments = [
        line for line in (out / CONFIG).read_text(encoding="utf-8").splitlines() if line[:1] == "#"
    ]
    text = "\n".join([*comments, to_toml(replace(config, model=model))])
    write_file(out / CONFIG, lambda file: file.write(text.encode()))
