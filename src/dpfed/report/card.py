"""The model card: what was trained, on what, how well it does, and what its privacy means.

It is made to be published, so it holds the plan's figures (a client in every round; a third party) and nothing that says
who took part (SPEC 6.2 b): no seed, no cohort, no client's own epsilon.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpfed.config import Config
from dpfed.engine.accounts import NO_PRIVACY, SEEDED, Accounts
from dpfed.engine.durable import write_file
from dpfed.engine.export import export, name_elsewhere, read_run
from dpfed.engine.setup import dealt_note
from dpfed.privacy.statement import NOT_COVERED, PUBLIC
from dpfed.text import counted

OWN = ("gn-resnet18", "linear")  # models of this program's own making, which start at random


def model_card(config: Config, result: dict[str, Any], accounts: Accounts | None, kind: str) -> str:
    """Markdown with the front matter that model hubs read."""
    title = f"# {config.model.name}, fine-tuned on {config.data.name}\n"
    parts = [_front(config, kind), title, _release(result, accounts)]
    parts += [_privacy(config, accounts), _training(config, result), _scores(result), _use(config, kind)]
    return "\n".join(parts)


def _front(config: Config, kind: str) -> str:
    weights = config.model.weights
    named = weights is not None and weights != "random" and not Path(weights).expanduser().exists()
    lines = ["---"]
    lines += [f"base_model: {weights}"] if named else []  # a folder here means nothing elsewhere
    lines += ["library_name: peft"] if kind == "adapter" else []
    return "\n".join([*lines, "tags: [differential-privacy, federated-learning, dpfed]", "---", ""])


def _release(result: dict[str, Any], accounts: Accounts | None) -> str:
    if result["release"].startswith(SEEDED) or (accounts is not None and accounts.seeded):
        return "> **Not for release.** The noise was seeded, so that whoever knows the seed can remove it.\n"
    if result["release"] == NO_PRIVACY:
        return "> **No privacy.** This model was trained without differential privacy.\n"
    return ""


def _privacy(config: Config, accounts: Accounts | None) -> str:
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
            f"| the server | every message, and who took part | {accounts.server_worst:.3f} |",
            f"| a third party | the global models only | {accounts.third_party:.3f} |",
            "",
            f"delta = {planned.delta:g} for both. The server's figure is for a client that takes part in every round. "
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
    accuracy = found.get("accuracy", result["test_accuracy"])  # a stopped run may end between two evaluations
    if accuracy is not None:
        lines.append(f"- accuracy {accuracy:.4f} (before training {result['start_accuracy']:.4f})")
    for key, name in (("f1", "F1"), ("macro_f1", "macro F1")):
        if key in found:
            lines.append(f"- {name} {found[key]:.4f}")
    if "one_answer" in found:
        lines.append(f"- every record is taken for {found['one_answer']}: the model does not tell classes apart")
    rows = found.get("per_class", {})
    if rows and len(rows) <= 50:
        lines += ["", "| class | precision | recall | F1 | records |", "|---|---|---|---|---|"]
        lines += [
            f"| {name} | {s['precision']:.3f} | {s['recall']:.3f} | {s['f1']:.3f} | {s['support']} |"
            for name, s in rows.items()
        ]
    return "\n".join([*lines, ""])


def _use(config: Config, kind: str) -> str:
    if kind != "adapter":
        known = config.model.name not in OWN
        how = "Load this folder with `from_pretrained`." if known else "The tensors are in `model.safetensors`."
        return f"## Use\n\n{how}{_entering(config)}\n"
    return (
        '## Use\n\n```python\nfrom peft import PeftModel\n\nmodel = PeftModel.from_pretrained(base_model, "this folder")\n```\n\n'
        f"`base_model` is {_base(config)}, with a head for as many classes as there are here.{_entering(config)}\n"
    )


def _entering(config: Config) -> str:
    """What is done to images that others would not do by themselves."""
    resize, sharpen = getattr(config.model, "resize", "bilinear"), getattr(config.model, "sharpen", 0.0)
    if resize == "bilinear" and not sharpen:
        return ""
    said = f" Images are resized {'bicubically' if resize == 'bicubic' else 'bilinearly'} to the size of the model"
    if sharpen:
        said += (
            f", then sharpened: x + {sharpen:g} times (x - x blurred by 1 4 6 4 1 along each side), cut to the range"
        )
    return f"{said}, before mean and standard deviation are taken off."


def _base(config: Config) -> str:
    weights = config.model.weights
    if weights == "random" or (weights is None and config.model.name in OWN):
        return f"{config.model.name} with the random weights of that run, which only `--merge` exports"
    if weights is None:
        return f"{config.model.name} as it comes with dpfed"
    return f"`{name_elsewhere(weights)}`"


def write_export(run: Path, out: Path, merge: bool = False) -> str:
    """Model and card in one new folder; returns "adapter" or "model"."""
    trained = read_run(run)
    kind = export(trained, out, merge)
    card = model_card(trained.config, trained.result, trained.accounts, kind)
    write_file(out / "README.md", lambda file: file.write(card.encode()))
    return kind
