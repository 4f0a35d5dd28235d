"""Write a report as one HTML file, which needs no other file and no network.

The templates escape every text of a configuration, a folder or a table. The numbers of figures are
stored as JSON, in a block that no browser executes. A content security policy allows only the
page's own scripts, by their hashes. It allows no requests, except of a live page to its server.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dpfed.errors import DpfedError
from dpfed.federation.server.status import read_status
from dpfed.privacy.ledger.private_files import open_private
from dpfed.report import narrative
from dpfed.report.figures.figure import Figure
from dpfed.report.figures.run_figures import all_figures
from dpfed.report.labels import apart
from dpfed.report.run_reader import Group, grouped, runs_and_studies
from dpfed.report.sections import sections_of
from dpfed.report.tables import Row, Table
from dpfed.training.callbacks.public_figures import flat
from dpfed.training.run_folder.folder import versions

TEMPLATES = Environment(
    loader=PackageLoader("dpfed.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)

ReadStudy = Callable[[Path, bool], tuple[Table, list[Group]]]
"""Function of (folder, public) that returns a study's table, and its runs grouped by method."""


@dataclass(frozen=True)
class Report:
    """The contents of a report page, read from the folders of runs and of studies (comparisons)."""

    title: str
    groups: Sequence[Group]
    tables: Sequence[Table]
    figures: Sequence[Figure]
    public: bool
    federations: Sequence[Mapping[str, Any]] = ()


def runs_only(folder: Path, public: bool) -> tuple[Table, list[Group]]:
    """Raise DpfedError for a study's folder: the default `read_study`, for pages with runs only."""
    raise DpfedError(f"{folder} is the folder of a study: give the folder of a run")


def read_report(
    paths: Sequence[Path], public: bool = False, read_study: ReadStudy = runs_only
) -> Report:
    """Read all runs and studies in `paths`, and return the contents of one page.

    paths       folders of runs and of studies
    public      True to leave out values that a published page must not show
    read_study  returns the table and the runs of a study's folder
    """
    runs, studies = runs_and_studies(paths)
    groups = grouped(runs, public)
    places = ["given by itself"] * len(groups)
    found = [read_study(folder, public) for folder in studies]
    titles = [table.title for table, _ in found]
    tables = []
    for i, (folder, (table, theirs)) in enumerate(zip(studies, found, strict=True), 1):
        place = f"study {i}" if public else f"in {folder.resolve().name}"
        repeated = titles.count(table.title) > 1
        tables.append(replace(table, title=f"{table.title}, {place}") if repeated else table)
        places += [place] * len(theirs)
    single = len(groups)
    groups = _with_different_labels([*groups, *(g for _, theirs in found for g in theirs)], places)
    if not groups and not tables:
        raise DpfedError("there is nothing to report: give the folder of a run or of a study")
    if single > 1:
        tables.insert(0, runs_side_by_side(groups[:single]))
    title = narrative.title_of(groups, [] if runs else titles)
    # The status of a federation contains client names, so a public page does not show it.
    statuses = [] if public else [read_status(path) for path in paths]
    federations = [status for status in statuses if status is not None]
    return Report(title, groups, tables, all_figures(groups, tables), public, federations)


def _with_different_labels(groups: Sequence[Group], places: Sequence[str]) -> list[Group]:
    settings = [flat(group.settings) for group in groups]
    names = apart([group.label for group in groups], settings, settings, places)
    return [replace(group, label=name) for group, name in zip(groups, names, strict=True)]


def runs_side_by_side(groups: Sequence[Group]) -> Table:
    """Return a table with one row per group of runs, for runs that belong to no study.

    Unlike the table of a study, it has no columns about the search for learning rates.
    """
    rows = []
    notes = [
        "accuracy: mean ± standard deviation over the runs of each method, on the server's public "
        "test set"
    ]
    for group in groups:
        traffic = group.first("traffic")
        row = Row(
            label=group.label,
            scores=group.accuracies,
            diverged=sum(run.diverged for run in group.runs),
            epsilon=group.epsilon,
            traffic=traffic if isinstance(traffic, dict) else None,
        )
        rows.append(row)
        notes += narrative.planned_epsilon_note(group)
    return Table("Runs side by side", "", tuple(rows), notes=tuple(notes))


def _contents(report: Report) -> dict[str, Any]:
    """Return the variables for `body.html.j2`, the template of the page's visible contents."""
    groups = report.groups
    runs = [run for group in groups for run in group.runs]
    return {
        "report": report,
        "live": narrative.live(runs),
        "lead": narrative.lead(groups),
        "banners": narrative.banners(groups, report.public),
        "cards": narrative.cards(groups),
        "meaning": narrative.meaning(groups),
        "sections": sections_of(
            groups, report.tables, report.figures, report.public, report.federations
        ),
    }


def body(report: Report) -> str:
    """Return the HTML of the page's visible contents, which change while a run is in progress."""
    return TEMPLATES.get_template("body.html.j2").render(_contents(report))


def render(report: Report, version: str = "") -> str:
    """Return the HTML of the whole page.

    version  version of a live page, which asks its server for newer versions; "" for a page in a
             file, which sends no requests
    """
    library = plotly_js()
    script = _asset("page.js")
    connect = "'self'" if version else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; font-src data:; base-uri 'none'; "
        f"form-action 'none'; connect-src {connect}"
    )
    return TEMPLATES.get_template("page.html.j2").render(
        **_contents(report),
        policy=policy,
        version=version,
        dpfed_version=versions()["dpfed"],
        style=_asset("page.css"),
        figures=json_block(plain_figures(report)),
        library=compressed(library),
        script=script,
    )


def plain_figures(report: Report) -> dict[str, Any]:
    return {figure.id: figure.plain() for figure in report.figures}


def json_block(value: Any) -> str:
    """Return `value` as JSON in which no character can end the HTML script element around it."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def plotly_js() -> str:
    """Return the JavaScript library plotly, from its Python package."""
    try:
        path = resources.files("plotly") / "package_data" / "plotly.min.js"
        return path.read_text(encoding="utf-8")
    except (ModuleNotFoundError, OSError):
        raise DpfedError(
            "reports are drawn with plotly, which is not installed: pip install 'plotly>=6'"
        ) from None


def _asset(name: str) -> str:
    return (resources.files("dpfed.report") / "assets" / name).read_text(encoding="utf-8")


def compressed(text: str) -> str:
    """Return the text gzipped and in base64. A script in the page unpacks it."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _hash(script: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() + "'"


def write_page(
    paths: Sequence[Path], out: Path, public: bool = False, read_study: ReadStudy = runs_only
) -> Report:
    """Write the page of all runs and studies in `paths` to the file `out`; return its contents.

    If the page is not public, only the owner of the file may read it.
    """
    report = read_report(paths, public, read_study)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w", encoding="utf-8") if public else open_private(out, "w") as file:
            file.write(render(report))
    except OSError as error:
        raise DpfedError(f"the page {out} cannot be written: {error.strerror or error}") from None
    return report
