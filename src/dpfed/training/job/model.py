"""Build the model of a job, check it on synthetic records and make it ready for training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpfed.config import Config
from dpfed.errors import DpfedError
from dpfed.model.build import AssembledModel, assemble
from dpfed.model.frozen.model_hash import model_hash
from dpfed.model.lora import Adapted
from dpfed.model.per_sample.forward_check import faithful_form, faithful_model, plain_outputs
from dpfed.model.per_sample.gradients import PerSample, trainable
from dpfed.model.per_sample.isolation_check import (
    RECORDS,
    check_gradients,
    check_isolation,
    records_mix,
)
from dpfed.model.per_sample.places import settle_places
from dpfed.model.task import InputSpec
from dpfed.privacy.noise import Streams
from dpfed.training.job.device import set_threads
from dpfed.training.job.job_cache import JobCache
from dpfed.training.job.memory_advice import caused_by_memory, less_memory_advice

PRECISION = {"float32": torch.float32, "bf16": torch.bfloat16}
# Shorter runs (fewer local steps) are not compiled. Compilation takes minutes, and it makes each
# step only a third faster.
MIN_STEPS_TO_COMPILE = 20_000


class ReadyModel(NamedTuple):
    """A model that is checked and on its device.

    model    computes per-record gradients and scores
    adapted  the same model as a torch module, with its adapter
    theta    initial trainable vector, `[P]`, for P trainable parameters
    notes    facts for the user to know
    """

    model: PerSample
    adapted: Adapted
    theta: Tensor
    notes: tuple[str, ...]


def build_model(
    config: Config,
    spec: InputSpec,
    streams: Streams,
    device: torch.device,
    cache: JobCache | None = None,
) -> ReadyModel:
    """Build and check the model of a job. The run's seed determines the initial vector `theta`.

    cache  has the model of an earlier job, which is reused if frozen weights and settings are
           equal; None to build the model without a cache
    """
    seeds = (streams.number("init"), streams.number("init", 1))
    parts = assemble(config.model, spec, seeds, **block_rules(config))
    set_threads(config.run.threads, parts.total)
    space = parts.space
    theta = space.flatten(trainable(parts.adapted.model)).detach().to(device)

    def make() -> tuple[PerSample, Adapted]:
        try:
            return _checked_model(config, spec, streams, parts, theta), parts.adapted
        except Exception as error:
            if not caused_by_memory(error):
                raise
        raise DpfedError(
            f"{type(parts.adapted.model).__name__} does not fit into the memory of {device}: "
            f"{less_memory_advice(config)}"
        )

    if cache is None:
        ready, adapted = make()
        return ReadyModel(ready, adapted, theta, (*parts.notes, *isolation_notes(ready)))
    frozen = model_hash(parts.adapted.model, space, skip_replaced=True)
    compiles = (config.run.compile, worth_compiling(config, device))
    blocks = (space.block_names, space.blocks.numpy().tobytes())
    exact = (config.privacy.isolation, config.data.views, config.run.max_slots)
    key = (config.model, spec, device, config.run.precision, compiles, blocks, frozen, exact)
    ready, adapted = cache.get("model", key, make)
    return ReadyModel(ready, adapted, theta, (*parts.notes, *isolation_notes(ready)))


def isolation_notes(model: PerSample) -> tuple[str, ...]:
    """Return a note if `privacy.isolation = "exact"` must compute this model one record at a time.

    Exact isolation ensures that no record can change the gradient of another record.
    """
    if model.alone is None:
        return ()
    kind = type(model.model).__name__
    return (f"exact isolation computes one record at a time, because {kind} {model.alone}",)


def _checked_model(
    config: Config, spec: InputSpec, streams: Streams, parts: AssembledModel, theta: Tensor
) -> PerSample:
    """Check the model on synthetic records, and return it ready to compute per-record gradients.

    The returned model has the run's precision. It is compiled if the configuration asks for that.
    """
    device = theta.device
    built = parts.built
    model = parts.adapted.model.to(device)
    space = parts.space.to(device)
    generator = torch.Generator().manual_seed(streams.number("check"))
    synthetic = (built.spec or spec).synthetic(RECORDS, generator)
    synthetic = {name: x.to(device) for name, x in synthetic.items()}
    plain = plain_outputs(model, space, theta, synthetic, built.prepare)
    ready, form = faithful_model(built, model, space, plain)
    if config.model.gradient_checkpointing:
        ready.checkpoint()
    if config.model.liveness:
        check_gradients(ready, theta, synthetic, spec.classes, generator)
    ready.to(PRECISION[config.run.precision])
    if config.model.liveness:
        faithful_form(ready, plain, (form,))
        check_isolation(ready, theta, synthetic, spec.classes, generator)
        mix = records_mix(ready, theta, synthetic, spec.classes, generator)
        ready.shares_passes = ready.shares_passes and not mix
    if config.privacy.isolation == "exact":
        views, rows = config.data.views, config.run.max_slots
        settle_places(ready, theta, built.spec or spec, views, rows, generator)
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
    """Return True if the model can be compiled and the run is long enough to gain time by it."""
    if config.privacy.isolation == "exact" or device.type != "cuda":
        return False
    return config.run.rounds * config.run.local_steps >= MIN_STEPS_TO_COMPILE


def block_rules(config: Config) -> dict[str, Any]:
    """Return the algorithm's option `granularity` as a keyword argument; {} without such an option.

    `assemble` divides the parameters into blocks by this option.
    """
    if not hasattr(config.algorithm, "granularity"):
        return {}
    return {"granularity": config.algorithm.granularity}
