"""Workers: a death affects one run only, mistakes become sentences, each worker has its GPU."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from study_case import BASE

from dpfed.config import load, to_dict
from dpfed.registry import registry
from dpfed.studies.outcomes import Task, key_of, read_outcome
from dpfed.studies.pool import Pool, Worker, run_one, run_pack, visible_gpu
from dpfed.training.job.data import label_task
from dpfed.training.job.job_cache import JobCache
from dpfed.training.run_folder.files import RESULT


def task(*sets: str) -> Task:
    tables = to_dict(load("digits", [*BASE, *sets], registry()))
    return Task(key_of(tables), "a run", tables, tuning=True)


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    one, two, three = (
        task("run.rounds=100000"),
        task("run.checkpoint_every=0"),
        task("run.checkpoint_every=0", "run.seed=1"),
    )
    with Pool(1) as pool:
        pool.start(one, tmp_path / "one")
        assert not pool.free()
        worker = pool._busy[one.key]
        os.kill(worker._process.pid, signal.SIGKILL)
        key, failed = pool.wait()
        assert key == one.key
        assert failed is not None
        assert "signal 9" in failed
        assert "--workers" in failed
        pool.start_pack([(two, tmp_path / "two"), (three, tmp_path / "three")])
        assert not pool.free()
        assert dict([pool.wait(), pool.wait()]) == {two.key: None, three.key: None}
        assert pool.free()
    assert read_outcome(tmp_path / "two") is not None
    done = read_outcome(tmp_path / "three")
    assert done is not None
    supports = [
        row["support"]
        for row in json.loads((tmp_path / "three" / RESULT).read_text())["metrics"][
            "per_class"
        ].values()
    ]
    shares = [count / done.records for count in supports]
    assert (
        done.score[3:]
        == done.blind
        == (max(shares), pytest.approx(-sum(p * math.log(p) for p in shares)))
    )
    assert read_outcome(tmp_path / "one") is None


def test_a_mistake_is_a_sentence_and_divergence_a_result(tmp_path: Path) -> None:
    wrong = task("data.clients=100000")
    assert "more than the" in (run_one(wrong.tables, tmp_path / "a", True, {}) or "")
    wild = task("algorithm.name=dp-fedavg", "algorithm.lr=1e38", "run.rounds=9")
    assert run_one(wild.tables, tmp_path / "b", True, {}) is None
    found = read_outcome(tmp_path / "b")
    assert found is not None
    assert found.diverged
    assert found.score.accuracy == 0


def test_a_defect_is_reported_with_its_place(tmp_path: Path) -> None:
    class Broken:
        pass

    good = task()
    config = load("digits", BASE, registry())
    sources = {(config.data, label_task(config.model)): Broken()}
    answer = run_one(good.tables, tmp_path / "a", True, sources)
    assert answer is not None
    assert "AttributeError" in answer
    assert "line" in answer


def test_tuning_runs_do_not_keep_their_model(tmp_path: Path) -> None:
    good = task()
    assert run_one(good.tables, tmp_path / "a", True, {}) is None
    assert run_one(good.tables, tmp_path / "b", False, {}) is None
    assert not (tmp_path / "a" / "model.safetensors").exists()
    assert (tmp_path / "b" / "model.safetensors").exists()


def test_each_worker_sees_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [visible_gpu(i, 1) for i in range(2)] == [None, None]
    assert [visible_gpu(i, 2) for i in range(3)] == ["0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [visible_gpu(i, 2) for i in range(3)] == ["3", "5", "3"]


def test_each_run_of_a_pack_has_its_own_answer(tmp_path: Path) -> None:
    """A mistake or a divergence of one run does not change the other runs of its pack."""
    pack = [
        task("run.checkpoint_every=0", "run.seed=1"),
        task("run.checkpoint_every=0", "algorithm.name=dp-fedavg", "algorithm.lr=1e38"),
        task("run.checkpoint_every=0", "run.min_clients=1000"),
    ]
    answers: dict[str, str | None] = {}
    given = [(t.key, t.tables, str(tmp_path / t.key), True) for t in pack]
    run_pack(given, {}, JobCache(), answers.__setitem__)
    assert set(answers) == {t.key for t in pack}
    assert answers[pack[0].key] is None
    assert answers[pack[1].key] is None
    assert "run.min_clients = 1000 is more" in (answers[pack[2].key] or "")
    good, wild = (read_outcome(tmp_path / t.key) for t in pack[:2])
    assert good is not None
    assert wild is not None
    assert (good.diverged, wild.diverged) == (False, True)
    assert not (tmp_path / pack[0].key / "model.safetensors").exists()


def test_runs_of_a_dead_pack_are_repeated_one_by_one(tmp_path: Path) -> None:
    """One worker has three runs; it dies after its first answer."""
    pack = [task("run.checkpoint_every=0", f"run.seed={seed}") for seed in range(3)]

    class Dying(Worker):
        def __init__(self, *given: Any) -> None:
            self.number = 0
            self.unanswered = {}
            self.packed = False
            self.connection, self.theirs = multiprocessing.Pipe()

        def obituary(self) -> str:
            return "killed"

        def end(self) -> None:
            pass

    with Pool(1) as pool:
        first, second = Dying(), Dying()
        pool._idle.append(first)
        pool.start_pack([(t, tmp_path / t.key) for t in pack])
        assert [key for key, *_ in first.theirs.recv()] == [t.key for t in pack]
        first.theirs.send((pack[0].key, None))
        assert pool.wait() == (pack[0].key, None)
        assert not pool.free()
        first.theirs.close()
        pool._idle.append(second)
        (tmp_path / pack[1].key).mkdir()
        second.theirs.send((pack[1].key, None))
        assert pool.wait() == (pack[1].key, None)
        assert [key for key, *_ in second.theirs.recv()] == [pack[1].key]
        assert not (tmp_path / pack[1].key).exists(), "the files of the dead worker are removed"
        assert not pool.free(), "one run is still to be repeated"
        second.theirs.send((pack[2].key, "too large"))
        assert pool.wait() == (pack[2].key, "too large")
        assert pool.free()


@pytest.mark.parametrize(
    "where",
    ["dpfed.model.per_sample.gradients.PerSample.raw_grads", "dpfed.training.round_loop.aggregate"],
)
def test_a_run_out_of_memory_in_a_pack_is_repeated_alone(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is complete: neither stopped early nor reported as a failure."""
    pack = [
        task("run.checkpoint_every=0", "model.liveness=false", f"run.seed={seed}")
        for seed in range(2)
    ]
    original = resolve_name(where)

    def crowded(*given: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            raise torch.OutOfMemoryError("out of memory")
        return original(*given, **named)

    monkeypatch.setattr(where, crowded)
    answers: dict[str, str | None] = {}
    given = [(t.key, t.tables, str(tmp_path / t.key), True) for t in pack]
    run_pack(given, {}, JobCache(), answers.__setitem__)
    assert answers == {t.key: None for t in pack}
    for t in pack:
        result = json.loads((tmp_path / t.key / "run.json").read_text())
        assert (result["state"], result["rounds"]) == ("finished", t.tables["run"]["rounds"])


def test_a_single_run_clears_the_cache(tmp_path: Path) -> None:
    shared, one = JobCache(), task()
    shared.get("model", 1, object)
    run_pack([(one.key, one.tables, str(tmp_path), True)], {}, shared, lambda key, answer: None)
    assert shared.get("model", 1, lambda: "made anew") == "made anew"


def test_features_are_kept_between_runs_of_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run has the results that it has with features of its own."""
    from dpfed.training.job import frozen_features

    made: list[int] = []
    original = frozen_features._records

    def counted(*given: Any) -> Any:
        made.append(1)
        return original(*given)

    monkeypatch.setattr(frozen_features, "_records", counted)
    both = [
        task("model.name=glyph-vit", "model.train=head", "run.features=true", f"run.seed={seed}")
        for seed in (1, 2)
    ]
    shared, sources, answers = JobCache(), dict[Any, Any](), dict[str, Any]()
    for one in both:
        run_pack(
            [(one.key, one.tables, str(tmp_path / one.key), False)],
            sources,
            shared,
            answers.__setitem__,
        )
    assert answers == {one.key: None for one in both}
    assert len(made) == 2, "features of the training records and of the test records"
    run_pack(
        [(both[1].key, both[1].tables, str(tmp_path / "alone"), False)],
        {},
        JobCache(),
        answers.__setitem__,
    )
    assert len(made) == 4
    kept, own = (read_outcome(tmp_path / name) for name in (both[1].key, "alone"))
    assert kept is not None
    assert own is not None
    assert (kept.accuracy, kept.loss) == (own.accuracy, own.loss)


@pytest.mark.usefixtures("from_source")
def test_a_run_from_a_source_tree_names_its_version(tmp_path: Path) -> None:
    """Without a version, runs of different versions would count as equal."""
    import dpfed

    one = task()
    assert run_one(one.tables, tmp_path / "a", True, {}) is None
    assert (
        json.loads((tmp_path / "a" / "run.json").read_text())["versions"]["dpfed"]
        == dpfed.__version__
    )


def test_the_cache_of_another_model_is_cleared(tmp_path: Path) -> None:
    """A run of the head needs the memory of the previous pack."""
    shared, answers = JobCache(), dict[str, Any]()
    for i, model in enumerate((("model.train=lora",), ("model.train=head", "run.features=true"))):
        one = task("model.name=glyph-vit", "run.rounds=1", *model)
        run_pack(
            [(one.key, one.tables, str(tmp_path / str(i)), True)], {}, shared, answers.__setitem__
        )
        if i == 0:
            shared.get("left over", 1, object)
    assert set(answers.values()) == {None}
    assert shared.get("left over", 1, lambda: "made anew") == "made anew"


def test_a_broken_device_fails_one_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack is repeated one by one in another process; a single run fails and its worker ends."""
    pack = [task("run.checkpoint_every=0", f"run.seed={seed}") for seed in range(2)]

    def broken(*given: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("dpfed.training.round_loop.aggregate", broken)
    answers: dict[str, str | None] = {}
    given = [(t.key, t.tables, str(tmp_path / t.key), True) for t in pack]
    with pytest.raises(RuntimeError, match="illegal memory"):
        run_pack(given, {}, JobCache(), answers.__setitem__)
    assert answers == {}
    said = run_one(pack[0].tables, tmp_path / "alone", True, {})
    assert said is not None
    assert "illegal memory" in said

    ended: list[Any] = []
    with Pool(1) as pool:
        worker = Worker.__new__(Worker)
        worker.number = 0
        worker.unanswered = {}
        worker.packed = False
        worker.connection, theirs = multiprocessing.Pipe()
        worker.end = lambda: ended.append(worker)
        pool._idle.append(worker)
        pool.start(pack[0], tmp_path / "next")
        theirs.send((pack[0].key, said))
        assert pool.wait() == (pack[0].key, said)
        assert ended == [worker]
        assert pool.free()
        assert not pool._idle
