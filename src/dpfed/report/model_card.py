"""The model card: what was trained, on what, how well it does, and what its privacy means.

It is made to be published, so it holds the plan's figures (a client in every round; a third party) and nothing that says
who took part (SPEC 6.2 b): no seed, no cohort, no client's own epsilon.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpfed.config import Config
from dpfed.model.export_files import Companions
from dpfed.privacy.accounting.guarantee import NOT_COVERED, PUBLIC
from dpfed.privacy.published import show_delta, show_loss, show_score
from dpfed.text import counted
from dpfed.training.budget.recorded_spending import RecordedSpending
from dpfed.training.budget.release import NO_PRIVACY, SEEDED
from dpfed.training.export import ADAPTED_CONFIG, base_of, export, read_run
from dpfed.training.job.notes import dealt_note
from dpfed.training.run_folder.atomic_file import write_file

SCORES = ("precision", "recall", "f1")
OWN = ("gn-resnet18", "linear")  # models of this program's own making, which start at random


def model_card(
    config: Config,
    result: dict[str, Any],
    accounts: RecordedSpending | None,
    kind: str,
    companions: Companions,
) -> str:
    """Markdown with the front matter that model hubs read."""
    title = f"# {config.model.name}, fine-tuned on {config.data.name}\n"
    parts = [_front(config, kind), title, _release(result, accounts)]
    parts += [_privacy(config, accounts), _training(config, result), _scores(result)]
    parts += [_use(config, result["input"]["kind"], kind, companions)]
    return "\n".join(parts)


def _front(config: Config, kind: str) -> str:
    weights = config.model.weights
    named = weights is not None and weights != "random" and not Path(weights).expanduser().exists()
    lines = ["---"]
    lines += [f"base_model: {weights}"] if named else []  # a folder here means nothing elsewhere
    lines += ["library_name: peft"] if kind == "adapter" else []
    return "\n".join([*lines, "tags: [differential-privacy, federated-learning, dpfed]", "---", ""])


def _release(result: dict[str, Any], accounts: RecordedSpending | None) -> str:
    if result["release"].startswith(SEEDED) or (accounts is not None and accounts.seeded):
        return "> **Not for release.** The noise was seeded, so that whoever knows the seed can remove it.\n"
    if result["release"] == NO_PRIVACY:
        return "> **No privacy.** This model was trained without differential privacy.\n"
    return ""


def _privacy(config: Config, accounts: RecordedSpending | None) -> str:
    if accounts is None:
        return "## Privacy\n\nNone: nothing in this model's training is protected.\n"
    planned = accounts.planned
    secret = accounts.void or "it holds while nobody outside knows who took part"
    return "\n".join(
        [
            "## Privacy\n",
            f"Protected unit: one {planned.unit} of one client, {planned.kinds[0].adjacency}.\n",
            "| who | sees | epsilon |",
            "|---|---|---|",
            f"| the server | every message, and who took part | {show_loss(accounts.server_worst)} |",
            f"| a third party | the global models only | {show_loss(accounts.third_party)} |",
            "",
            f"delta = {show_delta(planned.delta)} for both. "
            "The server's figure is for a client that takes part in every round. "
            f"Of the third party's: {secret}.\n",
            f"- {planned.assumptions()}",
            *(f"- {note}" for note in ([] if accounts.served else dealt_note(config))),
            f"- clip norm {config.privacy.clip:g} ({config.privacy.clip_mode}), one norm over all trainable numbers",
            f"- assumed public: {PUBLIC}",
            f"- not covered: {NOT_COVERED}",
            "- epsilon excludes any tuning of settings on these data\n",
        ]
    )


def _training(config: Config, result: dict[str, Any]) -> str:
    run, data = config.run, config.data
    held = f"{data.name}, {counted(result['clients'], 'client')}, partition {data.partition}"
    if result.get("served"):
        held = f"kept by {counted(result['clients'], 'client')}"
    return "\n".join(
        [
            "## Training\n",
            f"- method: {result['algorithm']}, learning rate {config.algorithm.lr:g}",
            f"- data: {held}",
            f"- {result['rounds']} of {counted(run.rounds, 'round')}, "
            f"{counted(run.local_steps, 'local step')}, {run.participation:.0%} of the clients "
            "in each round",
            f"- trained: {config.model.train}, {counted(result['parameters'], 'number')}\n",
        ]
    )


def _scores(result: dict[str, Any]) -> str:
    found = result.get("metrics") or {}
    lines = ["## Results on the server's public test set\n"]
    accuracy = found.get(
        "accuracy", result["test_accuracy"]
    )  # a stopped run may end between two evaluations
    if accuracy is not None:
        start = show_score(result["start_accuracy"], 4)
        lines.append(f"- accuracy {show_score(accuracy, 4)} (before training {start})")
    for key, name in (("f1", "F1"), ("macro_f1", "macro F1")):
        if key in found:
            lines.append(f"- {name} {show_score(found[key], 4)}")
    if "one_answer" in found:
        lines.append(
            f"- every record is taken for {found['one_answer']}: the model does not tell classes apart"
        )
    rows = found.get("per_class", {})
    if rows and len(rows) <= 50:
        lines += ["", "| class | precision | recall | F1 | records |", "|---|---|---|---|---|"]
        lines += [
            f"| {name} | {' | '.join(show_score(s[key]) for key in SCORES)} | {s['support']} |"
            for name, s in rows.items()
        ]
    return "\n".join([*lines, ""])


def _use(config: Config, inputs: str, kind: str, companions: Companions) -> str:
    """How to load the export with plain transformers and peft."""
    use = _use_adapter if kind == "adapter" else _use_whole
    how = f"{use(config, inputs, companions)}{_entering(config)}"
    return "\n".join(["## Use\n", how, *(f"\n{note}" for note in companions.notes), ""])


def _auto(config: Config, inputs: str) -> tuple[str, str]:
    """Return the class of transformers and the task of its pipeline that fit the model."""
    if getattr(config.model, "causal", False):
        return "AutoModelForCausalLM", "text-generation"
    if inputs == "text":
        return "AutoModelForSequenceClassification", "text-classification"
    return "AutoModelForImageClassification", "image-classification"


def _use_whole(config: Config, inputs: str, companions: Companions) -> str:
    if config.model.name in OWN:
        return "The tensors are in `model.safetensors`."
    trust = ", trust_remote_code=True" if companions.has_code else ""
    task = _auto(config, inputs)[1]
    call = f'model = pipeline("{task}", "this folder"{trust})'
    return f"```python\nfrom transformers import pipeline\n\n{call}\n```\n"


def _use_adapter(config: Config, inputs: str, companions: Companions) -> str:
    lines = ["```python", "from peft import PeftModel"]
    if config.model.name in OWN:
        lines += ["", 'model = PeftModel.from_pretrained(base_model, "this folder")']
    else:
        lines += _adapter_pipeline(config, inputs, companions)
    return "\n".join([*lines, "```\n", f"`base_model` is {_base(config)}."])


def _adapter_pipeline(config: Config, inputs: str, companions: Companions) -> list[str]:
    """Return the lines of code that join an adapter with its base in a pipeline."""
    auto, task = _auto(config, inputs)
    part = "image_processor" if inputs == "image" else "tokenizer"
    trust = ", trust_remote_code=True" if companions.has_code else ""
    if getattr(config.model, "causal", False):
        lines = [f"from transformers import {auto}, pipeline", ""]
        options = ""
    elif companions.model_class is not None:
        auto = "Model"
        lines = [
            "from transformers import pipeline",
            "from transformers.dynamic_module_utils import get_class_from_dynamic_module",
            "",
            f'Model = get_class_from_dynamic_module("{companions.model_class}", "this folder")',
            f'config = Model.config_class.from_pretrained("this folder/{ADAPTED_CONFIG}")',
        ]
        options = ", config=config, ignore_mismatched_sizes=True"
    else:
        lines = [f"from transformers import AutoConfig, {auto}, pipeline", ""]
        lines.append(f'config = AutoConfig.from_pretrained("this folder/{ADAPTED_CONFIG}")')
        options = ", config=config, ignore_mismatched_sizes=True"
    return [
        *lines,
        f"base = {auto}.from_pretrained(base_model{options})",
        'joined = PeftModel.from_pretrained(base, "this folder").merge_and_unload()',
        f'model = pipeline("{task}", joined, {part}="this folder"{trust})',
    ]


def _entering(config: Config) -> str:
    """What is done to images that others would not do by themselves."""
    resize, sharpen = (
        getattr(config.model, "resize", "bilinear"),
        getattr(config.model, "sharpen", 0.0),
    )
    if resize == "bilinear" and not sharpen:
        return ""
    said = f" Images are resized {'bicubically' if resize == 'bicubic' else 'bilinearly'} to the size of the model"
    if sharpen:
        said += f", then sharpened: x + {sharpen:g} times (x - x blurred by 1 4 6 4 1 along each side), cut to the range"
    return f"{said}, before mean and standard deviation are taken off."


def _base(config: Config) -> str:
    weights = config.model.weights
    if base_of(config) is None:
        return (
            f"{config.model.name} with the random weights of that run, which only `--merge` exports"
        )
    path = Path(weights).expanduser() if weights is not None else None
    if path is not None and not path.exists():
        return f"`{weights}`"
    name = (
        f"a copy of `{path.resolve().name}`"
        if path
        else f"{config.model.name} as it comes with dpfed"
    )
    return (
        f"{name}: give the folder of your own copy. `base_model_name_or_path` in `adapter_config.json` "
        "is the path of that folder on the machine that trained; change it before you publish this folder"
    )


def write_export(run: Path, out: Path, merge: bool = False) -> str:
    """Model and card in one new folder; returns "adapter" or "model"."""
    trained = read_run(run)
    kind = export(trained, out, merge)
    card = model_card(trained.config, trained.result, trained.accounts, kind, trained.companions)
    write_file(out / "README.md", lambda file: file.write(card.encode()), for_release=True)
    return kind
