"""A client that guards its own budget: a fleet of one, with its own data, ledger, noise and memory.

    check -> charge -> compute -> store the message -> send

A request whose bytes equal one that was answered gets the stored bytes. Any other request for a round that is not after
the last one of its run is refused, and a charge without a stored message is spent: so no server can have the same round
twice under different noise, and a kill at any point loses no budget and spends none twice.

The server chooses theta, so the client computes each record in a pass of its own
(`policy.isolation = "exact"`) and only within `policy.max_distance` of the initial vector.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms import REGISTRY as ALGORITHMS
from dpfed.algorithms.base import Algorithm, ClientState, Context, Facts, Message
from dpfed.config import Config, PrivacySection, RunSection, parse
from dpfed.data.partition import Shards, shards_of
from dpfed.data.tables import Source
from dpfed.errors import DpfedError
from dpfed.federation.client.storage import Store, own_folder
from dpfed.federation.held_out import PART, mechanism_of, noised_counts, rows_of, split
from dpfed.federation.messages import (
    Receipt,
    Reply,
    Request,
    Scoring,
    ScoringTerms,
    Terms,
    check_fields,
    digest,
    pack,
    unpack_any,
)
from dpfed.federation.policy import (
    ClientConfig,
    History,
    RefusedError,
    ToldError,
    check,
    check_base,
    check_distance,
    check_model,
    check_scoring,
    check_sender,
)
from dpfed.model.model_hash import model_hash
from dpfed.model.per_sample.gradients import PerSample
from dpfed.privacy.accounting.pld import epsilon
from dpfed.privacy.accounting.rdp import rdp_epsilon
from dpfed.privacy.grid_noise import grid_of
from dpfed.privacy.ledger.charge import Charge
from dpfed.privacy.ledger.ledger import Ledger
from dpfed.privacy.mechanism import Mechanism
from dpfed.privacy.noise import Purpose, Streams
from dpfed.privacy.oracle import FleetOracle, PassLimits, RoundTerms
from dpfed.privacy.plan import Plan
from dpfed.privacy.published import show_loss, show_sigma
from dpfed.privacy.record_batch import PrivateData, Records
from dpfed.training.budget.ledgers import client_ledger
from dpfed.training.job.data import (
    augmentations_for,
    records_of,
    refuse_unreleasable,
    spec_of,
    tokenised,
)
from dpfed.training.job.device import device_of
from dpfed.training.job.message_size import meta_message
from dpfed.training.job.model import build_model

LOG = logging.getLogger("dpfed")
LARGEST = 1e4  # of the noise on a mean gradient: its square stays below `wire.FIELDS`
MAX_EXACT_MECHANISMS = (
    8  # different mechanisms in a ledger whose exact epsilon takes about a second
)


@dataclass(frozen=True)
class OwnPlan(Plan):
    """One client's plan: `sizes` is what it holds, `expected` follows from what it has declared and may be smaller.

    Every unit it holds has its coin, also those beyond the declared number: were they left out, removing one unit would
    move another one in.
    """

    def __post_init__(self) -> None:
        if not (self.sampling == "poisson" and self.multipliers.all()):
            raise ValueError("a real client releases nothing without noise and accounting")


class IndexedStreams(Streams):
    """Streams of one client that has this number in the run; its own rows all have number 0."""

    def __init__(self, seed: int, index: int) -> None:
        super().__init__(seed)
        self._index = index

    def key(self, purpose: Purpose, round: int = 0, client: int = 0) -> bytes:
        return super().key(purpose, round, self._index)


@dataclass(frozen=True)
class Built:
    """A model as some request needs it, with the hash that names it and the shapes of what is broadcast to it.

    start  the initial vector `[P]`, from which `policy.max_distance` is measured
    """

    algorithm: Algorithm
    model: PerSample
    start: Tensor
    hash: str
    shapes: dict[str, tuple[int, ...]]


class Client:
    """Answers requests. `source` replaces the configured data source. Repeatable noise, which protects nothing, is for
    tests: it needs `insecure`, a link on this machine alone, as well as client.allow_seeded.

    `log` is told after each answer what has been spent. None of it goes to the server.
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
                "client.allow_seeded = true is for tests with --insecure on one machine: take it out"
            )
        self.config = config
        self._log = log
        self._device = device_of(config.client.device)
        loader: Any = config.data
        source = source or loader.load()
        if not config.client.allow_seeded:  # said at once, not at the first request
            refuse_unreleasable(self._as_run(None, "os"), source)
        self._state = own_folder(Path(config.client.state))
        trained, held_out = split(config, source.train, self._state)
        self._source = tokenised(config.model, source)
        if not len(trained):
            raise DpfedError(
                "this client holds no records to train on: check [data], client.held_out_share and held_out_column"
            )
        # The declared numbers are never compared with the data: a server could see the difference.
        self._records, self._shards = self._holdings(trained)
        self._units = int(self._shards.sizes[0])
        self._scored = self._holdings(held_out) if config.policy.evaluate else None
        self._view = augmentations_for(self._as_run(None, "os"), self._source)
        self._built: tuple[tuple[Algorithm, int, bool], Built] | None = None

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def answer(self, data: bytes) -> bytes:
        """The reply to a request, or an error; what a transport calls for each message.

        Of an error the server is told what `policy.told` gives, and nothing else of it leaves this client.
        """
        request = unpack_any(data, self.config.client.max_message << 20)
        refuse(check_sender(request.terms, self.config))
        if not request.terms.seeded:
            refuse_unreleasable(self._as_run(None, "os"), self._source)
        if isinstance(request, Scoring):
            return self._count(request, digest(data))
        return self._train(request, digest(data))

    def _train(self, request: Request, asked: str) -> bytes:
        terms = request.terms
        store = Store(self._state, terms.run)
        with (
            self._ledger() as ledger
        ):  # its lock also keeps a second answer out until this one is stored
            stored = store.reply(terms.round, asked)
            if stored is not None:
                self._say(
                    f"round {terms.round} answered again with the stored message, nothing spent"
                )
                return stored
            algorithm = algorithm_of(terms)
            plan = self._plan(terms, algorithm)
            refuse(check_base(terms, algorithm.lr, self.config.policy))
            refuse(
                check(
                    terms,
                    self.config.policy,
                    plan.mechanism(0),
                    ledger.history(self.config.client.name),
                )
            )
            self._check_place(terms, ledger, store)
            built = self._build(terms, algorithm)
            refuse(check_model(built.hash, terms, self.config.policy))
            self._check_fields(request, built, plan)
            memory = self._memory(terms, built, store)
            ledger.charge(
                [charge_of(terms, plan.mechanism(0), terms.local_steps)], run=terms.run
            )  # from here on it is spent, whatever happens
            message, memory = self._compute(request, built, plan, memory)
            reply = pack(Reply(receipt_of(terms, asked, ledger), message))
            store.keep_memory(terms.round, memory)
            store.keep_reply(terms.round, asked, reply)
            self._say_spent(f"round {terms.round} answered", terms, ledger)
        return reply

    def _count(self, request: Scoring, asked: str) -> bytes:
        """The noised number of right answers on held-out units, in the same order: charge, compute, store, send."""
        terms, policy = request.terms, self.config.policy
        store = Store(self._state, terms.run)
        with self._ledger() as ledger:
            stored = store.reply(terms.round, asked, "score")
            if stored is not None:
                self._say(
                    f"round {terms.round} scored again with the stored message, nothing spent"
                )
                return stored
            mechanism = mechanism_of(terms.sigma)
            refuse(check_scoring(terms, policy, mechanism, ledger.history(self.config.client.name)))
            check_head(terms, ledger)
            last = ledger.last_round(terms.run, PART)
            if terms.round <= last or store.last_reply("score") > last:
                raise RefusedError(
                    f"refused: round {terms.round} is not after round {last}, the last that was scored"
                )
            built = self._build(terms, algorithm_of(terms))
            refuse(check_model(built.hash, terms, policy))
            check_fields(request.fields, {"theta": (built.model.space.size,)})
            theta = request.fields["theta"].to(self._device)
            refuse(check_distance(theta, built.start, policy))
            if self._scored is None:
                raise RefusedError("refused: there are no held-out records here")
            ledger.charge(
                [charge_of(terms, mechanism, 1, PART)], run=terms.run
            )  # from here on it is spent
            noise = self._streams(terms).noise(
                -terms.round, 0, torch.device("cpu")
            )  # training's have positive names
            counts = noised_counts(
                built.model, theta, *self._scored, terms.sigma, noise, policy.isolation
            )
            reply = pack(Reply(receipt_of(terms, asked, ledger), {"counts": counts}))
            store.keep_reply(terms.round, asked, reply, "score")
            self._say_spent(f"round {terms.round} scored", terms, ledger)
        return reply

    def _say(self, line: str) -> None:
        if self._log is not None:
            self._log(line)

    def _say_spent(self, what: str, terms: Terms | ScoringTerms, ledger: Ledger) -> None:
        """Log what the whole ledger has spent of the budget; the answer is stored and stays valid."""
        try:
            self._log_spent(what, terms, ledger)
        except (OSError, ValueError, RuntimeError, DpfedError) as error:
            LOG.warning("what was spent could not be logged: %s", error)

    def _log_spent(self, what: str, terms: Terms | ScoringTerms, ledger: Ledger) -> None:
        if self._log is None:
            return
        if terms.seeded:
            self._log(f"{what} in test mode, with repeatable noise that protects nothing")
            return
        spent = spent_of(ledger.history(self.config.client.name), self.config.policy.delta)
        self._log(f"{what}, {spent} of {self.config.policy.max_epsilon} spent")

    def _holdings(self, rows: np.ndarray) -> tuple[Records, Shards]:
        """Return these records and the units that they belong to."""
        table = rows_of(self._source.train, rows)
        units = table.column(self.config.data.unit_column)
        return records_of(table, self._device), own_shards(len(table), units)

    def _ledger(self) -> Ledger:
        released = (self._state / "runs").exists()
        return client_ledger(
            self._state, self.config.client.name, self.config.policy.delta, released
        )

    def _build(self, terms: Terms | ScoringTerms, algorithm: Algorithm) -> Built:
        """The model of a request; the last one is kept, as a run asks for the same each round."""
        counts = isinstance(terms, Terms) and terms.clipping.rule().counts
        key = (algorithm, terms.seed, counts)
        if self._built is None or self._built[0] != key:
            config, streams = self._as_run(algorithm, "seeded"), Streams(terms.seed)
            spec = spec_of(self._source)
            model, adapted, start, _ = build_model(config, spec, streams, self._device)
            _, down = meta_message(algorithm, model.space, varying_phi=counts)
            shapes = {name: tuple(value.shape) for name, value in down.items()}
            hash_ = model_hash(adapted.model, model.space)
            self._built = (key, Built(algorithm, model, start, hash_, shapes))
        return self._built[1]

    def _as_run(self, algorithm: Any, noise: Any) -> Config:
        """This client's sections as the configuration of a run, for what is built from one."""
        data = replace(
            self.config.data, partition="natural"
        )  # its records are its own, nobody deals them
        privacy = PrivacySection(isolation=self.config.policy.isolation)
        return Config(data, self.config.model, algorithm, privacy, RunSection(noise=noise))

    def _plan(self, terms: Terms, algorithm: Algorithm) -> OwnPlan:
        """Every constant from the request, which the policy then judges; nothing of it is computed from the data."""
        return OwnPlan(
            sampling="poisson",
            clip=terms.clip,
            sizes=np.array([self._units]),
            rates=np.array([terms.rate]),
            expected=np.array([terms.expected]),
            multipliers=np.array([terms.sigma]),
            batches=algorithm.releases.batches,
            releases=algorithm.releases.releases,
            unit=self.config.data.unit_column or "record",
            clipping=terms.clipping.rule(),
        )

    def _check_place(self, terms: Terms, ledger: Ledger, store: Store) -> None:
        """The ledger is the one that the server knows, and the round comes after all that it was charged for."""
        check_head(terms, ledger)
        last = ledger.last_round(terms.run)
        if store.last_reply() > last:
            raise RefusedError(
                f"the ledger lacks round {store.last_reply()}, which was answered: put back the newest"
            )
        if terms.round <= last:
            raise RefusedError(
                f"refused: round {terms.round} is not after round {last}, the last one of this run"
            )
        if terms.round > terms.rounds or terms.used > last:
            raise RefusedError(
                f"refused: round {terms.round} of {terms.rounds} with {terms.used} used was never due"
            )

    def _check_fields(self, request: Request, built: Built, plan: OwnPlan) -> None:
        """All that could go wrong because of the request is said before anything is charged."""
        check_fields(request.fields, built.shapes)
        theta = request.fields["theta"].to(self._device)
        refuse(check_distance(theta, built.start, self.config.policy))
        try:
            built.algorithm.check(
                Facts(request.terms.equal_phi, True, False, varying_phi=plan.clipping.counts)
            )
            if request.terms.grid:
                grid_of(plan.noise_std(0), plan.clip, built.model.space.size)
        except DpfedError as error:  # of the request's own numbers alone
            raise RefusedError(f"refused: {error}") from None
        if not plan.noise_std(0) / float(plan.expected[0]) <= LARGEST:
            raise RefusedError(
                f"refused: sigma {show_sigma(request.terms.sigma)} makes noise beyond {LARGEST:g}"
            )

    def _memory(self, terms: Terms, built: Built, store: Store) -> ClientState:
        names = built.algorithm.remembers
        if names:
            store.settle(terms.used)
        return store.memory(terms.used, names, built.model.space.size, self._device)

    def _compute(
        self, request: Request, built: Built, plan: OwnPlan, memory: ClientState
    ) -> tuple[Message, ClientState]:
        """The client's round, as a fleet of one; only noised values and public constants are in what it returns."""
        terms, algorithm = request.terms, built.algorithm
        ctx = self._context(terms, built, plan)

        def admit(theta: Tensor) -> None:
            # Iterates follow from noised values and the request, so stopping at one tells nothing more.
            reason = check_distance(theta, built.start, self.config.policy)
            if reason is not None:
                raise ToldError(f"round {terms.round} was stopped and stays charged: {reason}")

        oracle = FleetOracle(
            PrivateData(built.model, self._records, self._shards, self._view),
            RoundTerms(
                plan,
                self._streams(terms),
                terms.round,
                [0],
                steps=terms.local_steps,
                grid=terms.grid,
                isolation=self.config.policy.isolation,
            ),
            PassLimits(self.config.client.max_slots),
            admit=admit,
        )
        server = SimpleNamespace(
            **{name: value.to(self._device) for name, value in request.fields.items()}
        )
        local = algorithm.start(ctx, server, memory)
        for k in range(1, terms.local_steps + 1):
            local = algorithm.step(ctx, local, oracle, self._scalar(k))
        message, memory = algorithm.finish(ctx, server, local)
        if plan.clipping.counts:
            message = message | {"below": oracle.below}
        for name, value in message.items():
            if not bool(value.isfinite().all()):
                raise ToldError(
                    f"round {terms.round} left the finite numbers in {name}: the server's lr is too high"
                )
        return {name: value[0] for name, value in message.items()}, memory

    def _streams(self, terms: Terms | ScoringTerms) -> Streams:
        return (
            IndexedStreams(terms.seed, terms.index)
            if terms.seeded
            else Streams(terms.seed, secret=True)
        )

    def _context(self, terms: Terms, built: Built, plan: OwnPlan) -> Context:
        phi = torch.tensor([[plan.phi(0)]], dtype=torch.float64).to(torch.float32)
        return Context(
            space=built.model.space,
            N=terms.clients,
            S=1,
            T=terms.rounds,
            K=terms.local_steps,
            t=self._scalar(terms.round),
            lr=self._scalar(terms.lr),
            lr0=self._scalar(built.algorithm.lr),
            phi=phi.to(self._device),
            equal_phi=terms.equal_phi,
            varying_phi=plan.clipping.counts,
        )

    def _scalar(self, x: float) -> Tensor:
        return torch.tensor(x, dtype=torch.float64, device=self._device)


