"""Weights for `gn-resnet18` from a pretrained teacher and public images alone.

The network learns to give the answers of a pretrained classifier for crops of public images and for mixtures of two of them, both seeing
the same view (Beyer et al. 2022, who train far longer), without any label. The teacher sees it at its own size, the network at the size of the clients' images.
Run: python experiments/distill_cnn.py --teacher FOLDER --images FOLDER --out FILE.safetensors [--steps 1000] [--device cuda]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from choose_sharpen import read
from safetensors.torch import save_file
from torch import Tensor, nn

from dpfed.errors import DpfedError
from dpfed.model.per_sample.gradients import call
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built
from dpfed.model.zoo.pretrained import config_of
from dpfed.model.zoo.resnet import GNResNet18
from dpfed.model.zoo.vision import AutoImage

SMALLEST = 0.3  # the least share of the side that a crop has
FLATTER = 0.75  # and the least of it that width and height, each by itself, then keep
WARM_UP = 0.05  # share of the steps


def views(x: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
    """A random crop of each image (`[n, 3, h, w]`, 0 to 255), half of them mirrored, and half then mixed with another one."""
    n = len(x)
    side = SMALLEST + (1 - SMALLEST) * draw(n)
    flip = (draw(n) < 0.5).float() * 2 - 1
    grid = torch.zeros(n, 2, 3, device=x.device)
    for axis in (0, 1):
        extent = side * (FLATTER + (1 - FLATTER) * draw(n))
        grid[:, axis, axis], grid[:, axis, 2] = extent, (2 * draw(n) - 1) * (1 - extent)
    grid[:, 0, 0] *= flip
    where = F.affine_grid(grid, list(x.shape), align_corners=False)
    out = F.grid_sample(x.float(), where, padding_mode="border", align_corners=False)
    share = torch.where(draw(n) < 0.5, torch.ones(n, device=x.device), draw(n)).view(-1, 1, 1, 1)
    return share * out + (1 - share) * out.roll(1, 0)


def divergence(given: Tensor, wanted: Tensor) -> Tensor:
    """The mean of KL(wanted || given) over records; both are logits."""
    return F.kl_div(
        given.log_softmax(1), wanted.log_softmax(1), reduction="batchmean", log_target=True
    )


def build(
    teacher: str, shape: tuple[int, ...], size: int, width: int, groups: int
) -> tuple[Built, Built]:
    config = config_of(teacher)
    if not any("ImageClassification" in name for name in config.architectures or ()):
        raise DpfedError(
            f"{teacher} has no classifier of its own to learn from: give --teacher a model that was trained to classify"
        )
    large, small = (
        InputSpec("image", "pixel_values", s, int(config.num_labels))
        for s in (shape, (3, size, size))
    )
    return AutoImage(weights=teacher, head="kept").build(large), GNResNet18(
        width=width, groups=groups
    ).build(small)


def distill(
    teacher: Built,
    student: Built,
    x: Tensor,
    size: int,
    steps: int,
    batch: int,
    lr: float,
    say: Callable[[str], None] = print,
) -> nn.Module:
    device, generator = x.device, torch.Generator(x.device).manual_seed(0)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    teacher.model.to(device).eval().requires_grad_(False)
    model = student.model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01)
    began = time.monotonic()
    for step in range(steps):
        warm = min(1.0, (step + 1) / (WARM_UP * steps))
        optimizer.param_groups[0]["lr"] = lr * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        rows = torch.randint(len(x), (batch,), generator=generator, device=device)
        seen = views(x[rows], lambda n: torch.rand(n, generator=generator, device=device))
        small = F.interpolate(seen, (size, size), mode="bilinear", antialias=True)
        large, small = (
            built.prepare({"pixel_values": view})
            for built, view in ((teacher, seen), (student, small))
        )
        with autocast:
            with torch.no_grad():
                wanted = call(teacher.model, {}, large).float()
            given = call(model, {}, small).float()
        loss = divergence(given, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            same = (given.argmax(1) == wanted.argmax(1)).float().mean()
            took = time.monotonic() - began
            say(
                f"step {step + 1}: divergence {float(loss.detach()):.3f}, same answer {100 * float(same):.1f} %, {took:.0f} s"
            )
    return model


def check(args: argparse.Namespace) -> None:
    """What would otherwise be noticed late, or not at all."""
    if min(args.size, args.width, args.groups, args.count, args.steps, args.batch) < 1:
        raise DpfedError(
            "--size, --width, --groups, --count, --steps and --batch must be at least 1"
        )
    if not 0 < args.lr < 1e30:
        raise DpfedError(f"--lr {args.lr} is not a learning rate: give a small number above 0")
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise DpfedError(
            f"{args.out} cannot be written: give --out the name of a file in a folder that is there"
        )
    try:
        torch.zeros(1, device=args.device)
    except (RuntimeError, AssertionError):
        raise DpfedError(
            f"--device {args.device} is not there: give cpu, or cuda on a machine with a GPU"
        ) from None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=32, help="side of the clients' images")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--count", type=int, default=100_000, help="images at most")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    check(args)
    torch.manual_seed(0)
    x = read(args.images, args.count).to(args.device)
    teacher, student = build(args.teacher, tuple(x.shape[1:]), args.size, args.width, args.groups)
    model = distill(teacher, student, x, args.size, args.steps, args.batch, args.lr)
    state = {
        name: value.contiguous().cpu()
        for name, value in model.state_dict().items()
        if not name.startswith("classifier.")
    }
    if not all(value.isfinite().all() for value in state.values()):
        raise DpfedError("training diverged, nothing was written: give a smaller --lr")
    save_file(state, args.out)
    print(
        f"{len(x)} images; {sum(value.numel() for value in state.values()):,} numbers in {args.out}"
    )


if __name__ == "__main__":
    try:
        main()
    except DpfedError as error:
        sys.exit(f"distill_cnn: {error}")
