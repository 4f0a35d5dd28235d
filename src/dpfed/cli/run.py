"""`dpfed run`: train a model as configured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfed.cli.options import AsJson, Debug, Overrides, Target, settings_of, show
from dpfed.errors import DpfedError, counted
from dpfed.privacy.published import show_loss, show_number, show_perplexity, show_score

if TYPE_CHECKING:
    from dpfed.config import Config
    from dpfed.training.interrupt import Stop
    from dpfed.training.job.job import Job
    from dpfed.training.open_run import Mode

Out = Annotated[Path | None, typer.Option(help="folder of the run; default: a new one under runs/")]
Resume = Annotated[Path | None, typer.Option(help="resume the run in this folder")]
Force = Annotated[bool, typer.Option(help="replace the run in the folder")]


def run(
    config: Target = None,
    overrides: Overrides = None,
    out: Out = None,
    resume: Resume = None,
    force: Force = False,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Train a model as configured.

    Example: dpfed run --set run.rounds=10 --set algorithm.gamma=0.3
    """
    from dpfed.training.interrupt import on_signals

    mode: Mode = "replace" if force else "new"
    with on_signals() as stop, starting() as started:
        if resume is not None:
            if out is not None or force:
                raise DpfedError("--resume goes on in its own folder: leave out --out and --force")
            config = config or _config_of(resume)
            mode = "resume"
        settings = settings_of(config, overrides)
        result = _train(settings, resume or out, mode, stop, started)
    if result is not None:
        show(closing(result), result, as_json)


def _config_of(folder: Path) -> str:
    path = folder / "config.toml"
    if not path.exists():
        raise DpfedError(
            f"{folder} is not the folder of a run: --resume needs one that `dpfed run` has made"
        )
    return str(path)


def _train(
    settings: Config, out: Path | None, mode: Mode, stop: Stop, started: Callable[[], None]
) -> dict[str, Any] | None:
    """Train as configured and return the result; None in all torchrun processes except the first.

    stop     raises an error in the training loop after a signal such as Ctrl-C
    started  called before round 1
    """
    from dpfed.training.backends.execution import InProcess, Torchrun
    from dpfed.training.backends.torchrun import join
    from dpfed.training.callbacks.base import OnStart
    from dpfed.training.callbacks.progress import ProgressDisplay
    from dpfed.training.run import assist
    from dpfed.training.run import run as train

    with ExitStack() as stack:
        group = join(settings)
        if group is not None:
            stack.callback(group.close)
            if group.rank > 0:
                started()
                assist(settings, group)
                return None
        display = stack.enter_context(ProgressDisplay(settings.run.rounds))

        def on_start(job: Job) -> None:
            started()
            stop.gently = True

        return train(
            settings,
            out,
            mode,
            callbacks=[OnStart(on_start), display],
            execution=Torchrun(group, stop) if group else InProcess(stop),
        )


@contextmanager
def starting() -> Iterator[Callable[[], None]]:
    """Pause garbage collection while a run is prepared, to save time.

    The pause ends when the yielded function is called, before round 1. Imports create half a
    million objects that are never freed. Searching them for garbage takes about a tenth of the time
    until round 1.
    """
    enabled = gc.isenabled()
    gc.disable()

    def started() -> None:
        if enabled and not gc.isenabled():
            gc.collect()
            # After `gc.freeze`, garbage collections no longer search the objects that exist now.
            gc.freeze()
            gc.enable()

    try:
        yield started
    finally:
        if enabled:
            gc.unfreeze()
            gc.enable()


def closing(result: dict[str, Any]) -> list[str]:
    """Return the lines shown after the last round: accuracy, warnings, epsilon and the folder."""
    from dpfed.training.callbacks.progress import warning_lines
    from dpfed.training.job.notes import result_warnings

    accuracy = "no accuracy, as the server has no test set,"
    if result["test_accuracy"] is not None:
        start = show_score(result["start_accuracy"])
        end = show_score(result["test_accuracy"])
        accuracy = f"accuracy {start} -> {end} on the server's test set"
    if result.get("test_perplexity") is not None:
        start = show_perplexity(result["start_perplexity"])
        end = show_perplexity(result["test_perplexity"])
        accuracy = f"perplexity {start} -> {end} on the server's test set"
    if result.get("test_r2") is not None:
        start, end = show_score(result["start_r2"]), show_score(result["test_r2"])
        error = show_number(result["metrics"]["mae"])
        accuracy = f"R2 {start} -> {end}, mean absolute error {error} on the server's test set"
    lines = [
        f"{accuracy} after {counted(result['rounds'], 'round')}, {result['seconds']:.1f} s",
        *warning_lines(result_warnings(result)),
        *_spent(result),
    ]
    if result["release"].startswith("simulation"):
        lines.append(
            "  noise was seeded: this is a simulation, not for release "
            '(run.noise = "os" makes it releasable)'
        )
    return [*lines, f"written to {result['out']}"]


def _most_rounds(result: dict[str, Any]) -> str:
    cap = result.get("max_rounds_per_client")
    return "every round" if cap is None else f"{counted(cap, 'round')}, the most it may take"


def _spent(result: dict[str, Any]) -> list[str]:
    epsilon = {view: show_loss(value) for view, value in result["epsilon"].items()}
    if result["epsilon"]["server_worst"] is None:
        return ["epsilon: none, this run had no privacy"]
    if result.get("served"):
        return [
            f"epsilon at most {epsilon['server_worst']} for this run, whoever looks; "
            "only a client's own ledger knows its total over all runs",
            f"  {result['guarantee']}",
        ]
    return [
        f"epsilon {epsilon['server_max']} for the client that spent most, "
        f"{epsilon['server_worst']} for one in {_most_rounds(result)} (server's view); "
        f"{epsilon['third_party']} for a third party who sees only global models",
        f"  {result['guarantee']}",
        f"  {_third_party_condition(result)}",
    ]


def _third_party_condition(result: dict[str, Any]) -> str:
    from dpfed.privacy.accounting.guarantee import CAPPED

    if "max_rounds_per_client" in result:
        return f"the third party: {CAPPED}"
    return (
        "the third-party figure holds only while nobody outside knows who took part: "
        "publish it without the others"
    )
