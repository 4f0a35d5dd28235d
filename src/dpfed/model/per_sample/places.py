"""Choose the places of an isolated pass, and test that no place depends on another.

With exact isolation, a pass of `PerSample` has a fixed number of places. At a given place, the
gradient and the scores of a record must be bitwise independent of the records at other places.
Kernels of matrix products, norms and attention have this property as long as the shape of a pass is
fixed. A mixture of experts does not: its products have as many rows as the records choose. Nor does
a model that looks for the largest number of a pass, or that asks if any record has padding.

Two places are of one kind if a record has bitwise the same gradient and scores at both. Place p is
of kind p modulo k, for a small power of two k. A kernel treats places differently mainly because of
their addresses in memory, so k is small where the sizes of a record's tensors are even.

`settle_places` tests the model itself, on its device and in its dtype. A model that fails computes
one record at a time. The test uses synthetic records only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import poisson
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dpfed.model.per_sample.gradients import Batch, PerSample
from dpfed.model.task import InputSpec

# Numbers of places that are considered if all places differ.
CHOICES = (1, 2, 4, 8, 16, 32)
# Number of places of a pass that shares kinds. Batches are often powers of two, and the loads of
# the kinds differ a little, so it is an eighth more than 64.
SHARED_PLACES = 72
KINDS = (1, 2, 4, 8)
# Kinds are looked for if a record needs at most this many operations. The search then takes about
# a second, and larger models gain little from passes of many records.
MAX_OPERATIONS_TO_SEARCH = 2e7
# Passes that look for kinds. Each of them holds one record at all places.
SEARCH_PASSES = 32
# Number of drawn records for which the choice is best.
NOMINAL_RECORDS = 32
# The part of a pass that does not grow with its records takes as long as this many records, plus a
# number of operations that the device could do meanwhile. Fitted on a CPU to
# the times of passes of 1 to 128 records, for three models of 5 million to 1.4 billion operations
# per record. The number for GPUs comes from one measured model (docs/performance.md, "Growth").
OVERHEAD_RECORDS = 0.7
OVERHEAD_OPERATIONS = {"cpu": 1.4e8, "cuda": 1e11}
# Scale of the random changes of theta in the test: near the initial vector, and far from it.
NEAR = 0.02
FAR = 1.0
HUGE = 1e30


def settle_places(
    model: PerSample,
    theta: Tensor,
    spec: InputSpec,
    augmentations: int,
    max_rows: int,
    generator: torch.Generator,
) -> None:
    """Set `model.places` and `model.kinds`; both are 1 if the model fails the test.

    theta          initial trainable vector, `[P]`
    augmentations  rows of a record in a pass
    max_rows       most rows in a pass
    generator      draws the synthetic records
    """
    model.places = model.kinds = 1
    model.alone = None
    if not model.shares_passes:
        model.alone = "mixes the records of a pass, by experts or by its choice of numbers"
        return
    cost = operations(model, theta, spec, generator)
    most = max(1, max_rows // augmentations)
    places = places_for(cost, theta.device.type)
    while places > most:
        places //= 2
    if places <= 1:
        return
    model.alone = failing_part(model, theta, spec, (places, augmentations), generator)
    if model.alone is not None:
        return
    model.places = model.kinds = places
    if theta.device.type == "cpu" and cost <= MAX_OPERATIONS_TO_SEARCH and most >= SHARED_PLACES:
        _share_kinds(model, theta, spec, (SHARED_PLACES, augmentations), generator)


def _share_kinds(
    model: PerSample,
    theta: Tensor,
    spec: InputSpec,
    shape: tuple[int, int],
    generator: torch.Generator,
) -> None:
    """Set `model.places` and `model.kinds` to passes that share kinds, if the model allows it.

    shape  number of places, and rows of each record (its augmentations)
    """
    kinds = kinds_of_places(model, theta, spec, shape, generator)
    if kinds is None or failing_part(model, theta, spec, shape, generator) is not None:
        return
    model.places, _ = shape
    model.kinds = kinds


def operations(
    model: PerSample, theta: Tensor, spec: InputSpec, generator: torch.Generator
) -> float:
    """Return the number of floating-point operations of one record's forward pass.

    The number follows from shapes alone, so it is equal on all machines.
    """
    inputs = {name: x.to(theta.device) for name, x in spec.synthetic(1, generator).items()}
    with FlopCounterMode(display=False) as counter:
        model.scores(theta, inputs)
    return float(counter.get_total_flops())


def places_for(operations: float, device: str) -> int:
    """Return the number of places that makes a batch of `NOMINAL_RECORDS` records cheapest.

    The number of passes is the load of the fullest place. Few places have nearly equal loads, and
    many places share the overhead of a pass.
    """
    per_pass = OVERHEAD_OPERATIONS.get(device, OVERHEAD_OPERATIONS["cuda"])
    overhead = OVERHEAD_RECORDS + per_pass / max(operations, 1.0)
    work = [expected_passes(NOMINAL_RECORDS, m) * (overhead + m) for m in CHOICES]
    return CHOICES[int(np.argmin(work))]


def expected_passes(records: float, places: int) -> float:
    """Return the mean load of the fullest place, for Poisson batches of this mean size."""
    load = records / places
    passes = np.arange(math.ceil(load + 12 * math.sqrt(load) + 30))
    return float(np.sum(1 - poisson.cdf(passes, load) ** places))


@dataclass(frozen=True)
class _Contents:
    """The contents of a pass of m places.

    theta    the trainable vectors of two clients, `[2, P]`, or of one
    client   `[m]` the row of theta of each place
    record   `[m]` index of the synthetic record at each place
    """

    theta: Tensor
    client: Tensor
    record: Tensor

    def others(self, keep: Tensor, theta: Tensor, record: Tensor) -> _Contents:
        """Return other contents at the places where `keep` is False: client 1 and `record`."""
        changed = torch.stack([self.theta[0], theta])
        client = torch.where(keep, self.client, 1)
        return _Contents(changed, client, torch.where(keep, self.record, record))


class _Passes:
    """Computes the gradients and the scores of passes with given contents."""

    def __init__(
        self, model: PerSample, inputs: Batch, labels: Tensor, shape: tuple[int, int]
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._labels = labels
        self.places, self._rows = shape

    def grads(self, contents: _Contents) -> list[Tensor]:
        """Return for each tensor its gradients, `[m, rows of a record * n]`."""
        record = contents.record.repeat_interleave(self._rows)
        client = contents.client.repeat_interleave(self._rows)
        inputs = {name: x[record] for name, x in self._inputs.items()}
        keys = 7919 * record + client if self._model.has_dropout else None
        found = self._model.grads(contents.theta, client, inputs, self._labels[record], keys)
        return [grad.reshape(self.places, -1) for grad in found]

    def scores(self, contents: _Contents) -> Tensor:
        """Return the scores of the records for the theta of client 0, `[m, ...]`."""
        inputs = {name: x[contents.record] for name, x in self._inputs.items()}
        return self._model.scores(contents.theta[0], inputs).flatten(1)


def failing_part(
    model: PerSample,
    theta: Tensor,
    spec: InputSpec,
    shape: tuple[int, int],
    generator: torch.Generator,
) -> str | None:
    """Return a text that says what changed at a place when only other places did; else None.

    shape  number of places, and rows of each record (its augmentations)
    """
    places, _ = shape
    device = theta.device
    inputs = {name: x.to(device) for name, x in spec.synthetic(2 * places, generator).items()}
    labels = model.task.examples(2 * places, spec.classes).to(device)
    passes = _Passes(model, inputs, labels, shape)
    try:
        for contents, keep, changed in _comparisons(theta, places, generator):
            before = passes.grads(contents)
            after = passes.grads(changed)
            for name, a, b in zip(model.space.names, before, after, strict=True):
                if not same_bits(a[keep], b[keep]):
                    return f"changes the gradient of {name} at one place with the records at others"
            if not same_bits(passes.scores(contents)[keep], passes.scores(changed)[keep]):
                return "changes the scores at one place with the records at other places"
    except Exception as error:
        # Models raise errors of many classes for numbers that are not finite: catch them all.
        return f"cannot compute a pass of {places} places ({type(error).__name__})"
    return None


def kinds_of_places(
    model: PerSample,
    theta: Tensor,
    spec: InputSpec,
    shape: tuple[int, int],
    generator: torch.Generator,
) -> int | None:
    """Return the least number k of kinds: place p is of kind p modulo k. None if there are more.

    Each pass holds one synthetic record at all places. The passes differ in record, in theta and
    in its scale, and in the number of clients.

    shape  number of places, and rows of each record (its augmentations)
    """
    places, _ = shape
    device = theta.device
    inputs = {name: x.to(device) for name, x in spec.synthetic(SEARCH_PASSES, generator).items()}
    labels = model.task.examples(SEARCH_PASSES, spec.classes).to(device)
    passes = _Passes(model, inputs, labels, shape)
    nobody = torch.zeros(places, dtype=torch.int64, device=device)
    possible = list(KINDS)
    for i in range(SEARCH_PASSES):
        scale = NEAR * (FAR / NEAR) ** (i % 8 / 4)
        own = theta + scale * torch.randn(len(theta), generator=generator).to(device)
        clients = own.expand(1 + i % 2, -1).contiguous()
        contents = _Contents(clients, nobody, nobody + i)
        try:
            found = [*passes.grads(contents), passes.scores(contents)]
        except Exception:
            # Models raise errors of many classes for large numbers: catch them all.
            return None
        possible = [kinds for kinds in possible if all(_by_kind(rows, kinds) for rows in found)]
    return min(possible, default=None)


def _by_kind(rows: Tensor, kinds: int) -> bool:
    """Return True if row p `[m, n]` has the bits of row p modulo `kinds`, for all places p."""
    groups = rows.view(-1, kinds, rows.shape[1])
    return same_bits(groups, groups[:1].expand_as(groups))


def _comparisons(
    theta: Tensor, places: int, generator: torch.Generator
) -> Iterator[tuple[_Contents, Tensor, _Contents]]:
    """Yield (contents, kept places, contents with other records at the remaining places).

    The first record has no padding, and most others have some. In two of the comparisons all
    places hold the first record, so that the padding of the whole pass changes. In the last two
    all places have the same theta.
    """
    device = theta.device
    even = torch.arange(places, device=device) % 2 == 0
    mixed = torch.arange(places, device=device)
    nobody = torch.zeros_like(mixed)

    def moved(scale: float) -> Tensor:
        return theta + scale * torch.randn(len(theta), generator=generator).to(device)

    cases = (
        (mixed, NEAR, even, torch.full_like(theta, math.nan)),
        (mixed, FAR, ~even, HUGE * moved(FAR)),
        (nobody, NEAR, ~even, moved(NEAR)),
        (nobody, FAR, even, moved(FAR)),
    )
    for record, scale, keep, other in cases:
        own = moved(scale)
        contents = _Contents(torch.stack([own, own]), nobody, record)
        yield contents, keep, contents.others(keep, other, mixed + places)
    # A single client, as on a network: its weights are one block of memory, not a copy per place.
    for scale, keep in ((NEAR, even), (FAR, ~even)):
        contents = _Contents(moved(scale).unsqueeze(0), nobody, mixed)
        yield contents, keep, replace(contents, record=torch.where(keep, mixed, mixed + places))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal; NaN and infinity count as equal to each other.

    A gradient that is not finite contributes zero, whatever it is.
    """
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    return torch.equal(one[finite], other[finite])
