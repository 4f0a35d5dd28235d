"""`dpfed run` around the run itself: the garbage collector."""

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


def test_no_garbage_collection_before_the_first_round() -> None:
    with starting() as started:
        assert not gc.isenabled()
        started()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        started()
        assert gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_failed_start_enables_the_collector() -> None:
    with pytest.raises(DpfedError), starting():
        raise DpfedError("a mistake")
    assert gc.isenabled()


def test_a_disabled_collector_stays_disabled() -> None:
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
    # A result of None is that of a torchrun process other than the first.
    run()
    assert seen == [False, True]
    assert gc.get_freeze_count() == 0
