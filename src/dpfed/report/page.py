"""The page of a report: one HTML file that needs nothing else, on the web or on the disk.

Every text of a configuration, a folder or a table goes through `esc`; figures travel as JSON in a block that no browser
executes; a content policy lets only the page's own scripts run (by their hashes) and nothing be fetched.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from dpfed.errors import DpfedError
from dpfed.privacy.private_files import open_private
from dpfed.privacy.published import show_setting
from dpfed.report import narrative
from dpfed.report.figures import Figure, all_figures
from dpfed.report.labels import apart
from dpfed.report.run_reader import Group, grouped, number, runs_and_studies
from dpfed.report.study_reader import Listing, listing_of, read_study
from dpfed.studies.tables import (
    DASH,
    Table,
    best_of,
    cells,
    footnotes,
    grid_words,
    larger_epsilon,
    percent,
)
from dpfed.training.callbacks.public_figures import flat
from dpfed.training.run_folder.folder import versions

SECTIONS = (
    ("training", "Training"),
    ("privacy", "Privacy"),
    ("comparison", "Comparison"),
    ("clients", "Clients' data"),
    ("communication", "Communication"),
    ("diagnostics", "Diagnostics"),
    ("settings", "Settings"),
    ("environment", "Environment"),
    ("left-out", "Left out"),
)


@dataclass(frozen=True)
class Report:
    """What a page shows, read once."""

    title: str
    groups: Sequence[Group]
    listings: Sequence[Listing]
    figures: Sequence[Figure]
    public: bool


def esc(text: Any) -> str:
    return html.escape(str(text), quote=True)


def read_report(paths: Sequence[Path], public: bool = False) -> Report:
    """One report of all runs and studies that are given."""
    runs, studies = runs_and_studies(paths)
    groups = grouped(runs, public)
    alone = len(groups)
    found = [read_study(folder, public) for folder in studies]
    titles = [listing.title for listing, _ in found]
    places = ["given by itself"] * alone
    tables = []
    for i, (folder, (listing, theirs)) in enumerate(zip(studies, found, strict=True), 1):
        place = f"study {i}" if public else f"in {folder.resolve().name}"
        repeated = titles.count(listing.title) > 1
        tables.append(replace(listing, title=f"{listing.title}, {place}") if repeated else listing)
        groups += theirs
        places += [place] * len(theirs)
    groups = _renamed(groups, places)
    listings = [listing_of(groups[:alone]), *tables] if alone > 1 else tables
    if not groups and not listings:
        raise DpfedError("there is nothing to report: give the folder of a run or of a study")
    title = narrative.title_of(groups, titles if not runs else []) if groups else titles[0]
    return Report(title, groups, listings, all_figures(groups, listings), public)


def _renamed(groups: Sequence[Group], places: Sequence[str]) -> list[Group]:
    """Return the groups with labels that name what tells equal methods of several folders apart."""
    settings = [flat(group.settings) for group in groups]
    names = apart([group.label for group in groups], settings, settings, places)
    return [replace(group, label=name) for group, name in zip(groups, names, strict=True)]


def body(report: Report) -> str:
    """The part of the page that changes while a run goes on."""
    parts = {name: part for name, _ in SECTIONS if (part := _section(report, name))}
    links = "".join(
        f'<a href="#{name}">{esc(head)}</a>' for name, head in SECTIONS if name in parts
    )
    sections = "".join(
        f'<section id="{name}" aria-labelledby="h-{name}"><h2 id="h-{name}">{esc(head)}</h2>{parts[name]}</section>'
        for name, head in SECTIONS
        if name in parts
    )
    return f'{_top(report)}<nav aria-label="Sections">{links}</nav>{sections}'


def _part(name: str, inner: str) -> str:
    """Something that the page replaces by its name when it changes."""
    return f'<div data-part="{name}">{inner}</div>' if inner else ""


def _top(report: Report) -> str:
    groups = report.groups
    kind = "public report" if report.public else "operator's report"
    live = narrative.live([run for group in groups for run in group.runs])
    kicker = f'<p class="kicker"><b>dpfed</b> {kind} <span class="live" role="status">{esc(live)}</span></p>'
    lead = f'<p class="lead">{esc(narrative.lead(groups))}</p>' if groups else ""
    banners = "".join(
        f'<p class="banner {kind}">{esc(text)}</p>'
        for kind, text in narrative.banners(groups, report.public)
    )
    shown = "".join(
        f'<div class="number"><dt>{esc(card.name)}</dt><dd class="value">{esc(card.value)}</dd>'
        f'<dd class="under">{esc(card.note)}</dd></div>'
        for card in narrative.cards(groups)
    )
    said = narrative.meaning(groups) if groups else ""
    headline = (f'<dl class="headline">{shown}</dl>' if shown else "") + (
        f'<p class="meaning">{esc(said)}</p>' if said else ""
    )
    return f"<header>{_part('top', f'{kicker}<h1>{esc(report.title)}</h1>{lead}{banners}{headline}')}</header>"


def _section(report: Report, name: str) -> str:
    drawn = [figure for figure in report.figures if figure.section == name]
    before = {
        "privacy": _statement,
        "comparison": _comparison,
        "settings": _settings,
        "environment": _environment,
        "left-out": _left_out,
    }.get(name)
    text = _part(f"{name}-text", before(report)) if before else ""
    figures = f'<div class="figures">{"".join(map(_card, drawn))}</div>' if drawn else ""
    return f'<div class="stack">{figures}{text}</div>' if figures or text else ""


def _card(figure: Figure) -> str:
    series = len({str(row[0]) for row in figure.rows})
    said = f"{figure.title}. {figure.caption} {series} series; the numbers are in the table below the figure."
    wide = " wide" if figure.wide else ""
    buttons = "".join(
        f'<button type="button" data-do="{kind}" aria-label="Save {esc(figure.title)} as {kind.upper()}">{kind.upper()}</button>'
        for kind in ("png", "svg", "csv")
    )
    return (
        f'<figure class="card{wide}"><figcaption><h3>{esc(figure.title)}</h3><p>{esc(figure.caption)}</p></figcaption>'
        f'<div class="plot" role="img" aria-label="{esc(said)}" data-figure="{esc(figure.id)}" '
        f'style="min-height:{figure.height}px"></div>'
        f'<div class="tools">{buttons}<details><summary>Numbers</summary><div tabindex="0"></div></details></div></figure>'
    )


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    inner = "".join(f"<dt>{esc(head)}</dt><dd>{esc(text)}</dd>" for head, text in pairs)
    return f'<dl class="pairs">{inner}</dl>'


def _statement(report: Report) -> str:
    if not report.groups:
        return ""
    said = _pairs(narrative.statement(report.groups, report.public))
    return f'<div class="card stack"><h3>The privacy statement</h3>{said}</div>'


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], best: Sequence[int] = (), kind: str = ""
) -> str:
    """Words are escaped here; \\x00 and \\x01 around a word make it bold."""

    def cell(word: str) -> str:
        return esc(word).replace("\x00", "<strong>").replace("\x01", "</strong>")

    top = "".join(f'<th scope="col">{cell(word)}</th>' for word in head)
    lines = "".join(
        f"<tr{' class=best' if i in best else ''}>{''.join(f'<td>{cell(word)}</td>' for word in row)}</tr>"
        for i, row in enumerate(rows)
    )
    table = f'<table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>'
    return f'<div class="scroll" role="region" aria-label="Table" tabindex="0">{table}</div>'


def _comparison(report: Report) -> str:
    cards = "".join(
        f'<div class="card stack">{_listing(listing)}</div>' for listing in report.listings
    )
    return f'<div class="stack">{cards}</div>' if cards else ""


def _strong(text: str) -> str:
    return f"\x00{text}\x01"


def _listing(listing: Listing) -> str:
    rows = tuple(entry.row for entry in listing.entries)
    table = Table(listing.title, listing.axis, rows, listing.reference, listing.notes)
    head, lines = cells(table)
    for line, entry in zip(lines, listing.entries, strict=True):
        mean, half = entry.difference or (None, None)
        line[4] = percent(mean, half, sign=True)
    best = set() if listing.axis else best_of(rows, larger_epsilon(table))
    at = [i for i, row in enumerate(rows) if row.label in best]
    for i in at:
        lines[i][0], lines[i][3] = _strong(lines[i][0]), _strong(lines[i][3])
    kept = [
        j for j in range(len(head)) if j == 0 or any(line[j] not in (DASH, "0") for line in lines)
    ]
    out = f"<h3>{esc(listing.title)}</h3>"
    laid_out = grid_words(table, _strong)
    if laid_out is not None:
        out += _table(*laid_out)
    out += _table([head[j] for j in kept], [[line[j] for j in kept] for line in lines], at)
    said = [
        *footnotes(table),
        *listing.notes,
        *(["the best on equal terms is in bold"] if "<strong>" in out else []),
    ]
    return out + f'<ul class="under-table">{"".join(f"<li>{esc(note)}</li>" for note in said)}</ul>'


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return show_setting(value)
    return ", ".join(map(_shown, value)) or "none" if isinstance(value, list) else str(value)


def _settings(report: Report) -> str:
    """A table of what tells the groups apart, what they have in common by section, and each method's own keys."""
    tables = [flat(group.settings) for group in report.groups]
    if not tables:
        return ""
    keys = list(dict.fromkeys(key for table in tables for key in table))
    common = {
        key: tables[0][key]
        for key in keys
        if all(key in t and t[key] == tables[0][key] for t in tables)
    }
    if any(len(group.runs) > 1 for group in report.groups):  # the list of runs has all seeds
        common.pop("run.seed", None)
    several = [
        key
        for key in keys
        if key not in common and key != "run.seed" and sum(key in t for t in tables) > 1
    ]
    out = ""
    if several:
        rows = [
            [key, *(_shown(table[key]) if key in table else DASH for table in tables)]
            for key in several
        ]
        head = ["key", *(group.label for group in report.groups)]
        out = f'<div class="card stack"><h3>Where the methods differ</h3>{_table(head, rows, kind="words")}</div>'
    boxes = ""
    for section in dict.fromkeys(key.split(".")[0] for key in common):
        boxes += _box(
            section, {key: value for key, value in common.items() if key.split(".")[0] == section}
        )
    for group, table in zip(report.groups, tables, strict=True):
        own = {
            key: value for key, value in table.items() if key not in common and key not in several
        }
        own.pop("run.seed", None)
        boxes += _box(f"{group.label} only", own) if own else ""
    return f'<div class="stack">{out}<div class="settings">{boxes}</div></div>'


