"""Run the studies of results/studies.toml and write the page of results.

    python experiments/results.py run --out DIR --set vision:data.path=... [--minutes M]
    python experiments/results.py pack DIR FILE.tar.gz     pack the studies without their models
    python experiments/results.py unpack FILE.tar.gz DIR   unpack them on another machine
    python experiments/results.py page [DIR]               write results/*.csv and docs/results.md
    python experiments/results.py page --check             fail if the page is not up to date

`run` does the studies in order, stops in time and resumes when called again. All runs are in
DIR/runs, each under a name that follows from its configuration, so studies share equal runs. Paths
are part of a configuration: give the same paths on every machine, relative ones if possible.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results_pack import ASKED, STUDY, TABLE, pack, share_runs, unpack
from results_process import interruptible
from results_specs import (
    PATHS,
    RUNS,
    STARTS,
    Spec,
    base_of,
    best_arms,
    first_words,
    overrides_of,
    published,
    read_specs,
    started,
    study_from,
    words_of,
)

from dpfed.errors import DpfedError

if TYPE_CHECKING:
    from dpfed.studies.study import Study

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "results" / "studies.toml"


# ------------------------------------------------------------------ run

# (words after `dpfed`, log, seconds) -> exit code, None if the time was over.
Compare = Callable[[Sequence[str], Path, float | None], int | None]


def compare(words: Sequence[str], log: Path, seconds: float | None) -> int | None:
    return interruptible([sys.executable, "-m", "dpfed", *words], log, seconds)


def machine(device: str) -> str | None:
    """Return the name of this machine's device for runs; None if it has no such device."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return None if device.startswith("cuda") else f"CPU, {platform.machine()}"


def prepare(spec: Spec, study: Study, command: str, out: Path) -> Path:
    """Return the study's folder, which shares the runs of all studies."""
    from dpfed.studies.study import claim

    folder = out / spec.name
    asked = asked_of(folder)
    _refuse_other_paths(spec.name, study, folder)
    claim(folder, study, force=True).close()
    (out / RUNS).mkdir(exist_ok=True)
    share_runs(folder)
    machines = asked.get("machines", [])
    here = machine(str(study.base["run"]["device"]))
    if here is not None and here not in machines:
        machines = [*machines, here]
    same = asked.get("command") == command
    states = {state: same and bool(asked.get(state)) for state in ("table", "complete")}
    _write_asked(folder, {"command": command, "machines": machines, **states})
    return folder


def asked_of(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / ASKED).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _write_asked(folder: Path, asked: Mapping[str, Any]) -> None:
    scratch = folder / f"{ASKED}.tmp"
    scratch.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")
    scratch.replace(folder / ASKED)


def _refuse_other_paths(name: str, study: Study, folder: Path) -> None:
    try:
        before = json.loads((folder / STUDY).read_text(encoding="utf-8"))["base"]
    except (OSError, ValueError, KeyError):
        return
    for key in PATHS:
        section, _, short = key.partition(".")
        old = before[section].get(short)
        new = study.base[section].get(short)
        if old != new:
            raise DpfedError(
                f"{name} was begun with {key} = {old!r} and is now given {new!r}; "
                "paths are part of a run's name, so all of it would be done anew: "
                "give the same one, or make a link there"
            )


def refuse_other_versions(out: Path) -> None:
    """Refuse runs of other versions, which `dpfed compare` would silently repeat."""
    from dpfed.training.run_folder.folder import versions

    current = versions()
    for file in sorted((out / RUNS).glob("*/run.json")):
        try:
            made = json.loads(file.read_text(encoding="utf-8")).get("versions")
        except ValueError:
            continue
        if made is not None and made != current:
            differ = ", ".join(
                f"{k} {made.get(k)} not {v}" for k, v in current.items() if made.get(k) != v
            )
            raise DpfedError(
                f"runs in {out} were made with other versions ({differ}): --anew does those again"
            )


@dataclass(frozen=True)
class Sitting:
    """The arguments of one call of `run`."""

    out: Path
    given: tuple[str, ...]
    studies: Path = STUDIES
    only: tuple[str, ...] = ()
    minutes: float | None = None
    extra: tuple[str, ...] = ()
    anew: bool = False


