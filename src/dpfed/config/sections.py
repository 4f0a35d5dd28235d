"""The sections of a configuration: each key with its type, range, default and help sentence.

Data sources and models add keys in subclasses. An algorithm is a dataclass of its own keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

Partition = Literal["dirichlet_equal", "dirichlet_classwise", "iid", "natural"]
CountOrAuto = Annotated[int, Ge(1)] | Literal["auto"]
BatchOrAuto = Annotated[float, Gt(0)] | Literal["auto"]
CohortChoice = Literal["balanced", "uniform"]
MessageFormat = Literal["float32", "bf16", "int8"]
BoolOrAuto = bool | Literal["auto"]
# Kinds of labels: one class per record, one number per record, or several classes per record (a 0
# or 1 for each class).
LabelTask = Literal["classify", "regress", "multilabel"]
Trainable = Literal["lora", "full", "head"] | tuple[str, ...]


@dataclass(frozen=True)
class DataSection:
    # Values of `model.task` that this source supports, in addition to "auto" and "causal".
    tasks: ClassVar[tuple[str, ...]] = ("classify",)

    name: Annotated[str, "data source; `dpfed list datasets` shows them"] = "digits"
    path: Annotated[str | None, "file or folder with the data, for sources that read one"] = None
    clients: Annotated[int, Ge(1), "number of clients N"] = 10
    partition: Annotated[Partition, "how records are dealt to clients"] = "dirichlet_equal"
    alpha: Annotated[float, Gt(0), "Dirichlet parameter; smaller is more skewed"] = 0.5
    augment: Annotated[
        Literal["none", "flip", "crop_flip"],
        "random augmentation of an image each time it is in a batch",
    ] = "none"
    views: Annotated[
        int,
        Ge(1),
        "with augment: augmentations of a record; their gradients are averaged before clipping",
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
    freeze_a: Annotated[bool, "train only B; A keeps its public random start (FFA-LoRA)"] = False


@dataclass(frozen=True)
class ModelSection:
    name: Annotated[str, "model; `dpfed list models` shows them"] = "glyph-vit"
    weights: Annotated[
        str | None,
        'folder or hub name of pretrained weights, or "random"; default: those of the model',
    ] = None
    train: Annotated[
        Trainable,
        "adapters and head, the whole model, the head, or a list of modules and tensors",
    ] = "lora"
    lora: LoraSection = field(default_factory=LoraSection)
    task: Annotated[
        Literal["auto", "classify", "regress", "multilabel"],
        "what a label is: one class, a number, or several classes; auto: one class",
    ] = "auto"
    target_mean: Annotated[
        float | None, "regress: a public constant near the mean; default: mean of the test set"
    ] = None
    target_scale: Annotated[
        float | None, Gt(0), "regress: a public constant for the spread; default: of the test set"
    ] = None
    class_weights: Annotated[
        tuple[Annotated[float, Gt(0)], ...],
        "factor of the loss of each class: public constants, not counts of private labels",
    ] = ()
    adapter: Annotated[
        str | None, "folder of a peft LoRA adapter to start from; its rank and targets apply"
    ] = None
    qkv_layout: Annotated[
        Literal["auto", "separate", "3HD", "H3D"],
        "order of the heads in the rows of the projections; auto: by architecture",
    ] = "auto"
    attention: Annotated[
        tuple[str, ...], "names of the q, k, v projections, for an unknown architecture"
    ] = ()
    gradient_checkpointing: Annotated[
        bool, "keep only the inputs of layers and compute the rest again: less memory, more time"
    ] = False
    liveness: Annotated[
        bool, "check on synthetic inputs, before any record is read, that every part trains"
    ] = True


@dataclass(frozen=True)
class PrivacySection:
    enabled: Annotated[
        bool, "false: no clipping, no noise and no guarantee; every output states this"
    ] = True
    clip: Annotated[
        float, Gt(0), "clip norm C of one record's gradient; quantile: C of the first round"
    ] = 0.1
    clip_mode: Annotated[
        Literal["flat", "automatic", "quantile"],
        "cut to norm C, normalise to norm C, or let C follow a noised quantile of the norms",
    ] = "flat"
    # At least 1e-12: with a smaller value, a tiny gradient could get a norm above the clip norm,
    # because its squares underflow in float32 and its norm is then taken for 0.
    clip_stability: Annotated[
        float | None, Ge(1e-12), "automatic: s in g·C/(‖g‖+s); default 0.01"
    ] = None
    quantile: Annotated[
        float | None, Gt(0), Lt(1), "quantile: share of norms at or below C; default 0.5"
    ] = None
    quantile_lr: Annotated[
        float | None, Gt(0), "quantile: step size of log C per round; default 0.2"
    ] = None
    quantile_noise: Annotated[
        float | None,
        Gt(1),
        Le(1e6),
        "quantile: noise multiplier of the count, over that of the whole round; default 10",
    ] = None
    sigma: Annotated[float | None, Ge(0), "noise multiplier; give this or target_epsilon"] = None
    target_epsilon: Annotated[
        float | None, Gt(0), "find sigma for this epsilon; give this or sigma"
    ] = None
    view: Annotated[
        Literal["server_worst", "server_expected", "third_party"],
        "observer whose epsilon the target is",
    ] = "server_worst"
    delta: Annotated[float, Gt(0), Lt(1), "δ"] = 1e-5
    allow_large_delta: Annotated[
        bool | None, "true: run with delta >= 1 / (records of the largest client)"
    ] = None
    sampling: Annotated[
        Literal["poisson", "fixed_wor"],
        "batches: each record by an independent draw, or a fixed number without replacement",
    ] = "poisson"
    batch: Annotated[
        BatchOrAuto | None,
        "expected batch size; give this or rate; auto: the smallest with nearly the least noise",
    ] = None
    rate: Annotated[
        float | None, Gt(0), Le(1), "sampling rate of every client; give this or batch"
    ] = None
    batch_per_client: Annotated[
        bool, "unequal clients: same batch for all (small clients pay more) instead of same rate"
    ] = False
    sigma_per_client: Annotated[
        bool, "with target_epsilon: a sigma for each client, so that all have the same epsilon"
    ] = False
    budget: Annotated[
        float | None,
        Gt(0),
        "largest epsilon (server's view) of a client; it takes no round that would pass it",
    ] = None
    grid: Annotated[
        BoolOrAuto,
        "round clipped gradients and noise to one grid; auto: in federations, not in simulations",
    ] = "auto"
    isolation: Annotated[
        Literal["exact", "fast"],
        "exact: records at drawn places, so that no record can change another's gradient",
    ] = "fast"


@dataclass(frozen=True)
class RunSection:
    rounds: Annotated[int, Ge(1), "rounds T"] = 100
    local_steps: Annotated[int, Ge(1), "local steps K of a client in a round"] = 20
    participation: Annotated[float, Gt(0), Le(1), "share of clients in a round"] = 0.1
    cohort_choice: Annotated[
        CohortChoice, "balanced: the clients with the fewest requests so far; uniform: any"
    ] = "uniform"
    max_rounds_per_client: Annotated[
        CountOrAuto,
        "most rounds n of a client; epsilon counts these; auto: balanced ceil(T S/N), uniform T",
    ] = "auto"
    max_records_per_step: Annotated[
        int, Ge(1), 'most records of a cohort in a local step, for privacy.batch = "auto"'
    ] = 2048
    lr_schedule: Annotated[Literal["cosine", "constant"], "learning rate over rounds"] = "cosine"
    seed: Annotated[int, "seed of every random stream of a simulation"] = 0
    noise: Annotated[
        Literal["seeded", "os"], "os: unseeded, cryptographic, so that the result may be released"
    ] = "seeded"
    device: Annotated[str, "auto, cpu, cuda or cuda:N"] = "auto"
    precision: Annotated[
        Literal["float32", "bf16"],
        "of frozen weights and activations; all DP arithmetic is float32",
    ] = "float32"
    threads: Annotated[
        CountOrAuto, "CPU threads; auto: one for small models, which more threads slow down"
    ] = "auto"
    fleet_size: Annotated[
        CountOrAuto, "clients computed side by side; auto: all of the cohort that fit"
    ] = "auto"
    max_slots: Annotated[int, Ge(1), "most records in one forward pass of variable size"] = 512
    slots: Annotated[
        CountOrAuto,
        "records in a pass of fixed size; auto: least work on a GPU, variable size on a CPU",
    ] = "auto"
    compile: Annotated[
        BoolOrAuto, "compile the model; auto: where a run is long enough to repay it"
    ] = "auto"
    graphs: Annotated[BoolOrAuto, "replay a captured CUDA graph of a pass; auto: on every GPU"] = (
        "auto"
    )
    features: Annotated[
        BoolOrAuto,
        "train = head: compute the frozen part once per record; auto: where possible and faster",
    ] = "auto"
    eval_every: Annotated[int, Ge(1), "rounds between evaluations on the server's test set"] = 1
    eval_on: Annotated[
        Literal["all", "validation", "test"], "half of the server's public data to evaluate on"
    ] = "all"
    average: Annotated[
        float,
        Ge(0),
        Lt(1),
        "decay of the average over rounds that is evaluated and saved; 0: the last round",
    ] = 0.0
    metric: Annotated[
        Literal[
            "auto", "accuracy", "loss", "perplexity", "macro_f1", "auroc", "mae", "r2", "given"
        ],
        "score on public data for early_stopping and keep; auto: accuracy, or r2 for numbers; "
        "given: a program's own",
    ] = "auto"
    early_stopping: Annotated[
        int | None, Ge(1), "end after this many evaluations without a better score; default: never"
    ] = None
    keep: Annotated[
        Literal["last", "best"], "model that is saved: of the last round, or of the best score"
    ] = "last"
    checkpoint_every: Annotated[
        Annotated[int, Ge(0)] | Literal["auto"],
        "rounds between checkpoints; 0: none; auto: each, on a GPU at most one per second",
    ] = "auto"
    memory_limit: Annotated[
        int, Ge(1), "MiB of clients' state (dp-scaffold, dp-fafed) kept in memory, not in files"
    ] = 2048
    timeout: Annotated[
        int, Ge(1), "seconds that processes of a torchrun run wait for one another in a round"
    ] = 60
    diagnostics: Annotated[
        bool,
        "record spread of v, histograms of m and √v, drift of simulated clients: not private",
    ] = False
    trackers: Annotated[
        tuple[Literal["tensorboard", "mlflow", "wandb"], ...],
        "experiment trackers that receive each round's public figures",
    ] = ()
    min_clients: Annotated[
        int | None,
        Ge(1),
        "stop when fewer clients may take part in a round; default: the whole cohort",
    ] = None
    allow_nan: Annotated[bool, "continue when a state is no longer finite"] = False


@dataclass(frozen=True)
class FederationSection:
    """Section [federation]: the settings of a server whose clients are on other machines.

    Simulations use `upload` and `download`, and ignore the other keys.
    """

    clients: Annotated[
        dict[str, Annotated[int, Ge(1)]],
        "every client's name and its declared number of records (protected units)",
    ] = field(default_factory=dict)
    server: Annotated[
        str, MinLen(1), "name of this server, as clients have it in client.servers"
    ] = "server"
    timeout: Annotated[float, Gt(0), "seconds that a round waits for answers"] = 600.0
    upload: Annotated[
        MessageFormat,
        "numbers in clients' messages; int8: a quarter of the bytes, rounded at random after noise",
    ] = "float32"
    download: Annotated[
        MessageFormat, "numbers in the server's messages; second moments stay in float32"
    ] = "float32"
    retries: Annotated[
        int, Ge(0), "how often other clients are asked when too few have answered"
    ] = 1
    patience: Annotated[
        int, Ge(1), "consecutive rounds with too few answers before the run stops"
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
        bool, "evaluate on the public test set of [data], which is on the server's disk"
    ] = True
    kind: Annotated[
        Literal["image", "features"], "test_set = false: kind of the clients' records"
    ] = "image"
    shape: Annotated[
        tuple[int, ...], "test_set = false: shape of one record, e.g. [3, 32, 32]"
    ] = ()
    classes: Annotated[int | None, Ge(2), "test_set = false: number of classes"] = None
    white: Annotated[float, Gt(0), "test_set = false: pixel value of full intensity"] = 255.0


@dataclass(frozen=True)
class Config:
    """A complete, checked configuration of one run."""

    data: DataSection
    model: ModelSection
    algorithm: Any
    privacy: PrivacySection
    run: RunSection
    federation: FederationSection | None = None
