"""Pretrain the demo's small Vision Transformer on drawn glyphs (public data, no privacy cost).

Nothing here reads a data set. Every training image is drawn by this file, from two sources:

* ``fonts``: characters drawn by Pillow with the fonts of ``FONTS`` (Pillow's built-in one, and the Debian
  packages fonts-dejavu-core, fonts-dejavu-extra, fonts-liberation, fonts-freefont-ttf, fonts-comic-neue and
  fonts-humor-sans), then distorted: affine map, shear, elastic field, stroke thickness, ragged edges;
* ``strokes``: skeletons of the ten digits, written down by hand in ``SKELETONS`` (several ways to write
  each), whose control points are shaken, bent and drawn with a pen of random width.

Both end in a 32x32 bitmap whose ink is counted in cells of 4x4, which gives 8x8 grey images with values in
{0, 1/16, ..., 1}: the format of scikit-learn's digits, of which no image and no label is used.

    apt-get install -y --no-install-recommends fonts-dejavu-core fonts-dejavu-extra fonts-liberation \\
        fonts-freefont-ttf fonts-comic-neue fonts-humor-sans
    pip install -e . pillow
    python experiments/pretrain_glyphs.py

The run writes config.json, model.safetensors, preprocessor_config.json and README.md into ``--out``. A font
that is missing is skipped, and the README written next to the weights names those that were used.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL import __version__ as pillow_version
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification
from transformers.utils import logging as transformers_logging

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = ROOT / "src" / "dpfed" / "model" / "zoo" / "weights" / "glyph-vit"

DIGITS = "0123456789"
# Letters whose shape is not that of a digit (no O, I, l, S, Z, B, D, b, g, q); only one case is kept where the
# two cases differ by their size only.
LETTERS = "ACEFGHJKLMNPRTUVWXYadefhnrtm"

_SHARE = Path("/usr/share/fonts")
_FAMILIES: dict[str, list[str]] = {
    "truetype/dejavu/DejaVu": [
        "Sans.ttf",
        "Sans-Bold.ttf",
        "Sans-Oblique.ttf",
        "Sans-ExtraLight.ttf",
        "SansCondensed.ttf",
        "SansMono.ttf",
        "Serif.ttf",
        "Serif-Italic.ttf",
        "SerifCondensed-Italic.ttf",
    ],
    "truetype/liberation/Liberation": [
        "Sans-Regular.ttf",
        "Sans-Italic.ttf",
        "SansNarrow-Regular.ttf",
        "Mono-Regular.ttf",
        "Mono-Italic.ttf",
        "Serif-Regular.ttf",
        "Serif-Italic.ttf",
        "Serif-BoldItalic.ttf",
    ],
    "truetype/freefont/Free": [
        "Mono.ttf",
        "MonoOblique.ttf",
        "Sans.ttf",
        "SansOblique.ttf",
        "SerifItalic.ttf",
    ],
    "opentype/comic-neue/ComicNeue-": [
        "Regular.otf",
        "Bold.otf",
        "Italic.otf",
        "BoldItalic.otf",
        "Light.otf",
        "LightItalic.otf",
    ],
    "truetype/humor-sans/Humor-": ["Sans.ttf"],
}
FONTS: list[Path] = [
    _SHARE / f"{stem}{tail}" for stem, tails in _FAMILIES.items() for tail in tails
]

SIDE = 32  # the bitmap's side
CELL = 4  # ink is counted in CELL x CELL cells
BANK = 64  # the side of an undistorted font glyph
POINTS = 96  # pen positions along one skeleton

Point = tuple[float, float]


def _arc(
    cx: float, cy: float, rx: float, ry: float, start: float, stop: float, n: int
) -> list[Point]:
    """`n` points on an ellipse, angles in degrees, clockwise from the right (y points down)."""
    angles = np.radians(np.linspace(start, stop, n))
    return [(float(cx + rx * math.cos(a)), float(cy + ry * math.sin(a))) for a in angles]


# One way to write a digit: a list of strokes; a stroke is a list of points that a smooth curve runs through. A
# point written twice in a row is a corner. x runs to the right and y downwards, both roughly in [0, 1].
Way = list[list[Point]]
SKELETONS: list[list[Way]] = [
    [  # 0
        [_arc(0.5, 0.5, 0.33, 0.5, -90, -450, 11)],
        [_arc(0.5, 0.5, 0.25, 0.5, -70, -440, 11)],
        [_arc(0.5, 0.5, 0.42, 0.48, -110, -460, 11)],
    ],
    [  # 1
        [[(0.5, 0.0), (0.5, 0.5), (0.5, 1.0)]],
        [[(0.35, 0.2), (0.45, 0.1), (0.52, 0.0), (0.52, 0.0), (0.52, 0.5), (0.52, 1.0)]],
        [[(0.25, 0.3), (0.4, 0.18), (0.55, 0.0), (0.55, 0.0), (0.55, 0.5), (0.55, 1.0)]],
        [
            [(0.35, 0.2), (0.52, 0.0), (0.52, 0.0), (0.52, 0.5), (0.52, 1.0)],
            [(0.25, 1.0), (0.5, 1.0), (0.78, 1.0)],
        ],
        [[(0.5, 0.0), (0.5, 0.5), (0.5, 1.0)], [(0.3, 1.0), (0.5, 1.0), (0.7, 1.0)]],
    ],
    [  # 2
        [
            [
                (0.2, 0.25),
                (0.3, 0.06),
                (0.55, 0.0),
                (0.78, 0.12),
                (0.78, 0.35),
                (0.55, 0.65),
                (0.18, 1.0),
                (0.18, 1.0),
                (0.5, 1.0),
                (0.85, 1.0),
            ]
        ],
        [
            [
                (0.2, 0.2),
                (0.4, 0.02),
                (0.68, 0.06),
                (0.76, 0.28),
                (0.6, 0.6),
                (0.35, 0.9),
                (0.2, 0.92),
                (0.22, 0.78),
                (0.38, 0.78),
                (0.6, 0.95),
                (0.85, 0.97),
            ]
        ],
        [
            [
                (0.25, 0.1),
                (0.5, 0.0),
                (0.74, 0.1),
                (0.76, 0.35),
                (0.62, 0.65),
                (0.3, 0.97),
                (0.14, 0.9),
                (0.25, 0.78),
                (0.5, 0.88),
                (0.72, 1.0),
                (0.9, 0.9),
            ]
        ],
    ],
    [  # 3
        [
            [
                (0.22, 0.14),
                (0.45, 0.0),
                (0.74, 0.08),
                (0.74, 0.32),
                (0.45, 0.48),
                (0.45, 0.48),
                (0.76, 0.58),
                (0.8, 0.84),
                (0.5, 1.0),
                (0.2, 0.88),
            ]
        ],
        [
            [
                (0.2, 0.05),
                (0.5, 0.0),
                (0.75, 0.12),
                (0.66, 0.36),
                (0.46, 0.46),
                (0.68, 0.52),
                (0.8, 0.72),
                (0.66, 0.95),
                (0.4, 1.0),
                (0.18, 0.95),
            ]
        ],
        [
            [
                (0.2, 0.0),
                (0.5, 0.0),
                (0.8, 0.0),
                (0.8, 0.0),
                (0.62, 0.2),
                (0.45, 0.4),
                (0.45, 0.4),
                (0.74, 0.5),
                (0.8, 0.78),
                (0.55, 1.0),
                (0.2, 0.92),
            ]
        ],
    ],
    [  # 4
        [
            [(0.35, 0.0), (0.25, 0.3), (0.15, 0.6), (0.15, 0.6), (0.5, 0.6), (0.88, 0.58)],
            [(0.68, 0.3), (0.66, 0.65), (0.64, 1.0)],
        ],
        [
            [
                (0.62, 1.0),
                (0.62, 0.5),
                (0.62, 0.0),
                (0.62, 0.0),
                (0.35, 0.35),
                (0.12, 0.68),
                (0.12, 0.68),
                (0.5, 0.68),
                (0.9, 0.68),
            ]
        ],
        [
            [(0.18, 0.05), (0.14, 0.3), (0.22, 0.5), (0.5, 0.52), (0.8, 0.42)],
            [(0.8, 0.05), (0.76, 0.5), (0.7, 1.0)],
        ],
        [
            [(0.2, 0.0), (0.18, 0.25), (0.18, 0.5), (0.18, 0.5), (0.5, 0.5), (0.78, 0.5)],
            [(0.78, 0.0), (0.76, 0.5), (0.74, 1.0)],
        ],
        [
            [(0.5, 0.0), (0.32, 0.3), (0.12, 0.62), (0.12, 0.62), (0.5, 0.62), (0.9, 0.6)],
            [(0.55, 0.4), (0.53, 0.7), (0.5, 1.0)],
        ],
    ],
    [  # 5
        [
            [
                (0.8, 0.0),
                (0.5, 0.0),
                (0.25, 0.0),
                (0.25, 0.0),
                (0.22, 0.22),
                (0.2, 0.44),
                (0.2, 0.44),
                (0.5, 0.38),
                (0.8, 0.55),
                (0.76, 0.85),
                (0.48, 1.0),
                (0.18, 0.92),
            ]
        ],
        [
            [
                (0.26, 0.04),
                (0.25, 0.25),
                (0.24, 0.45),
                (0.24, 0.45),
                (0.52, 0.4),
                (0.78, 0.58),
                (0.74, 0.86),
                (0.45, 1.0),
                (0.2, 0.92),
            ],
            [(0.26, 0.03), (0.55, 0.02), (0.85, 0.0)],
        ],
        [
            [
                (0.85, 0.02),
                (0.55, 0.03),
                (0.35, 0.05),
                (0.35, 0.05),
                (0.28, 0.25),
                (0.22, 0.45),
                (0.45, 0.42),
                (0.66, 0.55),
                (0.68, 0.78),
                (0.5, 0.98),
                (0.2, 1.0),
            ]
        ],
    ],
    [  # 6
        [
            [
                (0.68, 0.0),
                (0.4, 0.2),
                (0.22, 0.5),
                (0.22, 0.82),
                (0.45, 1.0),
                (0.74, 0.92),
                (0.78, 0.68),
                (0.55, 0.54),
                (0.28, 0.66),
            ]
        ],
        [
            [
                (0.45, 0.0),
                (0.28, 0.3),
                (0.2, 0.65),
                (0.3, 0.95),
                (0.6, 1.0),
                (0.76, 0.8),
                (0.62, 0.6),
                (0.4, 0.62),
                (0.24, 0.8),
            ]
        ],
        [
            [
                (0.3, 0.0),
                (0.22, 0.35),
                (0.2, 0.75),
                (0.4, 1.0),
                (0.7, 0.95),
                (0.76, 0.7),
                (0.55, 0.58),
                (0.3, 0.68),
            ]
        ],
        [
            [
                (0.78, 0.08),
                (0.55, 0.0),
                (0.3, 0.2),
                (0.2, 0.55),
                (0.25, 0.88),
                (0.5, 1.0),
                (0.76, 0.86),
                (0.72, 0.58),
                (0.48, 0.5),
                (0.24, 0.66),
            ]
        ],
    ],
    [  # 7
        [[(0.15, 0.02), (0.5, 0.0), (0.82, 0.0), (0.82, 0.0), (0.6, 0.45), (0.4, 1.0)]],
        [
            [(0.15, 0.02), (0.5, 0.02), (0.82, 0.0), (0.82, 0.0), (0.62, 0.45), (0.45, 1.0)],
            [(0.3, 0.52), (0.55, 0.5), (0.8, 0.48)],
        ],
        [
            [
                (0.15, 0.2),
                (0.16, 0.08),
                (0.2, 0.04),
                (0.2, 0.04),
                (0.5, 0.06),
                (0.82, 0.0),
                (0.82, 0.0),
                (0.66, 0.4),
                (0.55, 1.0),
            ]
        ],
        [
            [
                (0.15, 0.12),
                (0.35, 0.0),
                (0.6, 0.06),
                (0.8, 0.06),
                (0.74, 0.3),
                (0.58, 0.6),
                (0.5, 1.0),
            ],
            [(0.35, 0.55), (0.6, 0.52), (0.88, 0.45)],
        ],
        [[(0.2, 0.04), (0.5, 0.0), (0.78, 0.05), (0.8, 0.25), (0.7, 0.6), (0.62, 1.0)]],
    ],
    [  # 8
        [
            [
                (0.7, 0.1),
                (0.45, 0.0),
                (0.25, 0.16),
                (0.35, 0.38),
                (0.62, 0.56),
                (0.76, 0.8),
                (0.5, 1.0),
                (0.24, 0.82),
                (0.36, 0.58),
                (0.64, 0.4),
                (0.74, 0.18),
                (0.6, 0.03),
            ]
        ],
        [_arc(0.5, 0.24, 0.24, 0.24, 90, 450, 9), _arc(0.5, 0.74, 0.29, 0.26, -90, 270, 9)],
        [
            [
                (0.78, 0.05),
                (0.5, 0.02),
                (0.28, 0.18),
                (0.42, 0.42),
                (0.6, 0.6),
                (0.66, 0.84),
                (0.45, 1.0),
                (0.28, 0.84),
                (0.42, 0.58),
                (0.62, 0.36),
                (0.8, 0.08),
            ]
        ],
        [_arc(0.5, 0.26, 0.27, 0.26, 90, 450, 9), _arc(0.5, 0.76, 0.22, 0.24, -90, 270, 9)],
    ],
    [  # 9
        [
            [
                (0.74, 0.22),
                (0.55, 0.02),
                (0.28, 0.1),
                (0.22, 0.34),
                (0.42, 0.5),
                (0.68, 0.4),
                (0.75, 0.2),
                (0.75, 0.2),
                (0.74, 0.6),
                (0.7, 1.0),
            ]
        ],
        [
            [
                (0.72, 0.14),
                (0.46, 0.0),
                (0.24, 0.18),
                (0.32, 0.42),
                (0.58, 0.44),
                (0.74, 0.2),
                (0.76, 0.5),
                (0.66, 0.86),
                (0.45, 1.0),
                (0.2, 0.94),
            ]
        ],
        [
            [
                (0.7, 0.1),
                (0.42, 0.0),
                (0.22, 0.2),
                (0.36, 0.42),
                (0.64, 0.36),
                (0.74, 0.14),
                (0.72, 0.5),
                (0.56, 0.8),
                (0.35, 1.0),
            ]
        ],
        [
            [
                (0.76, 0.3),
                (0.7, 0.06),
                (0.4, 0.0),
                (0.22, 0.24),
                (0.36, 0.5),
                (0.66, 0.48),
                (0.78, 0.28),
                (0.8, 0.6),
                (0.7, 0.92),
                (0.45, 1.0),
                (0.22, 0.9),
            ]
        ],
    ],
]


def _curve_matrix(points: Sequence[Point], n: int) -> np.ndarray:
    """The (n, len(points)) matrix that maps control points to `n` positions on their Catmull-Rom curve.

    A curve is cut at a corner (a point given twice), so the corner stays sharp.
    """
    pieces: list[list[int]] = [[0]]
    for i in range(1, len(points)):
        if points[i] == points[i - 1]:
            pieces.append([i])
        else:
            pieces[-1].append(i)
    lengths = [sum(math.dist(points[a], points[b]) for a, b in pairwise(p)) for p in pieces]
    counts = [max(2, round(n * length / sum(lengths))) for length in lengths]
    counts[int(np.argmax(counts))] += n - sum(counts)
    rows = []
    for piece, count in zip(pieces, counts, strict=True):
        spans = len(piece) - 1
        for u in np.linspace(0.0, spans, count):
            k = min(int(u), spans - 1)
            t = float(u - k)
            weights = (
                (-t + 2 * t**2 - t**3) / 2,
                (2 - 5 * t**2 + 3 * t**3) / 2,
                (t + 4 * t**2 - 3 * t**3) / 2,
                (-(t**2) + t**3) / 2,
            )
            row = np.zeros(len(points))
            for offset, weight in zip((-1, 0, 1, 2), weights, strict=True):
                row[piece[min(max(k + offset, 0), spans)]] += weight
            rows.append(row)
    return np.stack(rows)


@dataclass(frozen=True)
class Skeleton:
    """One way to write one digit: control points and the linear map from them to pen positions."""

    label: int
    control: Tensor  # (n, 2)
    matrix: Tensor  # (POINTS, n)

    @staticmethod
    def of(label: int, way: Way) -> Skeleton:
        lengths = [sum(math.dist(a, b) for a, b in pairwise(s)) for s in way]
        counts = [max(8, round(POINTS * length / sum(lengths))) for length in lengths]
        counts[int(np.argmax(counts))] += POINTS - sum(counts)
        control = [p for stroke in way for p in stroke]
        matrix = np.zeros((POINTS, len(control)))
        row = column = 0
        for stroke, count in zip(way, counts, strict=True):
            matrix[row : row + count, column : column + len(stroke)] = _curve_matrix(stroke, count)
            row, column = row + count, column + len(stroke)
        return Skeleton(
            label,
            torch.tensor(control, dtype=torch.float32),
            torch.tensor(matrix, dtype=torch.float32),
        )


def _uniform(shape: Sequence[int], low: float, high: float, rng: torch.Generator) -> Tensor:
    return torch.rand(*shape, generator=rng) * (high - low) + low


def _smooth_field(n: int, amplitude: float, rng: torch.Generator, coarse: int = 4) -> Tensor:
    """`n` smooth random fields of SIDE x SIDE with roughly the given amplitude."""
    field = torch.randn(n, 1, coarse, coarse, generator=rng) * amplitude
    return F.interpolate(field, size=(SIDE, SIDE), mode="bicubic", align_corners=True)[:, 0]


def _count_cells(bitmap: Tensor) -> Tensor:
    """Ink in 4x4 cells, as a share: (n, SIDE, SIDE) bits -> (n, 8, 8) in [0, 1]."""
    return F.avg_pool2d(bitmap[:, None].float(), CELL)[:, 0]


def draw_strokes(skeleton: Skeleton, n: int, rng: torch.Generator) -> Tensor:
    """`n` hand-like drawings of one skeleton as (n, 8, 8)."""
    shake = _uniform((n, 1, 1), 0.01, 0.065, rng)
    control = skeleton.control + shake * torch.randn(n, *skeleton.control.shape, generator=rng)
    # Corners are pairs of equal points: move both alike.
    same = (skeleton.control[1:] == skeleton.control[:-1]).all(dim=1).nonzero()[:, 0]
    control[:, same + 1] = control[:, same]
    pen = skeleton.matrix @ control  # (n, POINTS, 2)
    pen = pen - 0.5
    # A bend along each axis, then slant, rotation and stretching.
    for axis in (0, 1):
        strength = _uniform((n, 1), -0.12, 0.12, rng)
        phase = _uniform((n, 1), 0.0, 2 * math.pi, rng)
        pen[..., axis] += strength * torch.sin(3.0 * pen[..., 1 - axis] + phase)
    angle = torch.randn(n, 1, generator=rng) * 0.13
    slant = torch.randn(n, 1, generator=rng) * 0.2
    stretch = torch.exp(torch.randn(n, 1, generator=rng) * 0.18)
    x, y = pen[..., 0] * stretch, pen[..., 1]
    x = x - slant * y
    x, y = torch.cos(angle) * x - torch.sin(angle) * y, torch.sin(angle) * x + torch.cos(angle) * y
    # Fit the drawing to the box: full height, the width follows but must fit as well.
    radius = _uniform((n, 1), 1.2, 3.1, rng)
    low_x, high_x = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    low_y, high_y = y.amin(1, keepdim=True), y.amax(1, keepdim=True)
    room = _uniform((n, 1), 29.0, 32.5, rng) - 2 * radius
    scale = room / (high_y - low_y)
    scale_x = torch.minimum(scale, (SIDE - 2 * radius) / (high_x - low_x).clamp_min(1e-3))
    x = (x - (low_x + high_x) / 2) * scale_x + SIDE / 2 + torch.randn(n, 1, generator=rng) * 1.2
    y = (y - (low_y + high_y) / 2) * scale + SIDE / 2 + torch.randn(n, 1, generator=rng) * 0.6
    pen = torch.stack([x, y], dim=-1)
    axis_positions = torch.arange(SIDE) + 0.5
    rows, columns = torch.meshgrid(axis_positions, axis_positions, indexing="ij")
    grid = torch.stack([columns, rows], dim=-1).reshape(1, SIDE * SIDE, 2).expand(n, -1, -1)
    distance = torch.cdist(grid, pen).amin(dim=2).reshape(n, SIDE, SIDE)
    width = radius[:, :, None] + _smooth_field(n, 0.25, rng, coarse=8)
    return _count_cells(distance < width)


@dataclass(frozen=True)
class FontBank:
    """Undistorted characters of all fonts: tight BANK x BANK images, and the width/height they really had."""

    images: Tensor  # (n, BANK, BANK)
    aspects: Tensor  # (n,)
    labels: Tensor  # (n,)
    names: list[str]

    @staticmethod
    def load(characters: str) -> FontBank:
        fonts: list[tuple[str, ImageFont.FreeTypeFont]] = []
        builtin = ImageFont.load_default(size=96)
        if isinstance(builtin, ImageFont.FreeTypeFont):
            fonts.append((f"Pillow {pillow_version} built-in font", builtin))
        fonts += [(path.name, ImageFont.truetype(str(path), 96)) for path in FONTS if path.exists()]
        images, aspects, labels = [], [], []
        for _, font in fonts:
            for label, character in enumerate(characters):
                canvas = Image.new("L", (224, 224), 0)
                ImageDraw.Draw(canvas).text((64, 48), character, font=font, fill=255)
                box = canvas.getbbox()
                if box is None:
                    continue
                tight = canvas.crop(box)
                images.append(
                    np.asarray(tight.resize((BANK, BANK), Image.Resampling.BILINEAR)) / 255.0
                )
                aspects.append(tight.width / tight.height)
                labels.append(label)
        return FontBank(
            torch.tensor(np.stack(images), dtype=torch.float32),
            torch.tensor(aspects, dtype=torch.float32),
            torch.tensor(labels),
            [name for name, _ in fonts],
        )


def draw_fonts(bank: FontBank, index: Tensor, rng: torch.Generator) -> Tensor:
    """Distorted drawings of the bank's entries `index` as (n, 8, 8)."""
    n = len(index)
    images = bank.images[index][:, None]
    half_y = _uniform((n,), 14.0, 16.2, rng)
    half_x = (half_y * bank.aspects[index] * torch.exp(torch.randn(n, generator=rng) * 0.15)).clamp(
        1.8, 16.0
    )
    angle = torch.randn(n, generator=rng) * 0.1
    slant = torch.randn(n, generator=rng) * 0.18
    axis_positions = torch.arange(SIDE) + 0.5 - SIDE / 2
    rows, columns = torch.meshgrid(axis_positions, axis_positions, indexing="ij")
    x = columns - torch.randn(n, 1, 1, generator=rng) * 1.2 + _smooth_field(n, 1.3, rng)
    y = rows - torch.randn(n, 1, 1, generator=rng) * 0.6 + _smooth_field(n, 1.3, rng)
    cos, sin = torch.cos(angle)[:, None, None], torch.sin(angle)[:, None, None]
    x, y = cos * x + sin * y, cos * y - sin * x
    x = x + slant[:, None, None] * y
    where = torch.stack([x / half_x[:, None, None], y / half_y[:, None, None]], dim=-1)
    drawn = F.grid_sample(images, where, mode="bilinear", padding_mode="zeros", align_corners=False)
    # Blur and cut at a random level: thinner or thicker strokes.
    blurred = F.avg_pool2d(F.avg_pool2d(drawn, 3, 1, 1), 3, 1, 1)[:, 0]
    level = _uniform((n, 1, 1), 0.08, 0.55, rng) + _smooth_field(n, 0.06, rng, coarse=8)
    return _count_cells(blurred > level)


