"""The server of a federation: a backend of the round loop whose clients are on a network.

The server sends each client of the cohort a request, checks the replies and averages the valid
ones. The log names each client without a valid reply. If too few replies are valid, the server
repeats the requests that have no valid reply. If too few are valid even then, the round is lost:
the server's state stays as it is, and the next round begins.

The clients charge their own ledgers, so the round loop's `Spending` has no ledger here. It counts
every client that got a request as charged. The server's epsilons are therefore upper bounds, and
for this run only. The spending of a client over all runs is only in the client's own ledger.

A request depends only on the configuration and on the checkpoint. A killed and resumed server
therefore repeats its last requests byte for byte. Clients then send their stored replies and charge
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfed.algorithms.base import Message
from dpfed.config import Config, FederationSection, to_dict
from dpfed.errors import DpfedError, StoppedError, counted
from dpfed.federation.held_out import Score, bounds, score_of
from dpfed.federation.log_line import LogLine
from dpfed.federation.messages import (
    ClippingTerms,
    MessageError,
    Reply,
    Request,
    ScoringRequest,
    ScoringTerms,
    Terms,
    digest,
    pack,
    unpack_reply,
)
from dpfed.model.frozen.model_hash import model_hash
from dpfed.training.backends.base import LostRoundError, WaitForCharge, no_charge
from dpfed.training.job.job import Job
from dpfed.training.job.message_size import meta_message
from dpfed.training.job.plan import client_names
from dpfed.training.round_context import learning_rate
from dpfed.training.server_state import State

Log = Callable[[str], None]
# Requests by the number of the client in the plan.
Requests = Mapping[int, Request] | Mapping[int, ScoringRequest]


class Transport(Protocol):
    """Sends requests to clients and returns their replies, both by client name.

    The result has no entry for a client that does not reply within `timeout` seconds. For a refusal
    or an unreadable reply, the entry is an error.
    """

    def send_all(
        self, requests: Mapping[str, bytes], timeout: float
    ) -> Mapping[str, bytes | Exception]: ...


class Federation:
    """The backend of the round loop for clients on a network.

    Client i of the plan is the i-th name of `section.clients` in alphabetical order. `run` is the
    run's name in requests. With `seeded`, the clients use repeatable noise (test mode).

    heads   row count and last hash of each client's ledger in its last reply
    used    last round in which each client's message was used
    scores  accuracies on held-out units so far

    The next request to a client contains its `heads` and `used`. A checkpoint contains all three.
    """

    def __init__(
        self,
        job: Job,
        transport: Transport,
        run: str,
        section: FederationSection,
        seeded: bool = False,
        log: Log = lambda line: None,
    ) -> None:
        self._names = sorted(section.clients)
        refuse_unsendable(job, self._names)
        held_out = section.held_out.keys()
        if section.evaluate_every and not (held_out and held_out <= section.clients.keys()):
            raise DpfedError(
                "federation.held_out must say how many units which of the clients hold out, "
                "and is not told"
            )
        self._job = job
        self._transport = transport
        self._run = run
        self._section = section
        self._seeded = seeded
        self._log = log
        self._lost = 0
        self._model = model_hash(job.adapted.model, job.space)
        message, _ = meta_message(job.algorithm, job.space, varying_phi=job.plan.clipping.counts)
        self._shapes = {name: tuple(value.shape[1:]) for name, value in message.items()}
        if job.plan.clipping.counts:
            self._shapes["below"] = (1,)
        self.scores: list[Score] = []
        self.heads: dict[int, tuple[int, str]] = {}
        self.used: dict[int, int] = {}

    def run_cohort(
        self,
        t: int,
        state: State,
        clients: Sequence[int],
        wait_for_charge: WaitForCharge = no_charge,
    ) -> tuple[Message, int]:
        """Return the mean of the valid messages, and the number of these messages.

        `wait_for_charge` is not used, because each client charges its own ledger.
        """
        requests = {i: self.training_request(t, state, i) for i in clients}
        needed = min(self._job.config.run.min_clients or self._job.schedule.cohort, len(clients))
        limit = norm_limit(self._job, t, state)
        replies: dict[int, Reply] = {}
        for _ in range(1 + self._section.retries):
            missing = {i: request for i, request in requests.items() if i not in replies}
            replies |= self._exchange(missing, self._shapes, limit, "left out")
            if len(replies) >= needed:
                break
        # Average in the order of the clients. The order of arrival would change the last bits.
        replies = {i: replies[i] for i in clients if i in replies}
        for i, reply in replies.items():
            self.heads[i] = (reply.receipt.rows, reply.receipt.head)
        if len(replies) < needed:
            raise self._too_few(t, len(replies), needed)
        self._lost = 0
        self.used |= dict.fromkeys(replies, t)
        return self._mean(replies), len(replies)

    def _exchange(
        self,
        requests: Requests,
        shapes: Mapping[str, tuple[int, ...]],
        limit: float,
        consequence: str,
    ) -> dict[int, Reply]:
        """Send requests; return the valid replies by client number, and log why others are missing.

        limit        largest norm of a reply's `delta`
        consequence  text for the log: what happens to a client without a valid reply
        """
        packed = {i: pack(request) for i, request in requests.items()}
        found = self._transport.send_all(
            {self._names[i]: data for i, data in packed.items()}, self._section.timeout
        )
        replies: dict[int, Reply] = {}
        for i, request in requests.items():
            terms = request.terms
            try:
                data = self._bytes_of(found.get(self._names[i]))
                reply = unpack_reply(data, shapes, terms, digest(packed[i]), limit)
                if isinstance(terms, ScoringTerms):
                    check_counts(reply, terms)
                replies[i] = reply
            except DpfedError as error:
                reason = one_line(str(error))
                name = self._names[i]
                facts = {"round": terms.round, "client": name, "reason": reason}
                text = f"round {terms.round}: client {name!r} is {consequence}: {reason}"
                self._log(LogLine(text, "left_out", **facts))
        return replies

    def _bytes_of(self, found: bytes | Exception | None) -> bytes:
        if found is None:
            raise MessageError(f"no answer within {self._section.timeout:g} seconds")
        if isinstance(found, Exception):
            raise MessageError(str(found) or type(found).__name__)
        return found

    def _too_few(self, t: int, found: int, needed: int) -> DpfedError:
        self._lost += 1
        clients = counted(found, "client")
        what = f"in round {t} only {clients} gave a usable answer and {needed} are needed"
        if self._lost < self._section.patience:
            self._log(f"{what}: the round is lost, and the next one comes")
            return LostRoundError(what)
        return StoppedError(f"{what}: see the log for who did not, and run.min_clients")

    def after(self, t: int, state: State) -> dict[str, Any]:
        every = self._section.evaluate_every
        if every and t % every == 0:
            self._score(t, state)
        return self.remembered()

    def _score(self, t: int, state: State) -> None:
        """Request noised counts on held-out units, and log the accuracy computed from them.

        The accuracy leaves out clients without a valid reply.
        """
        held_out = [i for i, name in enumerate(self._names) if name in self._section.held_out]
        requests = {i: self.scoring_request(t, state, i) for i in held_out}
        counts: dict[str, tuple[float, float]] = {}
        for i, reply in self._exchange(requests, {"counts": (2,)}, 0.0, "not scored").items():
            right, wrong = reply.fields["counts"].tolist()
            counts[self._names[i]] = (right, wrong)
            self.heads[i] = (reply.receipt.rows, reply.receipt.head)
        number = t // self._section.evaluate_every
        delta = self._job.config.privacy.delta
        score = score_of(t, counts, self._section.evaluate_sigma, number, delta)
        if score is not None:
            self.scores.append(score)
            self._log(str(score))

    def report(self) -> dict[str, Any]:
        scores = [asdict(score) for score in self.scores]
        return {"held_out": scores} if self._section.evaluate_every else {}

    def remembered(self) -> dict[str, Any]:
        """Return the state of this backend that a checkpoint stores, as JSON values."""
        return {
            "heads": {str(i): list(head) for i, head in sorted(self.heads.items())},
            "used": {str(i): t for i, t in sorted(self.used.items())},
            "scores": [asdict(score) for score in self.scores],
        }

    def restore(self, remembered: Mapping[str, Any]) -> None:
        try:
            heads = remembered["heads"].items()
            self.heads = {int(i): (int(rows), str(hash_)) for i, (rows, hash_) in heads}
            self.used = {int(i): int(t) for i, t in remembered["used"].items()}
            self.scores = [Score(**score) for score in remembered["scores"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DpfedError(
                "the checkpoint does not say how the clients' ledgers stood: it is no server's"
            ) from None

    def training_request(self, t: int, state: State, client: int) -> Request:
        job = self._job
        run, plan, schedule = job.config.run, job.plan, job.schedule
        terms = Terms(
            **self._common_terms(t, client),
            rounds=run.rounds,
            local_steps=run.local_steps,
            clients=schedule.clients,
            cohort=schedule.cohort,
            lr=learning_rate(job.algorithm.base_lr, run.lr_schedule, t, run.rounds),
            rate=float(plan.rates[client]),
            expected=float(plan.expected[client]),
            sigma=float(plan.multipliers[client]),
            clip=state.clip,
            clipping=ClippingTerms(**asdict(plan.clipping)),
            grid=job.config.privacy.grid is not False,
            equal_phi=plan.equal_phi,
            used=self.used.get(client, 0),
            max_rounds=schedule.cap or 0,
        )
        fields = {name: getattr(state.server, name) for name in job.algorithm.broadcast}
        return Request(terms, fields)

    def scoring_request(self, t: int, state: State, client: int) -> ScoringRequest:
        terms = ScoringTerms(
            **self._common_terms(t, client),
            held_out=self._section.held_out[self._names[client]],
            sigma=self._section.evaluate_sigma,
        )
        return ScoringRequest(terms, {"theta": state.result})

    def _common_terms(self, t: int, client: int) -> dict[str, Any]:
        """Return the fields that requests to train and requests for counts have in common."""
        rows, head = self.heads.get(client, (0, ""))
        return {
            "run": self._run,
            "server": self._section.server,
            "client": self._names[client],
            "index": client,
            "seed": self._job.config.run.seed,
            "seeded": self._seeded,
            "round": t,
            "algorithm": to_dict(self._job.config)["algorithm"],
            "model": self._model,
            "rows": rows,
            "head": head,
        }

    def _mean(self, replies: Mapping[int, Reply]) -> Message:
        """Return the weighted mean of the replies' tensors, by name.

        The weights depend on public numbers only, and add up to 1 over these clients.
        """
        weights = torch.ones(len(replies))
        if self._job.algorithm.agg_weights == "size":
            weights = torch.tensor([float(self._job.plan.sizes[i]) for i in replies])
        weights = (weights / weights.sum()).to(self._job.device)

        def stacked(name: str) -> Tensor:
            return torch.stack([reply.fields[name] for reply in replies.values()])

        return {
            name: torch.tensordot(weights, stacked(name).to(self._job.device), dims=1)
            for name in self._shapes
        }


def check_counts(reply: Reply, terms: ScoringTerms) -> None:
    """Raise MessageError for counts that no honest client can send."""
    right, wrong = reply.fields["counts"].tolist()
    least, most = bounds(terms)
    if not (least <= right <= most and least <= wrong <= most):
        raise MessageError(
            f"{right:g} right and {wrong:g} wrong are no answers of {terms.held_out} units"
        )


def one_line(text: str) -> str:
    """Return a client's text as one line of at most 300 printable characters, for the log."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:300]


