"""From a configuration to a job: everything a run needs, built and checked before any private record is used."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfed.algorithms.base import Algorithm, Facts
from dpfed.config import Config, ModelSection, refuse_idle_augmentations
from dpfed.data.cache import cached, key_of
from dpfed.data.partition import Shards, partition
from dpfed.data.tables import Published, Source, Table
from dpfed.errors import DpfedError, phrase
from dpfed.model.augment import augmentation_of
from dpfed.model.build import AssembledModel, assemble
from dpfed.model.lora import Adapted
from dpfed.model.parameter_vector import Space
from dpfed.model.per_sample.forward_check import faithful_form, faithful_model, plain_outputs
from dpfed.model.per_sample.gradients import PerSample, trainable
from dpfed.model.per_sample.isolation_check import RECORDS, check_alive, check_apart
from dpfed.model.task import InputSpec
from dpfed.privacy.accounting.guarantee import NO_PRIOR_SPENDING, PriorSpending
from dpfed.privacy.batched_sums import BatchedSum
from dpfed.privacy.noise import Streams
from dpfed.privacy.plan import Plan, Schedule, make_plan
from dpfed.privacy.record_batch import Augmentations, Records
from dpfed.training.callbacks.activity import OnActivity, ignore
from dpfed.training.job.frozen_features import Basis, features_of
from dpfed.training.job.job_cache import JobCache, frozen_digest
from dpfed.training.job.notes import data_notes, data_warnings, plan_warnings
from dpfed.training.job.threads import set_threads

PRECISION = {"float32": torch.float32, "bf16": torch.bfloat16}
LONG = 20_000  # local steps after which a compilation has paid for itself


@dataclass(frozen=True)
class Job:
    """One run, ready to go. Nothing in it changes while it runs. `served`: its clients and their records are elsewhere.

    notes     what a person should know about the run
    warnings  what a person should change, or know before using the result
    seat   its place among runs that compute their gradients together; None: it computes them by itself
    given  the training inputs as they were read, where the records are features of them and the model is the head
    """

    config: Config
    algorithm: Algorithm
    classes: tuple[str, ...]
    spec: InputSpec
    model: PerSample
    space: Space
    theta: Tensor
    plan: Plan
    schedule: Schedule
    shards: Shards
    records: Records
    test: Records
    streams: Streams
    device: torch.device
    adapted: Adapted
    view: Augmentations | None = None
    past: PriorSpending = NO_PRIOR_SPENDING
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    served: bool = False
    batched_sum: BatchedSum | None = None
    given: Mapping[str, Tensor] | None = None
    on_activity: OnActivity = ignore


def prepare(
    config: Config,
    source: Source | None = None,
    shared: JobCache | None = None,
    on_activity: OnActivity = ignore,
) -> Job:
    """Builds the job of a configuration; `source` replaces the configured data source.

    With `shared`, records and model are those of an earlier job wherever they are the same.
    """
    with shared.lock if shared else nullcontext():
        return _prepare(config, source, shared, on_activity)


def _prepare(
    config: Config, source: Source | None, shared: JobCache | None, on_activity: OnActivity
) -> Job:
    kept = shared or JobCache()
    device = device_of(config.run.device)
    streams = Streams(config.run.seed, secret=config.run.noise == "os")
    algorithm: Algorithm = config.algorithm
    loader: Any = config.data
    raw = source or kept.get("raw", config.data, loader.load)
    refuse_unreleasable(config, raw)
    # What a key names by its identity is kept with what was made of it, so that nothing else can come to have that identity.
    _, source = kept.get(
        "source", (id(raw), config.model), lambda: (raw, tokenised(config.model, raw))
    )
    which = (id(source), device)
    shards = shards_for(config, source, streams)
    plan, schedule = plan_for(config, shards.sizes)
    facts = Facts(
        equal_phi=plan.equal_phi,
        private=plan.private,
        allow_nan=config.run.allow_nan,
        calibrated=config.privacy.target_epsilon is not None,
        varying_phi=plan.clipping.counts,
    )
    notes = algorithm.check(facts)
    spec = spec_of(source)
    model, adapted, theta = build_model(config, spec, streams, device, notes, shared)
    scored, tested = scored_half(source.test, config.run.eval_on), (*which, config.run.eval_on)
    uses = (
        config.run.rounds * config.run.local_steps * schedule.cohort * float(plan.expected.mean())
    )
    tables, marks = (source.train, scored), (which, tested)
    basis = features_of(config, model, theta, tables, uses, kept, marks, source, notes, on_activity)
    if basis is None:
        _, records = kept.get("records", which, lambda: (source, records_of(source.train, device)))
        _, test = kept.get("test", tested, lambda: (source, records_of(scored, device)))
        basis = Basis(model, records, test)
    else:
        set_threads(config.run.threads, model.space.size)
    return Job(
        config=config,
        algorithm=algorithm,
        classes=source.classes,
        spec=spec,
        model=basis.model,
        space=model.space,
        theta=theta,
        plan=plan,
        schedule=schedule,
        shards=shards,
        records=basis.records,
        test=basis.test,
        streams=streams,
        device=device,
        adapted=adapted,
        view=augmentations_for(config, source),
        notes=[*notes, *data_notes(config, source, shards), *federation_note(config, plan)],
        warnings=[*data_warnings(config, source, shards), *plan_warnings(config, plan)],
        given=basis.given,
    )


def prepare_server(config: Config) -> Job:
    """The job of a server whose clients are elsewhere: no private record is in it, and nobody's are dealt.

    Sizes are those that [federation] declares; client i of the plan is the i-th name in alphabetical order.
    """
    device, algorithm = device_of(config.run.device), config.algorithm
    streams = Streams(config.run.seed, secret=config.run.noise == "os")
    plan, schedule = plan_for(config, declared_sizes(config))
    notes = algorithm.check(
        Facts(plan.equal_phi, plan.private, config.run.allow_nan, varying_phi=plan.clipping.counts)
    )
    spec, classes, test = public_facts(config, device)
    model, adapted, theta = build_model(config, spec, streams, device, notes)
    nothing = np.zeros(0, dtype=np.int64)
    return Job(
        config=config,
        algorithm=algorithm,
        classes=classes,
        spec=spec,
        model=model,
        space=model.space,
        theta=theta,
        plan=plan,
        schedule=schedule,
        shards=Shards(
            np.zeros(plan.clients + 1, dtype=np.int64), np.zeros(1, dtype=np.int64), nothing
        ),
        records=Records({}, torch.zeros(0, dtype=torch.int64)),
        test=test,
        streams=streams,
        device=device,
        adapted=adapted,
        notes=notes,
        warnings=plan_warnings(config, plan),
        served=True,
    )


def client_names(config: Config) -> list[str]:
    """The clients of a federation in the order of its plan, which does not depend on the order in a file."""
    if config.federation is None or not config.federation.clients:
        raise DpfedError(
            "a server needs the public figures of its clients: give [federation.clients], name = declared records"
        )
    return sorted(config.federation.clients)


def declared_sizes(config: Config) -> np.ndarray:
    names = client_names(config)
    return np.array(
        [config.federation.clients[name] for name in names] if config.federation else [],
        dtype=np.int64,
    )


def public_facts(
    config: Config, device: torch.device
) -> tuple[InputSpec, tuple[str, ...], Records]:
    """What a model is built from and evaluated on at the server: its public test set, or what is stated of the data."""
    section, loader = config.federation, config.data
    if section is None or section.test_set:
        source: Source = loader.load()  # type: ignore[attr-defined]
        # The file's training part is dropped unseen, and cached tokens of it are not to be mixed up with the test's.
        source = tokenised(config.model, replace(source, train=source.test, fingerprint=""))
        return (
            spec_of(source),
            source.classes,
            records_of(scored_half(source.test, config.run.eval_on), device),
        )
    published: Published | None = getattr(loader, "published", None)
    if section.classes is not None and section.shape:
        name = "pixel_values" if section.kind == "image" else "features"
        spec = InputSpec(section.kind, name, section.shape, section.classes, section.white)
    elif published is not None:
        spec = published_spec(published, config.model)
    else:
        raise DpfedError(
            "without a test set a server must be told what the clients' records are: give federation.shape and "
            "federation.classes, or federation.test_set = true"
        )
    return (
        spec,
        tuple(str(c) for c in range(spec.classes)),
        Records({}, torch.zeros(0, dtype=torch.int64)),
    )


def augmentations_for(config: Config, source: Source) -> Augmentations | None:
    """The random views that a record is given each time it is in a batch."""
    refuse_idle_augmentations(config.data)
    view = augmentation_of(config.data.augment)
    if view is None:
        return None
    if source.kind != "image":
        raise DpfedError(
            f'data.augment = "{config.data.augment}" is for images, this data has {source.kind}'
        )
    return Augmentations(
        lambda inputs, keys: {name: view(x, keys) for name, x in inputs.items()}, config.data.views
    )


def plan_for(config: Config, sizes: np.ndarray) -> tuple[Plan, Schedule]:
    """The plan of clients that hold so many protected units each."""
    run, privacy, releases = config.run, config.privacy, config.algorithm.releases
    if privacy.sigma is not None:
        privacy = replace(privacy, sigma=privacy.sigma * config.algorithm.noise_factor)
    if (run.min_clients or 0) > len(sizes):
        raise DpfedError(
            f"run.min_clients = {run.min_clients} is more than the {len(sizes)} clients there are"
        )
    schedule = Schedule.of(len(sizes), run.rounds, run.local_steps, run.participation)
    unit = config.data.unit_column
    return make_plan(privacy, sizes, schedule, releases.batches, releases.releases, unit), schedule


def plan_of(config: Config) -> tuple[Plan, Schedule]:
    """The plan alone, without a model: what a configuration will spend. A published data set need not be there."""
    return plan_for(config, sizes_of(config))


def sizes_of(config: Config) -> np.ndarray:
    known = published_sizes(config)
    if known is not None:
        return known
    loader: Any = config.data
    return shards_for(config, loader.load(), Streams(config.run.seed)).sizes


def published_sizes(config: Config) -> np.ndarray | None:
    """Sizes of clients that follow from public counts alone; None where the data must be read to know them."""
    data = config.data
    published: Published | None = getattr(data, "published", None)
    if (
        published is None
        or data.path is not None
        or data.unit_column
        or data.partition not in ("dirichlet_equal", "iid")
    ):
        return None
    if data.clients > published.records:
        raise DpfedError(
            f"data.clients = {data.clients} is more than the {published.records} records there are"
        )
    return np.full(data.clients, published.records // data.clients)


def device_of(name: str) -> torch.device:
    if name == "auto":
        return exact(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DpfedError(
            f"run.device = {name!r} cannot be used: {str(error).splitlines()[0]}"
        ) from None
    return exact(device)


def exact(device: torch.device) -> torch.device:
    """Sums of clipped gradients are made of whole float32 numbers: the short ones that GPUs offer would pass the clip."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return device


