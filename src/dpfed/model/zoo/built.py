"""Describe a model that was built, set its new head to zero, and set its dropout.

The head is the last layer of a classifier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dpfed.errors import DpfedError
from dpfed.model.export_files import Companions, MakeCompanions
from dpfed.model.task import CLASSIFY, InputSpec, Task

Prepare = Callable[[dict[str, Tensor]], dict[str, Tensor]]
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")
# Keys in model configurations of transformers for the dropout of hidden layers and of the head.
DROPOUT = (
    "hidden_dropout_prob",
    "hidden_dropout",
    "dropout",
    "resid_pdrop",
    "embd_pdrop",
    "emb_pdrop",
    "activation_dropout",
    "embed_dropout",
    "embedding_dropout",
    "resid_dropout",
    "residual_dropout",
    "mlp_dropout",
    "pooler_dropout",
    "classifier_dropout",
    "classifier_dropout_prob",
    "seq_classif_dropout",
    "summary_first_dropout",
)


@dataclass(frozen=True)
class Built:
    """A model with everything that training and export need to know about it.

    model       the plain model, without adapters
    head        names of modules that are trained in full, never by adapters; empty for a language
                model
    prepare     turns raw inputs into the arguments of the model
    task        turns the model's output into scores, losses and accuracies
    spec        kind and shape of the inputs, with the size of the model's vocabulary; None if the
                spec from which the model was built stays valid
    rows        number of records in one forward pass of an evaluation
    notes       sentences to show to the user
    companions  makes the files that an export writes beside the weights
    forms       functions that could serve as `prepare`, preferred first; a check before training
                chooses the first one that is correct
    """

    model: nn.Module
    head: str | tuple[str, ...]
    prepare: Prepare
    task: Task = CLASSIFY
    spec: InputSpec | None = None
    rows: int = 1024
    notes: tuple[str, ...] = ()
    companions: MakeCompanions = lambda reading: Companions()
    forms: tuple[Prepare, ...] = ()


def fresh_head(width: int, classes: int) -> nn.Linear:
    """Return a linear classifier whose weight and bias are zero."""
    return zero(nn.Linear(width, classes))


def zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def zero_head(head: nn.Module, name: str) -> None:
    """Set weight and bias of the last linear layer in the module `head` to zero.

    name  the head's name, for error messages
    """
    linear = [module for module in head.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise DpfedError(
            f"the head {name} is a {type(head).__name__} without a linear layer: use another model"
        )
    zero(linear[-1])


def set_dropout(config: Any, rate: float) -> None:
    """Set dropout in a model's configuration: `rate` for hidden layers and head, 0 in attention."""
    for name in (*DROPOUT, *ATTENTION_DROPOUT):
        if getattr(config, name, None) is not None:
            setattr(config, name, 0.0 if name in ATTENTION_DROPOUT else rate)


def refuse_other_dropout(model: nn.Module, rate: float) -> None:
    """Raise DpfedError if the model's dropout layers do not follow the setting `model.dropout`.

    Each layer must have this `rate` or 0. If the rate is not 0, at least one layer must have it.
    """
    found = {
        name: layer.p for name, layer in model.named_modules() if isinstance(layer, nn.Dropout)
    }
    other = next((name for name, p in found.items() if p not in (rate, 0.0)), None)
    if other is not None:
        raise DpfedError(
            f"model.dropout = {rate:g} does not reach {other} of {type(model).__name__}: "
            "leave it out"
        )
    if rate and rate not in found.values():
        raise DpfedError(f"model.dropout: {type(model).__name__} has no dropout, leave it out")
