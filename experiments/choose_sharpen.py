"""Choose `model.resize` and `model.sharpen` for a pretrained model from public images alone.

    python experiments/choose_sharpen.py --weights FOLDER --images FOLDER [--size 32] [--count 1000]

The script shrinks public images to the size of the clients' images and enlarges them in each way.
The best way changes the fewest answers of the pretrained model's own head. It needs no labels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dpfed.data.images import decode_all
from dpfed.errors import DpfedError
from dpfed.model.per_sample.gradients import call
from dpfed.model.task import InputSpec
from dpfed.model.zoo.pretrained import config_of
from dpfed.model.zoo.vision import AutoImage

WAYS = [
    ("bilinear", 0.0),
    ("bicubic", 0.0),
    *(("bicubic", s) for s in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)),
]


def read(folder: Path, count: int) -> Tensor:
    """Return at most `count` images of a folder, evenly spaced, as uint8 `[n, 3, h, w]`."""
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpeg", ".jpg", ".png"))
    if not files:
        raise DpfedError(
            f"there is no .jpeg, .jpg or .png file in {folder}: give a folder of public images"
        )
    n = min(count, len(files))
    files = [files[i * len(files) // n] for i in range(n)]
    hint = "give a folder of public images of one size"
    return torch.from_numpy(
        decode_all(lambda i: files[i].read_bytes(), [str(file) for file in files], hint)
    )


def answers(weights: str, x: Tensor, resize: str, sharpen: float) -> Tensor:
    """Return the class that the pretrained model gives to each image."""
    classes = int(config_of(weights).num_labels)
    spec = InputSpec("image", "pixel_values", tuple(x.shape[1:]), classes)
    model = AutoImage(weights=weights, head="kept", resize=resize, sharpen=sharpen)  # type: ignore[arg-type]
    built = model.build(spec)
    with torch.no_grad():
        parts = [
            call(built.model, {}, built.prepare({"pixel_values": piece})).argmax(1)
            for piece in x.split(100)
        ]
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--size", type=int, default=32, help="side of the clients' images")
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args()
    if min(args.size, args.count) < 1:
        raise DpfedError("--size and --count must be at least 1")
    x = read(args.images, args.count)
    small = F.interpolate(x.float(), (args.size, args.size), mode="bicubic", antialias=True)
    small = small.round().clamp(0, 255).to(torch.uint8)
    expected = answers(args.weights, x, "bilinear", 0.0)
    print(
        f"{len(x)} images of {x.shape[-1]} pixels, shrunk to {args.size}; "
        "answers that stay the same:"
    )
    for resize, sharpen in WAYS:
        same = (answers(args.weights, small, resize, sharpen) == expected).float().mean()
        shown = f"{100 * float(same):5.1f} %"
        print(f"  resize = {resize:9} sharpen = {sharpen:g}: {shown}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except DpfedError as error:
        sys.exit(f"choose_sharpen: {error}")
