"""Train weights for `gn-resnet18` from a pretrained teacher and public images alone.

    python experiments/distill_cnn.py --teacher FOLDER --images FOLDER --out FILE.safetensors

The network learns the answers of a pretrained classifier for augmentations of public images,
without labels (Beyer et al. 2022, who train far longer). An augmentation is a crop, or a mixture of
two crops. The teacher gets it at its own size, the network at the size of the clients' images.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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

# Smallest side of a crop, as a share of the image's side.
SMALLEST = 0.3
# Smallest width and height of a crop, as a share of the crop's side.
FLATTER = 0.75
# Share of the steps in which the learning rate rises.
WARM_UP = 0.05


@dataclass(frozen=True)
class Training:
    """Length and speed of the training, and the side of the network's images."""

    size: int
    steps: int
    batch: int
    lr: float

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: warm-up, then cosine decay."""
        warm = min(1.0, (step + 1) / (WARM_UP * self.steps))
        return self.lr * warm * 0.5 * (1 + math.cos(math.pi * step / self.steps))


def views(x: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
    """Return a random crop of each image `[n, 3, h, w]`; half are mirrored, half are mixed.

    `draw(n)` returns n random numbers in [0, 1).
    """
    n = len(x)
    side = SMALLEST + (1 - SMALLEST) * draw(n)
    flip = (draw(n) < 0.5).float() * 2 - 1
    grid = torch.zeros(n, 2, 3, device=x.device)
    for axis in (0, 1):
        extent = side * (FLATTER + (1 - FLATTER) * draw(n))
        grid[:, axis, axis] = extent
        grid[:, axis, 2] = (2 * draw(n) - 1) * (1 - extent)
    grid[:, 0, 0] *= flip
    where = F.affine_grid(grid, list(x.shape), align_corners=False)
    out = F.grid_sample(x.float(), where, padding_mode="border", align_corners=False)
    share = torch.where(draw(n) < 0.5, torch.ones(n, device=x.device), draw(n)).view(-1, 1, 1, 1)
    return share * out + (1 - share) * out.roll(1, 0)


def divergence(given: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean of KL(wanted || given) over records; both are logits."""
    return F.kl_div(
        given.log_softmax(1), wanted.log_softmax(1), reduction="batchmean", log_target=True
    )


def build(
    teacher: str, shape: tuple[int, ...], size: int, width: int, groups: int
) -> tuple[Built, Built]:
    """Return the teacher and the network, each for images of its own size."""
    config = config_of(teacher)
    if not any("ImageClassification" in name for name in config.architectures or ()):
        raise DpfedError(
            f"{teacher} has no classifier of its own to learn from: "
            "give --teacher a model that was trained to classify"
        )
    classes = int(config.num_labels)
    large = InputSpec("image", "pixel_values", shape, classes)
    small = InputSpec("image", "pixel_values", (3, size, size), classes)
    network = GNResNet18(width=width, groups=groups)
    return AutoImage(weights=teacher, head="kept").build(large), network.build(small)


def distill(teacher: Built, student: Built, x: Tensor, training: Training) -> nn.Module:
    """Train the network on the teacher's answers and return it."""
    device = x.device
    steps = training.steps
    generator = torch.Generator(device).manual_seed(0)

    def draw(n: int) -> Tensor:
        return torch.rand(n, generator=generator, device=device)

    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    teacher.model.to(device).eval().requires_grad_(False)
    model = student.model.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), training.lr, weight_decay=0.01)
    began = time.monotonic()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = training.rate(step)
        rows = torch.randint(len(x), (training.batch,), generator=generator, device=device)
        large = views(x[rows], draw)
        small = F.interpolate(large, (training.size,) * 2, mode="bilinear", antialias=True)
        large, small = (
            built.prepare({"pixel_values": images})
            for built, images in ((teacher, large), (student, small))
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
            print(
                f"step {step + 1}: divergence {float(loss.detach()):.3f}, "
                f"same answer {100 * float(same):.1f} %, {time.monotonic() - began:.0f} s"
            )
    return model


def check(args: argparse.Namespace) -> None:
    """Refuse arguments that would fail late or silently."""
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
    training = Training(args.size, args.steps, args.batch, args.lr)
    model = distill(teacher, student, x, training)
    state = {
        name: value.contiguous().cpu()
        for name, value in model.state_dict().items()
        if not name.startswith("classifier.")
    }
    if not all(value.isfinite().all() for value in state.values()):
        raise DpfedError("training diverged, nothing was written: give a smaller --lr")
    save_file(state, args.out)
    count = sum(value.numel() for value in state.values())
    print(f"{len(x)} images; {count:,} numbers in {args.out}")


if __name__ == "__main__":
    try:
        main()
    except DpfedError as error:
        sys.exit(f"distill_cnn: {error}")
