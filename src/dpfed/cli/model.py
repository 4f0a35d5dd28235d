"""`dpfed model`: list the trainable tensors, or write a classifier that reads all layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.cli.options import AsJson, Debug, Overrides, Target, settings_of, show
from dpfed.cli.overview import Command, Group
from dpfed.errors import DpfedError, counted

if TYPE_CHECKING:
    from dpfed.config import Config
    from dpfed.model.build import AssembledModel
    from dpfed.model.task import InputSpec

HELP = "Models: what is trained, and in which blocks."
model = typer.Typer(name="model", cls=Group, help=HELP, no_args_is_help=True)


@model.command("describe", cls=Command)
def describe(
    config: Target = None,
    overrides: Overrides = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="number of classes; default: that of the data")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="side of the images in pixels")
    ] = None,
    channels: Annotated[int | None, typer.Option(min=1, help="channels of the images")] = None,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Show the trainable tensors of a model, and the blocks that divide its parameters.

    Example: dpfed model describe --set model.train=full

    With --classes, --image-size or --channels no data is read. Without them the shapes are those of
    the configured data, if it can be read.
    """
    settings = settings_of(config, overrides)
    from dpfed.model.build import describe_space
    from dpfed.training.job.model import block_rules

    notes: list[str] = []
    if (classes, image_size, channels) == (None, None, None):
        spec, notes = spec_of_data(settings)
    else:
        spec = spec_of_options(settings, classes, image_size, channels)
    parts = describe_space(settings.model, spec, **block_rules(settings))
    notes += parts.notes
    found = plain(settings, parts, notes)
    show(lines(found, spec), found, as_json)


@model.command("layers", cls=Command)
def layers(
    config: Target = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="new folder for the model", show_default=False)] = Path(
        "all-layers"
    ),
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Write a classifier that reads all layers of an encoder, for a head that is trained alone.

    Example: dpfed model layers best-head --set model.weights=my-model --out all-layers

    The features are centred by the inputs of the server's public records, without labels.
    """
    settings = settings_of(config, overrides)
    from dpfed.training.layers_model import write_layers_model

    found = write_layers_model(settings, out)
    text = (
        f"{len(found.widths)} layers with {sum(found.widths)} numbers, centred by {found.records} "
        f"public records, written to {out}: set model.weights to it and model.train = head"
    )
    caution = (
        "the folder holds the mean and the spread of these records: they must be public, and not "
        "of the protected people"
    )
    facts = {"out": str(out), "widths": list(found.widths), "records": found.records}
    show([text, caution], facts, as_json)


def spec_of_data(config: Config) -> tuple[InputSpec, list[str]]:
    """Return the inputs (kind, shape, classes) of the configured data, and notes on them.

    If the data cannot be read, return inputs that are usual for the data or the model. A note says
    so.
    """
    from dpfed.training.job.data import configured_source, published_spec, spec_of

    section: Any = config.model
    loader: Any = config.data
    published = getattr(loader, "published", None)
    if published is not None and config.data.path is None:
        return published_spec(published, section), []
    try:
        return spec_of(configured_source(config.data, section), section), []
    except DpfedError as error:
        spec: InputSpec = section.usual_spec()
        if published is not None:
            spec = published_spec(published, section)
        return spec, [
            f"the data cannot be read ({error}); shapes are those usual for it, "
            f"with {spec.classes} classes"
        ]


def spec_of_options(
    config: Config, classes: int | None, image_size: int | None, channels: int | None
) -> InputSpec:
    """Return the model's usual inputs (kind, shape, classes), changed by command-line options."""
    section: Any = config.model
    usual: InputSpec = section.usual_spec()
    if usual.kind == "image":
        side = image_size or usual.shape[-1]
        usual = replace(usual, shape=(channels or usual.shape[0], side, side))
    elif image_size or channels:
        raise DpfedError(
            f"--image-size and --channels: {section.name} reads {usual.kind}, leave them out"
        )
    return replace(usual, classes=classes or usual.classes)


def lines(found: dict[str, Any], spec: InputSpec) -> list[str]:
    shapes = {name: "x".join(map(str, s)) or "1" for name, s in found["tensors"].items()}
    sizes = {name: f"{size:,}" for name, size in found["blocks"].items()}
    up_bytes = 4 * found["uplink"]
    # A language model has no classes, so its description does not mention any.
    classes = f" and {spec.classes} classes" if spec.classes > 1 else ""
    return [
        f"{found['model']} ({found['class']}), train = {found['train']}, for {spec.kind} of "
        f"shape {'x'.join(map(str, spec.shape))}{classes}",
        f"{found['total']:,} parameters, of which P = {found['trainable']:,} trainable numbers in "
        f"{counted(len(shapes), 'tensor')} (with adapters)",
        "",
        "trainable tensors (* stands for a number)",
        *gathered_lines(shapes),
        "",
        f"{counted(len(sizes), 'block')}, each with one second moment",
        *gathered_lines(sizes),
        "",
        f"uplink of dp-fedadamw: P + blocks = {found['uplink']:,} numbers "
        f"({up_bytes / 1e6:.2f} MB) per client and round",
        *(f"note: {note}" for note in found["notes"]),
    ]


def gathered_lines(table: Mapping[str, str]) -> list[str]:
    return [f"  {n:5} x  {name}  {value}" for (name, value), n in gather(table).items()]


def gather(table: Mapping[str, Any]) -> Counter[tuple[str, Any]]:
    """Return how often each pair (name, value) occurs, after * has replaced layer and head numbers.

    The tensors of equal layers then become one line of the output.
    """
    number = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=\.head)\d+$")
    return Counter((number.sub("*", name), value) for name, value in table.items())


def plain(config: Config, parts: AssembledModel, notes: list[str]) -> dict[str, Any]:
    """Return the description of the model as a JSON-serialisable dict."""
    from dpfed.model.build import block_sizes

    space = parts.space
    return {
        "model": config.model.name,
        "class": type(parts.adapted.model).__name__,
        "train": config.model.train,
        "total": parts.total,
        "trainable": space.size,
        "tensors": {n: list(s) for n, s in zip(space.names, space.shapes, strict=True)},
        "blocks": block_sizes(space),
        "uplink": space.size + space.num_blocks,
        "notes": notes,
    }
