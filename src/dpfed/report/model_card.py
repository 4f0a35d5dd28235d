"""The model card: the data, the quality and the privacy of a trained model.

The card may be published. It states the epsilon that was planned before the run. It contains
nothing that reveals the clients that took part: no seed, no cohort, no epsilon of a single client
(docs/privacy.md).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from dpfed.config import Config
from dpfed.errors import counted
from dpfed.model.export_files import Companions
from dpfed.model.given_module import GivenModule
from dpfed.privacy.published import show_delta, show_loss, show_number, show_perplexity, show_score
from dpfed.report.generated_texts import COLUMNS, examples
from dpfed.report.statement.build import Statement, statement_of, write_statement
from dpfed.report.statement.text import first_line, rows
from dpfed.training.budget.recorded_spending import RecordedSpending
from dpfed.training.budget.release import NO_PRIVACY, SEEDED
from dpfed.training.export import ADAPTED_CONFIG, base_of, export, read_run
from dpfed.training.job.notes import dealt_note
from dpfed.training.result import is_causal
from dpfed.training.run_folder.atomic_file import write_file
from dpfed.training.run_folder.files import STATEMENT

# Models whose architecture dpfed defines. They start from random weights, and transformers has no
# class for them.
OWN_MODELS = ("gn-resnet18", "linear")
MAX_CLASSES = 50

# Do not escape HTML: the card is Markdown, in which characters such as & must stay unchanged.
MARKDOWN = Environment(
    loader=PackageLoader("dpfed.report"),
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
MARKDOWN.filters |= {
    "counted": counted,
    "show_delta": show_delta,
    "show_loss": show_loss,
    "show_number": show_number,
    "show_perplexity": show_perplexity,
    "show_score": show_score,
}
MARKDOWN.globals |= {
    "COLUMNS": COLUMNS,
    "ADAPTED_CONFIG": ADAPTED_CONFIG,
    "MAX_CLASSES": MAX_CLASSES,
    "NO_PRIVACY": NO_PRIVACY,
    "STATEMENT": STATEMENT,
}


def model_card(
    config: Config,
    result: dict[str, Any],
    spending: RecordedSpending | None,
    kind: str,
    companions: Companions,
) -> str:
    """Return the model card as Markdown, beginning with the metadata block that model hubs read.

    spending    the privacy that the run has spent, from its ledger; None without privacy
    kind        the exported form: "adapter" or "model"
    companions  files that are written beside the model, such as its tokenizer
    """
    inputs = result["input"]["kind"]
    causal = is_causal(config, result)
    auto_class, task = _auto(inputs, causal)
    statement = _statement(config, result, spending)
    return MARKDOWN.get_template("model_card.md.j2").render(
        config=config,
        result=result,
        metrics=result.get("metrics") or {},
        examples=examples(result),
        spending=spending,
        headline=first_line(statement),
        guarantee=statement.guarantee,
        stated=rows(statement, observers=False),
        kind=kind,
        companions=companions,
        hub_name=_is_hub_name(config.model.weights),
        seeded=result["release"].startswith(SEEDED) or (spending is not None and spending.seeded),
        dealt_notes=[] if spending is None or spending.served else dealt_note(config),
        own_model=config.model.name in OWN_MODELS,
        given=config.model.name == GivenModule.name,
        causal=causal,
        auto_class=auto_class,
        task=task,
        part="image_processor" if inputs == "image" else "tokenizer",
        image_sentence=_image_sentence(config),
        base=_base(config) if kind == "adapter" else None,
    )


def _statement(
    config: Config, result: dict[str, Any], spending: RecordedSpending | None
) -> Statement:
    settings = {"privacy": asdict(config.privacy), "run": asdict(config.run)}
    return statement_of(spending, result, settings)


def _is_hub_name(weights: str | None) -> bool:
    """Return True if `weights` is the name of a model on a hub.

    Return False for random weights, and for a local path, which other machines cannot read.
    """
    return weights not in (None, "random") and not Path(weights).expanduser().exists()


def _auto(inputs: str, causal: bool) -> tuple[str, str]:
    """Return the names of the transformers Auto class and of the pipeline task for the model.

    inputs  kind of the inputs, "text" or "image"
    causal  True for a language model
    """
    if causal:
        return "AutoModelForCausalLM", "text-generation"
    if inputs == "text":
        return "AutoModelForSequenceClassification", "text-classification"
    return "AutoModelForImageClassification", "image-classification"


def _image_sentence(config: Config) -> str:
    """Return a sentence on how images are resized; "" for the usual bilinear resizing."""
    resize = getattr(config.model, "resize", "bilinear")
    sharpen = getattr(config.model, "sharpen", 0.0)
    if resize == "bilinear" and not sharpen:
        return ""
    way = "bicubically" if resize == "bicubic" else "bilinearly"
    said = f" Images are resized {way} to the size of the model"
    if sharpen:
        said += (
            f", then sharpened: x + {sharpen:g} times (x - x blurred by 1 4 6 4 1 along each "
            "side), cut to the range"
        )
    return f"{said}, before mean and standard deviation are taken off."


def _base(config: Config) -> str:
    """Return a phrase for the model card that says which base model an adapter needs."""
    name = config.model.name
    weights = config.model.weights
    if base_of(config) is None:
        return f"{name} with the random weights of that run, which only `--merge` exports"
    if _is_hub_name(weights):
        return f"`{weights}`"
    if name == GivenModule.name:
        return "the module as it was before training"
    place = f"{name} as it comes with dpfed"
    if weights is not None:
        place = f"a copy of `{Path(weights).expanduser().resolve().name}`"
    return (
        f"{place}: give the folder of your own copy. `base_model_name_or_path` in "
        "`adapter_config.json` is the path of that folder on the machine that trained; "
        "change it before you publish this folder"
    )


def write_export(run: Path, out: Path, merge: bool = False) -> str:
    """Write the trained model of a run and its model card to the new folder `out`.

    Return the exported form, "adapter" or "model". With `merge`, a LoRA adapter is added to its
    base weights, and the whole model is written.
    """
    trained = read_run(run)
    kind = export(trained, out, merge)
    card = model_card(trained.config, trained.result, trained.accounts, kind, trained.companions)
    write_file(out / "README.md", lambda file: file.write(card.encode()), for_release=True)
    statement = _statement(trained.config, trained.result, trained.accounts)
    write_statement(statement, out / STATEMENT, for_release=True)
    return kind
