"""`dpfed run`: train by a configuration."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.errors import DpfedError
from dpfed.privacy.published import show_loss, show_score
from dpfed.text import counted

if TYPE_CHECKING:
    from dpfed.training.backends.torchrun import Group
    from dpfed.training.interrupt import Stop
    from dpfed.training.job.job import Job
    from dpfed.training.open_run import Mode


def run(
    config: Annotated[
        str | None, typer.Argument(help="TOML file or preset; without it: the digits demonstration")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a key")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder of the run; default: a new one under runs/")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="go on with the run in this folder")] = None,
    force: Annotated[bool, typer.Option(help="replace a run that is in the folder")] = False,
    debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line of stdout")
    ] = False,
) -> None:
    """Train by a configuration. Example: dpfed run --set run.rounds=10 --set algorithm.gamma=0.3"""
    from dpfed.training.interrupt import on_signals

    with on_signals() as stop, starting() as started:
        result = _run(config, overrides or [], out, resume, force, stop, started)
    if result is None:
        return  # this process only helped
    for line in closing(result):
        print(line)
    if as_json:
        print(json.dumps(result, allow_nan=False))


def _run(
    config: str | None,
    overrides: list[str],
    out: Path | None,
    resume: Path | None,
    force: bool,
    stop: Stop,
    started: Callable[[], None],
) -> dict[str, Any] | None:
    from dpfed.config import load
    from dpfed.registry import DEFAULT, registry

    if resume is not None and (out is not None or force):
        raise DpfedError("--resume goes on in its own folder: leave out --out and --force")
    if resume is not None and config is None and not (resume / "config.toml").exists():
        raise DpfedError(
            f"{resume} is not the folder of a run: --resume needs one that `dpfed run` has made"
        )
    begun = DEFAULT if resume is None else str(resume / "config.toml")
    settings = load(config or begun, overrides, registry())
    from dpfed.training.backends.execution import InProcess, Torchrun
    from dpfed.training.backends.torchrun import join
    from dpfed.training.callbacks.base import OnStart
    from dpfed.training.callbacks.progress import ProgressDisplay
    from dpfed.training.run import assist
    from dpfed.training.run import run as train

    group = join(settings)
    if group is not None and group.rank > 0:
        started()
        with leaving(group):
            assist(settings, group)
        return None
    with leaving(group), ProgressDisplay(settings.run.rounds) as display:

        def on_start(job: Job) -> None:
            started()
            stop.gently = True

        mode: Mode = "new"
        if resume is not None:
            mode = "resume"
        elif force:
            mode = "replace"
        return train(
            settings,
            resume or out,
            mode,
            callbacks=[OnStart(on_start), display],
            execution=Torchrun(group, stop) if group else InProcess(stop),
        )


@contextmanager
def starting() -> Iterator[Callable[[], None]]:
    """No search for cyclic garbage until what this yields is called, before round 1: half a million objects come with
    the libraries and stay, and looking through them again and again is about a tenth of the time to get there."""
    enabled = gc.isenabled()
    gc.disable()

    def started() -> None:
        if enabled and not gc.isenabled():
            gc.collect()
            gc.freeze()  # what is left is not looked through during the rounds either
            gc.enable()

    try:
        yield started
    finally:
        if enabled:
            gc.unfreeze()
            gc.enable()


@contextmanager
def leaving(group: Group | None) -> Iterator[None]:
    """However the run ends here, the other processes of it are let go."""
    try:
        yield
    finally:
        if group is not None:
            group.close()


def closing(result: dict[str, Any]) -> list[str]:
    from dpfed.training.callbacks.progress import warning_lines
    from dpfed.training.job.notes import result_warnings

    epsilon = {view: show_loss(value) for view, value in result["epsilon"].items()}
    accuracy = "no accuracy, as the server has no test set,"
    if result["test_accuracy"] is not None:
        start = show_score(result["start_accuracy"])
        end = show_score(result["test_accuracy"])
        accuracy = f"accuracy {start} -> {end} on the server's test set"
    lines = [f"{accuracy} after {counted(result['rounds'], 'round')}, {result['seconds']:.1f} s"]
    lines += warning_lines(result_warnings(result))
    if result["epsilon"]["server_worst"] is None:
        lines.append("epsilon: none, this run had no privacy")
    elif result.get("served"):
        lines += [
            f"epsilon at most {epsilon['server_worst']} for this run, whoever looks; "
            "what a client has spent over all its runs only its own ledger knows",
            f"  {result['guarantee']}",
        ]
    else:
        lines += [
            f"epsilon {epsilon['server_max']} for the client that spent most, {epsilon['server_worst']} for one in every "
            f"round (server's view); {epsilon['third_party']} for a third party who sees only global models",
            f"  {result['guarantee']}",
            "  the third-party figure holds only while nobody outside knows who took part: publish it without the others",
        ]
    if result["release"].startswith("simulation"):
        lines.append(
            '  noise was seeded: this is a simulation, not for release (run.noise = "os" makes it releasable)'
        )
    return [*lines, f"written to {result['out']}"]
