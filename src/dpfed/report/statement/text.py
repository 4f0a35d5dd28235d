"""The privacy statement in words: pairs of a name and a sentence, or one page of plain text.

No number looks better than it is: privacy losses are rounded up, noise multipliers down.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from dpfed.errors import counted
from dpfed.privacy.published import (
    show_delta,
    show_loss,
    show_percent_loss,
    show_rate,
    show_setting,
    show_sigma,
)
from dpfed.report.statement.build import (
    QUESTIONS,
    Attack,
    Delta,
    Guarantee,
    Mechanics,
    Mu,
    Participation,
    Statement,
)

WIDTH = 96
NAME_WIDTH = 16
SAMPLINGS = {
    "poisson": "Poisson sampling, each unit by an independent draw",
    "fixed_wor": "a fixed number of units, drawn without replacement",
}


def first_line(statement: Statement) -> str:
    """Return the first line of a privacy statement: its warnings, or else epsilon and delta."""
    if statement.notices:
        return ". ".join(statement.notices) + "."
    guarantee = statement.guarantee
    assert guarantee is not None
    server = guarantee.observers[0]
    return (
        f"({show_loss(server.epsilon)}, {show_delta(guarantee.delta.value)})-differential privacy "
        f"against the server, for {guarantee.adjacency} {guarantee.unit} of one client."
    )


def rows(statement: Statement, observers: bool = True) -> list[tuple[str, str]]:
    """Return a privacy statement without its first line, as pairs (name, sentence).

    observers  False to leave out the rows with the epsilon of each observer (the server and a
               third party who sees only the global models)
    """
    out = []
    if statement.guarantee is not None:
        shown = _observer_rows(statement.guarantee) if observers else []
        first, *others = _guarantee_rows(statement.guarantee)
        out = [first, *shown, *others]
    versions = ", ".join(f"{name} {version}" for name, version in statement.software.items())
    head = statement.ledger_head or "none: this run has no ledger of its own"
    return [
        *out,
        ("Release", f"{statement.release or 'not stated'}."),
        ("Software", f"{versions or 'not recorded'}."),
        ("Ledger head", head),
        ("Questions", f"{QUESTIONS}."),
    ]


def page(statement: Statement) -> str:
    """Return the statement as one page of plain text."""
    lines = textwrap.wrap(first_line(statement), WIDTH)
    lines.append("")
    for name, sentence in rows(statement):
        indent = " " * NAME_WIDTH
        label = f"{name:{NAME_WIDTH}}"
        lines += textwrap.wrap(
            sentence, WIDTH, initial_indent=label, subsequent_indent=indent, break_long_words=False
        )
    return "\n".join(lines)


def attack_sentence(attack: Attack) -> str:
    """Return a sentence on an attacker who guesses if a record was used for training.

    It states the attacker's false-positive rate, and the highest true-positive rate at this rate.
    """
    accused = show_setting(100 * attack.false_positive_rate)
    return (
        f"an attacker that wrongly accuses {accused} % of the records that were not used "
        f"recognises at most {show_percent_loss(attack.true_positive_rate)} % of those that were"
    )


def _observer_rows(guarantee: Guarantee) -> list[tuple[str, str]]:
    return [
        (
            observer.name.capitalize(),
            f"epsilon {show_loss(observer.epsilon)}; it sees {observer.sees}; "
            f"{observer.condition}.",
        )
        for observer in guarantee.observers
    ]


def _guarantee_rows(guarantee: Guarantee) -> list[tuple[str, str]]:
    unit = guarantee.unit
    accountant = guarantee.accountant
    earlier = guarantee.earlier_releases
    return [
        ("Protected", f"one {unit} of one client; adjacency: {guarantee.adjacency} {unit}."),
        ("Delta", _delta_sentence(guarantee.delta, unit)),
        ("Attack", f"{attack_sentences(guarantee.attack)}."),
        ("Mu", _mu_sentence(guarantee.mu)),
        ("Mechanism", _mechanism_sentence(guarantee.mechanism)),
        ("Participation", _participation_sentence(guarantee.participation)),
        (
            "Accountant",
            f"{accountant.name}; the {accountant.check} epsilon, which must not be smaller, is "
            f"{show_loss(accountant.check_epsilon)}.",
        ),
        (
            "Spent before",
            f"{counted(earlier, 'release')}, counted in every figure." if earlier else "nothing.",
        ),
        ("Assumed public", f"{guarantee.assumed_public}."),
        ("Not covered", f"{guarantee.not_covered}."),
    ]


def attack_sentences(attack: tuple[Attack, ...]) -> str:
    """Return one sentence on an attacker who guesses if a record was used for training.

    attack  the highest true-positive rate for each of several false-positive rates
    """
    first, *others = attack
    more = "".join(
        f"; at {show_setting(100 * a.false_positive_rate)} %, "
        f"at most {show_percent_loss(a.true_positive_rate)} %"
        for a in others
    )
    return attack_sentence(first) + more


def _delta_sentence(delta: Delta, unit: str) -> str:
    parts = [f"{show_delta(delta.value)}"]
    if delta.largest_client is not None:
        held = counted(delta.largest_client, unit)
        times = show_delta(delta.times_largest_client, 3)
        parts.append(f"times the {held} of the largest client: {times}")
    if delta.all_records is not None:
        held = counted(delta.all_records, unit)
        parts.append(f"times all {held}: {show_delta(delta.times_all_records, 3)}")
    parts += [f"WARNING: {warning}" for warning in delta.warnings]
    return "; ".join(parts) + "."


def _mu_sentence(mu: Mu) -> str:
    if mu.value is None:
        return "none: delta(epsilon) is not known closely enough, or no mu is large enough."
    return (
        f"{show_loss(mu.value)}: the smallest mu whose Gaussian mechanism has at least this run's "
        f"delta(epsilon) wherever that is >= {show_setting(mu.cutoff)}."
    )


def _mechanism_sentence(mechanism: Mechanics) -> str:
    rate = _span(mechanism.rate, show_rate)
    noise = _span(mechanism.noise_multiplier, show_sigma)
    parts = [
        f"{SAMPLINGS.get(mechanism.sampling, mechanism.sampling)}, at rate {rate}",
        f"Gaussian noise of multiplier {noise}",
        f"{counted(mechanism.rounds, 'round')} of {counted(mechanism.local_steps, 'local step')}",
    ]
    if mechanism.clip is not None:
        mode = f" ({mechanism.clip_mode})" if mechanism.clip_mode else ""
        parts.append(f"clip norm {show_setting(mechanism.clip)}{mode} over all trained numbers")
    if mechanism.batches > 1 or mechanism.releases > 1:
        parts.append(
            f"a local step draws {counted(mechanism.batches, 'batch')} and releases each "
            f"{counted(mechanism.releases, 'time')}"
        )
    return "; ".join(parts) + "."


def _participation_sentence(participation: Participation) -> str:
    cap = participation.max_rounds_per_client
    limit = "no cap" if cap is None else f"a cap of {counted(cap, 'round')} for each client"
    return (
        f"{show_percent_loss(participation.share, 0)} % of "
        f"{counted(participation.clients, 'client')} in a round, {participation.client_choice} "
        f"choice of clients, {limit}; a client is accounted for in "
        f"{counted(participation.counted_rounds, 'round')}."
    )


def _span(values: tuple[float, float], show: Callable[[float], str]) -> str:
    least, most = map(show, values)
    return least if least == most else f"{least} to {most}"
