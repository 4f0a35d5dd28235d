"""The cache: whole entries or none, never a failed run, rebuilt when damaged."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpfed.data import cache
from dpfed.data.cache import cache_folder, cached, key_of, pack_text, unpack_text


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {
            "x": np.arange(12, dtype=np.uint8).reshape(3, 4),
            "names": np.array(["a", "βγ"]),
            "none": np.zeros((0, 2)),
        }


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(
        np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a
    )


def entry_of(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    return entry


def test_built_once_and_mapped_afterwards(own_cache: Path) -> None:
    build = Builder()
    first, second = cached("k", build), cached("k", build)
    assert build.calls == 1
    assert same(first, Builder()())
    assert same(second, first)
    assert isinstance(second["x"], np.memmap)
    assert {p.name for p in entry_of(own_cache).iterdir()} == {
        "manifest.json",
        "x.npy",
        "names.npy",
        "none.npy",
    }
    cached("another key", build)
    assert build.calls == 2


def test_what_a_caller_changes_is_not_kept() -> None:
    build = Builder()
    cached("k", build)
    cached("k", build)["x"][:] = 99
    assert cached("k", build)["x"].max() == 11
    assert build.calls == 1


def test_only_the_owner_can_look(own_cache: Path) -> None:
    cached("k", Builder())
    assert stat.S_IMODE(own_cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry_of(own_cache).stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage",
    ["truncate", "grow", "missing", "manifest", "no manifest", "forged", "not json", "type"],
)
def test_a_damaged_entry_is_built_again(own_cache: Path, damage: str) -> None:
    build = Builder()
    cached("k", build)
    entry = entry_of(own_cache)
    x, manifest = entry / "x.npy", entry / "manifest.json"
    text = manifest.read_text()
    if damage == "truncate":
        x.write_bytes(x.read_bytes()[:-1])
    elif damage == "grow":
        x.write_bytes(x.read_bytes() + b"\0")
    elif damage == "missing":
        x.unlink()
    elif damage == "manifest":
        manifest.write_text(text[: len(text) // 2])
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "forged":  # sizes that fit, under a checksum that does not
        facts = json.loads(text)
        facts["facts"]["arrays"].pop("names")
        manifest.write_text(json.dumps(facts))
    elif damage == "not json":
        manifest.write_bytes(b"\xff\xfe[]")
    else:
        manifest.write_text("[1, 2]")
    assert same(cached("k", build), Builder()())
    assert build.calls == 2
    assert same(cached("k", build), Builder()())
    assert build.calls == 2
    assert [p.name for p in own_cache.iterdir()] == [entry.name]


def test_a_build_that_fails_leaves_nothing(own_cache: Path) -> None:
    def fail() -> dict[str, np.ndarray]:
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        cached("k", fail)
    assert not own_cache.exists() or not list(own_cache.iterdir())


def test_a_full_disk_does_not_fail_the_run(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = np.save

    def full(out: object, array: np.ndarray, **rest: object) -> None:
        if array.ndim == 2 and array.dtype == np.uint8:
            raise OSError(errno.ENOSPC, "No space left on device")
        saved(out, array, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(np, "save", full)
    build = Builder()
    assert same(cached("k", build), Builder()())
    assert list(own_cache.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("DPFED_CACHE", str(own_cache))
    cached("k", build)
    assert build.calls == 2


def test_a_folder_that_cannot_be_written_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DPFED_CACHE", str(tmp_path / "file" / "deeper"))
    assert same(cached("k", Builder()), Builder()())


def test_a_killed_writer_leaves_nothing_that_is_read(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed before the rename leaves a folder that is ignored and later removed."""

    class Killed(BaseException):
        pass

    def rename(self: Path, target: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        patch.setattr(cache.shutil, "rmtree", lambda *a, **k: None)
        with pytest.raises(Killed):
            cached("k", Builder())
    (left,) = own_cache.iterdir()
    assert left.name.endswith(".tmp")
    build = Builder()
    cached("k", build)
    assert build.calls == 1
    assert left.exists()  # it might belong to a process that is still writing
    os.utime(left, (0, 0))
    cached("other", build)
    assert not left.exists()


def test_two_writers_at_once_agree(own_cache: Path) -> None:
    def meanwhile() -> dict[str, np.ndarray]:
        cached("k", Builder())
        return Builder()()

    assert same(cached("k", meanwhile), Builder()())
    assert len(list(own_cache.iterdir())) == 1


def test_objects_are_never_written() -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        cached("k", lambda: {"x": np.array([{}], dtype=object)})


def test_the_key_changes_with_everything_that_matters(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    os.utime(file, ns=(0, 1000))
    base = key_of("s", 1, [file], {"a": 1})
    assert key_of("s", 1, [file], {"a": 1}) == base
    assert key_of("t", 1, [file], {"a": 1}) != base
    assert key_of("s", 2, [file], {"a": 1}) != base
    assert key_of("s", 1, [file], {"a": 2}) != base
    os.utime(file, ns=(0, 1001))
    assert key_of("s", 1, [file], {"a": 1}) != base
    file.write_bytes(b"longer")
    os.utime(file, ns=(0, 1000))
    assert key_of("s", 1, [file], {"a": 1}) != base


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == Path(os.environ["DPFED_CACHE"])
    monkeypatch.setenv("DPFED_CACHE", "off")
    assert cache_folder() is None
    build = Builder()
    assert same(cached("k", build), Builder()())
    monkeypatch.delenv("DPFED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/dpfed")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_folder() == Path("/h/.cache/dpfed")


@given(st.lists(st.text()))
def test_texts_come_back(texts: list[str]) -> None:
    packed = pack_text("t", texts)
    assert not any(a.dtype.hasobject for a in packed.values())
    assert unpack_text("t", packed).tolist() == texts
