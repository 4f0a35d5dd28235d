"""Runs in a pack have the results and folders of separate runs, also when one of them fails."""

from __future__ import annotations

import gc
import inspect
import json
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dpfed.config import Config, load
from dpfed.errors import DivergedError, DpfedError
from dpfed.model.build import assemble
from dpfed.privacy.batched_sums import BatchedSums
from dpfed.privacy.fixed_shape_sum import FixedSum
from dpfed.registry import registry
from dpfed.training.backends.batched_runs import (
    BLOCKS,
    BatchedRun,
    Pack,
    UnbatchableError,
    can_share_pass,
    pack_key,
    pack_size,
    run_batched,
    union_slots,
)
from dpfed.training.backends.execution import InProcess
from dpfed.training.backends.fleet import Fleet
from dpfed.training.job import data as job_data
from dpfed.training.job import model as job_model
from dpfed.training.job.job import prepare
from dpfed.training.job.job_cache import JobCache
from dpfed.training.run import run

torch.set_num_threads(1)
SMALL = [
    "model.name=linear",
    "run.rounds=3",
    "run.local_steps=2",
    "run.participation=0.4",
    "run.device=cpu",
    "run.slots=40",
    "run.checkpoint_every=0",
    "privacy.batch=16",
    "privacy.sigma=1",
]


def config_of(*overrides: str) -> Config:
    return load("digits", [*SMALL, *overrides], registry())


def packed(configs: list[Config], out: Path, shared: JobCache | None = None) -> list[Any]:
    """Return each run's result, or the error that it raised."""

    def task(number: int) -> Callable[[BatchedRun | None], Any]:
        def work(place: BatchedRun | None) -> Any:
            try:
                return run(configs[number], out / str(number), execution=InProcess(batch=place))
            except (DpfedError, ValueError) as error:
                return error

        return work

    return run_batched([task(i) for i in range(len(configs))], shared)


def theta_of(folder: Path) -> Tensor:
    return torch.cat(
        [x.flatten() for _, x in sorted(load_file(folder / "model.safetensors").items())]
    )


# ------------------------------------------------------------------ equal results

MIXED = [
    ["algorithm.name=dp-fedadamw", "algorithm.lr=0.01"],
    [
        "algorithm.name=dp-fedadamw",
        "algorithm.lr=0.03",
        "run.seed=5",
        "privacy.sigma=0.5",
        "privacy.clip=0.7",
    ],
    [
        "algorithm.name=dp-scaffold",
        "algorithm.lr=0.2",
        "run.seed=2",
        "run.cohort_choice=balanced",
    ],
    ["algorithm.name=dp-fedsam", "algorithm.lr=0.3"],
    [
        "algorithm.name=dp-fedavg",
        "algorithm.lr=0.3",
        "run.eval_every=2",
        "privacy.enabled=false",
        "privacy.sigma=0",
    ],
]


