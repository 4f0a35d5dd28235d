"""Draw 8x8 grey glyphs from skeletons and fonts; no data set is read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL import __version__ as pillow_version
from torch import Tensor
from torch.nn import functional as F

DIGITS = "0123456789"
# Letters that look unlike every digit. If the two cases differ only in size, one of them is here.
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

# Side of a bitmap, whose ink is counted in CELL x CELL cells.
SIDE = 32
CELL = 4
# Side of an undistorted font glyph.
BANK = 64
# Number of pen positions along one skeleton.
POINTS = 96

Point = tuple[float, float]
# One way to write a digit: strokes of points that a smooth curve runs through. A point given twice
# is a corner. x runs to the right and y downwards, both roughly in [0, 1].
Way = list[list[Point]]


class Ellipse(NamedTuple):
    """Centre, radii, first and last angle, and number of points of an arc."""

    cx: float
    cy: float
    rx: float
    ry: float
    start: float
    stop: float
    n: int


def _arc(e: Ellipse) -> list[Point]:
    """Return `n` points on an ellipse; angles in degrees, clockwise from the right."""
    angles = np.radians(np.linspace(e.start, e.stop, e.n))
    return [(float(e.cx + e.rx * math.cos(a)), float(e.cy + e.ry * math.sin(a))) for a in angles]


def read_skeletons() -> list[list[Way]]:
    """Return the ways to write each digit; {"arc": [...]} has the arguments of `_arc`."""
    stored = json.loads(Path(__file__).with_name("glyph_skeletons.json").read_text("utf-8"))

    def points(stroke: Any) -> list[Point]:
        if isinstance(stroke, dict):
            return _arc(Ellipse(*stroke["arc"]))
        return [(x, y) for x, y in stroke]

    return [[[points(stroke) for stroke in way] for way in ways] for ways in stored]


SKELETONS = read_skeletons()


def _curve_matrix(points: Sequence[Point], n: int) -> np.ndarray:
    """Return the matrix from control points to `n` positions on their Catmull-Rom curve.

    A curve ends at a corner (a point given twice), so the corner stays sharp.
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
    """Return `n` smooth random fields of SIDE x SIDE with roughly the given amplitude."""
    field = torch.randn(n, 1, coarse, coarse, generator=rng) * amplitude
    return F.interpolate(field, size=(SIDE, SIDE), mode="bicubic", align_corners=True)[:, 0]


def _count_cells(bitmap: Tensor) -> Tensor:
    """Return the share of ink in 4x4 cells: (n, SIDE, SIDE) bits -> (n, 8, 8) in [0, 1]."""
    return F.avg_pool2d(bitmap[:, None].float(), CELL)[:, 0]


def draw_strokes(skeleton: Skeleton, n: int, rng: torch.Generator) -> Tensor:
    """Return `n` hand-like drawings of one skeleton as (n, 8, 8)."""
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
    """Undistorted characters of all fonts: cropped BANK x BANK images and their aspect ratios."""

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
    """Return distorted drawings of the bank's entries `index` as (n, 8, 8)."""
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
    """Add a scanner's faults: contrast, blur, specks, rounding to sixteenths."""
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
    """Return `n` glyphs (n, 1, 8, 8) in [0, 1] and their labels, in random order.

    A share `stroke_share` of the digits is drawn from skeletons, the rest from fonts. The ten
    digits are equally frequent. Letters come from fonts only and are three tenths of the images.
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