def own_shards(records: int, units: np.ndarray | None) -> Shards:
    """Return the units of one client that holds so many records; there may be none."""
    if records:
        return shards_of(np.zeros(records, dtype=np.int64), 1, units)
    none = np.zeros(0, dtype=np.int64)
    return Shards(np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int64), none)


def spent_of(history: History, delta: float) -> str:
    """Return the epsilon of a ledger in words, rounded up.

    A ledger of very many different mechanisms gets the Rényi bound, which is faster and larger.
    """
    if len(history) > MAX_EXACT_MECHANISMS:
        return f"epsilon at most {show_loss(rdp_epsilon(history, delta), 2)} (Rényi bound)"
    return f"epsilon {show_loss(epsilon(history, delta).value, 2)}"


def algorithm_of(terms: Terms | ScoringTerms) -> Algorithm:
    keys = dict(terms.algorithm)
    cls = ALGORITHMS.get(str(keys.pop("name", "")))
    if cls is None:
        raise RefusedError(
            f"there is no algorithm {terms.algorithm.get('name')!r} here: both sides need the same dpfed"
        )
    try:
        algorithm: Algorithm = parse("algorithm", cls, keys)
    except DpfedError as error:  # of the request's own words alone
        raise RefusedError(f"refused: {error}") from None
    return algorithm