def test_a_packed_run_has_the_results_of_a_separate_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack mixes methods, seeds, learning rates, noise, clip norms and cohorts."""
    configs = [config_of(*keys) for keys in MIXED]
    assert len({pack_key(config) for config in configs}) == 1
    sizes: list[int] = []
    original = BatchedSums._one_pass
    monkeypatch.setattr(
        BatchedSums,
        "_one_pass",
        lambda self, asked: sizes.append(len(asked)) or original(self, asked),
    )
    results = packed(configs, tmp_path / "packed")
    assert sizes == [5] * 6 + [1] * 6, "dp-fedsam asks twice as often"
    for i, config in enumerate(configs):
        alone = run(config, tmp_path / "alone" / str(i))
        mine = theta_of(tmp_path / "packed" / str(i))
        torch.testing.assert_close(mine, theta_of(tmp_path / "alone" / str(i)), rtol=0, atol=1e-6)
        same = ("epsilon", "sigma", "guarantee", "rounds", "test_records", "algorithm", "seed")
        assert {key: results[i][key] for key in same} == {key: alone[key] for key in same}
        assert results[i]["test_accuracy"] == pytest.approx(alone["test_accuracy"], abs=0.01)
        names = sorted(p.name for p in (tmp_path / "alone" / str(i)).iterdir())
        assert sorted(p.name for p in (tmp_path / "packed" / str(i)).iterdir()) == names


def test_packed_runs_have_their_own_quantile_clip_norms(tmp_path: Path) -> None:
    keys = ["privacy.clip_mode=quantile", "algorithm.name=dp-fedavg", "algorithm.lr=0.3"]
    configs = [
        config_of(*keys, f"privacy.clip={clip}", f"run.seed={seed}")
        for clip, seed in ((0.1, 0), (5.0, 1))
    ]
    packed(configs, tmp_path / "packed")
    clips = []
    for i, config in enumerate(configs):
        run(config, tmp_path / str(i))
        torch.testing.assert_close(
            theta_of(tmp_path / "packed" / str(i)), theta_of(tmp_path / str(i)), rtol=0, atol=1e-6
        )
        lines = [
            (tmp_path / where / str(i) / "metrics.jsonl").read_text().splitlines()
            for where in ("packed", ".")
        ]
        mine, alone = ([json.loads(line)["clip"] for line in part] for part in lines)
        assert mine == pytest.approx(alone, rel=1e-6)
        clips.append(mine[-1])
    assert clips[0] < 1 < clips[1]


def test_a_pack_with_augmentations_and_automatic_slots(tmp_path: Path) -> None:
    keys = [
        "data.augment=crop_flip",
        "data.views=2",
        "run.slots=auto",
        "algorithm.lr=0.01",
        "run.rounds=2",
    ]
    configs = [
        config_of(*keys, f"run.seed={s}", f"run.average={a}") for s, a in enumerate((0.0, 0.5))
    ]
    packed(configs, tmp_path / "packed")
    run(configs[1], tmp_path / "alone")
    torch.testing.assert_close(
        theta_of(tmp_path / "packed" / "1"), theta_of(tmp_path / "alone"), rtol=0, atol=1e-6
    )


def test_a_failing_run_does_not_affect_the_others(tmp_path: Path) -> None:
    wild = config_of("algorithm.name=dp-fedavg", "algorithm.lr=1e38")
    calm = config_of("algorithm.name=dp-fedavg", "algorithm.lr=0.3")
    wrong = config_of("algorithm.name=dp-fedavg", "algorithm.lr=0.3", "privacy.budget=1e-9")
    found = packed([wild, calm, wrong], tmp_path / "packed")
    assert isinstance(found[0], DivergedError)
    assert isinstance(found[2], DpfedError)
    run(calm, tmp_path / "alone")
    torch.testing.assert_close(
        theta_of(tmp_path / "packed" / "1"), theta_of(tmp_path / "alone"), rtol=0, atol=1e-6
    )
    assert json.loads((tmp_path / "packed" / "0" / "run.json").read_text())["diverged"] is True


def test_packed_runs_continue_alone_if_no_joint_pass_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [
        config_of("algorithm.name=dp-fedavg", "algorithm.lr=0.3", f"run.seed={s}") for s in range(3)
    ]
    for i, config in enumerate(configs):
        run(config, tmp_path / "alone" / str(i))

    def full(self: FixedSum) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(FixedSum, "_compute", full)
    found = packed(configs, tmp_path / "packed")
    assert [result["rounds"] for result in found] == [3] * 3
    for i in range(3):
        mine, alone = (theta_of(tmp_path / where / str(i)) for where in ("packed", "alone"))
        torch.testing.assert_close(mine, alone, rtol=0, atol=1e-6)


def test_threads_can_share_a_model() -> None:
    """A forward pass replaces the weights of the modules, so passes must not overlap."""
    job = prepare(config_of("model.name=glyph-vit", "model.lora.r=2", "model.liveness=false"))
    thetas = [
        job.theta + 0.1 * torch.randn(job.theta.shape, generator=torch.Generator().manual_seed(i))
        for i in range(4)
    ]
    inputs, labels = job.private.records.take(torch.arange(8))
    client = torch.zeros(8, dtype=torch.int64)

    def numbers(theta: Tensor) -> Tensor:
        grads = job.model.grads(theta.unsqueeze(0), client, inputs, labels)
        return torch.cat([job.model.scores(theta, inputs).flatten(), *[g.flatten() for g in grads]])

    wanted = [numbers(theta) for theta in thetas]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(numbers, thetas * 4))
    for i, each in enumerate(found):
        assert torch.equal(each, wanted[i % 4])


# ------------------------------------------------------------------ shared data and models


def test_a_second_job_shares_records_and_model_and_starts_from_its_own_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks: list[Any] = []
    original = job_model.check_gradients
    monkeypatch.setattr(
        job_model, "check_gradients", lambda *given: checks.append(original(*given))
    )
    keys = ["model.name=glyph-vit", "model.lora.r=2"]
    shared, configs = JobCache(), [config_of(*keys, f"run.seed={s}") for s in (0, 1)]
    one, two = (prepare(config, cache=shared) for config in configs)
    assert len(checks) == 1
    assert one.model is two.model
    assert one.private.records is two.private.records
    assert one.public.test is two.public.test
    assert can_share_pass(one, two)
    assert not torch.equal(one.theta, two.theta)
    for job, config in zip((one, two), configs, strict=True):
        assert torch.equal(job.theta, prepare(config).theta)


def test_jobs_prepared_in_parallel_have_their_own_start_weights() -> None:
    """Initial weights come from torch's global generator."""
    keys = ["model.name=glyph-vit", "model.lora.r=2", "model.liveness=false"]
    configs, shared = [config_of(*keys, f"run.seed={s}") for s in range(6)], JobCache()
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda config: prepare(config, cache=shared).theta, configs))
    for config, theta in zip(configs, found, strict=True):
        assert torch.equal(theta, prepare(config).theta)


