"""A few random inputs for every reader; tests/helpers/fuzz_loop.py tries many more."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from fuzz_cases import CASES, SEEDS, Case, attempt, override, read_plainly
from fuzz_mutants import mutate, write_folder
from hypothesis import given, settings

from dpfed.errors import DpfedError

EXAMPLES = int(os.environ.get("DPFED_FUZZ_EXAMPLES", "6"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFED_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", CASES)
def test_only_a_sentence_comes_out(name: str) -> None:
    @settings(max_examples=EXAMPLES, database=None, derandomize=True)
    @given(SEEDS)
    def check(rng: Random) -> None:
        attempt(CASES[name], rng)

    check()


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_changed_is_read(name: str, tmp_path: Path) -> None:
    """Unchanged files must be valid, or the changed ones would be refused for another reason."""
    assert read_plainly(CASES[name].read, write_folder(tmp_path / "files", CASES[name].files()))


@settings(max_examples=10 * EXAMPLES, database=None, derandomize=True)
@given(SEEDS)
def test_overrides(rng: Random) -> None:
    override(rng)


def test_a_reader_that_breaks_is_noticed() -> None:
    def broken(folder: Path) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        attempt(Case(lambda: {"a": b"x"}, broken), Random(0))

    def two_lines(folder: Path) -> None:
        raise DpfedError("a\nb")

    with pytest.raises(AssertionError):
        attempt(Case(lambda: {"a": b"x"}, two_lines), Random(0))


def test_a_seed_names_an_input() -> None:
    content = b'{"a": [1, 2, {"b": "c"}]}\n'
    assert all(
        mutate(Random(i), "a.json", content) == mutate(Random(i), "a.json", content)
        for i in range(50)
    )
    assert len({mutate(Random(i), "a.json", content) for i in range(50)}) > 30
