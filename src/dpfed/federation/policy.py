"""The rules of a client's policy, by which it refuses requests of the server.

Each function `check_...` returns None to accept the request, or the reason to refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dpfed.errors import DpfedError
from dpfed.federation.client_config import ClientConfig, Policy
from dpfed.federation.messages import AnyTerms, MessageError, ScoringTerms, Terms
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.accounting.rdp import rdp_epsilon
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_loss, show_setting

# The privacy that a client has spent: pairs of a mechanism and the number of its releases.
History = Sequence[tuple[Mechanism, int]]
Rule = tuple[bool, str]
# Text that the server gets instead of the message of an error that could contain private data.
FAILURE = "it failed, and its own log says why"


class PublicError(DpfedError):
    """An error whose text the client sends to the server.

    The text may depend on requests, policy and ledger, but never on records.
    """


class RefusedError(PublicError):
    """An error for a refused request.

    A client raises it before it spends privacy budget or computes anything. On the server, this
    error contains the refusal text that a client sent instead of a reply.
    """


def public_text(error: BaseException) -> str:
    """Return the text that the server may see about an error.

    This is the message of `PublicError` and `MessageError`. For any other error it is `FAILURE`,
    because the message of that error could name a record or a path.
    """
    if isinstance(error, PublicError | MessageError):
        return str(error)
    return FAILURE


def check_sender(terms: AnyTerms, config: ClientConfig) -> str | None:
    client = config.client
    return _first_violation(
        (
            terms.client == client.name,
            f"it is for client {terms.client!r}, and this is {client.name!r}",
        ),
        (
            terms.server in client.servers,
            f"the server {terms.server!r} is not one of client.servers",
        ),
        (
            not terms.seeded or client.allow_seeded,
            "it asks for repeatable noise, and client.allow_seeded is false",
        ),
    )


def check_model(model: str, terms: AnyTerms, policy: Policy) -> str | None:
    """Return None, or the reason to refuse if the request is for another model.

    model  hash of the frozen weights of this client's model
    """
    return _first_violation(
        (terms.model == model, "its model has other frozen weights than [model] of this client"),
        (
            not policy.models or terms.model in policy.models,
            f"its model {terms.model} is not in policy.models",
        ),
    )


def check_training(
    terms: Terms, policy: Policy, mechanism: Mechanism, history: History
) -> str | None:
    """Return None, or the reason to refuse a request to train.

    `mechanism` is that of a local step; `history` has those that this client has executed so far.
    """
    declared = terms.rate * policy.records
    algorithm = terms.algorithm.get("name")
    reason = _first_violation(
        (
            not policy.algorithms or algorithm in policy.algorithms,
            f"{algorithm!r} is not in policy.algorithms",
        ),
        (
            terms.sigma >= policy.min_sigma,
            f"sigma {show_setting(terms.sigma)} is below "
            f"policy.min_sigma = {show_setting(policy.min_sigma)}",
        ),
        (
            terms.clip <= policy.max_clip,
            f"clip {terms.clip:g} is above policy.max_clip = {policy.max_clip:g}",
        ),
        (
            terms.rate <= policy.max_rate,
            f"rate {show_setting(terms.rate)} is above "
            f"policy.max_rate = {show_setting(policy.max_rate)}",
        ),
        (
            terms.grid or not policy.require_grid,
            "it asks for sums off the grid, and policy.require_grid is true",
        ),
        (
            terms.local_steps <= policy.max_local_steps,
            f"{terms.local_steps} local steps are more than "
            f"policy.max_local_steps = {policy.max_local_steps}",
        ),
        (terms.lr <= policy.max_lr, f"lr {terms.lr:g} is above policy.max_lr = {policy.max_lr:g}"),
        (terms.index < terms.clients, f"client {terms.index} is not one of {terms.clients}"),
        (
            terms.cohort <= terms.clients,
            f"a cohort of {terms.cohort} is more than {terms.clients} clients",
        ),
        (
            abs(terms.expected - declared) <= 1e-9 * declared,
            f"an expected batch of {terms.expected:g} is not its rate times "
            f"policy.records = {policy.records}",
        ),
    )
    return reason or check_spending(policy, mechanism, terms.local_steps, history)


def check_learning_rate(terms: Terms, base: float, policy: Policy) -> str | None:
    """Return None, or the reason to refuse if the learning rate of the round is too large.

    base  the value of `algorithm.lr`; a schedule must not raise the rate of a round above it
    """
    return _first_violation(
        (
            base <= policy.max_lr,
            f"algorithm.lr {base:g} is above policy.max_lr = {policy.max_lr:g}",
        ),
        (terms.lr <= base * (1 + 1e-9), f"lr {terms.lr:g} is above algorithm.lr = {base:g}"),
    )


def check_distance(theta: Tensor, start: Tensor, policy: Policy) -> str | None:
    """Return None, or the reason to refuse if `theta` is too far from `start`.

    theta  the trained parameters, `[P]` or `[1, P]` for P numbers
    start  their initial values, which this client has computed itself
    """
    distance = float((theta.double() - start.double()).norm())
    limit = policy.max_distance
    # Compare so that NaN fails: a comparison with NaN is False, so a theta with NaN is refused.
    return _first_violation(
        (
            distance <= limit,
            f"theta is {distance:.4g} away from its initial vector, "
            f"above policy.max_distance = {limit:g}",
        )
    )


def check_scoring(
    terms: ScoringTerms, policy: Policy, mechanism: Mechanism, history: History
) -> str | None:
    """Return None, or the reason to refuse a request for noised counts on held-out records.

    Counts and training together may spend `policy.max_epsilon`.

    mechanism  the mechanism that releases the counts
    history    mechanisms that this client has executed so far
    """
    sigma = show_setting(terms.sigma)
    reason = _first_violation(
        (policy.evaluate, "it asks for a count on held-out records, and policy.evaluate is false"),
        (
            terms.sigma >= policy.min_evaluate_sigma,
            f"sigma {sigma} is below "
            f"policy.min_evaluate_sigma = {show_setting(policy.min_evaluate_sigma)}",
        ),
        (terms.sigma <= 1e6, f"sigma {sigma} leaves nothing of a count"),
        (
            terms.held_out == policy.held_out,
            f"{terms.held_out} is not policy.held_out = {policy.held_out}",
        ),
    )
    return reason or check_spending(policy, mechanism, 1, history)


def check_spending(
    policy: Policy, mechanism: Mechanism, steps: int, history: History
) -> str | None:
    """Return None, or the reason to refuse if `steps` more releases would exceed the budget.

    mechanism  the mechanism of each of these releases
    history    mechanisms that this client has executed so far
    """
    spent = [*history, (mechanism, steps)]
    # Try the Rényi bound first, which is a hundred times faster. It is never below the exact
    # epsilon, so a bound within the limit is sufficient.
    if rdp_epsilon(spent, policy.delta) <= policy.max_epsilon:
        return None
    after = epsilon(spent, policy.delta)
    return _first_violation(
        (
            after <= policy.max_epsilon,
            f"epsilon would be {show_loss(after)} after this round, "
            f"above policy.max_epsilon = {show_setting(policy.max_epsilon)}",
        )
    )


def _first_violation(*rules: Rule) -> str | None:
    return next((reason for holds, reason in rules if not holds), None)