def charge_of(
    terms: Terms | ScoringTerms, mechanism: Mechanism, steps: int, part: str = "train"
) -> Charge:
    """Repeatable noise protects nothing and is no spending: its row is void."""
    if terms.seeded:
        return Charge(terms.client, terms.round, steps, mechanism, "seeded", True, part)
    return Charge(terms.client, terms.round, steps, mechanism, "os", False, part)


def receipt_of(terms: Terms | ScoringTerms, asked: str, ledger: Ledger) -> Receipt:
    head = ledger.head()
    return Receipt(terms.run, terms.client, terms.round, asked, head.rows, head.hash)


def check_head(terms: Terms | ScoringTerms, ledger: Ledger) -> None:
    """Refuses with an old copy of the ledger; where it lies is for this client's own log."""
    if not terms.head:
        refuse(
            None if terms.rows == 0 else f"{terms.rows} rows without their hash are nobody's ledger"
        )
        return
    try:
        ledger.check_head((terms.rows, terms.head))
    except DpfedError as error:
        LOG.error("%s", error)
        rows = ledger.head().rows
        what = (
            f"row {rows + 1} is missing"
            if rows < terms.rows
            else f"row {terms.rows} is not the row it was"
        )
        raise RefusedError(
            f"refused: {what} in its ledger, which does not go on from the one that is known"
        ) from None


def refuse(reason: str | None) -> None:
    if reason is not None:
        raise RefusedError(f"refused: {reason}")
