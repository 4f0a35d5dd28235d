"""Reports in a real browser: figures, both colour schemes, two widths, printing, saving, `--watch`.

The runs are two methods with two seeds on the digits, with diagnostics. The tests need Playwright
and Chromium, and are skipped where one is missing. `DPFED_SCREENSHOTS=FOLDER` keeps screenshots.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]
KEYS = """
run.rounds=6 run.local_steps=2 run.diagnostics=true data.clients=20 run.participation=0.5
privacy.budget=7
"""
HOSTILE = '</script><img src=x onerror="document.title=1"><b>'


SCREENSHOTS = os.environ.get("DPFED_SCREENSHOTS")


@pytest.fixture(scope="module")
def runs(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def pages(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the report for the operator and the one for everybody."""
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in ("operator", "public")}
    dpfed("report", *map(str, runs), "--out", str(found["operator"]))
    dpfed("report", *map(str, runs), "--public", "--out", str(found["public"]))
    return found


def make_runs(folder: Path) -> list[Path]:
    out = []
    for name, rate in (("dp-fedadamw", "0.015"), ("dp-fedavg", "1.0")):
        for seed in (0, 1):
            path = folder / f"{name}-{seed}"
            keys = [
                f"algorithm.name={name}",
                f"algorithm.lr={rate}",
                f"run.seed={seed}",
                *KEYS.split(),
            ]
            flags = [word for key in keys for word in ("--set", key)]
            dpfed("run", *flags, "--out", str(path))
            out.append(path)
    return out


def dpfed(*words: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "dpfed", *words],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def check(fine: bool, message: str) -> None:
    assert fine, message


class OpenPage:
    """An open page, with the errors, warnings and fetches that the browser reported."""

    def __init__(self, browser: Any, address: str, width: int, scheme: str) -> None:
        self.wrong: list[str] = []
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.on(
            "console",
            lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda e: self.wrong.append(str(e)))
        self.page.on("request", lambda r: self._fetched(r.url, address))
        self.page.goto(address)
        self.page.wait_for_selector("body[data-drawn]")

    def _fetched(self, url: str, address: str) -> None:
        if not url.startswith(("data:", "blob:", address)):
            self.wrong.append(f"fetched {url}")

    def figures(self) -> tuple[int, int]:
        """Return the number of figures, and the number of figures with something drawn."""
        return tuple(
            self.page.evaluate(
                "(plots => [plots.length, plots.filter(p => p.querySelector("
                "'.main-svg .trace, .main-svg .hm, .main-svg .bars, .main-svg image')).length])"
                "(Array.from(document.querySelectorAll('.plot')))"
            )
        )

    def unmarked_tables(self) -> int:
        """Return how many tables scroll without a visible hint, or have a hint and fit."""
        return int(
            self.page.evaluate(
                "Array.from(document.querySelectorAll('.scroll')).filter(box => "
                "(box.scrollWidth > box.clientWidth + 1) !== "
                "(getComputedStyle(box, '::before').content !== 'none')).length"
            )
        )

    def overflow(self) -> int:
        return int(
            self.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
        )


