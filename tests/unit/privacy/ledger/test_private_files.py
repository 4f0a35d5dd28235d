"""Files that only their owner can read, whatever the umask is."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import dpfed
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.ledger.private_files import make_private_folder, open_private, restrict_tree
from dpfed.privacy.mechanism import Mechanism


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.usefixtures("umask")
def test_a_private_file_has_its_mode_before_the_first_byte(tmp_path: Path) -> None:
    for kind in ("wb", "ab", "xb"):
        with open_private(tmp_path / kind, kind) as file:
            assert mode(tmp_path / kind) == 0o600
            file.write(b"x")


@pytest.mark.parametrize(("kind", "left"), [("w", "new"), ("a", "oldnew")])
def test_a_file_that_is_open_to_others_is_restricted_before_it_is_written(
    kind: str, left: str, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    path.chmod(0o666)
    with open_private(path, kind) as file:
        assert mode(path) == 0o600
        file.write("new")
    assert path.read_text() == left


@pytest.mark.usefixtures("umask")
def test_missing_parents_of_a_private_folder_are_private_too(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "b")
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700


def test_a_whole_tree_is_restricted_but_no_link_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("x")
    outside.chmod(0o644)
    inside = tmp_path / "run" / "checkpoint"
    inside.mkdir(parents=True)
    (inside / "f").write_text("x")
    (inside / "f").chmod(0o644)
    (inside / "link").symlink_to(outside)
    restrict_tree(tmp_path / "run")
    assert (mode(tmp_path / "run"), mode(inside), mode(inside / "f"), mode(outside)) == (
        0o700,
        0o700,
        0o600,
        0o644,
    )


@pytest.mark.usefixtures("umask")
def test_a_ledger_and_every_file_beside_it_is_private_while_it_is_written(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "l.sqlite", run="r") as ledger:
        ledger.charge([Charge(0, 1, 2, Mechanism("poisson", 0.1, 1.0), "os")])
        found = {path.name: mode(path) for path in tmp_path.iterdir()}
    assert {"l.sqlite", "l.sqlite-wal", "l.sqlite.head", "l.sqlite.lock"} <= set(found)
    assert set(found.values()) == {0o600}


def test_a_ledger_of_an_older_version_is_restricted_when_it_is_written_again(
    tmp_path: Path,
) -> None:
    Ledger.create(tmp_path / "l.sqlite", run="r").close()
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    Ledger.open(tmp_path / "l.sqlite", readonly=True).close()
    assert {mode(path) for path in tmp_path.iterdir()} == {0o644}
    Ledger.open(tmp_path / "l.sqlite").close()
    assert {mode(path) for path in tmp_path.iterdir()} == {0o600}


# --- nothing is written in another way ---

ROOT = Path(dpfed.__file__).parent
WRITING = ("privacy", "training", "federation")
# Parents of a run's or a client's folder, and what is made for release: there the umask decides.
BY_UMASK = {
    "training/run_folder/atomic_file.py": {"mkdir"},
    "training/export.py": {"mkdir"},
    "training/layers_model.py": {"mkdir"},
    "training/run_folder/folder.py": {"mkdir"},
    "federation/client/storage.py": {"mkdir"},
    "federation/flower/app_folder.py": {"mkdir", "write_bytes"},
    "privacy/ledger/private_files.py": {"mkdir", "open"},
}


def by_umask(source: str) -> set[str]:
    """Return the names of calls that make files or folders with the mode that the umask leaves."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = [*node.args, *(word.value for word in node.keywords)]
        texts = [
            arg.value
            for arg in given
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
        writes = any(set(text) & set("wax") and set(text) <= set("rwaxbt+") for text in texts)
        variable_mode = (
            name == "open" and not texts and len(node.args) > 1 and isinstance(node.func, ast.Name)
        )
        if name in ("write_text", "write_bytes", "mkdir", "makedirs", "touch") or (
            name == "open" and (writes or variable_mode)
        ):
            found.add(name)
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('path.open("w")', {"open"}),
        ('open(path, mode="ab")', {"open"}),
        ("open(path, mode)", {"open"}),
        ("folder.mkdir(parents=True)", {"mkdir"}),
        ("path.write_text(text)", {"write_text"}),
        ('path.open("rb")', set()),
        ('open_private(path, "w")', set()),
    ],
)
def test_ways_around_the_private_ones_are_found(source: str, found: set[str]) -> None:
    assert by_umask(source) == found


def test_everything_that_is_not_for_release_is_written_privately() -> None:
    files = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] in WRITING]
    found = {
        str(path.relative_to(ROOT)): by_umask(path.read_text(encoding="utf-8")) for path in files
    }
    assert {name: calls for name, calls in found.items() if calls} == BY_UMASK
