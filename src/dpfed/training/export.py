"""Export the trained model of a run, as an adapter for peft or a whole model for transformers.

The export contains a spending record: a file that states the privacy spent on the weights. A later
run that starts from these weights counts this spending. The export also contains tokenizer or image
processor, class names and generation settings, so that plain `transformers` repeats the run's
predictions.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpfed.config import Config, load
from dpfed.errors import DpfedError, phrase
from dpfed.model.build import AssembledModel, assemble
from dpfed.model.export_files import Companions, Reading
from dpfed.model.frozen.quantised import has_quantised
from dpfed.model.parameter_vector import Space
from dpfed.model.target_units import can_convert, to_user_unit
from dpfed.model.task import InputSpec
from dpfed.privacy.noise import Streams
from dpfed.registry import registry
from dpfed.training.budget.prior_spending import SPENDING, spending_of
from dpfed.training.budget.recorded_spending import RecordedSpending, read_recorded_spending
from dpfed.training.budget.release import NO_PRIVACY
from dpfed.training.job.model import block_rules
from dpfed.training.run_folder.atomic_file import short_errors, write_file
from dpfed.training.run_folder.embedded_record import embed
from dpfed.training.run_folder.files import CONFIG, MODEL, read_result

# File name of the configuration beside an adapter. It must not be config.json, because transformers
# would take the folder for a whole model.
ADAPTED_CONFIG = "model_config.json"
PROBLEM_TYPES = {
    "classify": "single_label_classification",
    "regress": "regression",
    "multilabel": "multi_label_classification",
}


@dataclass(frozen=True)
class Trained:
    """A finished run that was read from its folder, with its trained model.

    config    the configuration of the run
    result    the content of run.json
    spec      kind, shape and labels of the inputs
    parts     the model with its trained weights
    accounts  the privacy spending in the run's ledger; None for a run without privacy
    """

    config: Config
    result: dict[str, Any]
    spec: InputSpec
    parts: AssembledModel
    accounts: RecordedSpending | None

    @cached_property
    def companions(self) -> Companions:
        """The files that the export contains besides the weights, such as a tokenizer."""
        data = self.config.data
        reading = Reading(getattr(data, "size", None), getattr(data, "colour", "rgb") == "grey")
        found = self.parts.built.companions(reading)
        if self.spec.task != "regress" or can_convert(self.parts.adapted.model, self.parts.head):
            return found
        unit = f"A predicted number is {self.spec.scale} * output + {self.spec.center}."
        return replace(found, notes=(*found.notes, unit))

    @property
    def spending_record(self) -> str:
        """The file content that states the privacy spent on the trained weights, as JSON text."""
        realised = self.accounts.realised if self.accounts else None
        return json.dumps(spending_of(self.result["release"], realised), indent=1)


def run_settings(folder: Path) -> tuple[Config, dict[str, Any], InputSpec]:
    """Read configuration, result and input description of a finished run from its folder."""
    if not (folder / CONFIG).is_file():
        raise DpfedError(f"{folder} is not the folder of a run: {phrase('a run folder')}")
    config = load(folder / CONFIG, [], registry())
    result = read_result(folder)
    try:
        spec = _input_of(result)
        # Raise KeyError here if the result has no release note, because the file is then damaged.
        _ = result["release"]
    except (KeyError, TypeError):
        raise DpfedError(
            f"the run in {folder} has no result yet: let it finish, or "
            f"{phrase('resume').format(folder)}"
        ) from None
    return config, result, spec


def read_run(folder: Path) -> Trained:
    """Read configuration, result, trained model and ledger of a run from its folder."""
    config, result, spec = run_settings(folder)
    parts = _assembled(config, spec)
    with torch.no_grad():
        for name, value in trained_tensors(folder, parts.space).items():
            parts.adapted.model.get_parameter(name).copy_(value)
    private = result["release"] != NO_PRIVACY
    return Trained(config, result, spec, parts, read_recorded_spending(folder) if private else None)


def _input_of(result: dict[str, Any]) -> InputSpec:
    return InputSpec(**{**result["input"], "shape": tuple(result["input"]["shape"])})


def _assembled(config: Config, spec: InputSpec) -> AssembledModel:
    """Return the untrained model of a run: its initial weights, from the run's seed."""
    streams = Streams(config.run.seed)
    seeds = (streams.number("init"), streams.number("init", 1))
    return assemble(config.model, spec, seeds, **block_rules(config))


def trained_tensors(folder: Path, space: Space) -> dict[str, Tensor]:
    """Return the trained tensors of a run by name.

    Raise DpfedError if their names or shapes differ from those of the model, which `space` lists.
    """
    path = folder / MODEL
    try:
        trained = load_file(path)
    except (OSError, SafetensorError):
        raise DpfedError(
            f"{path} is missing or damaged: the trained weights cannot be read"
        ) from None
    shapes = dict(zip(space.names, space.shapes, strict=True))
    for name in [*shapes, *trained]:
        if name not in trained or shapes.get(name) != trained[name].shape:
            raise DpfedError(f"{path} does not fit the model of its own configuration: see {name}")
    return trained


