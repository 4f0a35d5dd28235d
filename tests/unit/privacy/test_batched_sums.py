"""Runs that share passes: each receives its own rows, and nobody waits for a run that has left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpfed.privacy.batched_sums import BatchedSum, BatchedSums
from dpfed.privacy.clipping import Clipping
from dpfed.privacy.fixed_shape_sum import FixedSum, PassShape
from dpfed.privacy.record_batch import Records

SIZE, CLIENTS, UNLUCKY = 3, 2, 13.0
ROWS = torch.randn(40, SIZE, generator=torch.Generator().manual_seed(0))


@dataclass
class Space:
    shapes: tuple[torch.Size, ...] = (torch.Size([SIZE]),)


@dataclass
class Product:
    """The gradient of record x at theta is x * theta, which shows whose weights were used."""

    fail: list[Exception] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    too_many: int = 10**9
    why: Exception = field(default_factory=lambda: torch.OutOfMemoryError("out of memory"))
    space: Space = field(default_factory=Space)
    has_dropout: bool = False

    def ordered(self, raw: Tensor) -> Tensor:
        return raw

    def raw_grads(
        self, theta: Tensor, client: Tensor, inputs: Mapping[str, Tensor], *rest: Any
    ) -> list[Tensor]:
        self.sizes.append((len(theta), len(client)))
        if self.fail:
            raise self.fail.pop()
        if len(theta) > self.too_many:
            raise self.why
        if bool((theta == UNLUCKY).any()):
            raise ValueError("an unlucky number")
        return [inputs["x"] * theta.index_select(0, client)]

    grads = raw_grads


def shared_by(runs: int, slots: int = 8, model: Product | None = None) -> BatchedSums:
    records = Records({"x": ROWS}, torch.zeros(len(ROWS), dtype=torch.int64))
    gradients = model or Product()
    return BatchedSums(
        runs,
        CLIENTS,
        lambda n: FixedSum(
            gradients, records, Clipping(), None, PassShape(n * CLIENTS, n * slots, SIZE)
        ),
    )


def arrays(row: list[int], client: list[int]) -> dict[str, np.ndarray]:
    zeros = np.zeros(len(row), dtype=np.int64)
    return {
        "row": np.array(row, dtype=np.int64),
        "client": np.array(client, dtype=np.int64),
        "dropout": zeros,
        "augment": zeros,
    }


def reference(
    theta: Tensor, row: list[int], client: list[int], clip: float
) -> tuple[Tensor, Tensor]:
    """One record after another."""
    total, count = torch.zeros(len(theta), SIZE), torch.zeros(len(theta), 1)
    for r, c in zip(row, client, strict=True):
        g = ROWS[r] * theta[c]
        norm = float(g.norm())
        if not np.isfinite(norm):
            continue
        total[c] += g * min(1.0, clip / norm)
        count[c] += 0.5 if norm <= clip else -0.5
    return total, count


def together(shared: BatchedSums, tasks: list[Callable[[BatchedSum], Any]]) -> list[Any]:
    """Run each task in a thread; return its result or its exception. A deadlock fails the test."""
    out: list[Any] = [None] * len(tasks)

    def work(i: int) -> None:
        batched_sum = shared.batched_sum(i)
        try:
            out[i] = tasks[i](batched_sum)
        except Exception as error:
            out[i] = error
        finally:
            batched_sum.leave()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "somebody waits for a run that has left"
    return out


Batch = tuple[list[int], list[int], float]
batch = st.lists(st.tuples(st.integers(0, 39), st.integers(0, CLIENTS - 1)), max_size=25).flatmap(
    lambda pairs: st.tuples(
        st.just([p[0] for p in pairs]), st.just([p[1] for p in pairs]), st.floats(0.05, 5.0)
    )
)


@given(st.lists(st.lists(batch, max_size=4), min_size=1, max_size=5), st.sampled_from([1, 3, 16]))
@settings(max_examples=40)
def test_every_run_gets_the_sums_that_it_would_get_alone(
    asked: list[list[Batch]], slots: int
) -> None:
    """Runs make different numbers of requests; batches are empty or need several passes."""
    thetas = [
        torch.randn(CLIENTS, SIZE, generator=torch.Generator().manual_seed(i))
        for i in range(len(asked))
    ]

    def task(i: int) -> Callable[[BatchedSum], list[tuple[Tensor, Tensor]]]:
        return lambda batched_sum: [
            batched_sum.sums(thetas[i] + k, arrays(r, c), clip)
            for k, (r, c, clip) in enumerate(asked[i])
        ]

    found = together(shared_by(len(asked), slots), [task(i) for i in range(len(asked))])
    for i, answers in enumerate(found):
        assert len(answers) == len(asked[i])
        for k, ((total, count), (r, c, clip)) in enumerate(zip(answers, asked[i], strict=True)):
            wanted, counted = reference(thetas[i] + k, r, c, clip)
            torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-5)
            assert torch.equal(count, counted)


def test_a_result_is_not_overwritten_by_the_next_pass() -> None:
    """On a GPU every pass writes into the same tensors, so runs receive copies."""
    theta = torch.ones(CLIENTS, SIZE)
    same = (torch.zeros(2 * CLIENTS, SIZE), torch.zeros(2 * CLIENTS, 1))

    class Reusing(FixedSum):
        def _compute(self) -> tuple[Tensor, Tensor]:
            for kept, fresh in zip(same, super()._compute(), strict=True):
                kept.copy_(fresh)
            return same

    records = Records({"x": ROWS}, torch.zeros(len(ROWS), dtype=torch.int64))
    shared = BatchedSums(
        2,
        CLIENTS,
        lambda n: Reusing(Product(), records, Clipping(), None, PassShape(n * CLIENTS, 8, SIZE)),
    )

    def task(batched_sum: BatchedSum) -> list[Tensor]:
        return [batched_sum.sums(theta, arrays([k], [0]), 100.0)[0] for k in range(3)]

    for answers in together(shared, [task, task]):
        for k, total in enumerate(answers):
            torch.testing.assert_close(total[0], ROWS[k])


def test_a_run_may_write_into_its_result() -> None:
    """An oracle adds its noise in place; other runs and later passes do not see it."""
    theta, one = torch.ones(CLIENTS, SIZE), arrays([3, 4], [0, 1])

    def task(noise: float) -> Callable[[BatchedSum], list[tuple[Tensor, Tensor]]]:
        def ask(batched_sum: BatchedSum) -> list[tuple[Tensor, Tensor]]:
            answers = []
            for _ in range(3):
                total, count = batched_sum.sums(theta, one, 9.0)
                answers.append((total.clone(), count.clone()))
                total += noise
                count += noise
            return answers

        return ask

    wanted, counted = reference(theta, [3, 4], [0, 1], 9.0)
    for answers in together(shared_by(3), [task(1e3), task(-1e6), task(0.0)]):
        for total, count in answers:
            torch.testing.assert_close(total, wanted)
            assert torch.equal(count, counted)


def test_non_finite_weights_of_one_run_do_not_reach_another() -> None:
    good = torch.ones(CLIENTS, SIZE)
    bad = torch.full((CLIENTS, SIZE), float("nan"))
    one = arrays([0, 1, 2], [0, 1, 1])
    found = together(
        shared_by(3), [lambda s, t=t: s.sums(t, one, 0.5) for t in (bad, good, good * float("inf"))]
    )
    torch.testing.assert_close(found[1][0], reference(good, [0, 1, 2], [0, 1, 1], 0.5)[0])
    assert not found[0][0].any()
    assert not found[2][0].any()


def test_a_run_may_have_fewer_clients_than_rows() -> None:
    theta = torch.ones(1, SIZE)
    found = together(shared_by(2), [lambda s: s.sums(theta, arrays([3], [0]), 9.0)] * 2)
    assert [tuple(total.shape) for total, _ in found] == [(1, SIZE)] * 2
    torch.testing.assert_close(found[1][0][0], ROWS[3])


def test_nobody_waits_for_a_run_that_fails_or_makes_no_request() -> None:
    theta, one = torch.ones(CLIENTS, SIZE), arrays([0], [0])

    def raises(batched_sum: BatchedSum) -> None:
        batched_sum.sums(theta, one, 1.0)
        raise ValueError("mine alone")

    def asks(batched_sum: BatchedSum) -> int:
        return len([batched_sum.sums(theta, one, 1.0) for _ in range(5)])

    found = together(shared_by(4), [raises, asks, lambda batched_sum: None, asks])
    assert isinstance(found[0], ValueError)
    assert found[1:] == [5, None, 5]


def test_a_run_whose_pass_fails_fails_alone() -> None:
    """The other runs are computed without it."""
    thetas = [torch.full((CLIENTS, SIZE), x) for x in (2.0, UNLUCKY, 3.0, 4.0)]
    found = together(
        shared_by(4), [lambda s, t=t: s.sums(t, arrays([7], [1]), 99.0) for t in thetas]
    )
    assert isinstance(found[1], ValueError)
    assert str(found[1]) == "an unlucky number"
    for i in (0, 2, 3):
        torch.testing.assert_close(found[i][0][1], ROWS[7] * thetas[i][1])


def test_a_run_with_too_many_rows_fails_alone() -> None:
    one, model = arrays([7], [1]), Product()
    thetas = [torch.ones(CLIENTS + 1, SIZE), torch.ones(CLIENTS, SIZE)]
    found = together(
        shared_by(2, model=model), [lambda s, t=t: s.sums(t, one, 99.0) for t in thetas]
    )
    assert isinstance(found[0], ValueError)
    torch.testing.assert_close(found[1][0][1], ROWS[7])
    assert model.sizes == [(CLIENTS, 8)], "nothing is computed for it"


def test_a_run_may_request_again_after_a_failure() -> None:
    """The shared pass fails once, and so does the pass of each run alone."""
    theta, one = torch.ones(CLIENTS, SIZE), arrays([5], [1])
    model = Product(fail=[ValueError("once") for _ in range(3)])

    def asks(batched_sum: BatchedSum) -> Any:
        try:
            batched_sum.sums(theta, one, 1.0)
        except ValueError as error:
            return str(error), batched_sum.sums(theta, one, 100.0)

    for said, (total, _) in together(shared_by(2, model=model), [asks] * 2):
        assert said == "once"
        torch.testing.assert_close(total[1], ROWS[5])


@pytest.mark.parametrize(
    "why", [torch.OutOfMemoryError("out of memory"), RuntimeError("invalid configuration argument")]
)
def test_after_a_failed_pass_fewer_runs_share_one(why: Exception) -> None:
    """Five runs of two clients, memory for four rows: three runs do not fit, two do.

    The sum over two runs is made once, and also serves the one run left over in every turn.
    """
    model, made = Product(too_many=4, why=why), []
    shared = shared_by(5, model=model)
    make = shared._make
    shared._make = lambda runs: made.append(runs) or make(runs)
    thetas = [torch.full((CLIENTS, SIZE), float(i + 1)) for i in range(5)]
    found = together(
        shared, [lambda s, t=t: [s.sums(t, arrays([7], [1]), 99.0) for _ in "ab"] for t in thetas]
    )
    for theta, answers in zip(thetas, found, strict=True):
        for total, _ in answers:
            torch.testing.assert_close(total[1], ROWS[7] * theta[1])
    assert [rows for rows, _ in model.sizes] == [10, 6, 4, 4, 4, 4, 4, 4]
    assert made == [5, 3, 2]


def test_a_size_that_failed_is_not_tried_again() -> None:
    """`make` returns a sum over two runs, and memory holds one."""
    model = Product(too_many=CLIENTS)
    shared = shared_by(8, model=model)
    make = shared._make
    shared._make = lambda runs: make(min(runs, 2))
    theta = torch.ones(CLIENTS, SIZE)
    found = together(shared, [lambda s: s.sums(theta, arrays([7], [1]), 99.0)] * 8)
    assert all(torch.allclose(total[1], ROWS[7]) for total, _ in found)
    assert [rows for rows, _ in model.sizes] == [4] + [2] * 8


def test_if_one_run_does_not_fit_all_get_an_out_of_memory_error() -> None:
    theta = torch.ones(CLIENTS, SIZE)
    found = together(
        shared_by(3, model=Product(too_many=1)),
        [lambda s: s.sums(theta, arrays([0], [0]), 1.0)] * 3,
    )
    assert all(isinstance(error, torch.OutOfMemoryError) for error in found)


def test_the_pass_shrinks_with_the_members() -> None:
    """Runs make 1, 2, 3 and 4 requests: the pass holds four runs, then two, then one."""
    theta, model = torch.ones(CLIENTS, SIZE), Product()

    def asks(times: int) -> Callable[[BatchedSum], None]:
        return lambda batched_sum: (
            [batched_sum.sums(theta, arrays([0], [0]), 1.0) for _ in range(times)] and None
        )

    together(shared_by(4, slots=8, model=model), [asks(n) for n in (1, 2, 3, 4)])
    assert model.sizes == [(8, 32), (8, 32), (4, 16), (2, 8)]


def test_a_run_that_left_cannot_request_sums() -> None:
    shared = shared_by(2)
    batched_sum = shared.batched_sum(0)
    batched_sum.leave()
    batched_sum.leave()
    with pytest.raises(RuntimeError, match="run 0 has left"):
        batched_sum.sums(torch.ones(CLIENTS, SIZE), arrays([0], [0]), 1.0)
