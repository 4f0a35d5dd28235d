"""The documentation in a real browser: search without a network, and pages as wide as a phone.

The tests build the site, and are skipped where mkdocs is missing (`pip install -e '.[docs]'`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


def test_search_works_in_a_folder_without_a_network(browser: Any, site: Path) -> None:
    fetched: list[str] = []
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.on("request", lambda request: fetched.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("ledger")
    page.wait_for_selector(".md-search-result__item a")
    found = page.locator(".md-search-result__item a").first.get_attribute("href")
    context.close()
    assert "privacy" in found
    assert all(address.startswith("file:") for address in fetched)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_phone(browser: Any, site: Path, scheme: str) -> None:
    """Tables and code scroll inside the page, the page itself does not."""
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, color_scheme=scheme, offline=True
    )
    page = context.new_page()
    wide = []
    for source in sorted(DOCS.rglob("*.md")):
        built = site / source.relative_to(DOCS).with_suffix(".html")
        page.goto(built.as_uri())
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            wide.append(built.name)
    context.close()
    assert wide == []


def test_tables_keep_the_style_of_the_theme(browser: Any, site: Path) -> None:
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.goto((site / "glossary.html").as_uri())
    page.wait_for_selector(".table-filter")
    border = page.evaluate(
        "getComputedStyle(document.querySelector('article table td')).borderTopStyle"
    )
    context.close()
    assert border == "solid"
