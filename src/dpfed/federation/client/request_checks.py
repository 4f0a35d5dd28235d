"""Check a request against the client's ledger, files and model, before privacy is spent."""

from __future__ import annotations

import logging

from torch import Tensor

from dpfed.algorithms.base import Facts
from dpfed.errors import DpfedError
from dpfed.federation.client.round_setup import OwnPlan, RequestModel
from dpfed.federation.client.storage import Store
from dpfed.federation.client_config import Policy
from dpfed.federation.held_out import PART
from dpfed.federation.messages import AnyTerms, Request, Terms, read_fields
from dpfed.federation.policy import RefusedError, check_distance
from dpfed.privacy.grid_noise import grid_of
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.published import show_sigma
from dpfed.training.messages.message_format import Layout

LOG = logging.getLogger("dpfed")
# Largest standard deviation of the noise on a mean gradient. Messages contain its square, which
# must be below the limit `messages.MAX_TENSOR_VALUE`.
MAX_NOISE = 1e4


def refuse(reason: str | None) -> None:
    if reason is not None:
        raise RefusedError(f"refused: {reason}")


def check_training_round(terms: Terms, ledger: Ledger, store: Store) -> None:
    """Raise RefusedError if the client must not take part in the round of this request.

    It must not take part if the ledger (the record of spent privacy) is an old copy, or if the
    ledger already has this or a later round. It also must not take part if it has reached its
    largest number of rounds.
    """
    check_head(terms, ledger)
    charged = ledger.rounds_charged(terms.run)
    last = max(charged, default=0)
    if store.last_reply() > last:
        raise RefusedError(
            f"the ledger lacks round {store.last_reply()}, which was answered: put back the newest"
        )
    if terms.round <= last:
        refuse(f"round {terms.round} is not after round {last}, the last one of this run")
    if terms.round > terms.rounds or terms.used > last:
        refuse(f"round {terms.round} of {terms.rounds} with {terms.used} used was never due")
    refuse(check_cap(terms.max_rounds, store.cap(), len(charged)))


def check_cap(stated: int, agreed: int | None, taken: int) -> str | None:
    """Return None, or the reason to refuse if the client may not take part in another round.

    The cap is the largest number of rounds of this client in the run. A server must not change it.

    stated  cap in the request; 0 for no cap
    agreed  cap in the first request of the run that had one; None if no request had a cap
    taken   number of the client's rounds in this run, from its own ledger
    """
    if agreed is not None and stated != agreed:
        now = f"{stated} rounds" if stated else "any number of rounds"
        return f"the run began with at most {agreed} rounds of this client, and now asks for {now}"
    if stated and taken >= stated:
        return f"this client has taken part in {taken} rounds of this run, and its cap is {stated}"
    return None


def check_scoring_round(terms: AnyTerms, ledger: Ledger, store: Store) -> None:
    """Raise RefusedError if the client must not answer a request for noised counts of answers.

    It must not answer if the ledger (the record of spent privacy) is an old copy, or if the ledger
    already has counts of this or a later round.
    """
    check_head(terms, ledger)
    last = max(ledger.rounds_charged(terms.run, PART), default=0)
    if terms.round <= last or store.last_reply() > last:
        refuse(f"round {terms.round} is not after round {last}, the last that was scored")


def check_head(terms: AnyTerms, ledger: Ledger) -> None:
    """Raise RefusedError if the ledger lacks its last row that the server has stored.

    If this row is missing or differs, somebody has replaced the ledger (the record of spent
    privacy) by an older copy or by another ledger.
    """
    if not terms.head:
        if terms.rows:
            refuse(f"{terms.rows} rows without their hash are nobody's ledger")
        return
    try:
        ledger.check_head((terms.rows, terms.head))
    except DpfedError as error:
        # Only log this text and do not send it, because it contains the ledger's path, which the
        # server must not see.
        LOG.error("%s", error)
        rows = ledger.head().rows
        row = f"row {rows + 1} is missing"
        if rows >= terms.rows:
            row = f"row {terms.rows} is not the row it was"
        raise RefusedError(
            f"refused: {row} in its ledger, which does not go on from the one that is known"
        ) from None


def read_training_values(
    request: Request, layout: Layout, built: RequestModel, plan: OwnPlan, policy: Policy
) -> dict[str, Tensor]:
    """Return the vectors that a request contains, on the model's device.

    Raise RefusedError or MessageError if a tensor or a number of the request is invalid. These
    checks come before the charge. A later error would make the round fail after its privacy is
    spent.

    layout  expected formats and lengths of the vectors, by name
    """
    device = built.start.device
    fields = {name: x.to(device) for name, x in read_fields(request.fields, layout).items()}
    refuse(check_distance(fields["theta"], built.start, policy))
    terms = request.terms
    facts = Facts(terms.equal_phi, True, False, varying_phi=plan.clipping.counts)
    try:
        built.algorithm.check(facts)
        if terms.grid:
            grid_of(plan.noise_std(0), plan.clip, built.model.space.size)
    except DpfedError as error:
        # The server may see this text, because the text depends only on the request.
        raise RefusedError(f"refused: {error}") from None
    if not plan.noise_std(0) / float(plan.expected[0]) <= MAX_NOISE:
        refuse(f"sigma {show_sigma(terms.sigma)} makes noise beyond {MAX_NOISE:g}")
    return fields
