"""Build the model of a job, check it on synthetic records and make it ready for training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfed.config import Config
from dpfed.errors import DpfedError
from dpfed.model.build import AssembledModel, assemble
from dpfed.model.lora import Adapted
from dpfed.model.model_hash import model_hash
from dpfed.model.per_sample.forward_check import faithful_form, faithful_model, plain_outputs
from dpfed.model.per_sample.gradients import PerSample, trainable
from dpfed.model.per_sample.isolation_check import RECORDS, check_gradients, check_isolation
from dpfed.model.task import InputSpec
from dpfed.privacy.noise import Streams
from dpfed.training.job.device import set_threads
from dpfed.training.job.job_cache import JobCache

PRECISION = {"float32": torch.float32, "bf16": torch.bfloat16}
# A compilation takes minutes and saves a third of a step.
MIN_STEPS_TO_COMPILE = 20_000


class ReadyModel(NamedTuple):
    """Model of a job on its device, with the initial trainable vector `theta`, `[P]`."""

    model: PerSample
    adapted: Adapted
    theta: Tensor
    notes: tuple[str, ...]


def build_model(
    config: Config,
    spec: InputSpec,
    streams: Streams,
    device: torch.device,
    shared: JobCache | None = None,
) -> ReadyModel:
    """Return the checked model; `theta` follows from the run's seed.

    With `shared`, the model of an earlier job is reused if its frozen weights are equal.
    """
    seeds = (streams.number("init"), streams.number("init", 1))
    parts = assemble(config.model, spec, seeds, **block_rules(config))
    set_threads(config.run.threads, parts.total)
    space = parts.space
    theta = space.flatten(trainable(parts.adapted.model)).detach().to(device)

    def make() -> tuple[PerSample, Adapted]:
        return _checked_model(config, spec, streams, parts, theta), parts.adapted

    if shared is None:
        return ReadyModel(*make(), theta, parts.notes)
    frozen = model_hash(parts.adapted.model, space, skip_replaced=True)
    compiles = (config.run.compile, worth_compiling(config, device))
    blocks = (space.block_names, space.blocks.numpy().tobytes())
    key = (config.model, spec, device, config.run.precision, compiles, blocks, frozen)
    return ReadyModel(*shared.get("model", key, make), theta, parts.notes)


def _checked_model(
    config: Config, spec: InputSpec, streams: Streams, parts: AssembledModel, theta: Tensor
) -> PerSample:
    """Check the model on synthetic records, set its precision and compile it if asked."""
    device = theta.device
    built = parts.built
    model = parts.adapted.model.to(device)
    space = parts.space.to(device)
    generator = torch.Generator().manual_seed(streams.number("check"))
    synthetic = (built.spec or spec).synthetic(RECORDS, generator)
    synthetic = {name: x.to(device) for name, x in synthetic.items()}
    plain = plain_outputs(model, space, theta, synthetic, built.prepare)
    ready, form = faithful_model(built, model, space, plain)
    if config.model.liveness:
        check_gradients(ready, theta, synthetic, spec.classes, generator)
    ready.to(PRECISION[config.run.precision])
    if config.model.liveness:
        faithful_form(ready, plain, (form,))
        check_isolation(ready, theta, synthetic, spec.classes, generator)
    asked = config.run.compile
    if asked is True and config.privacy.isolation == "exact":
        raise DpfedError(
            'run.compile = true with privacy.isolation = "exact" is not supported: '
            'set run.compile = "auto"'
        )
    if asked is True or (asked == "auto" and worth_compiling(config, device)):
        ready.compile()
    return ready


def worth_compiling(config: Config, device: torch.device) -> bool:
    """Return True if a compilation may be used and the run is long enough to gain from it."""
    if config.privacy.isolation == "exact" or device.type != "cuda":
        return False
    return config.run.rounds * config.run.local_steps >= MIN_STEPS_TO_COMPILE


def block_rules(config: Config) -> dict[str, Any]:
    """Return the keys of an algorithm that shape its blocks; empty for one without blocks."""
    if not hasattr(config.algorithm, "granularity"):
        return {}
    return {"granularity": config.algorithm.granularity}
