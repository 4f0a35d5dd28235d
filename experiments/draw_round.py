"""Draw the picture of the home page: one round, with everything that leaves a client.

python experiments/draw_round.py           write docs/images/round-light.svg and -dark.svg
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
COLOURS = {
    "light": {"ink": "#1f2328", "soft": "#57606a", "stays": "#00785A", "leaves": "#0072B2"},
    "dark": {"ink": "#f0f6fc", "soft": "#9da7b1", "stays": "#33C79A", "leaves": "#56B4E9"},
}
SECONDS_OF_A_STEP = 2.0
TITLE = "One round: the model goes to the client; gradients are clipped and noised there"


@dataclass(frozen=True)
class Step:
    """One step of a round.

    number  its place in the round, from 1
    text    lines of text in its box
    at      left upper corner of the box
    kind    "stays" for steps inside a client, "leaves" for messages
    """

    number: int
    text: tuple[str, ...]
    at: tuple[int, int]
    kind: str


STEPS = (
    Step(1, ("server sends", "the model θ"), (12, 116), "leaves"),
    Step(2, ("gradient of", "each record"), (210, 70), "stays"),
    Step(3, ("clip each", "to norm C"), (352, 70), "stays"),
    Step(4, ("sum, and add", "noise σC"), (494, 70), "stays"),
    Step(5, ("optimizer step", "on θ"), (352, 166), "stays"),
    Step(6, ("client sends its", "noised change Δ"), (672, 116), "leaves"),
)
BOX = (130, 60)
ARROWS = (
    "M144 146 H194",
    "M342 100 H350",
    "M484 100 H492",
    "M558 132 V196 H486",
    "M350 196 H274 V134",
    "M638 146 H670",
)


def picture(colours: dict[str, str]) -> str:
    """Return the picture as SVG, in the colours of one theme."""
    period = SECONDS_OF_A_STEP * len(STEPS)
    share = 100 / len(STEPS)
    glow = f".glow{{animation:on {period:g}s infinite}}"
    lit = f"0%,{share:.1f}%{{fill-opacity:.28}}"
    unlit = f"{share + 4:.1f}%,100%{{fill-opacity:0}}"
    ink = colours["ink"]
    soft = colours["soft"]
    style = "".join(
        (
            "text{font:14px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:" + ink + "}",
            ".soft{fill:" + soft + ";font-size:13px}.box{fill:none;stroke-width:2}",
            ".stays{stroke:" + colours["stays"] + "}.leaves{stroke:" + colours["leaves"] + "}",
            ".arrow{fill:none;stroke:" + soft + ";marker-end:url(#head)}",
            "@media (prefers-reduced-motion:no-preference){" + glow + "}",
            "@keyframes on{" + lit + unlit + "}",
        )
    )
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 814 300" role="img">',
        f"<title>{TITLE}</title><style>{style}</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        f'<path d="M0 0L6 3L0 6z" fill="{colours["soft"]}"/></marker></defs>',
        f'<rect x="196" y="34" width="442" height="226" rx="10" class="box" '
        f'stroke="{colours["soft"]}" stroke-dasharray="6 5"/>',
        '<text x="212" y="56" class="soft">client: records and green steps stay here</text>',
        '<text x="352" y="250" class="soft">K times in a round</text>',
        '<text x="12" y="284" class="soft">Blue leaves a machine. The server averages the changes '
        "of all clients. The ledger is charged before step 6.</text>",
    ]
    parts += [f'<path class="arrow" d="{path}"/>' for path in ARROWS]
    for step in STEPS:
        parts += _box(step, colours)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _box(step: Step, colours: dict[str, str]) -> list[str]:
    x, y = step.at
    width, height = BOX
    size = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="8"'
    delay = SECONDS_OF_A_STEP * (step.number - 1)
    first, second = step.text
    return [
        f'<rect {size} class="glow" fill="{colours[step.kind]}" fill-opacity="0" '
        f'style="animation-delay:{delay:g}s"/>',
        f'<rect {size} class="box {step.kind}"/>',
        f'<text x="{x + 8}" y="{y + 25}"><tspan font-weight="600">{step.number}</tspan> '
        f"{first}</text>",
        f'<text x="{x + 8}" y="{y + 46}">{second}</text>',
    ]


def main() -> None:
    for theme, colours in COLOURS.items():
        path = IMAGES / f"round-{theme}.svg"
        path.write_text(picture(colours), encoding="utf-8")


if __name__ == "__main__":
    main()