def test_a_fleet_leaves_the_pack_if_its_pass_does_not_fit() -> None:
    job = prepare(config_of())
    pack = Pack(2)
    joined = replace(job, batched_sum=pack.join_batch(job, 0))
    fleet = Fleet(joined)
    assert fleet._fixed_sum([0, 1]) is joined.batched_sum
    fleet._fixed_fits = False
    assert fleet._fixed_sum([0, 1]) is None
    with pytest.raises(RuntimeError, match="left"):
        joined.batched_sum.sums(job.theta.unsqueeze(0), {}, 1.0)


@pytest.mark.parametrize(
    "other",
    [
        ["model.lora.freeze_a=true", "run.seed=1"],
        ["model.lora.r=3"],
        ["run.precision=bf16"],
        ["data.alpha=0.3"],
    ],
    ids=str,
)
def test_different_models_or_data_are_not_shared(other: list[str]) -> None:
    """With `freeze_a` the frozen weights depend on the seed, so each seed has another model."""
    keys = ["model.name=glyph-vit", "model.lora.r=2", "model.liveness=false"]
    first = [*keys, "model.lora.freeze_a=true"] if "freeze_a" in other[0] else keys
    shared = JobCache()
    one, two = (
        prepare(config_of(*first), cache=shared),
        prepare(config_of(*keys, *other), cache=shared),
    )
    assert not can_share_pass(one, two)
    if "alpha" not in other[0]:
        assert one.model is not two.model


def test_a_run_that_cannot_join_a_pack_runs_alone_afterwards(tmp_path: Path) -> None:
    """The frozen weights depend on the seed, which is detected before anything is written."""
    keys = [
        "model.name=glyph-vit",
        "model.lora.r=2",
        "model.lora.freeze_a=true",
        "run.rounds=1",
        "algorithm.lr=0.01",
    ]
    configs = [config_of(*keys, f"run.seed={s}") for s in (0, 1)]
    threads: list[str] = []

    def task(config: Config) -> Callable[[BatchedRun | None], Any]:
        def work(place: BatchedRun | None) -> Any:
            result = run(config, tmp_path / str(config.run.seed), execution=InProcess(batch=place))
            threads.append(threading.current_thread().name)
            return result["seed"]

        return work

    ended: list[tuple[int, Any]] = []
    assert run_batched(
        [task(c) for c in configs], ended=lambda i, answer: ended.append((i, answer))
    ) == [0, 1]
    assert sorted(ended) == [(0, 0), (1, 1)]
    assert threads.count(threading.current_thread().name) == 1
    pack, shared = Pack(2), JobCache()
    pack.join_batch(prepare(configs[0], cache=shared), 0)
    with pytest.raises(UnbatchableError):
        pack.join_batch(prepare(configs[1], cache=shared), 1)


def test_a_run_that_cannot_join_a_pack_frees_its_memory() -> None:
    class Model:
        pass

    alive: list[weakref.ref[Model]] = []

    def task(place: BatchedRun | None) -> int:
        if place is None:
            return sum(model() is not None for model in alive)
        mine = Model()
        alive.append(weakref.ref(mine))
        place.shared.get("model", len(alive), lambda: mine)
        raise UnbatchableError

    assert run_batched([task, task]) == [0, 0]


def test_cached_records_keep_their_source_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache key contains the source's `id`, which a new object could get after deletion."""
    made: list[weakref.ref[Any]] = []

    def fresh(section: Any, source: Any) -> Any:
        other = replace(source)
        made.append(weakref.ref(other))
        return other

    monkeypatch.setattr(job_data, "tokenised", fresh)
    shared = JobCache()
    prepare(config_of("run.eval_on=test"), cache=shared)
    assert len(made) == 1
    shared.get("source", "another", lambda: (None, None))
    for kind in ("records", "test"):
        assert made[0]() is not None, kind
        shared.get(kind, "another", lambda: None)
    gc.collect()
    assert made[0]() is None


def test_a_task_error_is_raised_after_all_tasks_have_ended() -> None:
    def fails(place: BatchedRun | None) -> int:
        raise OSError("the disk is full")

    def elsewhere(place: BatchedRun | None) -> int:
        assert place is not None, "this process is about to end"
        raise UnbatchableError

    ended: list[int] = []
    with pytest.raises(OSError, match="disk"):
        run_batched([elsewhere, fails, lambda place: 1], ended=lambda i, answer: ended.append(i))
    assert ended == [2]


# ------------------------------------------------------------------ runs that may share a pack