@pytest.mark.parametrize("name", ["operator", "public"])
def test_figures_are_drawn_in_both_schemes_and_widths(
    browser: Any, pages: dict[str, Path], name: str
) -> None:
    ways = (("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390))
    for scheme, width in ways if name == "operator" else ways[::3]:
        seen = OpenPage(browser, pages[name].as_uri(), width, scheme)
        asked, drawn = seen.figures()
        what = f"{name}, {scheme}, {width} px"
        if SCREENSHOTS:
            file = Path(SCREENSHOTS) / f"{name}-{scheme}-{width}.png"
            seen.page.screenshot(path=str(file), full_page=True)
        check(asked == drawn > 0, f"{what}: {drawn} of {asked} figures drawn")
        check(seen.unmarked_tables() == 0, f"{what}: tables say whether they scroll")
        check(seen.overflow() <= 0, f"{what}: no horizontal scroll ({seen.overflow()} px)")
        check(not seen.wrong, f"{what}: no errors, nothing fetched {seen.wrong[:3]}")
        seen.context.close()


def test_the_page_prints(browser: Any, pages: dict[str, Path]) -> None:
    seen = OpenPage(browser, pages["operator"].as_uri(), 1280, "dark")
    content = seen.page.pdf(format="A4", print_background=True)
    check(
        content[:5] == b"%PDF-" and len(content) > 20_000,
        f"prints to PDF, {len(content) / 1e3:.0f} kB",
    )
    seen.context.close()


def test_figures_and_tables_can_be_saved(browser: Any, pages: dict[str, Path]) -> None:
    seen = OpenPage(browser, pages["operator"].as_uri(), 1280, "light")
    starts = {"png": b"\x89PNG", "svg": b"<svg", "csv": b"method,"}
    for kind, start in starts.items():
        with seen.page.expect_download() as waited:
            seen.page.locator(f".card button[data-do={kind}]").first.click()
        saved = Path(waited.value.path()).read_bytes()
        check(saved.startswith(start), f"saves {kind} ({len(saved)} bytes)")
    seen.page.locator(".card summary").first.click()
    seen.page.wait_for_selector(".card details tbody tr", timeout=5000)
    rows = seen.page.locator(".card details tbody tr").count()
    check(
        rows > 2 and not seen.wrong, f"the table below a figure has {rows} lines {seen.wrong[:3]}"
    )
    seen.context.close()


def test_a_hostile_name_is_only_text(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    run = runs[-1]
    folder = tmp_path
    bad = folder / "bad"
    shutil.copytree(run, bad)
    config = (bad / "config.toml").read_text()
    quoted = json.dumps(HOSTILE)
    (bad / "config.toml").write_text(
        config.replace('name = "digits"', f"name = {quoted}").replace(
            'name = "dp-fedavg"', f"name = {quoted}"
        )
    )
    held = json.loads((bad / "holdings.json").read_text())
    held["classes"] = [f"{HOSTILE}{i}" for i in range(len(held["classes"]))]
    (bad / "holdings.json").write_text(json.dumps(held))
    page = folder / "bad.html"
    dpfed("report", str(bad), str(run), "--out", str(page))
    seen = OpenPage(browser, page.as_uri(), 1280, "light")
    injected = seen.page.evaluate(
        "document.querySelectorAll('#main img, #main b:not(.kicker b), #main script').length"
    )
    check(
        injected == 0 and seen.page.title() != "1" and not seen.wrong,
        f"a hostile name is only text {seen.wrong[:2]}",
    )
    check(
        HOSTILE in seen.page.locator("h1").inner_text() + seen.page.locator("#main").inner_text(),
        "and it is shown",
    )
    seen.context.close()


def test_watch_follows_a_run_without_reloading(
    browser: Any, runs: list[Path], tmp_path: Path
) -> None:
    run = runs[0]
    folder = tmp_path
    from dpfed.report.live_page import open_server
    from dpfed.report.page import read_report

    live = folder / "live"
    shutil.copytree(run, live)
    lines = (live / "metrics.jsonl").read_text().splitlines(keepends=True)
    state = json.loads((live / "run.json").read_text())
    (live / "run.json").write_text(
        json.dumps({"run": state["run"], "state": "running", "release": state["release"]})
    )
    (live / "metrics.jsonl").write_text("".join(lines[:3]))
    with open_server([live], 0, lambda: read_report([live])) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        seen = OpenPage(browser, address, 1280, "light")
        check(
            "round 2 of" in seen.page.locator(".live").inner_text(),
            "--watch shows how far a run is",
        )
        seen.page.evaluate("window.kept = true")
        (live / "metrics.jsonl").write_text("".join(lines[:5]))
        seen.page.locator(".live", has_text="round 4 of").wait_for(timeout=20_000)
        check(
            seen.page.evaluate("window.kept === true"),
            "--watch brings news without loading the page again",
        )
        (live / "run.json").write_text(json.dumps(state))
        seen.page.locator(".live").wait_for(state="hidden", timeout=20_000)
        asked, drawn = seen.figures()
        check(
            asked == drawn and not seen.wrong,
            f"--watch at the end: {drawn} of {asked} figures {seen.wrong[:3]}",
        )
        seen.context.close()
        server.shutdown()


def test_the_public_page_has_nothing_of_single_clients(
    pages: dict[str, Path], runs: list[Path]
) -> None:
    text = pages["public"].read_text(encoding="utf-8")
    data = text[text.index('id="figures">') :].split("</script>", 1)[0]
    shown = text.split('<main id="main">', 1)[1].split("</main>", 1)[0]
    words = [run.name for run in runs] + [
        "epsilon_server_max",
        "spent most so far",
        'cohort"',
        'eligible"',
        "holdings",
    ]
    found = [word for word in words if word in data or word in shown]
    check(not found, f"the public page has nothing of single clients {found}")
    check(
        not {"clients", "labels", "drift", "sqrt-v"} & set(json.loads(data.split(">", 1)[1])),
        "nor their figures",
    )
    check("Left out" in shown, "and says what it leaves out")
