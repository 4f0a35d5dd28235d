"""Every reader of foreign bytes, with files that it accepts and a call that reads them."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import data_files_case
import export_case
import makers
import numpy as np
import study_case
import torch
from callback_case import Watcher
from fuzz_mutants import ODD, SMALL, Files, mutate, read_folder, write_folder
from hypothesis import strategies as st

from dpfed.config import build, load, to_toml
from dpfed.data.sources.glue import Qnli, Rte
from dpfed.data.sources.npz import Npz
from dpfed.data.sources.text_table import TextTable
from dpfed.errors import DpfedError
from dpfed.federation.messages import (
    ClippingTerms,
    Receipt,
    Reply,
    Request,
    Terms,
    digest,
    pack,
    unpack_reply,
    unpack_request,
)
from dpfed.model.build import assemble, describe_space
from dpfed.model.task import InputSpec
from dpfed.model.zoo.text import AutoText
from dpfed.model.zoo.vision import AutoImage
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.registry import registry
from dpfed.report.table_files import to_csv, to_json, to_latex, to_markdown
from dpfed.studies.output import curves_of, search_csv, table_of
from dpfed.studies.study import RUNS, STUDY, claim, conduct
from dpfed.training.backends.client_state import ClientStates
from dpfed.training.budget.prior_spending import prior_spending_of
from dpfed.training.budget.recorded_spending import read_recorded_spending
from dpfed.training.callbacks.diagnostics import read_diagnostics
from dpfed.training.export import read_run
from dpfed.training.job.data import tokenised
from dpfed.training.job.job import prepare
from dpfed.training.messages.message_format import Field
from dpfed.training.round_context import first_state
from dpfed.training.run import run
from dpfed.training.run_folder.checkpoint import Checkpoints, index_hash, job_hash
from dpfed.training.run_folder.folder import refuse_occupied
from dpfed.training.run_folder.run_identity import run_identity

KNOWN = registry()
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A reader and its valid files.

    read     reads a folder of the files; the only error it may raise is DpfedError
    spoiled  endings of the files to change; empty: all files
    odd      values to put into JSON, without large ones where a value is a size to allocate
    """

    files: Callable[[], Files]
    read: Callable[[Path], object]
    spoiled: tuple[str, ...] = ()
    odd: tuple[Any, ...] = ODD


def attempt(case: Case, rng: Random) -> bool:
    """Return True if a changed input was read, and False if it was refused in one sentence."""
    files = case.files()
    name = rng.choice(sorted(n for n in files if not case.spoiled or n.endswith(case.spoiled)))
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), {**files, name: mutate(rng, name, files[name], case.odd)})
        return read_plainly(case.read, Path(folder))


def read_plainly(read: Callable[[Path], object], folder: Path) -> bool:
    sentence: str | None = None
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            read(folder)
    except DpfedError as error:
        sentence = str(error)
    assert sentence is None or (sentence.strip() and "\n" not in sentence), (
        f"not one sentence: {sentence!r}"
    )
    return sentence is None


# ---- configuration


@cache
def presets() -> Files:
    return {
        f"{name.replace('/', '-')}.toml": to_toml(load(name, [], KNOWN)).encode()
        for name in sorted(KNOWN.presets)
    }


def read_configuration(folder: Path) -> None:
    for path in folder.iterdir():
        to_toml(load(path, [], KNOWN))


def override(rng: Random) -> bool:
    """Use `--set` with a real or slightly changed key and any text."""
    section = rng.choice(
        ("data", "model", "algorithm", "privacy", "run", "model.lora", "", "x", "data.")
    )
    keys = (
        "name",
        "path",
        "clients",
        "lr",
        "clip",
        "sigma",
        "rounds",
        "seed",
        "r",
        "targets",
        "x",
        "",
        "gamma",
        "batch",
    )
    texts = (
        "1e999",
        "nan",
        "-1",
        '"',
        "[" * 3000,
        "{}",
        "[1,2]",
        "1979-05-27",
        "0x10",
        "true",
        "\n",
        "\x00",
        "9" * 5000,
    )
    value = rng.choice((*texts, rng.randbytes(6).decode("latin-1"), str(rng.choice(ODD))))
    item = f"{section}.{rng.choice(keys)}={value}" if rng.random() < 0.95 else value
    return read_plainly(lambda _: to_toml(load("digits", [item], KNOWN)), Path())


# ---- run folders


def run_config() -> Any:
    tables = {
        "data": {"clients": 3, "partition": "iid"},
        "model": {"name": "linear"},
        "algorithm": {"name": "dp-scaffold", "lr": 0.1},
        "privacy": {"sigma": 1.0, "clip": 0.5, "batch": 4},
        "run": {
            "rounds": 3,
            "local_steps": 1,
            "participation": 0.7,
            "device": "cpu",
            "diagnostics": True,
        },
    }
    return build(tables, KNOWN)


