"""Fail if a built page would load a font, script, style or picture from another host.

    mkdocs build --strict && python docs/tools/check_site.py site

Links that a reader may follow are allowed; resources that a browser fetches by itself are not.
"""

from __future__ import annotations

import argparse
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

# A browser fetches a <link> only for these relations, not for rel="canonical".
FETCHED_LINKS = {
    "stylesheet",
    "icon",
    "shortcut",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "manifest",
    "modulepreload",
}
SOURCES = {
    "script",
    "img",
    "iframe",
    "source",
    "video",
    "audio",
    "embed",
    "track",
    "input",
    "object",
    "use",
    "image",
}
ELSEWHERE = re.compile(r"^\s*(https?:)?//", re.I)
IN_STYLE = re.compile(
    r"url\(\s*['\"]?\s*((?:https?:)?//[^'\")]+)|@import\s+['\"]((?:https?:)?//[^'\"]+)", re.I
)


class Page(HTMLParser):
    """A parser that collects the resources of other hosts in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        relations = set(given.get("rel", "").lower().split())
        fetched = tag in SOURCES or (tag == "link" and FETCHED_LINKS & relations)
        for name in ("src", "href", "data", "poster", "xlink:href"):
            if fetched and ELSEWHERE.match(given.get(name, "")):
                self.found.append(f"<{tag} {name}={given[name]}>")
        for part in given.get("srcset", "").split(","):
            if ELSEWHERE.match(part):
                self.found.append(f"<{tag} srcset={part.strip()}>")
        self.found += [
            f"style of <{tag}>: {address}" for address in in_style(given.get("style", ""))
        ]
        self._style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def handle_data(self, data: str) -> None:
        if self._style:
            self.found += [f"<style>: {address}" for address in in_style(data)]


def in_style(text: str) -> list[str]:
    return [url or imported for url, imported in IN_STYLE.findall(text)]


def elsewhere(path: Path) -> list[str]:
    """Return the resources that this file makes a browser fetch from another host."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".css":
        return in_style(text)
    page = Page()
    page.feed(text)
    return page.found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("site", type=Path, help="folder that mkdocs has built")
    site = parser.parse_args().site
    files = [path for kind in ("*.html", "*.css", "*.svg") for path in sorted(site.rglob(kind))]
    if not any(path.suffix == ".html" for path in files):
        print(f"{site} holds no pages: build them first")
        return 1
    bad = [(path, address) for path in files for address in elsewhere(path)]
    for path, address in bad:
        print(f"{path}: {address}")
    print(f"{len(files)} files looked at, {len(bad)} resources from elsewhere")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
