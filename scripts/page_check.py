"""Looks at a report in a real browser: `python scripts/page_check.py [--shots FOLDER] [RUN ...]`.

Without runs it makes its own: two methods with two seeds on the digits, with diagnostics. It checks that no script
complains, nothing is fetched, every figure is drawn, both colour schemes and both widths have no horizontal scroll, the
page prints, figures can be saved, a hostile name does nothing, `--watch` brings news, and the public page holds nothing
of single clients. It needs Playwright and a Chromium; where there is none it says so and exits with 77.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

SKIPPED = 77
KEYS = "run.rounds=6 run.local_steps=2 run.diagnostics=true data.clients=20 run.participation=0.5 privacy.budget=7"
HOSTILE = '</script><img src=x onerror="document.title=1"><b>'
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser_path() -> str | None:
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


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


class Looked:
    """A page that is open, and all that went wrong with it."""

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
        """How many there should be, and how many have something drawn in them."""
        return tuple(
            self.page.evaluate(
                "[document.querySelectorAll('.plot').length, Array.from(document.querySelectorAll('.plot'))"
                ".filter(p => p.querySelector('.main-svg .trace, .main-svg .hm, .main-svg .bars, .main-svg image')).length]"
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


def must(fine: bool, said: str) -> None:
    print(f"{'ok  ' if fine else 'FAIL'} {said}", flush=True)
    if not fine:
        sys.exit(1)


def look(browser: Any, page: Path, shots: Path | None, name: str) -> None:
    ways = (("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390))
    for scheme, width in ways if name == "operator" else ways[::3]:
        seen = Looked(browser, page.as_uri(), width, scheme)
        asked, drawn = seen.figures()
        what = f"{name}, {scheme}, {width} px"
        if shots is not None:
            seen.page.screenshot(path=str(shots / f"{name}-{scheme}-{width}.png"), full_page=True)
        must(asked == drawn > 0, f"{what}: {drawn} of {asked} figures drawn")
        must(seen.unmarked_tables() == 0, f"{what}: tables say whether they scroll")
        must(seen.overflow() <= 0, f"{what}: no horizontal scroll ({seen.overflow()} px)")
        must(not seen.wrong, f"{what}: no errors, nothing fetched {seen.wrong[:3]}")
        seen.context.close()


def look_at_print(browser: Any, page: Path, shots: Path | None) -> None:
    seen = Looked(browser, page.as_uri(), 1280, "dark")
    content = seen.page.pdf(format="A4", print_background=True)
    must(
        content[:5] == b"%PDF-" and len(content) > 20_000,
        f"prints to PDF, {len(content) / 1e3:.0f} kB",
    )
    if shots is not None:
        (shots / "print.pdf").write_bytes(content)
    seen.context.close()


def look_at_buttons(browser: Any, page: Path) -> None:
    seen = Looked(browser, page.as_uri(), 1280, "light")
    starts = {"png": b"\x89PNG", "svg": b"<svg", "csv": b"method,"}
    for kind, start in starts.items():
        with seen.page.expect_download() as waited:
            seen.page.locator(f".card button[data-do={kind}]").first.click()
        saved = Path(waited.value.path()).read_bytes()
        must(saved.startswith(start), f"saves {kind} ({len(saved)} bytes)")
    seen.page.locator(".card summary").first.click()
    seen.page.wait_for_selector(".card details tbody tr", timeout=5000)
    rows = seen.page.locator(".card details tbody tr").count()
    must(rows > 2 and not seen.wrong, f"the table below a figure has {rows} lines {seen.wrong[:3]}")
    seen.context.close()


def look_at_hostile(browser: Any, run: Path, folder: Path) -> None:
    """A run whose every name is an attack, opened in the browser."""
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
    seen = Looked(browser, page.as_uri(), 1280, "light")
    injected = seen.page.evaluate(
        "document.querySelectorAll('#main img, #main b:not(.kicker b), #main script').length"
    )
    must(
        injected == 0 and seen.page.title() != "1" and not seen.wrong,
        f"a hostile name is only text {seen.wrong[:2]}",
    )
    must(
        HOSTILE in seen.page.locator("h1").inner_text() + seen.page.locator("#main").inner_text(),
        "and it is shown",
    )
    seen.context.close()


def look_at_watch(browser: Any, run: Path, folder: Path) -> None:
    """A run that goes on: its lines come one by one, and the page follows without being loaded again."""
    from dpfed.report.watch import open_server

    live = folder / "live"
    shutil.copytree(run, live)
    lines = (live / "metrics.jsonl").read_text().splitlines(keepends=True)
    state = json.loads((live / "run.json").read_text())
    (live / "run.json").write_text(
        json.dumps({"run": state["run"], "state": "running", "release": state["release"]})
    )
    (live / "metrics.jsonl").write_text("".join(lines[:3]))
    with open_server([live], False, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/"
        seen = Looked(browser, address, 1280, "light")
        must(
            "round 2 of" in seen.page.locator(".live").inner_text(),
            "--watch shows how far a run is",
        )
        seen.page.evaluate("window.kept = true")
        (live / "metrics.jsonl").write_text("".join(lines[:5]))
        seen.page.locator(".live", has_text="round 4 of").wait_for(timeout=20_000)
        must(
            seen.page.evaluate("window.kept === true"),
            "--watch brings news without loading the page again",
        )
        (live / "run.json").write_text(json.dumps(state))
        seen.page.locator(".live").wait_for(state="hidden", timeout=20_000)
        asked, drawn = seen.figures()
        must(
            asked == drawn and not seen.wrong,
            f"--watch at the end: {drawn} of {asked} figures {seen.wrong[:3]}",
        )
        seen.context.close()
        server.shutdown()


def look_at_public(browser: Any, page: Path, runs: list[Path]) -> None:
    text = page.read_text(encoding="utf-8")
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
    must(not found, f"the public page has nothing of single clients {found}")
    must(
        not {"clients", "labels", "drift", "sqrt-v"} & set(json.loads(data.split(">", 1)[1])),
        "nor their figures",
    )
    must("Left out" in shown, "and says what it leaves out")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--shots", type=Path, help="keep screenshots and the PDF here")
    given = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("NOT RUN: the page stage needs Playwright (pip install playwright)")
        return SKIPPED
    chromium = browser_path()
    if chromium is None:
        print("NOT RUN: the page stage needs Chromium (apt-get install -y chromium)")
        return SKIPPED
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.shots:
        given.shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as play:
        folder = Path(scratch)
        runs = given.runs or make_runs(folder)
        for name, flags in (("operator", []), ("public", ["--public"])):
            dpfed("report", *map(str, runs), *flags, "--out", str(folder / f"{name}.html"))
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        look(browser, folder / "operator.html", given.shots, "operator")
        look(browser, folder / "public.html", given.shots, "public")
        look_at_print(browser, folder / "operator.html", given.shots)
        look_at_buttons(browser, folder / "operator.html")
        look_at_public(browser, folder / "public.html", runs)
        look_at_hostile(browser, runs[-1], folder)
        look_at_watch(browser, runs[0], folder)
        browser.close()
    print("the page stage passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
