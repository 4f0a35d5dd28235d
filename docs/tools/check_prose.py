"""Check that every hand-written page can be read at the first reading.

    python docs/tools/check_prose.py           print the pages that break a limit
    python docs/tools/check_prose.py --all     print the figures of every page

The limits: sentences of at most 18 words on average, at most 5 % of them over 35 words, no line of
prose over 120 columns, and no sentence that begins like a riddle ("What ...", "Whether ...").
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEAN_WORDS = 18.0
LONG_SENTENCE = 35
LONG_SHARE = 0.05
COLUMNS = 120
FORBIDDEN = re.compile(r"^(What|Whether|Who|Whose|Which|Of|The same)\b")
# Parts of a page that are not prose: code, tables, comments, headings, tags.
NOT_PROSE = re.compile(
    r"^```.*?^```|<!--.*?-->|^\|[^\n]*$|^#[^\n]*$|^\s*!\[[^\n]*$|<[^>\n]+>|^\[[^\]\n]*\]:[^\n]*$"
    r"|^---\n.*?^---$|\$\$.*?\$\$",
    re.S | re.M,
)
# The output of a command, which make_docs.py writes.
OUTPUT = re.compile(r"^<!-- output of: [^\n]*\n```.*?^```", re.S | re.M)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
BREAK = re.compile(r"(?<=[.!?])\s+|:\n|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+")


@dataclass(frozen=True)
class Figures:
    """The figures of one page.

    words      words of each sentence
    wide       numbers of the lines of prose that are too wide
    forbidden  sentences that begin like a riddle
    """

    words: tuple[int, ...]
    wide: tuple[int, ...]
    forbidden: tuple[str, ...]

    @property
    def mean(self) -> float:
        return sum(self.words) / max(1, len(self.words))

    @property
    def long_share(self) -> float:
        return sum(n > LONG_SENTENCE for n in self.words) / max(1, len(self.words))

    @property
    def faults(self) -> list[str]:
        """Sentences that name each limit that the page breaks."""
        found = []
        if self.mean > MEAN_WORDS:
            found.append(f"sentences have {self.mean:.1f} words on average, over {MEAN_WORDS:g}")
        if self.long_share > LONG_SHARE:
            found.append(f"{self.long_share:.0%} of the sentences have over {LONG_SENTENCE} words")
        if self.wide:
            found.append(f"lines over {COLUMNS} columns: {', '.join(map(str, self.wide[:8]))}")
        found += [f"a sentence begins like a riddle: {text[:60]}" for text in self.forbidden]
        return found


def figures(text: str) -> Figures:
    """Return the figures of a page of Markdown."""
    prose = LINK.sub(r"\1", NOT_PROSE.sub("", text))
    found = [part.split() for part in BREAK.split(prose)]
    sentences = [words for words in found if len(words) > 2]
    forbidden = [s for words in sentences if FORBIDDEN.match(s := " ".join(words).lstrip("-*_> "))]
    return Figures(tuple(len(words) for words in sentences), tuple(_wide(text)), tuple(forbidden))


def _wide(text: str) -> list[int]:
    """Return the numbers of too wide lines.

    Tables, pictures, comments and the output of commands cannot be wrapped.
    """
    text = OUTPUT.sub(lambda block: "\n" * block[0].count("\n"), text)
    fixed = re.compile(r"^\s*(\||!\[|<|\[[^\]]*\]:)")
    lines = enumerate(text.splitlines(), 1)
    return [i for i, line in lines if len(line) > COLUMNS and not fixed.match(line)]


def hand_written(root: Path) -> list[Path]:
    """Return the pages that people write; generated ones say so in their first line."""
    pages = [root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    pages += sorted((root / "docs").rglob("*.md"))
    return [page for page in pages if not _is_generated(page)]


def _is_generated(page: Path) -> bool:
    first = page.read_text(encoding="utf-8").splitlines()[:3]
    return any(line.startswith(("<!-- made by", "<!-- written by")) for line in first)


def main(words: Sequence[str]) -> int:
    broken = 0
    for page in hand_written(ROOT):
        found = figures(page.read_text(encoding="utf-8"))
        name = page.relative_to(ROOT)
        if "--all" in words:
            print(f"{name}: {found.mean:.1f} words, {found.long_share:.1%} long")
        for fault in found.faults:
            print(f"{name}: {fault}", file=sys.stderr)
        broken += bool(found.faults)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