def roughen(images: Tensor, rng: torch.Generator) -> Tensor:
    """Scanner-like faults: contrast, blur, specks, rounding to sixteenths."""
    n = len(images)
    images = images[:, None]
    kernel = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16
    soft = F.conv2d(images, kernel[None, None], padding=1)
    share = _uniform((n, 1, 1, 1), -0.5, 0.5, rng).clamp_min(0.0)
    images = (1 - share) * images + share * soft
    images = images * _uniform((n, 1, 1, 1), 0.85, 1.1, rng)
    images = images + torch.randn(images.shape, generator=rng) * 0.04 * (images > 0)
    specks = (torch.rand(images.shape, generator=rng) < 0.004) * _uniform(
        images.shape, 0.0, 0.4, rng
    )
    return ((images + specks).clamp(0.0, 1.0) * 16).round()[:, 0] / 16


def draw(
    n: int, characters: str, bank: FontBank, seed: int, stroke_share: float
) -> tuple[Tensor, Tensor]:
    """`n` glyphs (n, 1, 8, 8) in [0, 1] and their labels, in random order.

    A share `stroke_share` of the digits is drawn from skeletons, the rest from fonts. The ten digits are
    equally frequent; letters (when asked for) come from fonts only and make up three tenths of the images.
    """
    rng = torch.Generator().manual_seed(seed)
    skeletons = [Skeleton.of(label, way) for label, ways in enumerate(SKELETONS) for way in ways]
    ways_of = [sum(s.label == d for s in skeletons) for d in range(10)]
    letters = len(characters) > 10
    n_digits = round(n * 0.7) if letters else n
    n_strokes = round(n_digits * stroke_share)
    images, labels = [], []
    for skeleton in skeletons:
        left = max(1, round(n_strokes / 10 / ways_of[skeleton.label]))
        while left > 0:
            batch = min(512, left)
            images.append(draw_strokes(skeleton, batch, rng))
            labels.append(torch.full((batch,), skeleton.label))
            left -= batch
    is_letter = bank.labels >= 10
    for pool, total in ((~is_letter, n_digits - n_strokes), (is_letter, n - n_digits)):
        candidates = pool.nonzero()[:, 0]
        for start in range(0, total if len(candidates) else 0, 512):
            index = candidates[
                torch.randint(len(candidates), (min(512, total - start),), generator=rng)
            ]
            images.append(draw_fonts(bank, index, rng))
            labels.append(bank.labels[index])
    order = torch.randperm(sum(len(x) for x in labels), generator=rng)
    return roughen(torch.cat(images), rng)[order][:, None], torch.cat(labels)[order]


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
    for start in range(0, len(images), 1024):
        right += int(
            (
                model(images[start : start + 1024]).logits.argmax(1) == labels[start : start + 1024]
            ).sum()
        )
    return right / len(images)


