"""The server's side of a federation: a backend of the one round loop whose cohort is clients on a network.

It sends each client its request, holds every reply against what this model and this algorithm make, and averages the good
ones. Who is wrong or late is named in the log and left out. Where too few are left, the others are asked again with the
same bytes, and if that does not help the round is lost: the state stays, and the next round comes. The clients charge themselves: the loop's `Spending` gets no ledger here, and its figures are upper bounds for this
run (a client that was asked counts as charged). What a client has spent over all its runs only its own ledger knows.

A request is a function of the configuration and of what a checkpoint holds. So a server that was killed and goes on asks
for the same round with the same bytes, and whoever had answered sends the stored message, uncharged.
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
from dpfed.federation.held_out import Score, as_json, bounds, score_of
from dpfed.federation.messages import (
    ClippingTerms,
    MessageError,
    Reply,
    Request,
    Scoring,
    ScoringTerms,
    Terms,
    digest,
    pack,
    unpack_reply,
)
from dpfed.federation.policy import RefusedError, told
from dpfed.model.model_hash import model_hash
from dpfed.training.backends.base import LostRoundError
from dpfed.training.budget.spending import Spending, budget_of
from dpfed.training.job.job import Job
from dpfed.training.job.message_size import meta_message
from dpfed.training.job.plan import client_names
from dpfed.training.round_context import learning_rate
from dpfed.training.server_state import State


class Transport(Protocol):
    """Brings requests to clients and their answers back, by name; who is silent until the timeout is left out."""

    def send_all(
        self, requests: Mapping[str, bytes], timeout: float
    ) -> Mapping[str, bytes | Exception]: ...


class Loopback:
    """Clients in this process, one after another; for tests."""

    def __init__(self, clients: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self.clients = dict(clients)

    def send_all(
        self, requests: Mapping[str, bytes], timeout: float
    ) -> dict[str, bytes | Exception]:
        return {
            name: self._ask(name, data) for name, data in requests.items() if name in self.clients
        }

    def _ask(self, name: str, data: bytes) -> bytes | Exception:
        try:
            return self.clients[name](data)
        except Exception as error:
            return RefusedError(told(error))


class Federation:
    """`run_cohort` over a transport. `names[i]` is client i of the plan; `server` is what this server is called.

    heads, used   what each client's ledger came to and the last round in which its message was used: they go into its
                  next request, and belong into a checkpoint (`remembered`, `restore`)
    """

    def __init__(
        self,
        job: Job,
        transport: Transport,
        run: str,
        server: str,
        names: Sequence[str],
        timeout: float = 600.0,
        seeded: bool = False,
        log: Callable[[str], None] = lambda line: None,
        retries: int = 0,
        patience: int = 1,
        held_out: Mapping[str, int] | None = None,
        evaluate_every: int = 0,
        evaluate_sigma: float = 5.0,
    ) -> None:
        refuse_unsendable(job, names)
        self._retries, self._patience, self._lost = retries, patience, 0
        self._held_out, self._every, self._sigma = (
            dict(held_out or {}),
            evaluate_every,
            evaluate_sigma,
        )
        if evaluate_every and not (self._held_out and self._held_out.keys() <= set(names)):
            raise DpfedError(
                "federation.held_out must say how many units which of the clients hold out, and is not told"
            )
        self.scores: list[Score] = []
        self._job, self._transport, self._run, self._server = job, transport, run, server
        self._names, self._timeout, self._seeded, self._log = list(names), timeout, seeded, log
        self._model = model_hash(job.adapted.model, job.space)
        up, _ = meta_message(job.algorithm, job.space, varying_phi=job.plan.clipping.counts)
        self._shapes: dict[str, tuple[int, ...]] = {
            name: tuple(value.shape[1:]) for name, value in up.items()
        }
        if job.plan.clipping.counts:
            self._shapes["below"] = (1,)
        self.heads: dict[int, tuple[int, str]] = {}
        self.used: dict[int, int] = {}

    def run_cohort(
        self,
        t: int,
        state: State,
        clients: Sequence[int],
        wait_for_charge: Callable[[], None] = lambda: None,
    ) -> tuple[Message, int]:
        """The mean of the messages that are good, and how many they are. The clients pay for themselves."""
        requests = {i: self._request(t, state, i) for i in clients}
        needed = min(self._job.config.run.min_clients or self._job.schedule.cohort, len(clients))
        good: dict[int, Reply] = {}
        for _ in range(1 + self._retries):
            good |= self._ask(
                t, {i: request for i, request in requests.items() if i not in good}, state
            )
            if len(good) >= needed:
                break
        good = {
            i: good[i] for i in clients if i in good
        }  # who answered late does not change the sum's last bits
        for i, reply in good.items():
            self.heads[i] = (reply.receipt.rows, reply.receipt.head)
        if len(good) < needed:
            raise self._too_few(t, len(good), needed)
        self._lost = 0
        self.used |= dict.fromkeys(good, t)
        return self._mean(good), len(good)

    def _ask(self, t: int, requests: Mapping[int, Request], state: State) -> dict[int, Reply]:
        """The good replies; who sent none is named."""
        packed = {i: pack(request) for i, request in requests.items()}
        answers = self._transport.send_all(
            {self._names[i]: data for i, data in packed.items()}, self._timeout
        )
        limit, good = norm_limit(self._job, t, state), {}
        for i, request in requests.items():
            try:
                found = self._answer(answers.get(self._names[i]))
                good[i] = unpack_reply(found, self._shapes, request.terms, digest(packed[i]), limit)
            except DpfedError as error:
                self._log(
                    f"round {t}: client {self._names[i]!r} is left out: {one_line(str(error))}"
                )
        return good

    def _too_few(self, t: int, answered: int, needed: int) -> DpfedError:
        self._lost += 1
        clients = counted(answered, "client")
        what = f"in round {t} only {clients} gave a usable answer and {needed} are needed"
        if self._lost < self._patience:
            self._log(f"{what}: the round is lost, and the next one comes")
            return LostRoundError(what)
        return StoppedError(f"{what}: see the log for who did not, and run.min_clients")

    def after(self, t: int, state: State) -> dict[str, Any]:
        if self._every and t % self._every == 0:
            self._score(t, state)
        return self.remembered()

    def _score(self, t: int, state: State) -> None:
        """Asks for noised counts of right answers; who does not answer is left out."""
        asked = {
            i: self._scoring(t, state, i)
            for i, name in enumerate(self._names)
            if name in self._held_out
        }
        packed = {i: pack(request) for i, request in asked.items()}
        answers = self._transport.send_all(
            {self._names[i]: data for i, data in packed.items()}, self._timeout
        )
        counts: dict[str, tuple[float, float]] = {}
        for i, request in asked.items():
            try:
                found = self._answer(answers.get(self._names[i]))
                reply = unpack_reply(found, {"counts": (2,)}, request.terms, digest(packed[i]), 0.0)
                right, wrong = (float(x) for x in reply.fields["counts"])
                least, most = bounds(request.terms)
                if not (least <= right <= most and least <= wrong <= most):
                    raise MessageError(
                        f"{right:g} right and {wrong:g} wrong are no answers of {request.terms.held_out} units"
                    )
                counts[self._names[i]] = right, wrong
                self.heads[i] = (reply.receipt.rows, reply.receipt.head)
            except DpfedError as error:
                self._log(
                    f"round {t}: client {self._names[i]!r} is not scored: {one_line(str(error))}"
                )
        score = score_of(t, counts, self._sigma, t // self._every, self._job.config.privacy.delta)
        if score is not None:
            self.scores.append(score)
            self._log(str(score))

    def report(self) -> dict[str, Any]:
        return {"held_out": as_json(self.scores)} if self._every else {}

    def remembered(self) -> dict[str, Any]:
        """What a checkpoint has to hold besides the state, as JSON takes it."""
        return {
            "heads": {str(i): list(head) for i, head in sorted(self.heads.items())},
            "used": {str(i): t for i, t in sorted(self.used.items())},
            "scores": as_json(self.scores),
        }

    def restore(self, remembered: Mapping[str, Any]) -> None:
        try:
            self.heads = {
                int(i): (int(rows), str(hash_)) for i, (rows, hash_) in remembered["heads"].items()
            }
            self.used = {int(i): int(t) for i, t in remembered["used"].items()}
            self.scores = [Score(**score) for score in remembered["scores"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DpfedError(
                "the checkpoint does not say how the clients' ledgers stood: it is no server's"
            ) from None

    def _request(self, t: int, state: State, client: int) -> Request:
        job, plan = self._job, self._job.plan
        rows, head = self.heads.get(client, (0, ""))
        terms = Terms(
            run=self._run,
            server=self._server,
            client=self._names[client],
            index=client,
            seed=job.config.run.seed,
            seeded=self._seeded,
            round=t,
            rounds=job.config.run.rounds,
            local_steps=job.config.run.local_steps,
            clients=job.schedule.clients,
            cohort=job.schedule.cohort,
            lr=learning_rate(
                job.algorithm.lr, job.config.run.lr_schedule, t, job.config.run.rounds
            ),
            algorithm=to_dict(job.config)["algorithm"],
            model=self._model,
            rate=float(plan.rates[client]),
            expected=float(plan.expected[client]),
            sigma=float(plan.multipliers[client]),
            clip=state.clip,
            clipping=ClippingTerms(**asdict(plan.clipping)),
            grid=job.config.privacy.grid is not False,
            equal_phi=plan.equal_phi,
            rows=rows,
            head=head,
            used=self.used.get(client, 0),
        )
        return Request(
            terms, {name: getattr(state.server, name) for name in job.algorithm.broadcast}
        )

    def _scoring(self, t: int, state: State, client: int) -> Scoring:
        rows, head = self.heads.get(client, (0, ""))
        terms = ScoringTerms(
            run=self._run,
            server=self._server,
            client=self._names[client],
            index=client,
            seed=self._job.config.run.seed,
            seeded=self._seeded,
            round=t,
            algorithm=to_dict(self._job.config)["algorithm"],
            model=self._model,
            held_out=self._held_out[self._names[client]],
            sigma=self._sigma,
            rows=rows,
            head=head,
        )
        return Scoring(terms, {"theta": state.result})

    def _answer(self, found: bytes | Exception | None) -> bytes:
        if found is None:
            raise MessageError(f"no answer within {self._timeout:g} seconds")
        if isinstance(found, Exception):
            raise MessageError(str(found) or type(found).__name__)
        return found

    def _mean(self, good: Mapping[int, Reply]) -> Message:
        """Weighted by public constants that sum to one over those who answered."""
        sizes = [float(self._job.plan.sizes[i]) for i in good]
        weights = (
            torch.tensor(sizes)
            if self._job.algorithm.agg_weights == "size"
            else torch.ones(len(good))
        )
        weights = (weights / weights.sum()).to(self._job.device)

        def stacked(name: str) -> Tensor:
            return torch.stack([reply.fields[name] for reply in good.values()]).to(self._job.device)

        return {name: torch.tensordot(weights, stacked(name), dims=1) for name in self._shapes}


def one_line(text: str) -> str:
    """What others have a say in, as the log takes it: printable, one line, and not a long one."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))[:300]