@cache
def stopped_run() -> tuple[Any, Files]:
    """Return a job and the folder of its run, which stopped before its last round."""

    class StopError(Exception):
        pass

    def stop(round: Any) -> None:
        if round.t == 3:
            raise StopError

    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(StopError):
            run(
                run_config(),
                Path(folder) / "run",
                source=export_case.images(side=2, channels=1),
                callbacks=[Watcher(on_round=stop)],
            )
        job = prepare(run_config(), export_case.images(side=2, channels=1))
        return job, read_folder(Path(folder) / "run")


def stopped_files() -> Files:
    return {n: c for n, c in stopped_run()[1].items() if not n.endswith((".lock", "-wal", "-shm"))}


@cache
def finished_files() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        run(run_config(), Path(folder) / "run", source=export_case.images(side=2, channels=1))
        kept = read_folder(Path(folder) / "run")
    return {n: c for n, c in kept.items() if not n.endswith((".lock", "-wal", "-shm"))}


def resume(folder: Path) -> None:
    run(run_config(), folder, source=export_case.images(side=2, channels=1), mode="resume")


def read_checkpoint(folder: Path) -> None:
    job = stopped_run()[0]
    memory = ClientStates(
        job.algorithm.remembers, job.space.size, folder / "checkpoint" / "memory", 1 << 20
    )
    checkpoints = Checkpoints(folder / "checkpoint", job_hash(run_identity(job), job.theta), memory)
    saved, said = checkpoints.load(first_state(job))
    assert all("\n" not in sentence for sentence in said)
    if saved is None:
        raise DpfedError("; ".join(said))
    memory.gather(range(3), CPU)
    checkpoints.save(saved.progress, saved.rounds_taken, wait=True)


def read_resealed(folder: Path) -> None:
    """Read a checkpoint whose hashes are recomputed after the change."""
    import hashlib

    for path in (folder / "checkpoint").glob("round-*.json"):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            index = json.loads(path.read_text())
            index.pop("sha256", None)
            index["state"] = hashlib.sha256(
                path.with_suffix(".safetensors").read_bytes()
            ).hexdigest()
            for entry in index["memory"].values():
                file = folder / "checkpoint" / "memory" / str(entry[0])
                if file.is_file():
                    entry[1] = hashlib.sha256(file.read_bytes()).hexdigest()
            path.write_text(json.dumps({**index, "sha256": index_hash(index)}))
    read_checkpoint(folder)


def read_ledger(folder: Path) -> None:
    for readonly in (True, False):
        with Ledger.open(folder / "ledger.sqlite", readonly=readonly) as ledger:
            ledger.verify()
            list(ledger.rows())
            ledger.histories()
            ledger.history(0)
            ledger.participation()


def read_results(folder: Path) -> None:
    read_diagnostics(folder)
    json.dumps(read_run(folder).result)
    read_recorded_spending(folder)


def occupied(folder: Path) -> None:
    refuse_occupied(folder, force=True)


# ---- models and adapters

SPEC = InputSpec("image", "pixel_values", (3, 8, 8), 3)


@cache
def adapter_files() -> Files:
    from dpfed.training.export import export

    with tempfile.TemporaryDirectory() as folder:
        made = export_case.vit_run(Path(folder), run={"rounds": 1})
        export(read_run(made), Path(folder) / "adapter")
        kept = {f"adapter/{n}": c for n, c in read_folder(Path(folder) / "adapter").items()}
        preprocessor = json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}).encode()
        base = {f"base/{n}": c for n, c in read_folder(Path(folder) / "base").items()}
        return {**kept, **base, "base/preprocessor_config.json": preprocessor}


def vision(folder: Path, adapter: bool = True) -> AutoImage:
    made = AutoImage(
        weights=str(folder / "base"), adapter=str(folder / "adapter") if adapter else None
    )
    return replace(made, lora=replace(made.lora, r=2))


def read_prior(folder: Path) -> None:
    config = export_case.settings(
        {"name": "auto-image", "weights": str(folder / "base"), "adapter": str(folder / "adapter")}
    )
    prior_spending_of(config)


def read_adapter(folder: Path) -> None:
    assemble(vision(folder), SPEC)


def read_weights(folder: Path) -> None:
    built = assemble(vision(folder, adapter=False), SPEC).built
    built.prepare({"pixel_values": torch.zeros(1, 3, 8, 8, dtype=torch.uint8)})


def read_shape(folder: Path) -> None:
    describe_space(vision(folder, adapter=False), SPEC)


@cache
def tokenizer_files() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        export_case.base("bert", Path(folder))
        return {n: c for n, c in read_folder(Path(folder)).items() if n != "model.safetensors"}


def read_tokenizer(folder: Path) -> None:
    section = AutoText(weights=str(folder), max_length=6)
    tokenised(section, export_case.texts())
    assert section.encoding


# ---- data


def npz_files() -> Files:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.normal(size=(6, 3)).astype(np.float32),
        "y_train": np.arange(6) % 3,
        "train_site": np.arange(6),
        "x_test": rng.normal(size=(3, 3)).astype(np.float32),
        "y_test": np.arange(3),
    }
    out = io.BytesIO()
    np.savez(out, **arrays)
    return {"a.npz": out.getvalue()}