def shards_for(config: Config, source: Source, streams: Streams) -> Shards:
    return partition(config.data, source.train, streams.generator("partition"))


def refuse_unreleasable(config: Config, source: Source) -> None:
    """With real noise nothing may be read off private records on the side."""
    data = config.data
    if data.client_column is not None and data.partition != "natural":
        raise DpfedError(
            f'data.client_column = {data.client_column!r} says who holds a record, so data.partition must be "natural", '
            f"not {data.partition!r}"
        )
    if config.run.noise != "os":
        return
    if not config.model.liveness:
        raise DpfedError(
            "model.liveness = false leaves it untested whether records mix inside the model: with "
            'run.noise = "os" set model.liveness = true'
        )
    if not source.declared:
        raise DpfedError(
            f'the number of classes was read off private labels: declare {phrase("classes")} for run.noise = "os"'
        )
    if data.unit_column is not None and data.partition != "natural":
        raise DpfedError(
            f"data.partition = {data.partition!r} would scatter the records of one {data.unit_column} over clients: with "
            'run.noise = "os" a protected unit needs data.partition = "natural"'
        )


def federation_note(config: Config, plan: Plan) -> list[str]:
    """A simulation deals its own clients; it takes a federation's way only where their sizes are those declared."""
    if config.federation is None or not config.federation.clients:
        return []
    declared = declared_sizes(config)
    if np.array_equal(declared, plan.sizes):
        return []
    return [
        f"[federation] declares {len(declared)} clients of {declared.min()} to {declared.max()} records, this simulation "
        f"deals {plan.clients} of {plan.sizes.min()} to {plan.sizes.max()}: the two will not take the same way"
    ]


