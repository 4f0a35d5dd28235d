"""The keyword arguments of `fine_tune`, with their types, so that an editor can complete them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

from dpfed.privacy.planning.federation import FederationPlan
from dpfed.training.job.public_score import Metric

Function = TypeVar("Function", bound=Callable[..., Any])


class Switches(TypedDict, total=False):
    """Keywords that set options of the algorithm (keys of the configuration section [algorithm]).

    `dpfed list algorithms --json` shows which algorithm has which key.
    """

    a: float
    agg: Literal["mean", "full_v", "off"]
    agg_weights: Literal["uniform", "size"]
    alpha: float
    bc: bool
    bc_floor: float
    bc_floor_abs: float
    bc_level: Literal["coordinate", "block"]
    beta1: float
    beta2: float | None
    eps: float
    equal_eps: bool
    fafed_vr: bool
    fedopt_preset: Literal["default", "authors"]
    gamma: float
    granularity: Literal["block", "tensor"]
    lada_amsgrad: bool
    lr: float | Literal["auto"]
    ls_sigma: float
    ls_where: Literal["server", "client_grad"]
    rho: float
    sam_batches: Literal["shared", "independent"]
    scaffold_c: Literal["mean", "displacement"]
    server_lr: float
    server_opt: Literal["adam", "yogi", "adagrad"]
    tau: float | None
    weight_decay: float


class Terms(TypedDict, total=False):
    """Keywords for the training and its privacy: clients, epsilon, rounds, task and more.

    Attributes:
        clients: Number of simulated clients; default 10.
        epsilon: Target epsilon against the server, for the client with the most rounds. "auto", the
            default, is 8.0, unless `settings` give privacy.sigma. With None, `settings` must give
            privacy.sigma or privacy.enabled = False.
        delta: Delta of the guarantee; default 1e-5.
        rounds: Number of rounds; default 50.
        plan: A plan of `dpfed.plan`, which sets clients, epsilon, delta, rounds and the batch.
        trainable: Adapters and head ("lora"), the head, the whole model, or names of modules and
            tensors. The default depends on the model.
        task: "classify" for one class per record, "multilabel" for several classes per record,
            "regress" for labels that are numbers, "causal" for the next token of texts. "auto", the
            default, is "multilabel" for lists of names, "causal" for data without labels, and
            "classify" for other data.
        class_weights: Factor of the loss of each class; public constants.
        classes: Class names in the order of their numbers, or the number of classes; default: found
            from the labels.
        tokenizer: Tokenizer of a language model in memory.
        settings: Other configuration keys, such as {"run.local_steps": 5}.
    """

    clients: int | None
    epsilon: float | Literal["auto"] | None
    delta: float | None
    rounds: int | None
    plan: FederationPlan | None
    trainable: Literal["lora", "head", "full"] | Sequence[str] | None
    task: Literal["auto", "classify", "causal", "regress", "multilabel"] | None
    class_weights: Sequence[float] | None
    classes: Sequence[str] | int | None
    tokenizer: Any
    settings: Mapping[str, Any] | None


class Options(Switches, Terms, total=False):
    """Keywords of `Terms`, and the algorithm with its switches (own options).

    Attributes:
        algorithm: Name of an algorithm; default "dp-fedadamw". Its switches, such as `lr`, are
            further keywords.
        metric: Score on the public records `test`: "accuracy", "loss", "macro_f1", "auroc",
            "perplexity", "r2" or "mae"; or a function of labels and predictions that returns a
            number, where larger is better. Default: "r2" for regression, else "accuracy".
        early_stopping: End the training after this many evaluations without a better score.
        keep: "best" to keep the model of the round with the best score; default "last".
    """

    algorithm: str | None
    metric: (
        Literal["accuracy", "loss", "macro_f1", "auroc", "perplexity", "r2", "mae"] | Metric | None
    )
    early_stopping: int | None
    keep: Literal["last", "best"] | None


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options in two groups: keywords of `fine_tune`, and switches of the algorithm."""
    own = set(get_type_hints(Options)) - set(get_type_hints(Switches))
    keywords = {name: value for name, value in options.items() if name in own}
    return keywords, {name: value for name, value in options.items() if name not in own}


def choices_of(name: str) -> tuple[str, ...]:
    """Return the strings that a keyword of `Options` accepts, such as "lora" for `trainable`."""
    kinds = get_args(get_type_hints(Options)[name])
    return tuple(text for kind in kinds if get_origin(kind) is Literal for text in get_args(kind))


def listing(options: type[Any]) -> Callable[[Function], Function]:
    """Return a decorator that lists every keyword of `options` in the function's signature.

    `help` and notebooks then show these keywords instead of `**options`.

    options  the TypedDict class of the function's keywords
    """

    def listed(function: Function) -> Function:
        signature = inspect.signature(function)
        plain = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in get_type_hints(options).items()
        ]
        parameters = [*plain, *sorted(more, key=lambda p: p.name in get_type_hints(Switches))]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters
        )
        return function

    return listed