def served(config: Config, seeded: bool = False) -> Config:
    """Return `config` as a server uses it: with secret noise, or repeatable noise if `seeded`.

    Diagnostics are switched off, because they would need the clients' states.
    """
    client_names(config)
    run = replace(config.run, noise="seeded" if seeded else "os", diagnostics=False)
    return replace(config, run=run)


def federation_of(
    job: Job, run: str, transport: Transport, log: Log = lambda line: None
) -> Federation:
    """Return the backend with remote clients, for a job that `prepare_server` has built.

    The job's configuration must come from `served`. `run` is the run's name in requests.
    """
    section = job.config.federation or FederationSection()
    return Federation(job, transport, run, section, job.config.run.noise == "seeded", log)


def refuse_unsendable(job: Job, names: Sequence[str]) -> None:
    plan = job.plan
    if len(names) != plan.clients:
        raise DpfedError(
            f"the federation has {plan.clients} clients, "
            "so it needs as many different names of clients"
        )
    if not plan.private or plan.sampling != "poisson":
        raise DpfedError(
            'real clients answer with noise only: privacy needs sigma > 0 and sampling = "poisson"'
        )


def norm_limit(job: Job, t: int, state: State) -> float:
    """Return the largest norm that the server accepts for a client's `delta` in round t.

    The limit is computed from public numbers. It is far above the norm that an honest client can
    reach in K local steps.
    """
    plan = job.plan.at(state.clip)
    run = job.config.run
    noise = max(math.sqrt(plan.phi(i)) for i in range(plan.clients))
    lr = learning_rate(job.algorithm.base_lr, run.lr_schedule, t, run.rounds)
    step = lr * (math.sqrt(job.space.size) * max(1.0, noise) + state.clip)
    return 1e4 * (run.local_steps * step + float(state.theta.norm()))
