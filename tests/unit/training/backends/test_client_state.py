"""What clients keep between rounds: the same numbers back, whether held, spilled or restored; nothing of it overwritten."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from dpfed.errors import DpfedError
from dpfed.training.backends import client_state as memory_module
from dpfed.training.backends.client_state import ClientStates, Entry

SIZE = 5
CPU = torch.device("cpu")
ONE = 2 * SIZE * 4  # bytes of one client: two vectors


def made(folder: Path, limit: int = 10**9, names: Sequence[str] = ("c", "x")) -> ClientStates:
    return ClientStates(names, SIZE, folder / "memory", limit)


def vectors(*values: float) -> dict[str, Tensor]:
    """Two vectors for each client, made of one number each."""
    rows = torch.tensor(values).unsqueeze(1) * torch.ones(1, SIZE)
    return {"c": rows, "x": -rows}


def held(memory: ClientStates, *clients: int) -> list[float]:
    got = memory.gather(clients, CPU)
    assert torch.equal(got["c"], -got["x"])
    assert got["c"].shape == (len(clients), SIZE)
    return [float(row[0]) for row in got["c"]]


def files(folder: Path) -> set[str]:
    return (
        {path.name for path in (folder / "memory").iterdir()}
        if (folder / "memory").exists()
        else set()
    )


def test_what_was_put_is_gathered_and_who_was_never_drawn_is_zero_and_not_seen(
    tmp_path: Path,
) -> None:
    memory = made(tmp_path)
    memory.put(1, [4, 2], vectors(1.5, 2.5))
    got = memory.gather([2, 3, 4], CPU)
    assert got["seen"].tolist() == [True, False, True]
    assert held(memory, 2, 3, 4) == [2.5, 0.0, 1.5]
    memory.put(2, [3], vectors(7.0))
    assert held(memory, 3, 2) == [7.0, 2.5]
    assert len(memory) == 3
    assert files(tmp_path) == set()  # nothing is written while it fits


def test_what_is_gathered_later_does_not_change_with_the_callers_tensors(tmp_path: Path) -> None:
    memory, given = made(tmp_path), vectors(1.0)
    memory.put(1, [0], given)
    given["c"].zero_()
    memory.gather([0], CPU)["x"].zero_()
    assert held(memory, 0) == [1.0]


def test_nothing_is_remembered_by_algorithms_that_remember_nothing(tmp_path: Path) -> None:
    memory = made(tmp_path, names=())
    memory.put(1, [0, 1], {})
    assert memory.gather([0, 1], CPU) == {}
    assert memory.save() == {}
    assert len(memory) == 0


def test_an_algorithm_gives_back_what_it_says_it_remembers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="remembers"):
        made(tmp_path).put(1, [0], {"c": torch.zeros(1, SIZE)})


def test_beyond_the_limit_the_ones_used_longest_ago_go_to_files_and_come_back(
    tmp_path: Path,
) -> None:
    memory = made(tmp_path, limit=3 * ONE)
    for t in range(1, 5):
        memory.put(t, [2 * t, 2 * t + 1], vectors(t, t + 0.5))
        assert memory.bytes_in_memory <= 3 * ONE
    assert len(files(tmp_path)) == 5
    assert held(memory, *range(2, 10)) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
    assert memory.bytes_in_memory <= 3 * ONE  # reading does not bring them back
    assert len(memory) == 8


def test_one_client_larger_than_the_limit_is_still_served(tmp_path: Path) -> None:
    memory = made(tmp_path, limit=1)
    memory.put(1, [0, 1], vectors(1.0, 2.0))
    assert held(memory, 0, 1) == [1.0, 2.0]
    assert memory.bytes_in_memory == ONE


def test_files_that_no_checkpoint_names_do_not_pile_up(tmp_path: Path) -> None:
    memory = made(tmp_path, limit=ONE)
    for t in range(1, 21):
        memory.put(t, [0, 1, 2], vectors(t, t, t))
    assert len(files(tmp_path)) <= 3
    named = memory.save()
    for t in range(21, 41):
        memory.put(t, [0, 1, 2], vectors(t, t, t))
    assert len(files(tmp_path)) <= 6
    assert {entry.file for entry in named.values()} <= files(tmp_path)
    assert held(memory, 0, 1, 2) == [40.0] * 3


def test_save_writes_only_who_changed_and_never_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write = memory_module.write_file

    def noted(path: Path, how: object) -> str:
        assert not path.exists()
        written.append(path.name)
        return write(path, how)  # type: ignore[arg-type]

    monkeypatch.setattr(memory_module, "write_file", noted)
    memory = made(tmp_path)
    memory.put(1, [0, 1, 2], vectors(1.0, 2.0, 3.0))
    first = memory.save()
    assert len(written) == 3
    memory.put(2, [1], vectors(9.0))
    second = memory.save()
    assert written[3:] == ["client-1.round-2.npy"]
    assert {i for i in first if first[i] != second[i]} == {1}
    memory.save()
    assert len(written) == 4


def test_prune_keeps_what_two_checkpoints_name(tmp_path: Path) -> None:
    memory = made(tmp_path)
    names = []
    for t in range(1, 4):
        memory.put(t, [0, t], vectors(t, t))
        names.append({entry.file for entry in memory.save().values()})
        (tmp_path / "memory" / ".half.part").write_bytes(b"left by a crash")
        memory.prune(set().union(*names[-2:]))
    assert files(tmp_path) == names[1] | names[2]
    assert "client-0.round-1.npy" not in files(tmp_path)
    assert "client-0.round-2.npy" in files(tmp_path)
    memory.prune(set())
    assert files(tmp_path) == names[2]  # what is in use is never removed


def test_a_fresh_memory_takes_up_what_was_saved(tmp_path: Path) -> None:
    memory = made(tmp_path)
    memory.put(3, [0, 5], vectors(0.1, 0.2))
    entries = memory.save()
    memory.put(4, [0], vectors(99.0))
    other = made(tmp_path)
    other.put(4, [7], vectors(1.0))
    other.restore(entries)
    assert held(other, 0, 5, 7) == [float(np.float32(0.1)), float(np.float32(0.2)), 0.0]
    assert len(other) == 2
    assert other.save() == entries  # nothing to write


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path, harm: str) -> None:
    memory = made(tmp_path)
    memory.put(1, [0, 3], vectors(1.0, 2.0))
    entries = memory.save()
    path = tmp_path / "memory" / entries[3].file
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(data) if harm == "flip" else bytes(data[:-7]))
    with pytest.raises(DpfedError, match="client 3"):
        made(tmp_path).restore(entries)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("a file where the folder should be")
    memory = made(tmp_path, limit=1)
    with pytest.raises(DpfedError, match="cannot be written"):
        memory.put(1, [0, 1], vectors(1.0, 2.0))


class Machine(RuleBasedStateMachine):
    """Against a plain dictionary, with checkpoints that are kept two deep and crashes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.memory, self.truth, self.t = made(self.folder, 2 * ONE), dict[int, float](), 0
        self.count = 0
        self.saved: list[tuple[dict[int, Entry], dict[int, float], int]] = []

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(clients=st.sets(st.integers(0, 5), min_size=1, max_size=3))
    def put(self, clients: set[int]) -> None:
        self.t += 1
        self.count += 1  # a round that is run again need not give the same numbers
        values = {i: self.count + i / 8 for i in sorted(clients)}
        self.memory.put(self.t, list(values), vectors(*values.values()))
        self.truth |= values

    @rule(clients=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    def gather(self, clients: list[int]) -> None:
        assert held(self.memory, *clients) == [self.truth.get(i, 0.0) for i in clients]
        seen = self.memory.gather(clients, CPU)["seen"].tolist()
        assert seen == [i in self.truth for i in clients]

    @rule()
    def checkpoint(self) -> None:
        self.saved = [*self.saved, (self.memory.save(), dict(self.truth), self.t)][-2:]
        self.memory.prune(
            {entry.file for entries, _, _ in self.saved for entry in entries.values()}
        )

    @precondition(lambda self: self.saved)
    @rule(newest=st.booleans())
    def crash(self, newest: bool) -> None:
        if not newest:
            self.saved = self.saved[:1]
        entries, truth, self.t = self.saved[-1]
        self.memory, self.truth = made(self.folder, 2 * ONE), dict(truth)
        self.memory.restore(entries)

    @invariant()
    def bounded(self) -> None:
        assert self.memory.bytes_in_memory <= 2 * ONE
        assert len(self.memory) == len(self.truth)


Machine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestMemory = Machine.TestCase


def test_what_is_spilled_while_a_checkpoint_is_written_is_not_lost(tmp_path: Path) -> None:
    """The disk is slow: between `begin_save` and its writing another round comes, and there is room for one client only."""
    memory = made(tmp_path, limit=ONE)
    memory.put(1, [0], vectors(1.0))
    memory.save()
    memory.put(2, [0], vectors(2.0))
    write = memory.begin_save()
    memory.put(3, [1], vectors(3.0))  # pushes client 0 out before its file of round 2 is written
    assert held(memory, 0, 1) == [2.0, 3.0]
    kept = write()
    assert kept[0].file == "client-0.round-2.npy"
    memory.put(4, [0], vectors(4.0))
    write_later = memory.begin_save()
    memory.put(5, [0], vectors(5.0))
    assert (
        write_later()[0].file == "client-0.round-4.npy"
    )  # the checkpoint's own round, not what came after
    assert held(memory, 0) == [5.0]
    assert memory.save()[0].file == "client-0.round-5.npy"
    fresh = made(tmp_path)
    fresh.restore(kept)
    assert held(fresh, 0) == [2.0]
