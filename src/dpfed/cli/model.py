"""`dpfed model describe`: what would be trained and how it is cut into blocks, without training and without weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.cli.overview import Command, Group
from dpfed.errors import DpfedError
from dpfed.text import counted

if TYPE_CHECKING:
    from dpfed.config import Config
    from dpfed.model.build import AssembledModel
    from dpfed.model.task import InputSpec

HELP = "Models: what is trained, and in which blocks."
app = typer.Typer(cls=Group, help=HELP, no_args_is_help=True)


@app.callback()
def group() -> None:
    """Models: what is trained, and in which blocks."""


@app.command("describe", cls=Command)
def describe(
    config: Annotated[
        str | None, typer.Argument(help="TOML file or preset; without it: the digits demonstration")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a key")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="number of classes; default: as the data says")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="side of the images in pixels")
    ] = None,
    channels: Annotated[int | None, typer.Option(min=1, help="channels of the images")] = None,
    debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line of stdout")
    ] = False,
) -> None:
    """The trainable tensors, how many numbers they are, and the blocks. Example: dpfed model describe --set model.train=full

    With --classes, --image-size or --channels no data is read; without them the configured data says it, if it is there.
    """
    from dpfed.config import load
    from dpfed.registry import DEFAULT, registry

    settings = load(config or DEFAULT, overrides or [], registry())
    from dpfed.model.build import describe_space
    from dpfed.training.job.model import block_rules

    spec, said = input_spec(settings, classes, image_size, channels)
    parts = describe_space(settings.model, spec, **block_rules(settings))
    for line in lines(settings, spec, parts, [*said, *parts.notes]):
        print(line)
    if as_json:
        print(json.dumps(as_object(settings, parts, [*said, *parts.notes])))


def input_spec(
    config: Config, classes: int | None, image_size: int | None, channels: int | None
) -> tuple[InputSpec, list[str]]:
    """The inputs as the options say, as the data says, or as is usual for the model; and what had to be assumed."""
    from dpfed.training.job.data import published_spec, spec_of

    section: Any = config.model
    usual: InputSpec = section.usual_spec()
    if (classes, image_size, channels) == (None, None, None):
        loader: Any = config.data
        published = getattr(loader, "published", None)
        if published is not None and config.data.path is None:
            return published_spec(published, section), []
        try:
            return spec_of(loader.load(), section), []
        except DpfedError as error:
            spec = usual if published is None else published_spec(published, section)
            return spec, [
                f"the data cannot be read ({error}); shapes are those usual for it, with {spec.classes} classes"
            ]
    if usual.kind == "image":
        c, side = usual.shape[0], usual.shape[-1]
        usual = replace(usual, shape=(channels or c, image_size or side, image_size or side))
    elif image_size or channels:
        raise DpfedError(
            f"--image-size and --channels: {section.name} reads {usual.kind}, leave them out"
        )
    return replace(usual, classes=classes or usual.classes), []


def lines(config: Config, spec: InputSpec, parts: AssembledModel, notes: list[str]) -> list[str]:
    from dpfed.model.build import block_sizes

    space = parts.space
    shapes = {
        n: "x".join(map(str, s)) or "1" for n, s in zip(space.names, space.shapes, strict=True)
    }
    out = [
        f"{config.model.name} ({type(parts.adapted.model).__name__}), train = {config.model.train}, for {spec.kind} of "
        f"shape {'x'.join(map(str, spec.shape))} and {spec.classes} classes",
        f"{parts.total:,} parameters, of which P = {space.size:,} trainable numbers in "
        f"{counted(len(space.names), 'tensor')} (with adapters)",
        "",
        "trainable tensors (* stands for a number)",
    ]
    out += [f"  {count:5} x  {name}  {shape}" for (name, shape), count in gather(shapes).items()]
    out += ["", f"{counted(space.num_blocks, 'block')}, each with one second moment"]
    out += [
        f"  {count:5} x  {name}  {size:,}"
        for (name, size), count in gather(block_sizes(space)).items()
    ]
    up = space.size + space.num_blocks
    out += [
        "",
        f"uplink of dp-fedadamw: P + blocks = {up:,} numbers ({4 * up / 1e6:.2f} MB) per client and round",
    ]
    return out + [f"note: {note}" for note in notes]


def gather(table: Mapping[str, Any]) -> dict[tuple[str, Any], int]:
    """Names that differ only in their numbers (layers, heads), with the same value, counted together."""
    out: dict[tuple[str, Any], int] = {}
    for name, value in table.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|(?<=\.head)\d+$", "*", name)
        out[pattern, value] = out.get((pattern, value), 0) + 1
    return out


def as_object(config: Config, parts: AssembledModel, notes: list[str]) -> dict[str, Any]:
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
