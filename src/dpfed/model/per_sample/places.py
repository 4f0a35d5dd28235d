"""Choose the number of places of a pass for exact isolation, and test that they are independent.

A pass is one forward and backward computation of several records. A place is the position of one
record in a pass. With exact isolation, no record may change another record's gradient, not even by
rounding. Every pass therefore has the same number of places. At each place, the gradient and the
scores of a record must be bitwise independent of the records at other places.

Kernels of matrix products, norms and attention have this property if the shape of a pass is fixed.
A mixture of experts does not have it, because records choose the sizes of its products. A model
that computes a maximum over all records of a pass, or asks if any has padding, does not either.

`settle_places` tests the model on its device and in its dtype, with synthetic records only. A model
that fails the test computes one record at a time.
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

# Numbers of places (records per pass) to choose from.
CHOICES = (1, 2, 4, 8, 16, 32)
# Batch size for which `places_for` minimises the time.
NOMINAL_RECORDS = 32
# Fixed cost of a pass: the time of OVERHEAD_RECORDS records and of OVERHEAD_OPERATIONS operations.
# Fitted to three models on a CPU and one model on a GPU (docs/performance.md, "Growth").
OVERHEAD_RECORDS = 0.7
OVERHEAD_OPERATIONS = {"cpu": 1.4e8, "cuda": 1e11}
# Standard deviations of the random changes of the trainable vector (theta) in the test.
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
    """Set the number of places of a pass with exact isolation, `model.places`.

    It is 1 if the model fails the test of this file.

    theta          initial values of the P trainable numbers, `[P]`
    augmentations  augmentations of each record; each of them is a row of the pass
    max_rows       most rows in a pass
    generator      draws the synthetic records
    """
    model.places = 1
    model.alone = None
    if not model.shares_passes:
        model.alone = "mixes the records of a pass, by experts or by its choice of numbers"
        return
    places = places_for(operations(model, theta, spec, generator), theta.device.type)
    while places * augmentations > max(1, max_rows):
        places //= 2
    if places <= 1:
        return
    model.alone = failing_part(model, theta, spec, (places, augmentations), generator)
    if model.alone is None:
        model.places = places


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
    """Return the number of places that minimises the time of a batch of `NOMINAL_RECORDS` records.

    With more places, a batch needs fewer passes, but more of their places stay empty.

    operations  floating-point operations of one record's forward pass
    device      "cpu" or "cuda"
    """
    per_pass = OVERHEAD_OPERATIONS.get(device, OVERHEAD_OPERATIONS["cuda"])
    overhead = OVERHEAD_RECORDS + per_pass / max(operations, 1.0)
    work = [expected_passes(NOMINAL_RECORDS, m) * (overhead + m) for m in CHOICES]
    return CHOICES[int(np.argmin(work))]


def expected_passes(records: float, places: int) -> float:
    """Return the mean number of passes of a batch with a Poisson-distributed number of records.

    Each record draws a place. A batch needs as many passes as its fullest place has records.

    records  mean number of records in a batch
    """
    load = records / places
    passes = np.arange(math.ceil(load + 12 * math.sqrt(load) + 30))
    return float(np.sum(1 - poisson.cdf(passes, load) ** places))


@dataclass(frozen=True)
class _Contents:
    """The contents of a test pass of m places: a synthetic record and a client at each place.

    A place is the position of a record in a pass. P is the number of trainable parameters.

    theta    the trainable vectors of two clients, `[2, P]`, or of one, `[1, P]`
    client   `[m]` the row of theta of each place
    record   `[m]` index of the synthetic record at each place
    """

    theta: Tensor
    client: Tensor
    record: Tensor

    def others(self, keep: Tensor, theta: Tensor, record: Tensor) -> _Contents:
        """Return these contents with other records and clients at the places with `keep` False.

        Those places get the records `record` and client 1, whose trainable vector is `theta`.
        """
        changed = torch.stack([self.theta[0], theta])
        client = torch.where(keep, self.client, 1)
        return _Contents(changed, client, torch.where(keep, self.record, record))


class _Passes:
    """Computes the gradients and the scores of test passes with given contents.

    shape  number of places, and rows of each record (its augmentations)
    """

    def __init__(
        self, model: PerSample, inputs: Batch, labels: Tensor, shape: tuple[int, int]
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._labels = labels
        self.places, self._rows = shape

    def grads(self, contents: _Contents) -> list[Tensor]:
        """Return the gradients of each trainable tensor of n numbers at all m places.

        Each result is `[m, rows of a record * n]`.
        """
        record = contents.record.repeat_interleave(self._rows)
        client = contents.client.repeat_interleave(self._rows)
        inputs = {name: x[record] for name, x in self._inputs.items()}
        keys = 7919 * record + client if self._model.has_dropout else None
        found = self._model.grads(contents.theta, client, inputs, self._labels[record], keys)
        return [grad.reshape(self.places, -1) for grad in found]

    def scores(self, contents: _Contents) -> Tensor:
        """Return the scores of the m places' records, computed with client 0's trainable vector."""
        inputs = {name: x[contents.record] for name, x in self._inputs.items()}
        return self._model.scores(contents.theta[0], inputs).flatten(1)


def failing_part(
    model: PerSample,
    theta: Tensor,
    spec: InputSpec,
    shape: tuple[int, int],
    generator: torch.Generator,
) -> str | None:
    """Return a text that names the part in which a place depends on other places; None if no part.

    The test changes the records and clients at some places and compares all other places bitwise.

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


def _comparisons(
    theta: Tensor, places: int, generator: torch.Generator
) -> Iterator[tuple[_Contents, Tensor, _Contents]]:
    """Yield pairs of passes: (contents, mask of kept places, contents changed at other places).

    The first synthetic record has no padding, and most others have some. In two of the comparisons
    all places hold the first record, and the change brings padding into the pass. In the last two
    comparisons there is a single client.
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
    # With a single client, all places read the same weights in memory, not a copy for each place.
    for scale, keep in ((NEAR, even), (FAR, ~even)):
        contents = _Contents(moved(scale).unsqueeze(0), nobody, mixed)
        yield contents, keep, replace(contents, record=torch.where(keep, mixed, mixed + places))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal; NaN and infinity count as equal to each other.

    Training replaces a gradient that is not finite by zero, so NaN or infinity make no difference.
    """
    if torch.equal(one, other):
        return True
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return False
    return torch.equal(one[finite], other[finite])
