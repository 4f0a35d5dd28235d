"""Result of building a model: its module, heads, input preparation and task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from dpfed.errors import DpfedError
from dpfed.model.export_files import MakeCompanions, no_companions
from dpfed.model.task import CLASSIFY, InputSpec, Task

Prepare = Callable[[dict[str, Tensor]], dict[str, Tensor]]
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")


@dataclass(frozen=True)
class Built:
    """A model with everything that training and export need to know about it.

    head        modules that are trained whole in every mode; none for a language model
    prepare     turns raw inputs into the arguments of the model
    spec        the inputs, completed with the vocabulary of the model
    rows        number of records in an evaluation pass
    companions  makes the files of an export besides the weights
    forms       alternatives to `prepare`, preferred first; a check takes the first correct one
    """

    model: nn.Module
    head: str | tuple[str, ...]
    prepare: Prepare
    task: Task = CLASSIFY
    spec: InputSpec | None = None
    rows: int = 1024
    notes: tuple[str, ...] = ()
    companions: MakeCompanions = no_companions
    forms: tuple[Prepare, ...] = ()


def fresh_head(width: int, classes: int) -> nn.Linear:
    """Return a classifier that starts at zero."""
    return zero(nn.Linear(width, classes))


def zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def zero_head(head: nn.Module, name: str) -> None:
    """Set the last linear layer of a head to zero."""
    linear = [module for module in head.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise DpfedError(
            f"the head {name} is a {type(head).__name__} without a linear layer: use another model"
        )
    zero(linear[-1])
