"""Copy the folder of a finished run, together with the model in memory that it began with."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from dpfed.api.memory_model import base_folder
from dpfed.config import load, to_toml
from dpfed.privacy.ledger.private_files import restrict_tree
from dpfed.registry import registry
from dpfed.training.run_folder.atomic_file import short_errors, write_file
from dpfed.training.run_folder.files import CHECKPOINTS, CONFIG
from dpfed.training.run_folder.folder import LOCK, refuse_occupied


def copy_run(source: Path, out: Path) -> None:
    """Copy a run folder to the new folder `out`, without checkpoints.

    If the run began with a model in memory, its weights are copied to a folder beside `out`.
    """
    refuse_occupied(out, force=False)
    config = load(source / CONFIG, [], registry())
    base = base_folder(source)
    begins_here = config.model.weights is not None and Path(config.model.weights) == base
    leave_out = shutil.ignore_patterns(CHECKPOINTS, LOCK)
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