def _box(head: str, table: Mapping[str, Any]) -> str:
    return f'<div class="card"><h3>{esc(head)}</h3>{_pairs([(k.split(".", 1)[-1], _shown(v)) for k, v in table.items()])}</div>'


def _environment(report: Report) -> str:
    runs = [run for group in report.groups for run in group.runs]
    seen: dict[str, list[str]] = {}
    for run in runs:
        versions = run.result.get("versions")
        for name, version in (versions if isinstance(versions, dict) else {}).items():
            seen.setdefault(str(name), []).append(str(version))
        if "python" in run.result:
            seen.setdefault("python", []).append(str(run.result["python"]))
    pairs = [(name, ", ".join(dict.fromkeys(found))) for name, found in seen.items()]
    first = next((run.result for run in runs if "parameters" in run.result), {})
    for key, word in (
        ("parameters", "trained numbers"),
        ("blocks", "blocks"),
        ("test_records", "test records"),
    ):
        if (count := number(first.get(key))) is not None:
            pairs.append((word, f"{count:,.0f}"))
    out = (
        f'<div class="card stack"><h3>Versions and sizes</h3>{_pairs(pairs)}</div>' if pairs else ""
    )
    if not report.public and runs:
        head = ["run", "method", "seed", "state", "rounds", "accuracy", "seconds"]
        rows = [_run_line(group, run) for group in report.groups for run in group.runs]
        out += f'<div class="card stack"><h3>Runs on this page</h3>{_table(head, rows)}</div>'
    return f'<div class="stack">{out}</div>' if out else ""


