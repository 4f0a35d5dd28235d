"""From studies of `dpfed compare` to the page of results.

    python experiments/results.py run --out DIR --set vision:data.path=... --set vision:model.weights=... [--minutes M]
    python experiments/results.py pack DIR FILE.tar.gz      what is needed to go on elsewhere, without the models
    python experiments/results.py unpack FILE.tar.gz DIR
    python experiments/results.py page [DIR]                DIR's studies into results/*.csv, and those into docs/results.md
    python experiments/results.py page --check              fails where the page is not what the CSV files give

The studies are those of results/studies.toml. `run` does them in order and stops in time; started again, it goes on. The
runs of all studies lie in DIR/runs, each under the name that its configuration gives it, so that a run two studies ask for
is done once. Paths are part of a configuration: give them the same way on every machine, relative ones best.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfed.errors import DpfedError

if TYPE_CHECKING:
    from dpfed.studies.study import Study

ROOT = Path(__file__).parents[1]
STUDIES = ROOT / "results" / "studies.toml"
RUNS, ASKED, TABLE, STUDY, STARTS = "runs", "asked.json", "table.json", "study.json", "starts"
KEPT = (
    "run.json",
    "metrics.jsonl",
    "config.toml",
)  # of a run: what says that it is done, and what it came to
WHOLE = (STUDY, ASKED, TABLE, "table.csv", "table.md", "search.csv")  # of a study
PATHS = {"data.path": "DATA", "model.weights": "WEIGHTS"}  # where they lie is nobody else's matter
PATIENCE, TRIES = 15.0, 4  # seconds that an interrupted study has to end, and how often it is told


@dataclass(frozen=True)
class Spec:
    """A study as results/studies.toml has it; the keys are explained there."""

    name: str
    title: str
    question: str
    base: str
    algorithms: tuple[str, ...] = ()
    preset: str | None = None
    seeds: int = 3
    search_seeds: int = 1
    lr: Mapping[str, Sequence[float]] = field(default_factory=dict)
    set: tuple[str, ...] = ()
    best_of: str | None = None
    best: int = 3
    start: tuple[str, ...] = ()
    plot: bool = False

    def __post_init__(self) -> None:
        if not self.name.replace("-", "").isalnum() or self.name in (RUNS, STARTS):
            raise DpfedError(
                f"the study {self.name!r} needs a name of letters, digits and hyphens, other than {RUNS!r} and {STARTS!r}"
            )


def _spec(table: Mapping[str, Any]) -> Spec:
    return Spec(**table)


def read_specs(path: Path) -> list[Spec]:
    try:
        tables: list[dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))["study"]
        specs = [
            _spec({k: tuple(v) if isinstance(v, list) else v for k, v in table.items()})
            for table in tables
        ]
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise DpfedError(f"{path} is not a list of studies: {error}") from None
    if len({spec.name for spec in specs}) != len(specs):
        raise DpfedError(f"{path} names a study twice")
    return specs


# ------------------------------------------------------------------ what is asked


def overrides_of(spec: Spec, given: Sequence[str]) -> list[str]:
    """The caller's --set, those for another base left out, then the study's own, which win."""
    mine = []
    for item in given:
        base = base_of(item)
        if base is None:
            mine.append(item)
        elif f"{base}.toml" == spec.base:
            mine.append(item.partition(":")[2])
    return [*mine, *spec.set]


def base_of(item: str) -> str | None:
    """`BASE:key=value` is for studies of that base alone."""
    base, colon, _ = item.partition("=")[0].partition(":")
    return base if colon else None


def words_of(
    spec: Spec, base: str, overrides: Sequence[str], algorithms: Sequence[str]
) -> list[str]:
    """The words after `dpfed`."""
    words = ["compare", base]
    words += ["--preset", spec.preset] if spec.preset else []
    words += ["--algorithms", ",".join(algorithms)] if algorithms else []
    for name, values in spec.lr.items():
        words += ["--lr", f"{name}={','.join(f'{value:g}' for value in values)}"]
    for item in overrides:
        words += ["--set", item]
    words += ["--search-seeds", str(spec.search_seeds)] if spec.search_seeds > 1 else []
    return [*words, "--seeds", str(spec.seeds)]


def published(spec: Spec, overrides: Sequence[str], algorithms: Sequence[str]) -> str:
    """The command as a reader would type it, with names in place of this machine's paths."""
    shown = []
    for item in overrides:
        key, _, value = item.partition("=")
        shown.append(f"{key}={PATHS[key]}" if key in PATHS and value != "random" else item)
    base = f"results/{spec.base}"
    compare = shlex.join(
        ["dpfed", *words_of(spec, base, started(spec, shown, "START"), algorithms)]
    )
    if not spec.start:
        return compare
    first = shlex.join(["dpfed", *first_words(spec, base, shown, "FIRST")])
    return f"{first} && dpfed export FIRST START && {compare}"


