"""MkDocs hook: turn LaTeX between dollar signs into MathML, so that pages need no script.

`$...$` inside a line becomes inline mathematics, `$$...$$` a displayed formula. Code is left alone.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.S)
DISPLAYED = re.compile(r"\$\$(.+?)\$\$", re.S)
INLINE = re.compile(r"(?<![\\$])\$(?!\s)([^$\n]+?)(?<!\s)\$(?!\d)")


def on_page_markdown(markdown: str, **context: Any) -> str:
    """Return the page with every formula outside of code as MathML."""
    if "$" not in markdown:
        return markdown
    parts = CODE.split(markdown)
    for i in range(0, len(parts), 2):
        displayed = DISPLAYED.sub(lambda m: convert(m[1].strip(), display="block"), parts[i])
        # Markdown takes a line that begins with <math> for a block of its own.
        parts[i] = INLINE.sub(lambda m: f"<span>{convert(m[1])}</span>", displayed)
    return "".join(parts)