def export(trained: Trained, out: Path, merge: bool = False) -> str:
    """Write the trained model to `out`, a new or empty folder; return "adapter" or "model".

    merge  True: add a LoRA adapter to its base weights, and write a whole model
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DpfedError(f"{out} is not empty: choose a new folder")
    if merge and trained.config.model.train != "lora":
        raise DpfedError(
            f"{phrase('merge')} joins an adapter with its base; "
            f"model.train = {trained.config.model.train!r} has none"
        )
    if merge:
        trained = _with_plain_base(trained)
    peft = trained.parts.adapted.peft
    record = trained.spending_record
    configure(trained)
    kind = "model"
    with short_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        # Write the spending record before the weights, so that no weights exist without a record of
        # their privacy after a crash.
        _write_text(out / SPENDING, record)
        if peft is None:
            _save_whole(trained.parts.adapted.model, out, trained)
        elif merge:
            _save_whole(peft.merge_and_unload(), out, trained)
        else:
            kind = "adapter"
            _save_adapter(peft, out, trained)
        embed(out, record)
        for processor in trained.companions.saved:
            processor.save_pretrained(str(out))
        for name, text in trained.companions.files.items():
            _write_text(out / name, text)
    return kind


def _with_plain_base(trained: Trained) -> Trained:
    """Return the run with its base weights unquantised, as the hub or the local folder has them.

    If the sum of base and adapter were stored in four bits, it would be rounded again.
    """
    section: Any = trained.config.model
    if getattr(section, "quantize", "none") == "none":
        if has_quantised(trained.parts.adapted.model):
            raise DpfedError(
                "the weights of this run's base are quantised, and a merged model would round the "
                "adapter: export the adapter alone"
            )
        return trained
    config = replace(trained.config, model=replace(section, quantize="none"))
    parts = _assembled(config, trained.spec)
    with torch.no_grad():
        for name in parts.space.names:
            value = trained.parts.adapted.model.get_parameter(name)
            parts.adapted.model.get_parameter(name).copy_(value)
    return replace(trained, config=config, parts=parts)


def configure(trained: Trained) -> None:
    """Add class names and model-specific entries to the exported model's configuration.

    Call this only once: for regression it also changes the model's head, which then predicts in the
    unit of the user's labels.
    """
    config = getattr(trained.parts.adapted.model, "config", None)
    if config is None:
        return
    # Only a model with a classification head has class names. A language model has none.
    if trained.parts.built.head:
        classes = trained.result["classes"]
        config.id2label = dict(enumerate(classes))
        config.label2id = {name: i for i, name in enumerate(classes)}
        # The pipelines of transformers choose softmax, sigmoid or the raw output by this value.
        config.problem_type = PROBLEM_TYPES[trained.spec.task]
        if trained.spec.task == "regress":
            to_user_unit(trained.parts.adapted.model, trained.parts.head, trained.spec)
    for key, value in trained.companions.config.items():
        setattr(config, key, value)


def _save_adapter(peft: Any, out: Path, trained: Trained) -> None:
    for adapter in peft.peft_config.values():
        adapter.base_model_name_or_path = base_of(trained.config)
        adapter.inference_mode = True
    # With save_embedding_layers=False, peft does not ask the hub about the base model.
    peft.save_pretrained(str(out), save_embedding_layers=False)
    # Delete the model card that peft has written, because it says nothing about privacy.
    (out / "README.md").unlink(missing_ok=True)
    model: Any = trained.parts.adapted.model
    if hasattr(model, "config") and trained.parts.built.head:
        model.config.architectures = [type(model).__name__]
        _write_text(out / ADAPTED_CONFIG, model.config.to_json_string())


def base_of(config: Config) -> str | None:
    """Return the hub name or absolute path of the base model; None if its weights were random.

    The path is absolute, because transformers could take the name of a folder for a name on the
    hub.
    """
    section: Any = config.model
    weights = section.chosen() if hasattr(section, "chosen") else section.weights
    if weights is None or weights == "random":
        return None
    path = Path(weights).expanduser()
    return os.path.abspath(path) if path.exists() else str(weights)


def _save_whole(model: Any, out: Path, trained: Trained) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(str(out))
        return
    tensors = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    metadata = {"release": str(trained.result["release"])}
    save_file(tensors, out / "model.safetensors", metadata=metadata)


def _write_text(path: Path, text: str) -> None:
    write_file(path, lambda file: file.write(text.encode()), for_release=True)
