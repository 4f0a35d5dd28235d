"""Results of an audit: lower bounds on epsilon, and sentences on claims that they disprove."""

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
    """A lower bound on epsilon that an audit found, beside the claimed epsilon.

    seen        values that the auditor used: "oracle" for noised gradients of canaries that it
                designed, "server" for messages to the server, "model" for noised gradients of
                records that are canaries and keep their own gradients
    assumes     the assumption that turns the observations into an epsilon
                (docs/audits.md)
    lower       lower bound on epsilon
    claimed     the claimed epsilon that is tested: the largest over all clients
    delta       delta for which `lower` and `claimed` hold
    confidence  probability that `lower` does not exceed the true epsilon
    canaries    number of canaries of all clients and all training runs together
    clients     number of audited clients
    runs        number of times that the audit trained the job
    steps       local steps of each client in a training run
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
    """Yield a sentence for each lower bound and each tested law that disproves the claim.

    A law is the distribution of batches or noise that the accountant assumes.
    """
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
