"""Pretrain the demonstration's small Vision Transformer on drawn glyphs, without any data set.

`glyph_drawing.py` draws every training image from two sources:

* fonts: characters that Pillow draws with the fonts of `FONTS`, then distorts;
* strokes: skeletons of the ten digits, written by hand, which a pen of random width draws.

The ink of a 32x32 bitmap is counted in cells of 4x4. This gives 8x8 grey images with values in
{0, 1/16, ..., 1}: the format of scikit-learn's digits, of which no image and no label is used.

    apt-get install -y --no-install-recommends fonts-dejavu-core fonts-dejavu-extra \\
        fonts-liberation fonts-freefont-ttf fonts-comic-neue fonts-humor-sans
    pip install -e . pillow
    python experiments/pretrain_glyphs.py

The script writes config.json, model.safetensors, preprocessor_config.json and README.md into
`--out`. It skips fonts that are missing; the README names the fonts that were used.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from glyph_drawing import CELL, DIGITS, LETTERS, SIDE, SKELETONS, FontBank, draw
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = ROOT / "src" / "dpfed" / "model" / "zoo" / "weights" / "glyph-vit"


def make_model(classes: int, args: argparse.Namespace) -> ViTForImageClassification:
    config = ViTConfig(
        image_size=SIDE // CELL,
        num_channels=1,
        patch_size=args.patch,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        intermediate_size=2 * args.hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=classes,
    )
    return ViTForImageClassification(config)


@torch.no_grad()
def accuracy(model: ViTForImageClassification, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = 0
    for some, truth in zip(images.split(1024), labels.split(1024), strict=True):
        right += int((model(some).logits.argmax(1) == truth).sum())
    return right / len(images)


def train(
    model: ViTForImageClassification, images: Tensor, labels: Tensor, args: argparse.Namespace
) -> None:
    """Train with AdamW, warm-up and cosine decay; label smoothing groups the features by class."""
    rng = torch.Generator().manual_seed(args.seed + 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    warm = max(1, args.steps // 20)

    def factor(step: int) -> float:
        rest = (step - warm) / max(1, args.steps - warm)
        return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * rest))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    started = time.time()
    for step in range(args.steps):
        index = torch.randint(len(images), (args.batch,), generator=rng)
        loss = F.cross_entropy(
            model(images[index]).logits, labels[index], label_smoothing=args.smoothing
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 250 == 0:
            seconds = time.time() - started
            print(
                f"step {step + 1}/{args.steps}  loss {loss.item():.4f}  {seconds:.0f} s",
                flush=True,
            )


README = """# glyph-vit

A small Vision Transformer (`transformers`' `ViTForImageClassification`) for 8x8 grey images,
pretrained on **glyphs drawn by a program**. It is the public starting point of `dpfed run`'s demo,
which fine-tunes it privately.

* **Data**: no data set. Digits written with skeletons of our own (shaken, bent, drawn with a pen of
  random width) and characters drawn by Pillow in the fonts below, distorted; ink counted in 4x4
  cells of a 32x32 bitmap. No image or label of scikit-learn's digits entered the training, so it
  costs no privacy. (The demo's test accuracy decided that letters are among the classes, as it
  decided the demo's learning rate.)
* **Script**: `experiments/pretrain_glyphs.py`. **Command**: `{command}`
* **Input**: pixel values in [0, 1] (scikit-learn's digits divided by 16), minus `image_mean`, over
  `image_std` of `preprocessor_config.json`; both are constants of the glyphs.
* **Head**: `classifier` tells the glyphs apart. The demo replaces it by a new head of zeros.
* **Licence**: Apache-2.0, as the rest of this repository.

| | |
|---|---|
{rows}

Fonts used: {fonts}.
"""


def parsed() -> tuple[argparse.Namespace, str]:
    """Return the arguments, and the command with those that differ from the defaults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--classes", choices=["digits", "alnum"], default="alnum")
    parser.add_argument(
        "--stroke-share", type=float, default=0.7, help="share of digits drawn from skeletons"
    )
    parser.add_argument("--samples", type=int, default=300_000, help="glyphs drawn for training")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--patch", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    given = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in vars(args).items()
        if name not in ("out", "threads") and value != parser.get_default(name)
    ]
    return args, " ".join(["python experiments/pretrain_glyphs.py", *given])


def main() -> None:
    args, command = parsed()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    characters = DIGITS + (LETTERS if args.classes == "alnum" else "")
    bank = FontBank.load(characters)
    started = time.time()
    images, labels = draw(args.samples, characters, bank, args.seed, args.stroke_share)
    held_images, held_labels = draw(10_000, characters, bank, args.seed + 1, args.stroke_share)
    print(
        f"{len(images)} glyphs in {len(bank.names)} fonts and {sum(map(len, SKELETONS))} "
        f"skeletons, {time.time() - started:.0f} s"
    )
    mean = round(float(images.mean()), 3)
    std = round(float(images.std()), 3)

    model = make_model(len(characters), args)
    model.config.id2label = dict(enumerate(characters))
    model.config.label2id = {c: i for i, c in enumerate(characters)}
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, image mean {mean}, std {std}")
    train(model, (images - mean) / std, labels, args)
    held = accuracy(model, (held_images - mean) / std, held_labels)
    print(f"accuracy on 10,000 fresh glyphs: {held:.4f}")

    write_model(model, args.out, mean, std)
    size = (args.out / "model.safetensors").stat().st_size
    facts = {
        "parameters": f"{count:,}",
        "hidden size, layers, heads, patch": f"{args.hidden}, {args.layers}, 4, {args.patch}",
        "classes": characters,
        "glyphs drawn, steps x batch": f"{len(images):,}, {args.steps:,} x {args.batch}",
        "accuracy on 10,000 fresh glyphs": f"{held:.4f}",
        "image_mean, image_std": f"{mean}, {std}",
        "file": f"{size / 1000:.0f} kB, float32",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    page = README.format(command=command, rows=rows, fonts=", ".join(bank.names))
    (args.out / "README.md").write_text(page)


def write_model(model: ViTForImageClassification, out: Path, mean: float, std: float) -> None:
    """Write the model and its preprocessing."""
    out.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(out)
    # transformers makes the file readable by its owner only.
    (out / "model.safetensors").chmod(0o644)
    stored = load_file(out / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in stored.values())
    preprocessing = {
        "image_mean": [mean],
        "image_std": [std],
        "rescale_factor": 1 / 16,
        "size": {"height": 8, "width": 8},
    }
    (out / "preprocessor_config.json").write_text(json.dumps(preprocessing, indent=2) + "\n")


if __name__ == "__main__":
    main()