def served(config: Config, seeded: bool = False) -> Config:
    """The configuration under which a server runs: the clients' noise is real, except in test mode."""
    client_names(config)
    return replace(
        config, run=replace(config.run, noise="seeded" if seeded else "os", diagnostics=False)
    )


def federation_of(
    job: Job, run: str, transport: Transport, log: Callable[[str], None] = lambda line: None
) -> Federation:
    """The backend of a job made by `prepare_server` from a configuration that `served` gave: `engine.run`'s `serve`."""
    section = job.config.federation or FederationSection()
    return Federation(
        job,
        transport,
        run,
        section.server,
        client_names(job.config),
        section.timeout,
        job.config.run.noise == "seeded",
        log,
        section.retries,
        section.patience,
        section.held_out,
        section.evaluate_every,
        section.evaluate_sigma,
    )


def refuse_unsendable(job: Job, names: Sequence[str]) -> None:
    plan = job.plan
    if len(set(names)) != len(names) or len(names) != plan.clients:
        raise DpfedError(
            f"the federation has {plan.clients} clients, so it needs as many different names of clients"
        )
    if not plan.private or plan.sampling != "poisson":
        raise DpfedError(
            'real clients answer with noise only: privacy needs sigma > 0 and sampling = "poisson"'
        )


def spending_of(job: Job) -> Spending:
    """The loop's accounts without a ledger: whom privacy.budget still allows, and figures that bound this run's."""
    budget = budget_of(
        job.plan, job.schedule, job.config.privacy.delta, job.config.privacy.budget, past=job.past
    )
    budget.check()
    return Spending(job, budget, None, by_choice=True)


def norm_limit(job: Job, t: int, state: State) -> float:
    """A public bound that no honest ‖delta‖ comes near: far beyond K steps of length lr, or of clip and noise."""
    plan, run = job.plan.at(state.clip), job.config.run
    noise = max(math.sqrt(plan.phi(i)) for i in range(plan.clients))
    lr = learning_rate(job.algorithm.lr, run.lr_schedule, t, run.rounds)
    step = lr * (math.sqrt(job.space.size) * max(1.0, noise) + state.clip)
    return 1e4 * (run.local_steps * step + float(state.theta.norm()))
