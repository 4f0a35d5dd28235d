"""A real client: it answers a server's requests, and never spends more than its privacy budget.

    check -> charge -> compute -> store the reply -> send

To charge is to record the privacy loss of the round in the client's ledger, a file. If a server
repeats a request, it gets the stored reply, byte for byte. A different request must be for a later
round of the run. So no server gets two replies for one round with different noise. A crash neither
loses nor repeats a charge. If a round was charged but has no stored reply, its epsilon stays spent.

The server chooses theta, the trained parameters that it sends. A malicious server could choose a
theta at which one record changes the gradients of other records. Therefore, the client puts records
at random positions in batches of a fixed shape (`policy.isolation = "exact"`,
privacy/isolation/turns.py). It also refuses a theta that is farther than `policy.max_distance` from
the initial parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import ClientState, Message
from dpfed.data.partition import Shards, shards_of
from dpfed.data.tables import Source, Table
from dpfed.errors import DpfedError
from dpfed.federation.client.budget_left import spending_line
from dpfed.federation.client.request_checks import (
    check_scoring_round,
    check_training_round,
    read_training_values,
    refuse,
)
from dpfed.federation.client.round_setup import (
    ModelBuilder,
    OwnPlan,
    RequestModel,
    algorithm_of,
    figures_of,
    layouts_of,
    plan_of,
    run_config,
    streams_of,
)
from dpfed.federation.client.storage import Store, own_folder
from dpfed.federation.client_config import ClientConfig, unit_of
from dpfed.federation.held_out import (
    PART,
    HeldOut,
    mechanism_of,
    noised_counts,
    rows_of,
    split,
)
from dpfed.federation.messages import (
    AnyTerms,
    Receipt,
    Reply,
    Request,
    ScoringRequest,
    Terms,
    digest,
    pack,
    read_fields,
    unpack_request,
)
from dpfed.federation.policy import (
    History,
    PublicError,
    check_distance,
    check_learning_rate,
    check_model,
    check_scoring,
    check_sender,
    check_training,
)
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms
from dpfed.privacy.record_batch import PrivateData, Records
from dpfed.training.budget.ledgers import client_ledger
from dpfed.training.job.data import (
    augmentations_for,
    configured_source,
    records_of,
    refuse_scoring,
    refuse_unreleasable,
    refuse_unstated,
    spec_of,
    tokenised,
)
from dpfed.training.job.device import device_of
from dpfed.training.local_steps import run_local_steps
from dpfed.training.messages.message_format import Field, Layout, draws, encode
from dpfed.training.round_context import build_context

LOG = logging.getLogger("dpfed")


@dataclass(frozen=True)
class Prepared:
    """A request that was checked and accepted, with a function that computes its reply.

    charge   privacy loss of the reply; must be in the ledger before `compute` is called
    compute  function without arguments that returns the reply's tensors and the client memory
             (vectors that the algorithm keeps at the client between rounds)
    """

    charge: Charge
    compute: Callable[[], tuple[Message, ClientState]]


class Client:
    """Answers servers' requests with noised messages, after it has recorded their privacy loss.

    source    data source to use instead of the configured one; None for the configured one
    insecure  True to permit client.allow_seeded: repeatable noise, for tests on one machine
    log       called after each reply with a line about the spent epsilon, which stays private
    """

    def __init__(
        self,
        config: ClientConfig,
        source: Source | None = None,
        insecure: bool = False,
        log: Callable[[str], None] | None = None,
    ) -> None:
        if config.client.allow_seeded and not insecure:
            raise DpfedError(
                "client.allow_seeded = true is for tests with --insecure on one machine: "
                "take it out"
            )
        self.config = config
        self._log = log
        self._device = device_of(config.client.device)
        refuse_unstated(config.model)
        refuse_scoring(config.model, config.policy.evaluate)
        source = source or configured_source(config.data, config.model, "train")
        # Check at the start, not only at the first request, if the settings are safe for real
        # records.
        if not config.client.allow_seeded:
            refuse_unreleasable(run_config(config, None, "os"), source)
        self._state = own_folder(Path(config.client.state))
        trained, held_out = split(config, source.train, self._state)
        if not len(trained):
            raise DpfedError(
                "this client holds no records to train on: "
                "check [data], client.held_out_share and held_out_column"
            )
        self._source = tokenised(config.model, source)
        # Do not compare the declared numbers of units with the data. A client that stops because
        # they differ would reveal something about the true numbers to the server.
        self._records, self._shards = self._on_device(rows_of(self._source.train, trained))
        scored = held_out if config.policy.evaluate else held_out[:0]
        self._held_out = HeldOut(*self._on_device(rows_of(self._source.train, scored)))
        self._view = augmentations_for(run_config(config, None, "os"), self._source)
        self._models = ModelBuilder(config, spec_of(self._source, config.model), self._device)

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def answer(self, data: bytes) -> bytes:
        """Return the reply to a request, or raise an error.

        `policy.public_text` decides which text of the error the server may see.
        """
        request = unpack_request(data, self.config.client.max_message << 20)
        terms = request.terms
        refuse(check_sender(terms, self.config))
        if not terms.seeded:
            refuse_unreleasable(run_config(self.config, None, "os"), self._source)
        request_hash = digest(data)
        scoring = isinstance(request, ScoringRequest)
        verb = "scored" if scoring else "answered"
        store = Store(self._state, terms.run, "score" if scoring else "reply")
        # Keep the ledger locked until the reply is stored. A second request has to wait until this
        # request is charged and answered.
        with self._ledger() as ledger:
            stored = store.reply(terms.round, request_hash)
            if stored is not None:
                self._say(
                    f"round {terms.round} {verb} again with the stored message, nothing spent"
                )
                return stored
            prepared = self._prepare(request, ledger, store)
            # Record the privacy loss before computing, so that no crash can lose it.
            ledger.charge([prepared.charge], run=terms.run)
            message, memory = prepared.compute()
            reply = pack(Reply(receipt_of(terms, request_hash, ledger), message))
            store.keep_memory(terms.round, memory)
            store.keep_reply(terms.round, request_hash, reply)
            self._log_spent(f"round {terms.round} {verb}", prepared, ledger, terms)
        return reply

    def _prepare(self, request: Request | ScoringRequest, ledger: Ledger, store: Store) -> Prepared:
        if isinstance(request, ScoringRequest):
            return self._prepare_scoring(request, ledger, store)
        return self._prepare_training(request, ledger, store)

    def _prepare_training(self, request: Request, ledger: Ledger, store: Store) -> Prepared:
        terms = request.terms
        policy = self.config.policy
        algorithm = algorithm_of(terms)
        plan = plan_of(terms, algorithm, int(self._shards.sizes[0]), unit_of(self.config))
        mechanism = plan.mechanism(0)
        refuse(check_learning_rate(terms, algorithm.base_lr, policy))
        refuse(check_training(terms, policy, mechanism, self._history(ledger)))
        check_training_round(terms, ledger, store)
        built = self._models.build(terms, algorithm)
        refuse(check_model(built.hash, terms, policy))
        up, down = layouts_of(terms, built)
        fields = read_training_values(request, down, built, plan, policy)
        if algorithm.remembers:
            store.settle(terms.used)
        size = built.model.space.size
        memory = store.memory(terms.used, algorithm.remembers, size, self._device)
        store.keep_cap(terms.max_rounds)
        charge = charge_of(terms, mechanism, terms.local_steps, "train")
        compute = partial(self._compute, terms, fields, built, plan, memory)
        return Prepared(charge, partial(_rounded, terms, up, compute))

    def _prepare_scoring(self, request: ScoringRequest, ledger: Ledger, store: Store) -> Prepared:
        terms = request.terms
        policy = self.config.policy
        mechanism = mechanism_of(terms.sigma)
        refuse(check_scoring(terms, policy, mechanism, self._history(ledger)))
        check_scoring_round(terms, ledger, store)
        built = self._models.build(terms, algorithm_of(terms))
        refuse(check_model(built.hash, terms, policy))
        fields = read_fields(request.fields, {"theta": Field(built.model.space.size)})
        theta = fields["theta"].to(self._device)
        refuse(check_distance(theta, built.start, policy))
        charge = charge_of(terms, mechanism, 1, PART)
        return Prepared(charge, partial(self._count, request, built, theta))

    def _count(
        self, request: ScoringRequest, built: RequestModel, theta: Tensor
    ) -> tuple[Message, ClientState]:
        """Return noised counts of right and wrong answers on the held-out units."""
        terms = request.terms
        # Use the negative round number to select random streams. The counts then get other random
        # numbers than the training of the same round.
        streams = streams_of(terms)
        noise = streams.noise(-terms.round, 0, torch.device("cpu"))
        exact = self.config.policy.isolation == "exact"
        draws = streams.generator("place", -terms.round) if exact else None
        counts = noised_counts(built.model, theta, self._held_out, terms.sigma, noise, draws)
        return {"counts": counts.to(torch.float32)}, {}

    def _compute(
        self,
        terms: Terms,
        fields: Message,
        built: RequestModel,
        plan: OwnPlan,
        memory: ClientState,
    ) -> tuple[Message, ClientState]:
        """Compute the local steps of one round; return the reply's tensors and the vectors to keep.

        The client keeps some vectors until its next round. Tensors and vectors contain only noised
        values and public constants.

        fields  vectors that the request contains, by name
        """

        def admit(theta: Tensor) -> None:
            # The client computes this error from the request and from noised values only. So the
            # server may see the text of the error, although it depends on theta.
            reason = check_distance(theta, built.start, self.config.policy)
            if reason is not None:
                raise PublicError(f"round {terms.round} was stopped and stays charged: {reason}")

        oracle = FleetOracle(
            PrivateData(built.model, self._records, self._shards, self._view),
            RoundTerms(
                plan,
                streams_of(terms),
                terms.round,
                [0],
                steps=terms.local_steps,
                grid=terms.grid,
                isolation=self.config.policy.isolation,
            ),
            PassLimits(self.config.client.max_slots, places=built.model.places),
            admit=admit,
        )
        figures = figures_of(terms, built.algorithm)
        ctx = build_context(built.model.space, plan, [0], figures, self._device)
        server = SimpleNamespace(**fields)
        result = run_local_steps(built.algorithm, ctx, server, memory, oracle)
        for name, value in result.message.items():
            if not bool(value.isfinite().all()):
                raise PublicError(
                    f"round {terms.round} left the finite numbers in {name}: "
                    "the server's lr is too high"
                )
        return {name: value[0] for name, value in result.message.items()}, result.memory

    def _on_device(self, table: Table) -> tuple[Records, Shards]:
        """Return the records of a table on the device, and the protected units that they belong to.

        The table may be empty.
        """
        records = records_of(table, self._device)
        if len(table):
            units = table.column(self.config.data.unit_column)
            return records, shards_of(np.zeros(len(table), dtype=np.int64), 1, units)
        none = np.zeros(0, dtype=np.int64)
        return records, Shards(np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int64), none)

    def _ledger(self) -> Ledger:
        released = (self._state / "runs").exists()
        client = self.config.client.name
        return client_ledger(
            self._state, client, self.config.policy.delta, unit_of(self.config), released
        )

    def _history(self, ledger: Ledger) -> History:
        return ledger.history(self.config.client.name)

    def _say(self, line: str) -> None:
        if self._log is not None:
            self._log(line)

    def _log_spent(self, event: str, prepared: Prepared, ledger: Ledger, terms: AnyTerms) -> None:
        """Write a log line with the epsilon spent so far, and the budget that is left.

        If this fails, write a warning and raise no error, because the reply is already stored and
        valid.
        """
        if self._log is None:
            return
        try:
            if terms.seeded:
                self._log(f"{event} in test mode, with repeatable noise that protects nothing")
            else:
                charge = prepared.charge
                history = self._history(ledger)
                self._log(spending_line(event, self.config.policy, charge, history))
        except (OSError, ValueError, RuntimeError, DpfedError) as error:
            LOG.warning("what was spent could not be logged: %s", error)


def _rounded(
    terms: Terms, layout: Layout, compute: Callable[[], tuple[Message, ClientState]]
) -> tuple[Message, ClientState]:
    """Compute the reply's tensors, and round them to the number format that the server asks for.

    Also return the vectors that the client keeps until its next round. The tensors already have
    their noise when they are rounded. The random numbers for rounding are independent of noise and
    batches.
    """
    message, memory = compute()
    return encode(message, layout, draws(streams_of(terms), "upload", terms.round)), memory


def charge_of(terms: AnyTerms, mechanism: Mechanism, steps: int, part: str) -> Charge:
    """Return the charge of a round: the privacy loss that the ledger records.

    In test mode noise is repeatable and protects nothing, so the charge is marked as void.
    """
    return Charge(
        terms.client,
        terms.round,
        steps,
        mechanism,
        noise="seeded" if terms.seeded else "os",
        void=terms.seeded,
        part=part,
    )


def receipt_of(terms: AnyTerms, request: str, ledger: Ledger) -> Receipt:
    head = ledger.head()
    return Receipt(terms.run, terms.client, terms.round, request, head.rows, head.hash)
