"""The budget that a client has left: epsilon spent in all runs, and how many rounds it can afford.

The client's operator sees this before the client joins a run. It is private, like the ledger (the
client's record of spent privacy).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dpfed.algorithms.base import Algorithm, Releases
from dpfed.errors import DpfedError, counted
from dpfed.federation.client_config import ClientConfig, Policy
from dpfed.federation.log_line import LogLine
from dpfed.federation.policy import History, check_spending
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.accounting.rdp import rdp_epsilon
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.published import show_delta, show_loss, show_lower_bound, show_setting
from dpfed.registry import registry
from dpfed.training.budget.ledgers import OWN_LEDGER

# Largest number of remaining rounds that is computed. If a client has more rounds left, the output
# adds "or more".
MOST_ROUNDS = 10_000
# The computed number of remaining rounds may be too small by this fraction, which saves time.
TOLERANCE = 0.02


# With more different mechanisms in a ledger, computing the exact epsilon takes over a second. The
# log then shows an upper bound, which is faster to compute.
MAX_EXACT_MECHANISMS = 8


@dataclass(frozen=True)
class BudgetLeft:
    """The privacy that a client has spent in all its runs, and the budget that is left.

    spent          epsilon spent so far, at `delta`
    max_epsilon    the budget, policy.max_epsilon
    rounds_least   number of rounds that are left if each costs as much privacy as the policy
                   permits
    limits         the settings of the policy that `rounds_least` assumes, in words
    rounds_alike   number of rounds that are left if each is like the last training round in the
                   ledger; None if there is none
    """

    client: str
    spent: float
    max_epsilon: float
    delta: float
    rounds_least: int
    limits: str
    rounds_alike: int | None

    def __str__(self) -> str:
        least = _shown(self.rounds_least)
        text = (
            f"{self.client} has spent epsilon {show_loss(self.spent)} of policy.max_epsilon = "
            f"{show_setting(self.max_epsilon)} at delta {show_delta(self.delta)}, over all runs; "
            f"left: at least {least}, if a server asks for all that the policy permits "
            f"({self.limits})"
        )
        if self.rounds_alike is not None:
            text += f"; {_shown(self.rounds_alike)} like the last one"
        return text


def budget_left(config: ClientConfig) -> BudgetLeft:
    """Return the privacy budget that a client has left, from its ledger.

    The ledger is the client's record of spent privacy. It may be missing before the first run.
    """
    policy = config.policy
    path = Path(config.client.state) / OWN_LEDGER
    history: History = []
    last: tuple[Mechanism, int] | None = None
    if path.exists():
        with Ledger.open(path, client=config.client.name, readonly=True) as ledger:
            history = ledger.history(config.client.name)
            charges = [row.charge for row in ledger.rows() if not row.charge.void]
        trained = [charge for charge in charges if charge.part == "train"]
        last = (trained[-1].mechanism, trained[-1].steps) if trained else None
    mechanism, steps = costliest_round(policy)
    return BudgetLeft(
        client=config.client.name,
        spent=epsilon(history, policy.delta) if history else 0.0,
        max_epsilon=policy.max_epsilon,
        delta=policy.delta,
        rounds_least=rounds_left(policy, mechanism, steps, history),
        limits=f"max_rate = {show_setting(policy.max_rate)}, "
        f"min_sigma = {show_setting(policy.min_sigma)}, "
        f"max_local_steps = {policy.max_local_steps}",
        rounds_alike=None if last is None else rounds_left(policy, *last, history),
    )


def costliest_round(policy: Policy) -> tuple[Mechanism, int]:
    """Return the costliest round that a policy permits: its mechanism and number of local steps."""
    algorithms = registry().algorithm
    names = policy.algorithms or tuple(algorithms)
    releases = [each for name in names for each in releases_of(algorithms[name])]
    mechanism = Mechanism(
        "poisson",
        policy.max_rate,
        policy.min_sigma,
        batches=max(each.batches for each in releases),
        releases=max(each.releases for each in releases),
    )
    return mechanism, policy.max_local_steps


def releases_of(algorithm: type[Algorithm]) -> list[Releases]:
    """Return the numbers of batches and noised sums in a local step, for all settings.

    The settings are all combinations of the algorithm's switches: booleans and named choices.
    """
    choices: dict[str, tuple[Any, ...]] = {}
    for name, hint in get_type_hints(algorithm).items():
        if hint is bool:
            choices[name] = (False, True)
        elif get_origin(hint) is Literal:
            choices[name] = get_args(hint)
    found = []
    for values in itertools.product(*choices.values()):
        # The constructor raises DpfedError for switches that exclude each other.
        with suppress(DpfedError):
            found.append(algorithm(**dict(zip(choices, values, strict=True))).releases)
    return found


def rounds_left(policy: Policy, mechanism: Mechanism, steps: int, history: History) -> int:
    """Return how many further rounds of `steps` local steps policy.max_epsilon allows.

    The number is never too large, and too small by at most the fraction TOLERANCE. A running client
    uses the same rule, `check_spending`, to refuse requests.

    mechanism  the mechanism that each local step spends
    history    mechanisms that the client has spent so far
    """

    def fits(rounds: int) -> bool:
        return check_spending(policy, mechanism, steps * rounds, history) is None

    return largest(fits)


def spending_line(event: str, policy: Policy, charge: Charge, history: History) -> LogLine:
    """Return the log line of a client after a round: the epsilon spent, and the epsilon left.

    The line also says how many rounds like this one are left, according to a fast upper bound on
    epsilon. This number is never too large.

    event    text for the beginning of the line
    charge   the entry of this round in the client's ledger
    history  mechanisms that the client has spent so far, including `charge`
    """
    bound = len(history) > MAX_EXACT_MECHANISMS
    spent = (rdp_epsilon if bound else exact)(history, policy.delta)
    left = max(0.0, policy.max_epsilon - spent)

    def fits(rounds: int) -> bool:
        whole = [*history, (charge.mechanism, charge.steps * rounds)]
        return rdp_epsilon(whole, policy.delta) <= policy.max_epsilon

    rounds = largest(fits)
    shown = f"at most {show_loss(spent, 2)} (Rényi bound)" if bound else show_loss(spent, 2)
    return LogLine(
        f"{event}, epsilon {shown} of {policy.max_epsilon} spent, {show_lower_bound(left, 2)} "
        f"left: at least {_shown(rounds)} like this one",
        "spent",
        round=charge.round,
        part=charge.part,
        epsilon=spent,
        epsilon_is_bound=bound,
        max_epsilon=policy.max_epsilon,
        epsilon_left=left,
        rounds_left=rounds,
        delta=policy.delta,
    )


def exact(history: History, delta: float) -> float:
    return epsilon(history, delta)


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number of rounds for which `fits` returns True; 0 if there is none.

    The result is at most MOST_ROUNDS, and it may be too small by the fraction TOLERANCE.
    """
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= MOST_ROUNDS and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST_ROUNDS + 1)
    while high - low > max(1, TOLERANCE * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _shown(rounds: int) -> str:
    more = " or more" if rounds >= MOST_ROUNDS * (1 - TOLERANCE) else ""
    return f"{counted(rounds, 'round')}{more}"