def first_words(spec: Spec, base: str, overrides: Sequence[str], out: str) -> list[str]:
    """The run whose model the study starts from, after `dpfed`."""
    own = [item for item in overrides if item not in spec.set]
    return [
        "run",
        base,
        *(word for item in (*own, *spec.start) for word in ("--set", item)),
        "--out",
        out,
    ]


def started(spec: Spec, overrides: Sequence[str], model: str) -> list[str]:
    """The settings of the study's own runs: with the weights and the head of the model that it starts from."""
    if not spec.start:
        return list(overrides)
    return [
        *(item for item in overrides if not item.startswith("model.weights=")),
        f"model.weights={model}",
        "model.head=kept",
    ]


def best_arms(table: Mapping[str, Any], count: int) -> list[str]:
    """The best private arms on equal terms, and the reference, as arms with their rates fixed: nothing is tuned again."""
    from dpfed.studies.arms import REFERENCE, SHORT

    able = [row for row in table["rows"] if row["accuracy"] is not None]
    fair = [
        row
        for row in able
        if row["epsilon"]["server_worst"] is not None and not row["larger_epsilon"]
    ]
    first = sorted(fair, key=lambda row: -row["accuracy"])[:count]
    first += [row for row in able if row["method"] == REFERENCE and row not in first]
    out = []
    for row in first:
        name, _, changes = SHORT.get(row["method"], row["method"]).partition(":")
        rates = [f"{key}={value!r}" for key, value in row["rates"].items()]
        out.append(
            f"{name}:{';'.join([*([changes] if changes else []), *rates])}"
            if changes or rates
            else name
        )
    return out


def study_from(
    spec: Spec, folder: Path, overrides: Sequence[str], algorithms: Sequence[str]
) -> Study:
    from dpfed.cli.compare import study_of
    from dpfed.registry import registry
    from dpfed.studies.study import check

    grids = [
        f"{name}={','.join(f'{value:g}' for value in values)}" for name, values in spec.lr.items()
    ]
    arms = ",".join(algorithms) or None
    study = study_of(
        str(folder / spec.base),
        list(overrides),
        arms,
        spec.preset,
        grids,
        spec.seeds,
        spec.search_seeds,
    )
    check(study, registry())
    return study


# ------------------------------------------------------------------ run

Compare = Callable[[Sequence[str], Path, float | None], int | None]
"""(words after `dpfed`, log, seconds) -> exit code, None where the time was over."""


def compare(words: Sequence[str], log: Path, seconds: float | None) -> int | None:
    return interruptible([sys.executable, "-m", "dpfed", *words], log, seconds)