def run(sitting: Sitting, call: Compare = compare, say: Callable[[str], None] = print) -> int:
    """Do the studies and return an exit code.

    0: all are complete; 1: a study failed, the others were done; 3: the time was over.
    """
    chosen = checked_specs(sitting)
    if not sitting.anew:
        refuse_other_versions(sitting.out)
    end = None if sitting.minutes is None else time.monotonic() + 60 * sitting.minutes
    codes = [0]
    for spec in chosen:
        code, line = do_study(spec, sitting, end, call)
        codes.append(code)
        say(f"{spec.name}: {line}")
    return 1 if 1 in codes else max(codes)


def checked_specs(sitting: Sitting) -> list[Spec]:
    """Return the studies to do; a mistake in any of them is found before the first one runs."""
    from dpfed.config import load
    from dpfed.registry import registry

    specs = read_specs(sitting.studies)
    names = [spec.name for spec in specs]
    unknown = sorted(set(sitting.only) - set(names))
    if unknown:
        raise DpfedError(
            f"--only {unknown[0]}: there is no such study; there are: {', '.join(names)}"
        )
    bases = {spec.base for spec in specs}
    used = {base for item in sitting.given if (base := base_of(item))}
    strange = used - {Path(base).stem for base in bases}
    if strange:
        raise DpfedError(
            f"--set {min(strange)}:... is for no base: there are {', '.join(sorted(bases))}"
        )
    chosen = [spec for spec in specs if not sitting.only or spec.name in sitting.only]
    folder = sitting.studies.parent
    for spec in chosen:
        overrides = overrides_of(spec, sitting.given)
        if spec.best_of is None:
            study_from(spec, folder, overrides, spec.algorithms)
        if spec.start:
            first = first_words(spec, "", overrides, "")
            settings = [first[i + 1] for i, word in enumerate(first) if word == "--set"]
            load(str(folder / spec.base), settings, registry())
    return chosen


def do_study(spec: Spec, sitting: Sitting, end: float | None, call: Compare) -> tuple[int, str]:
    """Do one study; return its exit code and a sentence."""
    from results_studies import survey

    if is_over(end):
        return 3, "not begun, the time is over"
    algorithms: Sequence[str] = spec.algorithms
    if spec.best_of is not None:
        first = sitting.out / spec.best_of
        if not asked_of(first).get("table"):
            return 3, f"waits for {spec.best_of}"
        algorithms = best_arms(json.loads((first / TABLE).read_text(encoding="utf-8")), spec.best)
    given = overrides_of(spec, sitting.given)
    if spec.start and (failed := begin(spec, sitting, given, end, call)):
        return failed
    overrides = started(spec, given, str(start_of(spec, sitting, given)))
    study = study_from(spec, sitting.studies.parent, overrides, algorithms)
    folder = prepare(spec, study, published(spec, given, algorithms), sitting.out)
    asked = asked_of(folder)
    if asked["complete"] and not sitting.anew:
        return 0, f"was complete, {survey(study, folder).done} runs"
    words = words_of(spec, str(sitting.studies.parent / spec.base), overrides, algorithms)
    log = sitting.out / f"{spec.name}.log"
    began = time.monotonic()
    code = call([*words, "--out", str(folder), "--force", *sitting.extra], log, time_to(end))
    seconds = time.monotonic() - began
    found = survey(study, folder)
    if code is None:
        return 3, f"stopped after {seconds:.0f} s, {found.done} runs done, {found.to_do}"
    # Exit code 3: the table names arms that could not be run; the next call tries them again.
    table = code in (0, 3) and (folder / TABLE).exists()
    _write_asked(folder, {**asked, "table": table, "complete": code == 0})
    if code != 0:
        return 1, f"exit code {code}, {found.done} runs done: {_last_line(log)}"
    return 0, f"complete, {found.done} runs, {seconds:.0f} s"


def time_to(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())


def is_over(end: float | None) -> bool:
    return time_to(end) == 0