TSV = {"t.tsv": b"text\tlabel\nab\t0\nc\t1\n", "test.csv": b"text,label\nd,1\n"}
SOURCES: dict[str, tuple[Files, Callable[[str], Any]]] = {
    **data_files_case.CASES,
    "npz": (npz_files(), lambda p: Npz(path=f"{p}/a.npz", client_column="site")),
    "tsv": (TSV, lambda p: TextTable(path=f"{p}/t.tsv", test_path=f"{p}/test.csv")),
    "qnli": (makers.glue("qnli"), lambda p: Qnli(path=p, check=False)),
    "rte": (makers.glue("rte"), lambda p: Rte(path=p, check=False)),
}


def source_case(files: Files, section: Callable[[str], Any]) -> Case:
    def read(folder: Path) -> None:
        source = section(str(folder)).load()
        assert len(source.train) > 0
        assert 0 <= source.train.labels.min() <= source.train.labels.max() < len(source.classes)

    return Case(lambda: files, read)


# ---- comparisons


@cache
def study() -> Any:
    return study_case.study("dp-fedavg", seeds=1)


def score(tables: Any) -> float:
    return 0.5


@cache
def study_files() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        with claim(Path(folder), study(), force=False):
            conduct(study(), Path(folder), study_case.FakeRunner(score), KNOWN)
        return {
            n: c for n, c in read_folder(Path(folder)).items() if n == STUDY or n.startswith(RUNS)
        }


def read_study(folder: Path) -> None:
    with claim(folder, study(), force=False):
        results = conduct(study(), folder, study_case.FakeRunner(score), KNOWN)
        # All output except the plots, which take a second.
        table = table_of(study(), results)
        for form in (to_csv, to_json, to_markdown, to_latex):
            form(table).encode()
        search_csv(results).encode()
        curves_of(results, "")


# ---- messages

TERMS = Terms(
    run="run-1",
    server="hub",
    client="clinic-0",
    index=0,
    seed=7,
    seeded=False,
    round=2,
    rounds=3,
    local_steps=2,
    clients=3,
    cohort=3,
    lr=0.01,
    algorithm={"name": "dp-fedavg", "lr": 0.1},
    model="ab",
    rate=0.1,
    expected=4.0,
    sigma=1.0,
    clip=0.5,
    clipping=ClippingTerms("flat", 0.01, 0.5, 0.2, 10.0),
    grid=True,
    equal_phi=True,
    rows=1,
    head="cd",
    used=1,
    max_rounds=0,
    upload="float32",
    download="float32",
)


@cache
def wire_files() -> Files:
    request = pack(Request(TERMS, {"theta": torch.arange(5.0), "v": torch.zeros(0)}))
    receipt = Receipt("run-1", "clinic-0", 2, digest(request), 2, "ef")
    return {
        "request": request,
        "reply": pack(Reply(receipt, {"delta": torch.ones(4), "v": torch.ones(2)})),
    }


def read_wire(folder: Path) -> None:
    asked = digest(wire_files()["request"])
    unpack_request((folder / "request").read_bytes(), 1 << 20)
    layout = {"delta": Field(4), "v": Field(2)}
    unpack_reply((folder / "reply").read_bytes(), layout, TERMS, asked, 5.0)


CASES: dict[str, Case] = {
    "message": Case(wire_files, read_wire),
    "configuration": Case(presets, read_configuration),
    **{f"data: {name}": source_case(*given) for name, given in SOURCES.items()},
    "checkpoint": Case(stopped_files, read_checkpoint, (".safetensors", ".npy", ".json")),
    "checkpoint, hashes made to fit": Case(
        stopped_files, read_resealed, (".safetensors", ".npy", ".json")
    ),
    "ledger": Case(stopped_files, read_ledger, ("ledger.sqlite", "ledger.sqlite.head")),
    "run to be resumed": Case(stopped_files, resume),
    "run to be replaced": Case(
        stopped_files, occupied, ("ledger.sqlite", "ledger.sqlite.head", "config.toml")
    ),
    "results of a run": Case(finished_files, read_results, odd=SMALL),
    "spending of a start": Case(
        adapter_files, read_prior, ("dpfed.json", "adapter_model.safetensors")
    ),
    "adapter": Case(
        adapter_files, read_adapter, ("adapter_config.json", "adapter_model.safetensors"), SMALL
    ),
    "weights": Case(
        adapter_files,
        read_weights,
        ("base/model.safetensors", "base/preprocessor_config.json"),
        SMALL,
    ),
    "shape of weights": Case(adapter_files, read_shape, ("base/config.json",), SMALL),
    "tokenizer": Case(tokenizer_files, read_tokenizer, odd=SMALL),
    "study": Case(study_files, read_study),
}
SEEDS = st.randoms(use_true_random=False)
