"""Partitions are disjoint, repeatable and have the sizes that their rule promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfed.config import DataSection
from dpfed.data.partition import RULES, Shards, partition, shards_of
from dpfed.data.tables import Table
from dpfed.errors import DpfedError


def labels_of(count: int, classes: int = 10, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, count)


def split(
    rule: str,
    labels: np.ndarray,
    clients: int,
    alpha: float = 0.5,
    seed: int = 0,
    **columns: np.ndarray,
) -> Shards:
    """Return the shards of records with these labels; columns may be `client` and `unit`."""
    keys: dict[str, Any] = {f"{name}_column": name for name in columns}
    section = DataSection(clients=clients, partition=rule, alpha=alpha, **keys)  # type: ignore[arg-type]
    return partition(section, Table({}, labels, columns), np.random.default_rng(seed))


def check_disjoint(shards: Shards, records: int) -> None:
    assert len(np.unique(shards.records)) == len(shards.records)
    assert len(shards.records) == 0 or (
        shards.records.min() >= 0 and shards.records.max() < records
    )
    assert np.array_equal(
        np.concatenate([shards.of(i) for i in range(len(shards))]), shards.records
    )


def skew(shards: Shards, labels: np.ndarray) -> float:
    """Mean over clients of the share of the most frequent label."""
    return float(
        np.mean(
            [
                np.bincount(labels[shards.of(i)]).max() / len(shards.of(i))
                for i in range(len(shards))
            ]
        )
    )


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0, 1e3, 1e8])
def test_disjoint_and_complete_for_any_alpha(rule: str, alpha: float) -> None:
    labels = labels_of(1003)
    if rule == "dirichlet_classwise" and alpha < 0.1:
        labels = (
            np.arange(1003) % 100
        )  # one class to one client each: with few classes a client may stay empty
    shards = split(rule, labels, 4, alpha)
    check_disjoint(shards, 1003)
    if rule == "dirichlet_classwise":
        assert sorted(shards.records) == list(range(1003))
    else:
        assert shards.sizes.tolist() == [250] * 4  # floor(n/N), 3 left over


@given(
    st.sampled_from(["iid", "dirichlet_equal"]),
    st.integers(1, 200),
    st.integers(1, 30),
    st.integers(1, 12),
    st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
    st.integers(0, 2**31),
)
@settings(max_examples=120, deadline=None)
def test_equal_sizes_for_any_shape(
    rule: str, records: int, clients: int, classes: int, alpha: float, seed: int
) -> None:
    labels = labels_of(records, classes, seed)
    if clients > records:
        with pytest.raises(DpfedError, match=r"data\.clients"):
            split(rule, labels, clients, alpha, seed)
        return
    shards = split(rule, labels, clients, alpha, seed)
    check_disjoint(shards, records)
    assert shards.sizes.tolist() == [records // clients] * clients


@given(
    st.integers(20, 300),
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from([0.05, 1.0, 100.0]),
    st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_classwise_uses_every_record_or_names_the_empty_client(
    records: int, clients: int, classes: int, alpha: float, seed: int
) -> None:
    labels = labels_of(records, classes, seed)
    owner = RULES["dirichlet_classwise"](labels, clients, alpha, np.random.default_rng(seed))
    assert owner.min() >= 0
    for c in range(classes):  # each class is dealt out whole
        assert (
            sum(((labels == c) & (owner == i)).sum() for i in range(clients)) == (labels == c).sum()
        )
    empty = sorted(set(range(clients)) - set(owner.tolist()))
    if empty:
        with pytest.raises(DpfedError, match=f"client {empty[0]} has no records"):
            shards_of(owner, clients)
    else:
        assert shards_of(owner, clients).sizes.sum() == records


@pytest.mark.parametrize("rule", ["dirichlet_equal", "dirichlet_classwise"])
def test_skew_grows_as_alpha_shrinks(rule: str) -> None:
    labels = labels_of(4000)
    skews = [
        np.mean([skew(split(rule, labels, 8, a, seed), labels) for seed in range(3)])
        for a in (0.1, 1.0, 100.0)
    ]
    assert skews[0] > skews[1] + 0.1 > skews[2] + 0.2
    assert skews[2] < 0.2


def test_tiny_alpha_gives_a_client_almost_one_class_while_it_lasts() -> None:
    labels = np.repeat(np.arange(10), 200)
    shards = split("dirichlet_equal", labels, 10, 1e-3)
    assert (
        np.bincount(labels[shards.of(0)]).max() == 200
    )  # the first client can have all of one class


@pytest.mark.parametrize("alpha", [1e100, 1e308, float("inf")])
def test_a_huge_alpha_is_even_not_one_hot(alpha: float) -> None:
    """Its gamma draws overflow; equal shares are the limit, not a single class."""
    labels = np.repeat(np.arange(10), 200)
    assert skew(split("dirichlet_equal", labels, 10, alpha), labels) < 0.2
    assert skew(split("dirichlet_classwise", labels, 10, alpha), labels) < 0.2


def test_tiny_alpha_below_what_gamma_draws_can_hold() -> None:
    labels = np.repeat(np.arange(4), 50)
    check_disjoint(split("dirichlet_equal", labels, 4, 1e-320), 200)


def test_iid_is_shuffled_not_cut_in_order() -> None:
    labels = np.repeat(np.arange(10), 100)
    assert skew(split("iid", labels, 10), labels) < 0.25


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_seed_decides(rule: str) -> None:
    labels = labels_of(500)
    a, b, other = (split(rule, labels, 4, 1.0, seed) for seed in (1, 1, 2))
    assert np.array_equal(a.records, b.records)
    assert np.array_equal(a.clients, b.clients)
    assert not np.array_equal(a.records, other.records)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_one_client_and_one_record_each(rule: str) -> None:
    labels = labels_of(12)
    assert split(rule, labels, 1).sizes.tolist() == [12]
    if rule != "dirichlet_classwise":
        assert split(rule, labels, 12).sizes.tolist() == [1] * 12


def test_a_class_without_records_is_no_problem() -> None:
    labels = np.array([0, 0, 5, 5, 5, 9, 9, 9])
    for rule in RULES:
        check_disjoint(split(rule, labels, 2, 10.0), 8)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_more_clients_than_records_is_refused(rule: str) -> None:
    with pytest.raises(DpfedError, match=r"data\.clients = 6 is more than the 5 records"):
        split(rule, labels_of(5), 6)


def test_an_empty_client_is_named() -> None:
    with pytest.raises(DpfedError, match=r"client 1 has no records \(2 of 4"):
        shards_of(np.array([0, 0, 2, 2]), 4)


def test_natural_follows_the_column() -> None:
    column = np.array(["oslo", "bonn", "oslo", "lima", "bonn", "oslo"])
    shards = split("natural", np.zeros(6, dtype=int), 99, client=column)
    # data.clients has no effect.
    assert len(shards) == 3
    assert [shards.of(i).tolist() for i in range(3)] == [[1, 4], [3], [0, 2, 5]]
    with pytest.raises(DpfedError, match="client_column"):
        split("natural", np.zeros(6, dtype=int), 3)


@pytest.mark.parametrize("kind", ["client", "unit"])
def test_a_missing_name_is_refused(kind: str) -> None:
    """Records without a unit would form one unit, and removing one could move the sum beyond C."""
    columns = {"client": np.array([0, 0, 1, 1]), kind: np.array([1.0, np.nan, 2.0, np.nan])}
    with pytest.raises(DpfedError, match="record 1 has no"):
        split("natural", np.zeros(4, dtype=int), 2, **columns)


def naive(owner: np.ndarray, clients: int, units: np.ndarray | None) -> list[list[list[int]]]:
    """Return the records of each unit of each client, found with dictionaries."""
    out = []
    for client in range(clients):
        groups: dict[int, list[int]] = {}
        for record in np.flatnonzero(owner == client).tolist():
            groups.setdefault(record if units is None else int(units[record]), []).append(record)
        out.append([groups[name] for name in sorted(groups)])
    return out


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 5)), min_size=4, max_size=60),
    st.booleans(),
    st.randoms(),
)
@settings(max_examples=150, deadline=None)
def test_shards_and_slots_equal_a_naive_reference(
    pairs: list[tuple[int, int]], grouped: bool, random: object
) -> None:
    pairs = [*pairs, (0, 0), (1, 0), (2, 0), (3, 0)]
    owner = np.array([p[0] for p in pairs])
    units = np.array([p[1] for p in pairs]) if grouped else None
    shards = shards_of(owner, 4, units)
    reference = naive(owner, 4, units)
    assert shards.sizes.tolist() == [len(groups) for groups in reference]
    check_disjoint(shards, len(pairs))
    for client, groups in enumerate(reference):
        assert shards.of(client).tolist() == [record for group in groups for record in group]
        for wanted in (range(len(groups)), range(0, len(groups), 2), []):
            rows, counts = shards.slots(client, np.array(list(wanted), dtype=np.int64))
            assert rows.tolist() == [record for u in wanted for record in groups[u]]
            assert counts.tolist() == [len(groups[u]) for u in wanted]


def test_a_unit_at_two_clients_is_one_unit_at_each() -> None:
    shards = shards_of(np.array([0, 1, 0, 1, 1]), 2, np.array(["a", "a", "a", "b", "b"]))
    assert shards.sizes.tolist() == [1, 2]
    assert shards.slots(0, np.array([0]))[0].tolist() == [0, 2]
    assert shards.slots(1, np.array([0, 1]))[0].tolist() == [1, 3, 4]


def test_every_unit_has_a_record() -> None:
    shards = split("dirichlet_equal", labels_of(300), 5)
    assert np.diff(shards.units).min() == 1
    grouped = split("iid", labels_of(300), 5, unit=labels_of(300, 40))
    assert np.diff(grouped.units).min() >= 1
    assert grouped.units[-1] == 300


@pytest.mark.parametrize("kind", ["client", "unit"])
@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_record_without_a_client_or_unit_is_named(kind: str, missing: object) -> None:
    column = np.array(["a", "b", missing, "a"], dtype=object)
    with pytest.raises(
        DpfedError, match=r"record 2 has no (client|unit): data\.(client|unit)_column"
    ):
        split("natural", np.zeros(4, dtype=int), 2, **{"client": np.arange(4), kind: column})
    mixed = np.array(["a", 1, 2, "b"], dtype=object)
    with pytest.raises(DpfedError, match="must hold texts or numbers, not both"):
        split("natural", np.zeros(4, dtype=int), 2, client=mixed)


def test_natural_clients_have_names() -> None:
    owners = np.array(["b", "a", "b"], dtype=object)
    shards = split("natural", np.zeros(3, dtype=int), 9, client=owners)
    assert shards.names == ("a", "b")
    assert [shards.of(i).tolist() for i in range(2)] == [[1], [0, 2]]
    assert split("iid", labels_of(30), 3).names == ()