def start_of(spec: Spec, sitting: Sitting, given: Sequence[str]) -> Path:
    """Return the folder of the model that the study starts from, named by a hash."""
    from dpfed.training.run_folder.folder import versions

    base = (sitting.studies.parent / spec.base).read_text(encoding="utf-8")
    asked = json.dumps([base, first_words(spec, "", given, ""), versions()])
    return sitting.out / STARTS / f"{spec.name}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"


def begin(
    spec: Spec, sitting: Sitting, given: Sequence[str], end: float | None, call: Compare
) -> tuple[int, str] | None:
    """Train and export the model that a study starts from; return an exit code if that fails."""
    model = start_of(spec, sitting, given)
    if model.exists() and not sitting.anew:
        return None
    log = sitting.out / f"{spec.name}.log"
    first = model.with_name(f"{model.name}.run")
    scratch = model.with_name(f"{model.name}.tmp")
    base = str(sitting.studies.parent / spec.base)
    shutil.rmtree(scratch, ignore_errors=True)
    for words in (
        [*first_words(spec, base, given, str(first)), "--force"],
        ["export", str(first), str(scratch)],
    ):
        code = None if is_over(end) else call(words, log, time_to(end))
        if code is None:
            return 3, "stopped before what it starts from was done"
        if code != 0:
            return 1, f"what it starts from failed with exit code {code}: {_last_line(log)}"
    shutil.rmtree(model, ignore_errors=True)
    scratch.rename(model)
    return None


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return (text.strip().splitlines() or ["it said nothing"])[-1]


# ------------------------------------------------------------------ command line


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run the studies, as far as the time goes")
    runner.add_argument("--out", type=Path, required=True, help="folder of all studies")
    runner.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[BASE:]KEY=VALUE",
        help="for all, or for one base",
    )
    runner.add_argument("--only", nargs="+", default=[], metavar="NAME")
    runner.add_argument("--minutes", type=float, help="stop in good order after so many")
    runner.add_argument("--studies", type=Path, default=STUDIES)
    runner.add_argument(
        "--anew", action="store_true", help="do runs of other versions of torch or dpfed again"
    )
    runner.add_argument(
        "--pack",
        metavar="N",
        help="as of dpfed compare; fewer together lose less when time is over",
    )
    runner.add_argument("--workers", metavar="N", help="as of dpfed compare")
    packer = commands.add_parser("pack", help="studies without models, to go on elsewhere")
    packer.add_argument("folder", type=Path)
    packer.add_argument("archive", type=Path)
    unpacker = commands.add_parser("unpack", help="the way back")
    unpacker.add_argument("archive", type=Path)
    unpacker.add_argument("folder", type=Path)
    pager = commands.add_parser("page", help="studies to CSV files, CSV files to the page")
    pager.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="of the studies; without it the CSV files stay as they are",
    )
    pager.add_argument(
        "--check", action="store_true", help="write nothing, fail where the page is another"
    )
    pager.add_argument("--studies", type=Path, default=STUDIES)
    pager.add_argument("--csv", type=Path, default=STUDIES.parent, help="folder of the CSV files")
    pager.add_argument("--docs", type=Path, default=ROOT / "docs" / "results.md")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    if options.command == "run":
        # Exit by an exception, so that the running study is interrupted.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        pairs = (("--pack", options.pack), ("--workers", options.workers))
        sitting = Sitting(
            options.out,
            tuple(options.set),
            options.studies,
            tuple(options.only),
            options.minutes,
            extra=tuple(word for name, value in pairs if value for word in (name, value)),
            anew=options.anew,
        )
        return run(sitting)
    if options.command == "pack":
        print(f"{pack(options.folder, options.archive)} runs in {options.archive}")
    elif options.command == "unpack":
        print(f"{unpack(options.archive, options.folder)} runs in {options.folder}")
    else:
        from results_page import page

        return page(
            options.folder, options.csv, options.docs, read_specs(options.studies), options.check
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DpfedError as error:
        print(f"results: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("results: stopped, the same command goes on from here", file=sys.stderr)
        sys.exit(130)
