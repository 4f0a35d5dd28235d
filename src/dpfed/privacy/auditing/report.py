"""Results of an audit, and the sentences that say what they disprove."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dpfed.privacy.auditing.laws import Law
from dpfed.privacy.published import show_loss, show_lower_bound, show_setting

Assumed = Literal["nothing", "the accounted curve", "Gaussian noise"]
Seen = Literal["oracle", "server", "model"]


@dataclass(frozen=True)
class Report:
    """A lower bound on epsilon from one run with canaries.

    seen        values that the audit used: "oracle" for the oracle's releases, "server" for the
                messages that the server receives, "model" for releases of the job's own model
    assumes     the assumption that turns the observations into an epsilon
                (docs/audits.md)
    lower       lower bound on epsilon
    claimed     the claimed epsilon that is tested: the largest over all clients
    delta       delta for which `lower` and `claimed` hold
    confidence  probability that `lower` does not exceed the true epsilon
    canaries    number of canaries
    clients     number of clients
    runs        number of training runs
    steps       local steps of each client in a run
    """

    seen: Seen
    assumes: Assumed
    lower: float
    claimed: float
    delta: float
    confidence: float
    canaries: int
    clients: int
    runs: int
    steps: int

    @property
    def disproved(self) -> bool:
        return self.lower > self.claimed

    @property
    def verdict(self) -> str:
        return "DISPROVES the claim" if self.disproved else "consistent with the claim"


def disproofs(reports: Sequence[Report], laws: Sequence[Law]) -> Iterator[str]:
    """Yield one sentence for each bound and each test whose result contradicts the claim."""
    for report in reports:
        if report.disproved:
            yield (
                f"canaries at the {report.seen}, assuming {report.assumes}: "
                f"epsilon is at least {show_lower_bound(report.lower)} with confidence "
                f"{show_setting(report.confidence)}, but {show_loss(report.claimed)} was claimed"
            )
    for law in laws:
        if law.broken:
            yield (
                f"the {law.what} do not follow the law that was accounted for ({law.verdict}, "
                f"p = {law.p_value:.1g})"
            )
