"""Typed configuration: TOML files and overrides -> one frozen object.

The sections below are common to all runs. Algorithms, models and data sources declare their own keys as frozen
dataclasses; the caller hands them over in `Registry`, and this module imports none of them. The annotation of a field
carries its type, its range and one sentence for the reference; a value outside it is refused in one sentence.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tomli_w
from annotated_types import Ge, Gt, Le, Lt, MinLen

from dpfed.config.parsing import nearest as nearest
from dpfed.config.parsing import overrides_layer
from dpfed.config.parsing import parse as parse
from dpfed.config.parsing import refuse_unknown as refuse_unknown
from dpfed.errors import DpfedError

Partition = Literal["dirichlet_equal", "dirichlet_classwise", "iid", "natural"]


@dataclass(frozen=True)
class DataSection:
    name: Annotated[str, "data source; `dpfed list datasets` shows them"] = "digits"
    path: Annotated[str | None, "file or folder with the data, for sources that read one"] = None
    clients: Annotated[int, Ge(1), "number of clients N"] = 10
    partition: Annotated[Partition, "how records are dealt to clients"] = "dirichlet_equal"
    alpha: Annotated[float, Gt(0), "Dirichlet parameter; smaller is more skewed"] = 0.5
    augment: Annotated[
        Literal["none", "flip", "crop_flip"], "random view of an image at each inclusion in a batch"
    ] = "none"
    views: Annotated[
        int,
        Ge(1),
        "with augment: random views of a record, whose gradients are averaged before clipping",
    ] = 1
    client_column: Annotated[
        str | None, "column that names each record's client, for partition = natural"
    ] = None
    unit_column: Annotated[
        str | None, "column that names the protected unit (a patient, a user); default: a record"
    ] = None


@dataclass(frozen=True)
class LoraSection:
    r: Annotated[int, Ge(1), "rank"] = 16
    alpha: Annotated[float, Gt(0), "scale α_L; the update is (α_L/r)·B·A"] = 32.0
    dropout: Annotated[float, Ge(0), Lt(1), "dropout before A"] = 0.0
    targets: Annotated[
        tuple[str, ...] | Literal["auto"],
        "modules by peft's rules; auto: every linear layer, or every convolution",
    ] = "auto"
    freeze_a: Annotated[bool, "train B alone, A stays at its public random start (FFA-LoRA)"] = (
        False
    )


@dataclass(frozen=True)
class ModelSection:
    name: Annotated[str, "model; `dpfed list models` shows them"] = "glyph-vit"
    weights: Annotated[
        str | None,
        'folder or hub name of pretrained weights, or "random"; default: those the model comes with',
    ] = None
    train: Annotated[
        Literal["lora", "full", "head"], "what is trained: adapters and head, all, the head"
    ] = "lora"
    lora: LoraSection = field(default_factory=LoraSection)
    adapter: Annotated[
        str | None, "folder of a LoRA adapter in peft's format to start from; its rank and targets"
    ] = None
    qkv_layout: Annotated[
        Literal["auto", "separate", "3HD", "H3D"],
        "how heads lie in the rows of the projections; auto: by architecture",
    ] = "auto"
    attention: Annotated[
        tuple[str, ...], "names of the q, k, v projections, for an unknown architecture"
    ] = ()
    liveness: Annotated[
        bool, "check on synthetic inputs, before any record is read, that everything trains"
    ] = True


@dataclass(frozen=True)
class PrivacySection:
    enabled: Annotated[
        bool, "false: no clipping, no noise, no guarantee, and every artefact says so"
    ] = True
    clip: Annotated[
        float, Gt(0), "clip norm C of one record's gradient; quantile: C of the first round"
    ] = 0.1
    clip_mode: Annotated[
        Literal["flat", "automatic", "quantile"],
        "cut to norm C, normalised to norm C, or C follows a noised quantile of the norms",
    ] = "flat"
    # Below 1e-12 a gradient whose squares are lost in single precision would be taken for zero and blown up beyond C.
    clip_stability: Annotated[
        float | None, Ge(1e-12), "automatic: s in g·C/(‖g‖+s); default 0.01"
    ] = None
    quantile: Annotated[
        float | None, Gt(0), Lt(1), "quantile: share of norms at or below C; default 0.5"
    ] = None
    quantile_lr: Annotated[float | None, Gt(0), "quantile: how fast log C follows; default 0.2"] = (
        None
    )
    quantile_noise: Annotated[
        float | None, Gt(1), Le(1e6), "quantile: noise of the count over that of all; default 10"
    ] = None
    sigma: Annotated[float | None, Ge(0), "noise multiplier; give this or target_epsilon"] = None
    target_epsilon: Annotated[
        float | None, Gt(0), "find sigma for this epsilon; give this or sigma"
    ] = None
    view: Annotated[
        Literal["server_worst", "server_expected", "third_party"], "whose epsilon the target is"
    ] = "server_worst"
    delta: Annotated[float, Gt(0), Lt(1), "δ"] = 1e-5
    allow_large_delta: Annotated[
        bool | None, "true: run with delta >= 1 / (records of the largest client)"
    ] = None
    sampling: Annotated[
        Literal["poisson", "fixed_wor"],
        "how batches are drawn: each record by its own coin, or a fixed number",
    ] = "poisson"
    batch: Annotated[float | None, Gt(0), "expected batch size; give this or rate"] = None
    rate: Annotated[
        float | None, Gt(0), Le(1), "sampling rate of every client; give this or batch"
    ] = None
    batch_per_client: Annotated[
        bool, "unequal clients: same batch for all (small clients pay more) instead of same rate"
    ] = False
    sigma_per_client: Annotated[
        bool, "with target_epsilon: every client its own sigma for the same epsilon"
    ] = False
    budget: Annotated[
        float | None,
        Gt(0),
        "epsilon (server's view) no client may pass; it is left out before it would",
    ] = None
    grid: Annotated[
        bool | Literal["auto"],
        "round clipped gradients and noise to one grid; auto: in federations, not in simulations",
    ] = "auto"
    isolation: Annotated[
        Literal["exact", "fast"],
        "exact: one record in a pass, so that no record can change another's gradient",
    ] = "fast"


@dataclass(frozen=True)
class RunSection:
    rounds: Annotated[int, Ge(1), "rounds T"] = 100
    local_steps: Annotated[int, Ge(1), "local steps K of a client in a round"] = 20
    participation: Annotated[float, Gt(0), Le(1), "share of clients in a round"] = 0.1
    lr_schedule: Annotated[Literal["cosine", "constant"], "learning rate over rounds"] = "cosine"
    seed: Annotated[int, "seed of every stream of a simulation"] = 0
    noise: Annotated[
        Literal["seeded", "os"], "os: unseeded, cryptographic, so that the result may be released"
    ] = "seeded"
    device: Annotated[str, "auto, cpu, cuda or cuda:N"] = "auto"
    precision: Annotated[
        Literal["float32", "bf16"],
        "of frozen weights and activations; all DP arithmetic is float32",
    ] = "float32"
    threads: Annotated[
        int | Literal["auto"], "CPU threads; auto: one for small models, which more would slow down"
    ] = "auto"
    fleet_size: Annotated[
        int | Literal["auto"], "clients computed side by side; auto: all of the cohort that fit"
    ] = "auto"
    max_slots: Annotated[int, Ge(1), "records in one forward pass of any size"] = 512
    slots: Annotated[
        int | Literal["auto"],
        "records in a pass of fixed size; auto: least work on a GPU, passes of any size on a CPU",
    ] = "auto"
    compile: Annotated[
        bool | Literal["auto"], "compile the model; auto: where a run is long enough to repay it"
    ] = "auto"
    graphs: Annotated[
        bool | Literal["auto"], "replay a captured pass on a GPU; auto: wherever there is one"
    ] = "auto"
    features: Annotated[
        bool | Literal["auto"],
        "train = head: compute the frozen part once for each record; auto: where it can be done and saves work",
    ] = "auto"
    eval_every: Annotated[int, Ge(1), "rounds between evaluations on the server's test set"] = 1
    eval_on: Annotated[
        Literal["all", "validation", "test"], "which half of the server's public data is scored"
    ] = "all"
    average: Annotated[
        float,
        Ge(0),
        Lt(1),
        "weight of the past in the average over rounds that is evaluated and saved; 0: the last round",
    ] = 0.0
    checkpoint_every: Annotated[
        Annotated[int, Ge(0)] | Literal["auto"],
        "rounds between checkpoints; 0: none; auto: each, but a simulation on a GPU at most once a second",
    ] = "auto"
    memory_limit: Annotated[
        int, Ge(1), "MiB of clients' memory (dp-scaffold, dp-fafed) held outside files"
    ] = 2048
    timeout: Annotated[
        int, Ge(1), "seconds that processes of a run under torchrun wait for one another in a round"
    ] = 60
    diagnostics: Annotated[
        bool,
        "record spread of v, histograms of m and √v, client drift of simulated clients: not private",
    ] = False
    trackers: Annotated[
        tuple[Literal["tensorboard", "mlflow", "wandb"], ...],
        "who else is told of each round, of what may be published",
    ] = ()
    min_clients: Annotated[
        int | None, Ge(1), "stop when fewer are within their budget; default: the whole cohort"
    ] = None
    allow_nan: Annotated[bool, "go on when a state is no longer finite"] = False


@dataclass(frozen=True)
class FederationSection:
    """What a server of real clients knows of them; all of it is public. A simulation takes no notice of it."""

    clients: Annotated[
        dict[str, Annotated[int, Ge(1)]],
        "every client's name and its declared number of records (protected units)",
    ] = field(default_factory=dict)
    server: Annotated[
        str, MinLen(1), "what this server is called, as clients have it in client.servers"
    ] = "server"
    timeout: Annotated[float, Gt(0), "seconds that a round waits for answers"] = 600.0
    retries: Annotated[
        int, Ge(0), "when too few have answered: how often the others are asked again"
    ] = 1
    patience: Annotated[
        int, Ge(1), "rounds in a row that may be lost to too few answers before the run stops"
    ] = 3
    evaluate_every: Annotated[
        int, Ge(0), "rounds between noised counts on clients' held-out records; 0: none"
    ] = 0
    evaluate_sigma: Annotated[
        float, Gt(0), Le(1e6), "standard deviation of the noise on such a count"
    ] = 5.0
    held_out: Annotated[
        dict[str, Annotated[int, Ge(1)]],
        "evaluate_every > 0: the declared number of held-out units of each client",
    ] = field(default_factory=dict)
    test_set: Annotated[
        bool, "evaluate on the public test set of [data], which is then on the server's disk"
    ] = True
    kind: Annotated[
        Literal["image", "features"], "test_set = false: what a record of the clients is"
    ] = "image"
    shape: Annotated[
        tuple[int, ...], "test_set = false: shape of one record, e.g. [3, 32, 32]"
    ] = ()
    classes: Annotated[int | None, Ge(2), "test_set = false: number of classes"] = None
    white: Annotated[float, Gt(0), "test_set = false: the value of full intensity in an image"] = (
        255.0
    )


@dataclass(frozen=True)
class Config:
    data: DataSection
    model: ModelSection
    algorithm: Any
    privacy: PrivacySection
    run: RunSection
    federation: FederationSection | None = None


@dataclass(frozen=True)
class Registry:
    """The keys that named things declare: name -> frozen dataclass, for each section that has a `name`."""

    data: Mapping[str, type[DataSection]]
    model: Mapping[str, type[ModelSection]]
    algorithm: Mapping[str, type[Any]]
    presets: Mapping[str, Path] = field(default_factory=dict)


# What stays when another thing is named: how records are dealt to clients does not depend on which records they are.
COMMON: dict[str, frozenset[str]] = {
    "algorithm": frozenset(),
    "model": frozenset(),
    "data": frozenset(f.name for f in dataclasses.fields(DataSection)),
}
# Common names of settings in other programs, and what the key is called here.
SYNONYMS = {
    "epsilon": "target_epsilon",
    "batch_size": "batch",
    "learning_rate": "lr",
    "noise_multiplier": "sigma",
    "max_grad_norm": "clip",
    "clip_norm": "clip",
    "num_clients": "clients",
    "num_rounds": "rounds",
}
EXCLUSIVE = (frozenset({"sigma", "target_epsilon"}), frozenset({"batch", "rate"}))


def load(source: str | Path, overrides: Sequence[str], registry: Registry) -> Config:
    """A preset's name or a TOML file, with `key=value` overrides, as one checked configuration."""
    return build(overlay(read(source, registry), overrides_layer(overrides)), registry)


