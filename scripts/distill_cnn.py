"""Weights for `gn-resnet18` from a pretrained teacher and public images alone.

For GN-ResNet-18 no weights are published that fit small images. This makes some: the network learns to give the answers of a pretrained
Transformer for crops of public images and for mixtures of two of them (Beyer et al. 2022), without any label. The teacher sees the images at
its own size, the network at the size of the clients' images.
Run: python scripts/distill_cnn.py --teacher FOLDER --images FOLDER --out FILE.safetensors [--steps 1000] [--device cuda]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from choose_sharpen import read
from safetensors.torch import save_file
from torch import Tensor, nn

from dpfed.model.per_sample import call
from dpfed.model.task import InputSpec
from dpfed.model.zoo.built import Built
from dpfed.model.zoo.pretrained import config_of
from dpfed.model.zoo.resnet import GNResNet18
from dpfed.model.zoo.vision import AutoImage

SMALLEST, TEMPERATURE, WARM_UP = 0.3, 1.0, 0.05  # a crop's share of the side; of both answers; share of the steps


def views(x: Tensor, draw: Callable[[int], Tensor]) -> Tensor:
    """A random crop of each image (`[n, 3, h, w]`, 0 to 255), half of them mirrored, then each mixed with another one."""
    n = len(x)
    side = SMALLEST + (1 - SMALLEST) * draw(n)
    flip = (draw(n) < 0.5).float() * 2 - 1
    grid = torch.zeros(n, 2, 3, device=x.device)
    grid[:, 0, 0], grid[:, 1, 1] = side * flip, side * (0.75 + 0.25 * draw(n))
    for axis in (0, 1):
        grid[:, axis, 2] = (2 * draw(n) - 1) * (1 - side)
    out = F.grid_sample(x.float(), F.affine_grid(grid, list(x.shape), align_corners=False), align_corners=False)
    share = torch.where(draw(n) < 0.5, torch.ones(n, device=x.device), draw(n)).view(-1, 1, 1, 1)
    return share * out + (1 - share) * out.roll(1, 0)


def answers(built: Built, x: Tensor) -> Tensor:
    return call(built.model, {}, built.prepare({"pixel_values": x})).float()


def build(teacher: str, pixels: int, size: int, width: int, groups: int) -> tuple[Built, Built]:
    classes = int(config_of(teacher).num_labels)
    large, small = (InputSpec("image", "pixel_values", (3, s, s), classes) for s in (pixels, size))
    return AutoImage(weights=teacher, head="kept").build(large), GNResNet18(width=width, groups=groups).build(small)


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
        with autocast:
            with torch.no_grad():
                wanted = answers(teacher, seen)
            given = answers(student, small)
        soft = [F.log_softmax(logits / TEMPERATURE, 1) for logits in (given, wanted)]
        loss = F.kl_div(*soft, reduction="batchmean", log_target=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    torch.manual_seed(0)
    x = read(args.images, args.count).to(args.device)
    teacher, student = build(args.teacher, x.shape[-1], args.size, args.width, args.groups)
    model = distill(teacher, student, x, args.size, args.steps, args.batch, args.lr)
    state = {
        name: value.contiguous().cpu()
        for name, value in model.state_dict().items()
        if not name.startswith("classifier.")
    }
    save_file(state, args.out)
    print(f"{len(x)} images; {sum(value.numel() for value in state.values()):,} numbers in {args.out}")


if __name__ == "__main__":
    main()
