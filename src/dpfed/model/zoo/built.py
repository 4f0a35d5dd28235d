"""What `build` gives: the module, the names of its heads, how raw inputs enter it and what its output is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfed.errors import DpfedError
from dpfed.model.export_files import MakeCompanions, no_companions
from dpfed.model.task import CLASSIFY, InputSpec, Task

Prepare = Callable[[dict[str, Tensor]], dict[str, Tensor]]
ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Built:
    """head: modules that are trained whole in every mode; none for a language model.
    spec: the inputs with what only the model knows (its vocabulary), where it adds something.
    rows: how many records are evaluated at once.
    companions: what an export of the model carries besides its weights.
    forms: ways in which inputs can enter, `prepare` first; a check takes the first right one."""

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
    """A classifier that starts at zero: the classes of the pretraining are not those of the clients."""
    return zero(nn.Linear(width, classes))


def zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def zero_head(head: nn.Module, name: str) -> None:
    """Its last linear layer starts at zero, whatever lies before it."""
    linear = [module for module in head.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise DpfedError(
            f"the head {name} is a {type(head).__name__} without a linear layer: use another model"
        )
    zero(linear[-1])


def normalise(name: str, white: float, mean: tuple[float, ...], std: tuple[float, ...]) -> Prepare:
    """uint8 images -> float, with public constants; record by record, so nothing is learnt from the data."""

    made: dict[
        torch.device, tuple[Tensor, Tensor]
    ] = {}  # a captured step cannot bring numbers to the device

    def prepare(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs[name]
        if x.device not in made:
            made[x.device] = tuple(
                torch.tensor(v, device=x.device).view(-1, 1, 1) for v in (mean, std)
            )  # type: ignore[assignment]
        m, s = made[x.device]
        return {name: (x.float() / white - m) / s}

    return prepare


def images(
    spec: InputSpec,
    size: int,
    channels: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    resize: str = "bilinear",
    sharpen: float = 0.0,
) -> Prepare:
    """Images of any size for a model of one size: grey ones repeated, resized, sharpened, normalised; each record by itself."""
    inner, resized = normalise(spec.name, spec.white, mean, std), resizing(size, resize)

    def prepare(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = inputs[spec.name].float()
        if x.shape[-2:] != (size, size):
            x = resized(x)
        if sharpen:
            x = x + sharpen * (x - blurred(x))
        if sharpen or resize == "bicubic":  # both overshoot at edges
            x = x.clamp(0, spec.white)
        if x.shape[1] != channels:
            x = x.expand(-1, channels, -1, -1)
        return inner({spec.name: x})

    return prepare


def resizing(size: int, mode: str) -> Callable[[Tensor], Tensor]:
    """Images `[M, C, H, W]` -> `[M, C, size, size]`; averaged where they become smaller.

    Torch's kernel for small images on a GPU takes longer than two products with the matrices that it stands for. A compiler
    has fusions of its own and gets the plain form.
    """
    made: dict[
        tuple[torch.device, int, bool], Tensor
    ] = {}  # a captured step cannot bring numbers to the device

    def resized(x: Tensor) -> Tensor:
        smaller = size < max(x.shape[-2:])
        if not takes_products(x):
            return F.interpolate(x, (size, size), mode=mode, align_corners=False, antialias=smaller)
        for side in x.shape[-2:]:
            if (x.device, side, smaller) not in made:
                made.setdefault(
                    (x.device, side, smaller), resize_matrix(side, size, mode, smaller).to(x.device)
                )
        down, across = (made[x.device, side, smaller] for side in x.shape[-2:])
        return by_products(x, down, across)

    return resized


def takes_products(x: Tensor) -> bool:
    return x.device.type == "cuda" and not torch.compiler.is_compiling()


def resize_matrix(side: int, size: int, mode: str, smaller: bool) -> Tensor:
    """What resizing does to a column of pixels, `[size, side]`: its own effect on each single pixel."""
    each = torch.eye(side).view(1, 1, side, side)
    return F.interpolate(
        each, (size, side), mode=mode, align_corners=False, antialias=smaller
    ).view(size, side)


def by_products(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Columns by one matrix and rows by the other; in whole float32 numbers, as `allow_tf32` is off wherever gradients are."""
    return down @ (x @ across.t())


def blurred(x: Tensor) -> Tensor:
    """By the binomial kernel 1 4 6 4 1 along each side, mirrored at the border."""
    for side in (2, 3):
        count = x.shape[side]
        padded = F.pad(x, (2, 2, 0, 0) if side == 3 else (0, 0, 2, 2), mode="reflect")
        x = sum((w / 16) * padded.narrow(side, i, count) for i, w in enumerate((1, 4, 6, 4, 1)))  # type: ignore[assignment]
    return x


def expect_images(name: str, spec: InputSpec, channels: int) -> None:
    if spec.kind != "image":
        raise DpfedError(
            f"model.name = {name!r} reads images, this data has {spec.kind}: choose another model or data"
        )
    if spec.shape[0] not in (1, channels):
        raise DpfedError(
            f"model.name = {name!r} reads images of {channels} channels (grey ones are repeated), this data has "
            f"{spec.shape[0]}"
        )