def read(source: str | Path, registry: Registry, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The raw tables of a file. `extends = "other.toml"` (or a preset) is read first and overlaid."""
    path = registry.presets.get(str(source), Path(source))
    if path in _seen:
        raise DpfedError(f"{path} extends itself")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = nearest(str(source), registry.presets)
        raise DpfedError(
            f"there is no configuration {source}: give a TOML file or a preset{hint}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise DpfedError(f"{path} is not valid TOML: {error}") from None
    except RecursionError:
        raise DpfedError(f"{path} is nested too deeply for a configuration") from None
    except (
        OSError,
        ValueError,
    ) as error:  # not UTF-8, a number of thousands of digits, a path that cannot be one
        raise DpfedError(f"the configuration {str(path)!r} cannot be read: {error}") from None
    table = raw.get("model")
    # A run folder holds every key, so a language model without this one is older than the key.
    if (path.parent / "run.json").is_file() and isinstance(table, dict) and "max_length" in table:
        table.setdefault("pooling", None)
    base = raw.pop("extends", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise DpfedError(f"{path}: extends = {base!r} must be the name of a file or preset")
    parent = base if base in registry.presets else path.parent / base
    return overlay(read(parent, registry, (*_seen, path)), raw)


def overlay(under: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, table by table; another `name` drops the keys that belonged to the old one."""
    out = dict(under)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(value, Mapping) and isinstance(old, dict):
            if key in COMMON and "name" in value and "name" in old and value["name"] != old["name"]:
                old = {k: v for k, v in old.items() if k in COMMON[key]}
            out[key] = overlay(old, value)
        else:
            out[key] = value
    for either in EXCLUSIVE:
        # One key of a pair replaces the other in a lower layer; `build` refuses both in one.
        given = {name for name in either if over.get(name) is not None}
        if len(given) == 1:
            for name in either - given:
                out.pop(name, None)
    return out


def build(raw: Mapping[str, Any], registry: Registry) -> Config:
    sections = [f.name for f in dataclasses.fields(Config)]
    for key, value in raw.items():
        if key not in sections:
            keys = [] if isinstance(value, Mapping) else key_names(key, registry)
            hint = f": write {' or '.join(keys)}" if keys else nearest(key, sections)
            raise DpfedError(f"[{key}] is not a section of the configuration{hint}")
        if not isinstance(value, Mapping):
            raise DpfedError(f"{key} = {value!r} must be a table, [{key}]")
    config = Config(
        data=_named("data", raw, registry.data, DataSection.name),
        model=_named("model", raw, registry.model, ModelSection.name),
        algorithm=_named("algorithm", raw, registry.algorithm, "dp-fedadamw"),
        privacy=parse("privacy", PrivacySection, raw.get("privacy", {})),
        run=parse("run", RunSection, raw.get("run", {})),
        federation=parse("federation", FederationSection, raw["federation"])
        if "federation" in raw
        else None,
    )
    _cross_check(config)
    return config


def key_names(word: str, registry: Registry) -> list[str]:
    """Return the full names of all keys called `word`, or of the key spelt most like it."""
    found = all_keys(registry)
    word = SYNONYMS.get(word, word)
    close = [word] if word in found else difflib.get_close_matches(word, found, n=1, cutoff=0.65)
    return found[close[0]] if close else []


def all_keys(registry: Registry) -> dict[str, list[str]]:
    """Return the full names of every key that is no table, by its short name."""
    classes: dict[str, list[type[Any]]] = {
        "data": [DataSection, *registry.data.values()],
        "model": [ModelSection, *registry.model.values()],
        "model.lora": [LoraSection],
        "algorithm": list(registry.algorithm.values()),
        "privacy": [PrivacySection],
        "run": [RunSection],
        "federation": [FederationSection],
    }
    found: dict[str, list[str]] = {}
    for section, kinds in classes.items():
        fields = [f for cls in kinds for f in dataclasses.fields(cls)]
        for name in dict.fromkeys(
            f.name for f in fields if f.default_factory is dataclasses.MISSING
        ):
            found.setdefault(name, []).append(f"{section}.{name}")
    return found


def _named(
    section: str, raw: Mapping[str, Any], known: Mapping[str, type[Any]], default: str
) -> Any:
    table = dict(raw.get(section, {}))
    name = table.get("name", default)
    if not isinstance(name, str) or name not in known:
        raise DpfedError(
            f"{section}.name = {name!r} is not known{nearest(str(name), known)}; "
            f"`dpfed list {section.rstrip('a') + 'asets' if section == 'data' else section + 's'}` shows what there is"
        )
    cls = known[name]
    if "name" in {f.name for f in dataclasses.fields(cls)}:
        table["name"] = name
    else:
        table.pop("name", None)
    return parse(section, cls, table)


def refuse_idle_augmentations(data: DataSection) -> None:
    if data.views > 1 and data.augment == "none":
        raise DpfedError(
            f'data.views = {data.views} needs views that differ: give data.augment, such as "crop_flip"'
        )


def _cross_check(config: Config) -> None:
    p = config.privacy
    refuse_idle_augmentations(config.data)
    if (p.batch is None) == (p.rate is None):
        raise DpfedError("give exactly one of privacy.batch (expected size) and privacy.rate")
    if p.enabled and (p.sigma is None) == (p.target_epsilon is None):
        raise DpfedError(
            "give exactly one of privacy.sigma and privacy.target_epsilon (or privacy.enabled = false)"
        )
    for key in ("fleet_size", "threads", "slots"):
        value = getattr(config.run, key)
        if isinstance(value, int) and value < 1:
            raise DpfedError(f'run.{key} = {value} must be at least 1, or "auto"')
    if p.enabled and p.clip == float("inf") and p.sigma != 0:
        raise DpfedError(
            "privacy.clip = inf is allowed only with privacy.sigma = 0, which gives no privacy"
        )
    if p.budget is not None and p.target_epsilon is not None and p.view == "third_party":
        raise DpfedError(
            'privacy.budget makes the clients that are left be drawn more often, so a target for view = "third_party" '
            "could not be kept: use another privacy.view or no budget"
        )
    if p.sigma_per_client and p.target_epsilon is None:
        raise DpfedError(
            "privacy.sigma_per_client calibrates each client to privacy.target_epsilon: give that, not sigma"
        )
    if p.budget is not None and (not p.enabled or p.sigma == 0):
        raise DpfedError(
            "privacy.budget cannot be kept without noise: give privacy.sigma > 0 or a target_epsilon"
        )
    _check_clipping(p)
    if p.sampling != "poisson" and p.batch is not None and p.batch % 1 != 0:
        raise DpfedError(
            f'privacy.batch = {p.batch} must be a whole number with sampling = "{p.sampling}"'
        )


def _check_clipping(p: PrivacySection) -> None:
    needs = {
        "clip_stability": "automatic",
        "quantile": "quantile",
        "quantile_lr": "quantile",
        "quantile_noise": "quantile",
    }
    for key, mode in needs.items():
        if getattr(p, key) is not None and p.clip_mode != mode:
            raise DpfedError(f'privacy.{key} has no effect without privacy.clip_mode = "{mode}"')
        if getattr(p, key) == float("inf"):
            raise DpfedError(f"privacy.{key} = inf is not allowed: it must be a finite number")
    if p.grid is True and (not p.enabled or p.sigma == 0):
        raise DpfedError(
            "privacy.grid = true is for sums with noise: it needs privacy.sigma > 0 or a target_epsilon"
        )
    if p.clip == float("inf") and p.clip_mode != "flat":
        raise DpfedError(
            f'privacy.clip = inf has no meaning with privacy.clip_mode = "{p.clip_mode}"'
        )


def to_dict(config: Config) -> dict[str, Any]:
    """Plain tables of a configuration; keys that are unset (None) are left out, as TOML has no null."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {
                f.name: plain(getattr(value, f.name))
                for f in dataclasses.fields(value)
                if getattr(value, f.name) is not None
            }
        return list(value) if isinstance(value, tuple) else value

    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    tables = {name: plain(section) for name, section in sections.items() if section is not None}
    tables["algorithm"] = {"name": config.algorithm.name, **tables["algorithm"]}
    return tables


def to_toml(config: Config) -> str:
    return tomli_w.dumps(to_dict(config))


def keys(cls: type[Any]) -> list[tuple[str, str, Any]]:
    """(key, sentence, default) of a section, for references and help."""
    hints = get_type_hints(cls, include_extras=True)
    out = []
    for f in dataclasses.fields(cls):
        sentence = next((a for a in get_args(hints[f.name])[1:] if isinstance(a, str)), "")
        out.append((f.name, sentence, f.default))
    return out