@pytest.mark.parametrize(
    "keys",
    [
        ["run.seed=7"],
        ["algorithm.lr=3"],
        ["algorithm.name=dp-fedavg", "algorithm.lr=3"],
        ["algorithm.gamma=0"],
        ["privacy.sigma=3"],
        ["privacy.clip=3"],
        ["privacy.delta=1e-6"],
        ["privacy.budget=3"],
        ["run.eval_every=2"],
        ["run.eval_on=test"],
        ["run.average=0.5"],
        ["run.lr_schedule=constant"],
    ],
    ids=str,
)
def test_settings_that_may_differ_in_a_pack(keys: list[str]) -> None:
    assert pack_key(config_of("algorithm.lr=0.01", *keys)) == pack_key(
        config_of("algorithm.lr=0.01")
    )


@pytest.mark.parametrize(
    "keys",
    [
        ["data.alpha=0.1"],
        ["data.clients=5"],
        ["data.augment=flip"],
        ["data.augment=flip", "data.views=2"],
        ["model.name=glyph-vit"],
        ["model.train=head"],
        ["algorithm.granularity=tensor"],
        ["privacy.clip_mode=automatic"],
        ["privacy.clip_mode=quantile"],
        ["privacy.clip_mode=automatic", "privacy.clip_stability=0.1"],
        ["privacy.batch=8"],
        ["run.rounds=4"],
        ["run.local_steps=3"],
        ["run.participation=0.5"],
        ["run.device=auto"],
        ["run.precision=bf16"],
        ["run.slots=41"],
        ["run.graphs=false"],
        ["run.features=false"],
    ],
    ids=str,
)
def test_settings_that_must_be_equal_in_a_pack(keys: list[str]) -> None:
    mine = pack_key(config_of("algorithm.lr=0.01", *keys))
    assert mine is not None
    assert mine != pack_key(config_of("algorithm.lr=0.01"))


@pytest.mark.parametrize(
    "keys",
    [
        ["privacy.grid=true"],
        ["run.fleet_size=2"],
        ["run.diagnostics=true"],
        ["run.trackers=['tensorboard']"],
        ["run.checkpoint_every=1"],
        ["run.noise=os"],
    ],
    ids=str,
)
def test_settings_that_exclude_packing(keys: list[str]) -> None:
    assert pack_key(config_of("algorithm.lr=0.01", *keys)) is None


def test_runs_without_a_pack_key_are_never_packed() -> None:
    job = prepare(config_of("privacy.grid=true"))
    assert not can_share_pass(job, job)
    with pytest.raises(UnbatchableError):
        Pack(2).join_batch(job, 0)


@pytest.mark.parametrize("keys", [["model.lora.freeze_a=true"], ["model.weights=random"]], ids=str)
def test_seeded_frozen_weights_change_the_pack_key(keys: list[str]) -> None:
    keys = ["model.name=glyph-vit", *keys]
    assert pack_key(config_of(*keys, "run.seed=1")) != pack_key(config_of(*keys, "run.seed=2"))
    assert pack_key(config_of(*keys, "run.seed=1", "algorithm.lr=1")) == pack_key(
        config_of(*keys, "run.seed=1")
    )
    trained = [*keys, "model.train=full"]
    assert pack_key(config_of(*trained, "run.seed=1")) == pack_key(
        config_of(*trained, "run.seed=2")
    )


def test_without_privacy_the_clip_mode_does_not_matter() -> None:
    plain = config_of("privacy.enabled=false", "privacy.clip_mode=automatic")
    assert pack_key(plain) == pack_key(config_of())
    assert can_share_pass(
        prepare(plain, cache=(shared := JobCache())), prepare(config_of(), cache=shared)
    )


def test_methods_without_blocks_use_the_default_blocks() -> None:
    defaults = inspect.signature(assemble).parameters
    assert {key: defaults[key].default for key in BLOCKS} == BLOCKS


def test_runs_with_a_unit_column_are_not_packed() -> None:
    config = config_of("algorithm.lr=0.01")
    assert pack_key(replace(config, data=replace(config.data, unit_column="patient"))) is None


def test_a_joint_pass_has_slots_for_all_runs() -> None:
    job = prepare(config_of("run.slots=auto"))
    assert union_slots(job, 4) < 4 * union_slots(job, 1)
    runs = 4
    clients_of_a_round = 4
    records_of_a_batch = 16
    assert union_slots(job, runs) >= runs * clients_of_a_round * records_of_a_batch
    assert union_slots(prepare(config_of()), 4) == 160


def test_the_size_of_a_pack() -> None:
    assert [pack_size("auto", 0), pack_size("auto", 1), pack_size("3", 0), pack_size("40", 2)] == [
        1,
        16,
        3,
        40,
    ]
    for wrong in ("0", "-1", "x", "1.5", ""):
        with pytest.raises(DpfedError, match="--pack"):
            pack_size(wrong, 0)