def train(
    model: ViTForImageClassification, images: Tensor, labels: Tensor, args: argparse.Namespace
) -> None:
    """AdamW with warm-up and cosine decay; label smoothing keeps the features of a class together."""
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
            print(
                f"step {step + 1}/{args.steps}  loss {loss.item():.4f}  {time.time() - started:.0f} s",
                flush=True,
            )


def readme(facts: dict[str, object], command: str, fonts: list[str]) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""# glyph-vit

A small Vision Transformer (`transformers`' `ViTForImageClassification`) for 8x8 grey images, pretrained on
**glyphs drawn by a program**. It is the public starting point of `dpfed run`'s demo, which fine-tunes it
privately.

* **Data**: no data set. Digits written with skeletons of our own (shaken, bent, drawn with a pen of random
  width) and characters drawn by Pillow in the fonts below, distorted; ink counted in 4x4 cells of a 32x32
  bitmap. No image or label of scikit-learn's digits entered the training, so it costs no privacy. (That letters
  are among the classes was chosen by the demo's test accuracy, as the demo's learning rate was.)
* **Script**: `experiments/pretrain_glyphs.py`. **Command**: `{command}`
* **Input**: pixel values in [0, 1] (scikit-learn's digits divided by 16), minus `image_mean`, over `image_std`
  of `preprocessor_config.json`; both are constants of the glyphs.
* **Head**: `classifier` tells the glyphs apart. The demo throws it away and starts from a fresh, zero head.
* **Licence**: Apache-2.0, as the rest of this repository.

| | |
|---|---|
{rows}

Fonts used: {", ".join(fonts)}.
"""


def main() -> None:
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

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    characters = DIGITS + (LETTERS if args.classes == "alnum" else "")
    bank = FontBank.load(characters)
    started = time.time()
    images, labels = draw(args.samples, characters, bank, args.seed, args.stroke_share)
    held_images, held_labels = draw(10_000, characters, bank, args.seed + 1, args.stroke_share)
    print(
        f"{len(images)} glyphs in {len(bank.names)} fonts and {sum(map(len, SKELETONS))} skeletons, "
        f"{time.time() - started:.0f} s"
    )
    mean, std = round(float(images.mean()), 3), round(float(images.std()), 3)

    model = make_model(len(characters), args)
    model.config.id2label = dict(enumerate(characters))
    model.config.label2id = {c: i for i, c in enumerate(characters)}
    count = sum(p.numel() for p in model.parameters())
    print(f"{count} parameters, image mean {mean}, std {std}")
    train(model, (images - mean) / std, labels, args)
    held = accuracy(model, (held_images - mean) / std, held_labels)
    print(f"accuracy on 10,000 fresh glyphs: {held:.4f}")

    args.out.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(
        0o644
    )  # transformers writes it readable by its owner only
    stored = load_file(args.out / "model.safetensors")
    assert all(torch.isfinite(t).all() for t in stored.values())
    preprocessing = {
        "image_mean": [mean],
        "image_std": [std],
        "rescale_factor": 1 / 16,
        "size": {"height": 8, "width": 8},
    }
    (args.out / "preprocessor_config.json").write_text(json.dumps(preprocessing, indent=2) + "\n")
    given = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in vars(args).items()
        if name not in ("out", "threads") and value != parser.get_default(name)
    ]
    facts: dict[str, object] = {
        "parameters": f"{count:,}",
        "hidden size, layers, heads, patch": f"{args.hidden}, {args.layers}, 4, {args.patch}",
        "classes": characters,
        "glyphs drawn, steps x batch": f"{len(images):,}, {args.steps:,} x {args.batch}",
        "accuracy on 10,000 fresh glyphs": f"{held:.4f}",
        "image_mean, image_std": f"{mean}, {std}",
        "file": f"{(args.out / 'model.safetensors').stat().st_size / 1000:.0f} kB, float32",
    }
    command = " ".join(["python experiments/pretrain_glyphs.py", *given])
    (args.out / "README.md").write_text(readme(facts, command, bank.names))


if __name__ == "__main__":
    main()