def tokenised(section: ModelSection, source: Source) -> Source:
    """Texts become tokens once, by the model's own tokenizer; other data stays as it is."""
    if "text" not in source.train.inputs:
        return source
    coder: Any = section
    if not hasattr(section, "encode"):
        raise DpfedError(
            f"model.name = {section.name!r} does not read text: choose a language model for this data"
        )

    def table(part: str, raw: Table) -> Table:
        if not source.fingerprint:
            return replace(raw, inputs=coder.encode(raw.inputs))
        key = key_of(
            "tokens",
            1,
            options={"data": source.fingerprint, "part": part, "encoding": coder.encoding},
        )
        return replace(raw, inputs=cached(key, lambda: coder.encode(raw.inputs)))

    return replace(source, train=table("train", source.train), test=table("test", source.test))


def published_spec(published: Published, section: ModelSection) -> InputSpec:
    """The public facts about a published data set, without its files."""
    if published.kind == "text":
        return InputSpec(
            "text", "input_ids", (getattr(section, "max_length", 0),), published.classes
        )
    return InputSpec(published.kind, "pixel_values", published.shape, published.classes)


def spec_of(source: Source, section: ModelSection | None = None) -> InputSpec:
    """The public facts about a source; texts need not be tokenised for it."""
    name, x = next(iter(source.train.inputs.items()))
    if name == "text":
        return InputSpec(
            "text", "input_ids", (getattr(section, "max_length", 0),), len(source.classes)
        )
    kind: Any = "text" if name == "input_ids" else source.kind
    return InputSpec(kind, name, tuple(x.shape[1:]), len(source.classes), source.white)


