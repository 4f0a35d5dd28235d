"""`dpfed run`: train by a configuration."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.errors import DpfedError, counted
from dpfed.privacy.published import show_loss, show_score

if TYPE_CHECKING:
    from dpfed.training.backends.torchrun import Group
    from dpfed.training.interrupt import Stop
    from dpfed.training.job.job import Job


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
    from dpfed.cli.progress import Watch
    from dpfed.training.backends.torchrun import join
    from dpfed.training.run import assist
    from dpfed.training.run import run as train

    group = join(settings)
    if group is not None and group.rank > 0:
        started()
        with leaving(group):
            assist(settings, group)
        return None
    with leaving(group), Watch(settings.run.rounds) as watch:

        def begin(job: Job) -> None:
            started()
            stop.gently = True
            for line in opening(job):
                watch.say(line)

        going_on = resume is not None
        return train(
            settings,
            resume or out,
            force,
            begin=begin,
            observe=watch.round,
            resume=going_on,
            stop=stop,
            group=group,
            on_activity=watch.activity,
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


def opening(job: Job) -> list[str]:
    """Return what is shown before round 1: the run in a few lines, notes and warnings."""
    return [*summary(job), *(f"note: {note}" for note in job.notes), *warning_lines(job.warnings)]


def summary(job: Job) -> list[str]:
    """Return the run in a few lines: sizes, traffic and privacy."""
    from dpfed.training.job.message_size import traffic
    from dpfed.training.run import guarantee

    plan, schedule = job.plan, job.schedule
    lines = [
        f"{job.algorithm.name} on {job.config.data.name}: "
        f"{counted(schedule.clients, 'client')}, {schedule.cohort} per round, "
        f"{counted(schedule.rounds, 'round')} of {counted(schedule.local_steps, 'local step')}; "
        f"{job.config.model.name} with {counted(job.space.size, 'trainable number')} in "
        f"{counted(job.space.num_blocks, 'block')}",
    ]
    sent = traffic(job.algorithm, job.space)
    lines.append(
        f"each client and round: {sent.up_numbers:,} numbers up ({sent.up_bytes / 1e6:.2f} MB), "
        f"{sent.down_numbers:,} down ({sent.down_bytes / 1e6:.2f} MB)"
    )
    if plan.private:
        lines.append(f"privacy: {guarantee(job)}; clip norm {plan.clip:g}")
    else:
        lines.append("NO PRIVACY: noise is off, nothing that leaves a client is protected")
    return lines


def warning_lines(sentences: Sequence[str]) -> list[str]:
    return [f"warning: {sentence}" for sentence in sentences]


def closing(result: dict[str, Any]) -> list[str]:
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
