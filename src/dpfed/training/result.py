"""The result of a run: the JSON object of `dpfed run --json`, with release note and guarantee."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dpfed.config import Config
from dpfed.privacy.accounting.guarantee import assumptions
from dpfed.training.budget.release import NO_PRIVACY, SEEDED
from dpfed.training.budget.spending import Spending
from dpfed.training.evaluation import perplexity
from dpfed.training.job.job import Job
from dpfed.training.job.plan import client_names
from dpfed.training.messages.message_size import traffic
from dpfed.training.rounds import Round

SIMULATION = f"{SEEDED}: not for release"
RELEASABLE = (
    "the model may be released under its privacy statement; "
    "all else in the folder is for the server only"
)


def release_note(config: Config, private: bool) -> str:
    """Return the release note: a sentence that says if the results of a run may be released.

    Configuration, metrics, model and result of the run contain this sentence.
    """
    if not private:
        return NO_PRIVACY
    return SIMULATION if config.run.noise == "seeded" else RELEASABLE


def result_of(
    job: Job, spending: Spending, rounds: list[Round], out: Path, note: str
) -> dict[str, Any]:
    """Return the result of a run as a JSON object; all its epsilons are null without privacy.

    rounds  the first and the last reported round
    out     the run folder
    note    the release note
    """
    first, last = rounds[0], rounds[-1]
    sigmas = job.plan.multipliers
    loss = last.loss if last.loss is not None and math.isfinite(last.loss) else None
    result: dict[str, Any] = {"test_accuracy": last.accuracy}
    if job.config.run.average:
        result["last_accuracy"] = last.last_accuracy
    result |= {
        "test_loss": loss,
        "test_records": len(job.public.test.labels),
        "start_accuracy": first.accuracy,
        **other_scores(job, first, last),
        "epsilon": spending.figures(),
        "delta": job.config.privacy.delta if job.plan.private else None,
        "sigma": [float(sigmas.min()), float(sigmas.max())] if np.ptp(sigmas) else float(sigmas[0]),
        "guarantee": guarantee(job),
        "release": note,
        "algorithm": job.algorithm.name,
        "clients": job.schedule.clients,
        "client_names": client_names(job.config) if job.served else list(job.private.shards.names),
        "largest_client": int(job.plan.sizes.max()),
        "records": int(job.plan.sizes.sum()),
        "task": job.model.task.name,
        "classes": list(job.public.classes),
        "input": asdict(job.public.spec),
        "parameters": job.space.size,
        "blocks": job.space.num_blocks,
        "traffic": asdict(traffic(job.algorithm, job.space, job.config.federation)),
        "seed": job.config.run.seed,
        "rounds": last.t,
        "seconds": last.seconds,
        "out": str(out),
    }
    if job.plan.private and job.schedule.cap is not None:
        result["max_rounds_per_client"] = job.schedule.cap
    return result | ({"served": True} if job.served else {})


def other_scores(job: Job, first: Round, last: Round) -> dict[str, float | None]:
    """Return the score before and after training, for tasks that are not measured by accuracy.

    It is R2 for regression and perplexity for language models. The dict is empty for other tasks.
    """
    if job.model.task.name == "regress":
        return {"test_r2": last.r2, "start_r2": first.r2}
    if not job.model.task.causal:
        return {}
    return {
        "test_perplexity": perplexity(last.loss),
        "start_perplexity": perplexity(first.loss),
    }


def task_name(config: Config, result: Mapping[str, Any]) -> str:
    """Return the task that a run trained, such as "classify".

    Results written by old versions of dpfed do not contain the task. For these, the name of the
    model decides.
    """
    causal = config.model.name == "auto-causal"
    return str(result.get("task") or ("causal" if causal else "classify"))


def is_causal(config: Config, result: Mapping[str, Any]) -> bool:
    """Return True if the run trained a language model."""
    return task_name(config, result) == "causal"


def guarantee(job: Job) -> str:
    """Return the text to show beside an epsilon: delta, protected unit and assumptions.

    Without privacy, the text says so.
    """
    if not job.plan.private:
        return NO_PRIVACY
    delta = job.config.privacy.delta
    mechanism = job.plan.kinds()[0]
    past = (job.past.prior, job.past.uncounted)
    return assumptions(mechanism, delta, job.plan.unit, *past, cap=job.schedule.cap)