def interruptible(command: Sequence[str], log: Path, seconds: float | None) -> int | None:
    """Runs a command that ends in good order on SIGINT, and sends it that when the time is over or we are stopped."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_us,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            _interrupt(process)
            return None
        except BaseException:
            _interrupt(process)
            raise


def _end_with_us() -> None:
    """In the child: it ends when its parent dies, so that nothing goes on alone; finished runs are on the disk. It has a
    session of its own, as Ctrl-C would otherwise reach it twice, and hears SIGINT even where we were started deaf to it (by
    nohup, in a script's background)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    for _ in range(TRIES):  # `dpfed compare` is deaf to SIGINT while it starts a worker
        process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()  # its workers end with it
    process.wait()


def machine(device: str) -> str | None:
    """Where runs on this device are made; None where they cannot be."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return None if device.startswith("cuda") else f"CPU, {platform.machine()}"


def prepare(spec: Spec, study: Study, command: str, out: Path) -> Path:
    """The study's folder, its runs shared with the other studies, and who works on it."""
    from dpfed.studies.study import claim

    folder = out / spec.name
    asked = asked_of(folder)
    _refuse_other_paths(spec.name, study, folder)
    claim(folder, study, force=True).close()
    (out / RUNS).mkdir(exist_ok=True)
    share_runs(folder)
    machines = asked.get("machines", [])
    kept = asked if asked.get("command") == command else {}
    here = machine(str(study.base["run"]["device"]))
    machines = machines if here is None or here in machines else [*machines, here]
    states = {state: bool(kept.get(state)) for state in ("table", "complete")}
    _write_asked(folder, {"command": command, "machines": machines, **states})
    return folder


def share_runs(folder: Path) -> None:
    """DIR/STUDY/runs leads to DIR/runs."""
    link = folder / RUNS
    if not link.is_symlink():
        if link.exists():
            raise DpfedError(
                f"{link} is a folder of its own: this study was not made by results.py, choose another --out"
            )
        link.symlink_to(Path("..") / RUNS)


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
        old, new = (base[section].get(short) for base in (before, study.base))
        if old != new:
            raise DpfedError(
                f"{name} was begun with {key} = {old!r} and is now given {new!r}; paths are part of a run's name, so all "
                "of it would be done anew: give the same one, or make a link there"
            )


def refuse_other_versions(out: Path) -> None:
    """`dpfed compare` does such runs anew, which is right, but must not happen unseen."""
    from dpfed.training.run_folder.folder import versions

    for file in sorted((out / RUNS).glob("*/run.json")):
        try:
            made = json.loads(file.read_text(encoding="utf-8")).get("versions")
        except ValueError:
            continue
        if made is not None and made != versions():
            differ = ", ".join(
                f"{k} {made.get(k)} not {v}" for k, v in versions().items() if made.get(k) != v
            )
            raise DpfedError(
                f"runs in {out} were made with other versions ({differ}): --anew does those again"
            )


@dataclass(frozen=True)
class Sitting:
    """What one call of `run` was given."""

    out: Path
    given: tuple[str, ...]
    studies: Path = STUDIES
    only: tuple[str, ...] = ()
    minutes: float | None = None
    extra: tuple[str, ...] = ()
    anew: bool = False


def run(sitting: Sitting, call: Compare = compare, say: Callable[[str], None] = print) -> int:
    """0: all done; 3: stopped in time, the rest is for the next call; 1: a study failed, the others were done."""
    from dpfed.config import load
    from dpfed.registry import registry

    specs = read_specs(sitting.studies)
    unknown = sorted(set(sitting.only) - {spec.name for spec in specs})
    if unknown:
        raise DpfedError(
            f"--only {unknown[0]}: there is no such study; there are: {', '.join(s.name for s in specs)}"
        )
    strange = {base for item in sitting.given if (base := base_of(item))} - {
        Path(spec.base).stem for spec in specs
    }
    if strange:
        raise DpfedError(
            f"--set {min(strange)}:... is for no base: there are {', '.join(sorted({s.base for s in specs}))}"
        )
    chosen = [spec for spec in specs if not sitting.only or spec.name in sitting.only]
    for spec in chosen:  # a mistake in the last one is found before the first one runs
        if spec.best_of is None:
            study_from(
                spec, sitting.studies.parent, overrides_of(spec, sitting.given), spec.algorithms
            )
        if spec.start:
            first = first_words(spec, "", overrides_of(spec, sitting.given), "")
            settings = [first[i + 1] for i, word in enumerate(first) if word == "--set"]
            load(str(sitting.studies.parent / spec.base), settings, registry())
    if not sitting.anew:
        refuse_other_versions(sitting.out)
    end = None if sitting.minutes is None else time.monotonic() + 60 * sitting.minutes
    codes = []
    for spec in chosen:
        code, line = do_study(spec, sitting, end, call)
        codes.append(code)
        say(f"{spec.name}: {line}")
    return 1 if 1 in codes else 3 if 3 in codes else 0


def do_study(spec: Spec, sitting: Sitting, end: float | None, call: Compare) -> tuple[int, str]:
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
    # 3: arms that could not be run, which the table names; they are tried again by the next call
    _write_asked(
        folder,
        {**asked, "table": code in (0, 3) and (folder / TABLE).exists(), "complete": code == 0},
    )
    if code != 0:
        return 1, f"exit code {code}, {found.done} runs done: {_last_line(log)}"
    return 0, f"complete, {found.done} runs, {seconds:.0f} s"


def time_to(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())


def is_over(end: float | None) -> bool:
    return time_to(end) == 0


def start_of(spec: Spec, sitting: Sitting, given: Sequence[str]) -> Path:
    """Under a name that what was asked gives it, and so are the runs that start from it."""
    from dpfed.training.run_folder.folder import versions

    base = (sitting.studies.parent / spec.base).read_text(encoding="utf-8")
    asked = json.dumps([base, first_words(spec, "", given, ""), versions()])
    return sitting.out / STARTS / f"{spec.name}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"


def begin(
    spec: Spec, sitting: Sitting, given: Sequence[str], end: float | None, call: Compare
) -> tuple[int, str] | None:
    """Runs and exports what a study starts from, where that is not done yet; what it gives back says why it could not."""
    model = start_of(spec, sitting, given)
    if model.exists() and not sitting.anew:
        return None
    log = sitting.out / f"{spec.name}.log"
    first, scratch = (model.with_name(f"{model.name}.{part}") for part in ("run", "tmp"))
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
    lines = (
        log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if log.exists()
        else []
    )
    return lines[-1] if lines else "it said nothing"


# ------------------------------------------------------------------ pack


def pack(out: Path, archive: Path) -> int:
    """Writes the archive whole or not at all. Unfinished runs stay behind: they are begun again anyway."""
    files = sorted(path for name in WHOLE for path in out.glob(f"*/{name}"))
    runs = [path.parent for path in sorted((out / RUNS).glob("*/run.json")) if _finished(path)]
    files += [run / name for run in runs for name in KEPT]
    if not files:
        raise DpfedError(f"there are no studies in {out}")
    scratch = archive.with_name(f"{archive.name}.tmp")
    with tarfile.open(scratch, "w:gz") as tar:
        for path in files:
            tar.add(path, str(path.relative_to(out)))
    scratch.replace(archive)
    return len(runs)


def _finished(path: Path) -> bool:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))["state"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return state in ("finished", "stopped") and all((path.parent / name).exists() for name in KEPT)


def unpack(archive: Path, out: Path) -> int:
    """Adds an archive's studies and runs to a folder; runs that are there already are equal, as their names are."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(out, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise DpfedError(f"{archive} cannot be unpacked: {error}") from None
    (out / RUNS).mkdir(exist_ok=True)
    for path in out.glob(f"*/{STUDY}"):
        share_runs(path.parent)
    return sum(1 for _ in (out / RUNS).glob("*/run.json"))


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
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(143)
        )  # so that the study at work is interrupted, not orphaned
        pairs = (("--pack", options.pack), ("--workers", options.workers))
        extra = tuple(word for name, value in pairs if value for word in (name, value))
        only, given = tuple(options.only), tuple(options.set)
        return run(
            Sitting(options.out, given, options.studies, only, options.minutes, extra, options.anew)
        )
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
