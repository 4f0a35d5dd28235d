"""From the folder of a run to artefacts that others load: a peft adapter, or a whole model.

An adapter folder also holds `dpfed.json`, the plan's spending in a form that the next run reads (`model.adapter`), so that
what was spent on an adapter is not forgotten when training goes on. It states the worst case over clients, never who
took part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dpfed.config import Config, load
from dpfed.engine.accounts import NO_PRIVACY, Accounts, read_accounts
from dpfed.engine.durable import write_file
from dpfed.engine.folder import CONFIG, MODEL, RESULT
from dpfed.engine.prior import SPENDING, spending_of
from dpfed.engine.setup import block_rules
from dpfed.errors import DpfedError
from dpfed.model.assemble import Assembled, assemble
from dpfed.model.task import InputSpec
from dpfed.privacy.noise import Streams
from dpfed.registry import registry


@dataclass(frozen=True)
class Trained:
    """A finished (or stopped) run, rebuilt: the model carries its trained weights."""

    config: Config
    result: dict[str, Any]
    parts: Assembled
    accounts: Accounts | None  # None without privacy


def read_run(folder: Path) -> Trained:
    """The model of a run with its trained weights, and its statement as the ledger has it."""
    if not (folder / CONFIG).is_file():
        raise DpfedError(f"{folder} is not the folder of a run: give one that `dpfed run` has made")
    config = load(folder / CONFIG, [], registry())
    try:
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        private = result["release"] != NO_PRIVACY
        spec = InputSpec(**{**result["input"], "shape": tuple(result["input"]["shape"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise DpfedError(
            f"the run in {folder} has no result yet: let it finish, or `dpfed run --resume {folder}`"
        ) from None
    streams = Streams(config.run.seed)
    parts = assemble(config.model, spec, (streams.number("init"), streams.number("init", 1)), **block_rules(config))
    _load_trained(parts, folder / MODEL)
    return Trained(config, result, parts, read_accounts(folder) if private else None)


def _load_trained(parts: Assembled, path: Path) -> None:
    try:
        trained = load_file(path)
    except (OSError, SafetensorError):
        raise DpfedError(f"{path} is missing or damaged: the trained weights cannot be read") from None
    shapes = dict(zip(parts.space.names, parts.space.shapes, strict=True))
    for name in [*shapes, *trained]:
        if name not in trained or shapes.get(name) != trained[name].shape:
            raise DpfedError(f"{path} does not fit the model of its own configuration: see {name}")
    with torch.no_grad():
        for name, value in trained.items():
            parts.adapted.model.get_parameter(name).copy_(value)


def export(trained: Trained, out: Path, merge: bool = False) -> str:
    """Writes the model to an empty folder; returns what was written: "adapter" or "model"."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DpfedError(f"{out} is not empty: choose a new folder")
    if merge and trained.config.model.train != "lora":
        raise DpfedError(f'--merge joins an adapter with its base; train = "{trained.config.model.train}" has none')
    peft = trained.parts.adapted.peft
    spending = json.dumps(spending_of(trained.result["release"], trained.accounts), indent=1)
    try:
        out.mkdir(parents=True, exist_ok=True)
        # First, so that no adapter is ever without the record of what was spent on it.
        write_file(out / SPENDING, lambda file: file.write(spending.encode()), for_release=True)
        if peft is not None and not merge:
            _name_base(peft, trained.config)
            peft.save_pretrained(str(out), save_embedding_layers=False)  # else it asks the hub about the base
            (out / "README.md").unlink(missing_ok=True)  # peft's own card, which knows nothing of privacy
        else:
            _save_whole(peft.merge_and_unload() if peft is not None else trained.parts.adapted.model, out, trained)
    except OSError as error:
        raise DpfedError(f"{out} cannot be written: {error.strerror or error}") from None
    return "adapter" if peft is not None and not merge else "model"


def _name_base(peft: Any, config: Config) -> None:
    """The adapter says what it belongs to, but not where that lies on this machine."""
    for adapter in peft.peft_config.values():
        adapter.base_model_name_or_path = name_elsewhere(config.model.weights or config.model.name)
        adapter.inference_mode = True


def name_elsewhere(weights: str) -> str:
    """The name of a model on the hub as it is; of a folder its last part, because its path says where somebody works."""
    path = Path(weights).expanduser()
    return path.resolve().name if path.exists() else weights


def _save_whole(model: Any, out: Path, trained: Trained) -> None:
    classes = trained.result["classes"]
    if hasattr(model, "save_pretrained"):
        if trained.parts.built.head:  # a language model has no classes
            model.config.id2label = dict(enumerate(classes))
            model.config.label2id = {name: i for i, name in enumerate(classes)}
        model.save_pretrained(str(out))
    else:
        tensors = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
        save_file(tensors, out / "model.safetensors", metadata={"release": str(trained.result["release"])})