def _run_line(group: Group, run: Any) -> list[str]:
    seconds = number(run.rows[-1].get("seconds")) if run.rows else None
    return [
        run.name,
        group.label,
        _shown(run.settings.get("run", {}).get("seed", DASH)),
        str(run.result.get("state", "unknown")) + (", diverged" if run.diverged else ""),
        str(run.last),
        percent(run.accuracy, None),
        DASH if seconds is None else f"{seconds:.1f}",
    ]


def _left_out(report: Report) -> str:
    if not report.public:
        return ""
    said = "This page may be read by a third party, whose epsilon holds only while nobody outside knows who took part. So it holds none of these:"
    rows = [[what, why] for what, why in narrative.left_out()]
    return f'<div class="card stack"><p>{esc(said)}</p>{_table(["left out", "because"], rows, kind="words")}</div>'


def plain_figures(report: Report) -> dict[str, Any]:
    return {figure.id: figure.plain() for figure in report.figures}


def inlined(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin another."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def plotly_js() -> str:
    """The drawing library, as its Python package carries it."""
    try:
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(
            encoding="utf-8"
        )
    except (ModuleNotFoundError, OSError):
        raise DpfedError(
            "reports are drawn with plotly, which is not installed: pip install 'plotly>=6'"
        ) from None


def _asset(name: str) -> str:
    return (resources.files("dpfed.report") / "assets" / name).read_text(encoding="utf-8")


def packed(text: str) -> str:
    """Compressed, as letters: a third of its size; the page unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _hash(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def render(report: Report, version: str = "") -> str:
    """The whole page. With a version it asks the server it came from for news."""
    library, script, style = plotly_js(), _asset("page.js"), _asset("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'; connect-src {chr(39)}{'self' if version else 'none'}{chr(39)}"
    )
    made = f"Made by dpfed {versions()['dpfed']}. The page needs no network and sends nothing anywhere."
    watched = f' data-version="{esc(version)}"' if version else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{esc(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f'<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n<title>{esc(report.title)} · dpfed</title>\n<style>{style}</style>\n</head>\n'
        f'<body{watched}>\n<div class="page"><main id="main">{body(report)}</main>\n'
        "<noscript><p>The figures are drawn by scripts in this page, which are switched off.</p></noscript>\n"
        f"<footer>{esc(made)}</footer></div>\n"
        f'<script type="application/json" id="figures">{inlined(plain_figures(report))}</script>\n'
        f'<script type="text/plain" id="library">{packed(library)}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def write_page(paths: Sequence[Path], out: Path, public: bool = False) -> Report:
    report = read_report(paths, public)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", encoding="utf-8") if public else open_private(out, "w") as file:
            file.write(render(report))
    except OSError as error:
        raise DpfedError(f"the page {out} cannot be written: {error.strerror or error}") from None
    return report