def scored_half(table: Table, which: str) -> Table:
    """Alternate records of each class: the first, third, ... for validation, the others for the test."""
    if which == "all":
        return table
    first = np.zeros(len(table), dtype=bool)
    for label in np.unique(table.labels):
        first[np.flatnonzero(table.labels == label)[::2]] = True
    rows = first if which == "validation" else ~first
    if not rows.any():
        raise DpfedError(
            "the server's test set is too small to be halved: give it two records of a class at least"
        )
    inputs = {name: x[rows] for name, x in table.inputs.items()}
    return Table(
        inputs, table.labels[rows], {name: column[rows] for name, column in table.columns.items()}
    )


def records_of(table: Table, device: torch.device) -> Records:
    inputs = {name: torch.from_numpy(x).to(device) for name, x in table.inputs.items()}
    return Records(inputs, torch.from_numpy(table.labels).to(device))


def build_model(
    config: Config,
    spec: InputSpec,
    streams: Streams,
    device: torch.device,
    notes: list[str],
    shared: JobCache | None = None,
) -> tuple[PerSample, Adapted, Tensor]:
    """The model, and the start of its trainable vector, which follows from the run's own seed."""
    seeds = (streams.number("init"), streams.number("init", 1))
    parts = assemble(config.model, spec, seeds, **block_rules(config))
    notes += parts.notes
    set_threads(config.run.threads, parts.total)
    theta = parts.space.flatten(trainable(parts.adapted.model)).detach().to(device)
    if shared is None:
        return ready_model(config, spec, streams, device, parts, theta), parts.adapted, theta
    run = config.run
    settings = (config.model, spec, device, run.precision)
    blocks = (parts.space.names, parts.space.block_names, parts.space.blocks.numpy().tobytes())
    compiled = (run.compile, repays(config, device))
    model, adapted = shared.get(
        "model",
        (settings, compiled, blocks, frozen_digest(parts.adapted.model)),
        lambda: (ready_model(config, spec, streams, device, parts, theta), parts.adapted),
    )
    return model, adapted, theta


def ready_model(
    config: Config,
    spec: InputSpec,
    streams: Streams,
    device: torch.device,
    parts: AssembledModel,
    theta: Tensor,
) -> PerSample:
    """The model on the device, checked on synthetic records, in its precision and compiled if that is asked."""
    built, adapted, space = parts.built, parts.adapted, parts.space.to(device)
    adapted.model.to(device)
    generator = torch.Generator().manual_seed(streams.number("check"))
    synthetic = (built.spec or spec).synthetic(RECORDS, generator)
    synthetic = {name: x.to(device) for name, x in synthetic.items()}
    plain = plain_outputs(adapted.model, space, theta, synthetic, built.prepare)
    ready, form = faithful_model(built, adapted.model, space, plain)
    if config.model.liveness:
        check_alive(ready, theta, synthetic, spec.classes, generator)
    ready.to(PRECISION[config.run.precision])
    if config.model.liveness:
        faithful_form(ready, plain, (form,))
        check_apart(ready, theta, synthetic, spec.classes, generator)
    if config.run.compile is True and config.privacy.isolation == "exact":
        raise DpfedError(
            'run.compile = true with privacy.isolation = "exact" is not supported: set run.compile = "auto"'
        )
    if config.run.compile is True or (config.run.compile == "auto" and repays(config, device)):
        ready.compile()
    return ready


def repays(config: Config, device: torch.device) -> bool:
    """A compilation takes minutes, and saves a third of a step."""
    if config.privacy.isolation == "exact":
        return False
    return device.type == "cuda" and config.run.rounds * config.run.local_steps >= LONG


def block_rules(config: Config) -> dict[str, Any]:
    """Return the keys of an algorithm that shape its blocks; empty for one without blocks."""
    return (
        {"granularity": config.algorithm.granularity}
        if hasattr(config.algorithm, "granularity")
        else {}
    )
