"""Clients' memory between rounds: in RAM, in files, in checkpoints and after restoring."""

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
# Bytes of one client, which has two vectors.
ONE = 2 * SIZE * 4


def made(folder: Path, limit: int = 10**9, names: Sequence[str] = ("c", "x")) -> ClientStates:
    return ClientStates(names, SIZE, folder / "memory", limit)


def vectors(*values: float) -> dict[str, Tensor]:
    """Return two vectors for each client; one number fills a vector."""
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


def test_gather_returns_stored_vectors_and_zeros_for_new_clients(
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
    # Below the limit nothing is written.
    assert files(tmp_path) == set()


def test_stored_vectors_are_copies(tmp_path: Path) -> None:
    memory, given = made(tmp_path), vectors(1.0)
    memory.put(1, [0], given)
    given["c"].zero_()
    memory.gather([0], CPU)["x"].zero_()
    assert held(memory, 0) == [1.0]


def test_algorithms_without_memory_store_nothing(tmp_path: Path) -> None:
    memory = made(tmp_path, names=())
    memory.put(1, [0, 1], {})
    assert memory.gather([0, 1], CPU) == {}
    assert memory.save() == {}
    assert len(memory) == 0


def test_a_missing_vector_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="remembers"):
        made(tmp_path).put(1, [0], {"c": torch.zeros(1, SIZE)})


def test_least_recently_used_clients_move_to_files(
    tmp_path: Path,
) -> None:
    memory = made(tmp_path, limit=3 * ONE)
    for t in range(1, 5):
        memory.put(t, [2 * t, 2 * t + 1], vectors(t, t + 0.5))
        assert memory.bytes_in_memory <= 3 * ONE
    assert len(files(tmp_path)) == 5
    assert held(memory, *range(2, 10)) == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
    # Reading leaves clients in their files.
    assert memory.bytes_in_memory <= 3 * ONE
    assert len(memory) == 8


def test_a_client_larger_than_the_limit_is_stored(tmp_path: Path) -> None:
    memory = made(tmp_path, limit=1)
    memory.put(1, [0, 1], vectors(1.0, 2.0))
    assert held(memory, 0, 1) == [1.0, 2.0]
    assert memory.bytes_in_memory == ONE


def test_files_of_no_checkpoint_are_removed(tmp_path: Path) -> None:
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


def test_save_writes_changed_clients_to_new_files(
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


def test_prune_keeps_the_files_of_two_checkpoints(tmp_path: Path) -> None:
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
    # Files in use are never removed.
    assert files(tmp_path) == names[2]


def test_a_new_memory_restores_saved_clients(tmp_path: Path) -> None:
    memory = made(tmp_path)
    memory.put(3, [0, 5], vectors(0.1, 0.2))
    entries = memory.save()
    memory.put(4, [0], vectors(99.0))
    other = made(tmp_path)
    other.put(4, [7], vectors(1.0))
    other.restore(entries)
    assert held(other, 0, 5, 7) == [float(np.float32(0.1)), float(np.float32(0.2)), 0.0]
    assert len(other) == 2
    # Nothing has changed since the checkpoint.
    assert other.save() == entries


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


def test_a_full_disk_gives_a_one_sentence_error(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("a file where the folder should be")
    memory = made(tmp_path, limit=1)
    with pytest.raises(DpfedError, match="cannot be written"):
        memory.put(1, [0, 1], vectors(1.0, 2.0))


class Machine(RuleBasedStateMachine):
    """Compare the memory with a dictionary, with two checkpoints and crashes in between."""

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
        # A repeated round may give other numbers.
        self.count += 1
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


def test_a_client_that_leaves_memory_during_a_checkpoint_is_saved(tmp_path: Path) -> None:
    """Between `begin_save` and its writing another round ends; one client fits into memory."""
    memory = made(tmp_path, limit=ONE)
    memory.put(1, [0], vectors(1.0))
    memory.save()
    memory.put(2, [0], vectors(2.0))
    write = memory.begin_save()
    # Client 0 leaves the memory before its file of round 2 is written.
    memory.put(3, [1], vectors(3.0))
    assert held(memory, 0, 1) == [2.0, 3.0]
    kept = write()
    assert kept[0].file == "client-0.round-2.npy"
    memory.put(4, [0], vectors(4.0))
    write_later = memory.begin_save()
    memory.put(5, [0], vectors(5.0))
    # The checkpoint has the vectors of its own round, not later ones.
    assert write_later()[0].file == "client-0.round-4.npy"
    assert held(memory, 0) == [5.0]
    assert memory.save()[0].file == "client-0.round-5.npy"
    fresh = made(tmp_path)
    fresh.restore(kept)
    assert held(fresh, 0) == [2.0]
