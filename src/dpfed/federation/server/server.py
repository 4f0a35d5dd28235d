"""The server of a federation: it computes each round of a training with clients on a network.

The server sends a request to each client of the cohort (the clients of this round). It checks each
reply when it arrives, and stores valid replies in files. At the end of the round, it averages them
in the order of the clients. Therefore, memory holds one message at a time, and the order of arrival
does not change the mean. The log names each client without a valid reply.

If too few replies are valid, the server repeats the requests that have no valid reply. If too few
are valid even then, the round is lost: the model does not change, and the next round begins.

Each client records its privacy spending in its own ledger file. The server has no ledger: it counts
every client that got a request as if the client had spent. The server's epsilons are therefore
upper bounds, and only for this run. Only the client's ledger has its spending over all runs.

A request depends only on the configuration and on the checkpoint. A killed and resumed server
therefore repeats its last requests byte for byte. Clients then send their stored replies again and
spend nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

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
    unpack_reply,
)
from dpfed.federation.server.exchange import PackedRequests, delete_leftovers, stored_replies
from dpfed.model.frozen.model_hash import model_hash
from dpfed.training.backends.base import LostRoundError, WaitForCharge, no_charge
from dpfed.training.job.job import Job
from dpfed.training.job.plan import client_names
from dpfed.training.messages.message_format import Field, Layout
from dpfed.training.messages.message_rounding import message_rounding
from dpfed.training.round_context import learning_rate
from dpfed.training.server_state import State

Log = Callable[[str], None]
# Requests by client number. The number is the position of the client's name in alphabetical order.
Requests = Mapping[int, Request] | Mapping[int, ScoringRequest]


class Transport(Protocol):
    """Sends requests to clients by name, and yields pairs of a client's name and its reply.

    There is no pair for a client that does not reply within `timeout` seconds. If a client refuses,
    or its reply is unreadable, the pair has an exception instead of the reply.
    """

    def send_all(
        self, requests: Mapping[str, bytes], timeout: float
    ) -> Iterable[tuple[str, bytes | Exception]]: ...


@dataclass(frozen=True)
class RunPlace:
    """The name of a run, which requests contain, and the folder for the files of replies.

    If `folder` is None, the files are in the system's folder of temporary files.
    """

    name: str
    folder: Path | None = None


class Federation:
    """The part of the server that lets clients on a network compute the rounds of a training.

    Client number i is the i-th name of `section.clients` in alphabetical order. With `seeded`, the
    clients use repeatable noise (test mode).

    heads   row count and last hash of each client's ledger, as in the client's last reply
    used    last round in which each client's message was used
    scores  accuracies so far, on records that clients hold out from training

    The next request to a client contains its entries of `heads` and `used`. A checkpoint contains
    all three.
    """

    def __init__(
        self,
        job: Job,
        transport: Transport,
        place: RunPlace,
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
        self._place = place
        self._section = section
        self._seeded = seeded
        self._log = log
        self._lost = 0
        self._model = model_hash(job.adapted.model, job.space)
        self._rounding = message_rounding(job, section)
        if place.folder is not None:
            delete_leftovers(place.folder)
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
        """Send the requests of round t; return the mean of the valid replies and their number.

        `wait_for_charge` is not used, because each client records its spending in its own ledger.
        """
        requests = self.training_requests(t, state, clients)
        needed = min(self._job.config.run.min_clients or self._job.schedule.cohort, len(clients))
        limit = norm_limit(self._job, t, state)
        with stored_replies(self._place.folder) as replies:
            for _ in range(1 + self._section.retries):
                missing = {i: r for i, r in requests.items() if i not in replies.receipts}
                for i, reply, data in self._exchange(missing, self._rounding.up, limit, "left out"):
                    replies.put(i, reply.receipt, data)
                    # Free the memory of this message before the transport fetches the next one.
                    del reply, data
                if len(replies.receipts) >= needed:
                    break
            answered = [i for i in clients if i in replies.receipts]
            for i in answered:
                self.heads[i] = (replies.receipts[i].rows, replies.receipts[i].head)
            if len(answered) < needed:
                raise self._too_few(t, len(answered), needed)
            self._lost = 0
            self.used |= dict.fromkeys(answered, t)
            weights = self._weights(answered)
            mean = replies.mean(answered, weights, self._rounding.up, self._job.device)
            return mean, len(answered)

    def _exchange(
        self, requests: Requests, layout: Layout, limit: float, consequence: str
    ) -> Iterator[tuple[int, Reply, bytes]]:
        """Send requests, and yield each valid reply when it arrives.

        An element is the client's number, the reply and the reply's bytes. The log says why a
        client has no valid reply.

        layout       formats and lengths of the tensors in a reply
        limit        largest allowed norm of the tensor `delta`, a client's change of the model
        consequence  text for the log: what happens to a client without a valid reply
        """
        numbers = {self._names[i]: i for i in requests}
        packed = PackedRequests({name: requests[i] for name, i in numbers.items()})

        def leave_out(name: str, reason: str) -> None:
            t = requests[numbers[name]].terms.round
            facts = {"round": t, "client": name, "reason": one_line(reason)}
            text = f"round {t}: client {name!r} is {consequence}: {facts['reason']}"
            self._log(LogLine(text, "left_out", **facts))

        waiting = set(numbers)
        for name, found in self._transport.send_all(packed, self._section.timeout):
            waiting.discard(name)
            if isinstance(found, Exception):
                leave_out(name, str(found) or type(found).__name__)
                continue
            terms = requests[numbers[name]].terms
            try:
                reply = unpack_reply(found, layout, terms, packed.digests[name], limit)
                if isinstance(terms, ScoringTerms):
                    check_counts(reply, terms)
            except DpfedError as error:
                leave_out(name, str(error))
                continue
            valid = [(numbers[name], reply, found)]
            # Keep no reference to this message. The caller can then free its memory before the next
            # message arrives.
            del reply, found
            yield valid.pop()
        for name in sorted(waiting):
            leave_out(name, f"no answer within {self._section.timeout:g} seconds")

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
        """Request noised counts of right answers on held-out records, and log the accuracy.

        The accuracy is computed from the counts of all clients with a valid reply.
        """
        held_out = [i for i, name in enumerate(self._names) if name in self._section.held_out]
        requests = {i: self.scoring_request(t, state, i) for i in held_out}
        counts: dict[int, tuple[float, float]] = {}
        layout = {"counts": Field(2)}
        for i, reply, _ in self._exchange(requests, layout, 0.0, "not scored"):
            right, wrong = reply.fields["counts"].tolist()
            counts[i] = (right, wrong)
            self.heads[i] = (reply.receipt.rows, reply.receipt.head)
        number = t // self._section.evaluate_every
        delta = self._job.config.privacy.delta
        # Add the counts in the order of the clients, so that the last bits of the sums do not
        # depend on the order of arrival.
        in_order = [counts[i] for i in sorted(counts)]
        score = score_of(t, in_order, self._section.evaluate_sigma, number, delta)
        if score is not None:
            self.scores.append(score)
            self._log(str(score))

    def report(self) -> dict[str, Any]:
        scores = [asdict(score) for score in self.scores]
        return {"held_out": scores} if self._section.evaluate_every else {}

    def remembered(self) -> dict[str, Any]:
        """Return what a checkpoint stores about the clients and the scores, as JSON values."""
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

    def training_requests(self, t: int, state: State, clients: Sequence[int]) -> dict[int, Request]:
        """Return the training requests of round t by client number, with shared tensors."""
        fields = self._rounding.broadcast(t, state.server)
        return {i: Request(self._training_terms(t, state, i), fields) for i in clients}

    def _training_terms(self, t: int, state: State, client: int) -> Terms:
        job = self._job
        run, plan, schedule = job.config.run, job.plan, job.schedule
        return Terms(
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
            upload=self._section.upload,
            download=self._section.download,
        )

    def scoring_request(self, t: int, state: State, client: int) -> ScoringRequest:
        terms = ScoringTerms(
            **self._common_terms(t, client),
            held_out=self._section.held_out[self._names[client]],
            sigma=self._section.evaluate_sigma,
        )
        return ScoringRequest(terms, {"theta": state.result})

    def _common_terms(self, t: int, client: int) -> dict[str, Any]:
        """Return the fields that training requests share with requests for noised counts."""
        rows, head = self.heads.get(client, (0, ""))
        return {
            "run": self._place.name,
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

    def _weights(self, clients: Sequence[int]) -> list[float]:
        """Return the weights of these clients in the mean; they add up to 1.

        The weights are equal, or proportional to the numbers of records that clients have declared.
        """
        weights = [1.0] * len(clients)
        if self._job.algorithm.agg_weights == "size":
            weights = [float(self._job.plan.sizes[i]) for i in clients]
        return [weight / sum(weights) for weight in weights]


def check_counts(reply: Reply, terms: ScoringTerms) -> None:
    """Raise MessageError if a reply has counts that no honest client can send."""
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

    Diagnostics are switched off, because they would need private states of the clients. Precision
    is float32, as at the clients. Otherwise, the hash of the frozen weights would differ, and
    clients would refuse the requests.
    """
    client_names(config)
    run = replace(config.run, noise="os", diagnostics=False, precision="float32")
    if seeded:
        run = replace(run, noise="seeded")
    return replace(config, run=run)


def federation_of(
    job: Job,
    run: str,
    transport: Transport,
    log: Log = lambda line: None,
    folder: Path | None = None,
) -> Federation:
    """Return the `Federation` that computes the rounds of `job` with clients on a network.

    job     made by `prepare_server`, from a configuration that `served` has returned
    run     name of the run in requests
    folder  folder for the files of replies, usually the run folder
    """
    section = job.config.federation or FederationSection()
    seeded = job.config.run.noise == "seeded"
    return Federation(job, transport, RunPlace(run, folder), section, seeded, log)


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
    """Return the largest norm of `delta`, a client's change of the model, that the server accepts.

    The limit is computed from public numbers. It is far above the norm that an honest client can
    reach in the local steps of a round.
    """
    plan = job.plan.at(state.clip)
    run = job.config.run
    noise = max(math.sqrt(plan.phi(i)) for i in range(plan.clients))
    lr = learning_rate(job.algorithm.base_lr, run.lr_schedule, t, run.rounds)
    step = lr * (math.sqrt(job.space.size) * max(1.0, noise) + state.clip)
    return 1e4 * (run.local_steps * step + float(state.theta.norm()))
