"""`dpfed run` as a process: what it does around the run itself."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from dpfed.cli.run import run, starting
from dpfed.errors import DpfedError


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_garbage_is_left_alone_until_the_rounds_begin() -> None:
    with starting() as started:
        assert not gc.isenabled()
        started()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        started()  # once more changes nothing
        assert gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_start_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(DpfedError), starting():
        raise DpfedError("a mistake")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with starting() as started:
        started()
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_run_collects_again_before_round_1(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def train(*_: Any, callbacks: Any, **__: Any) -> None:
        seen.append(gc.isenabled())
        callbacks[0].on_start(None)
        seen.append(gc.isenabled())

    monkeypatch.setattr("dpfed.training.run.run", train)
    run()  # the train above has no result, as in a process that only helps
    assert seen == [False, True]
    assert gc.get_freeze_count() == 0
