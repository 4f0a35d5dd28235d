"""`dpfed report`: write runs and studies as one HTML page, or serve the page while a run trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpfed.cli.options import AsJson, Debug, show
from dpfed.errors import DpfedError, counted


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="folders of runs and of studies")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="the page; default: report.html (public.html) in the first folder"),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="only what may be published: nothing of who took part")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="serve the page on this machine while a run trains")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port of --watch; 0: any free one")
    ] = 8050,
    debug: Debug = False,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page of runs and studies.

    Runs that differ only in their seed are shown as one method. The page needs no network.

    Example: dpfed report runs/a runs/b --out page.html
    """
    from dpfed.studies.study_reader import read_study

    if watch:
        from dpfed.report.live_page import serve
        from dpfed.report.page import read_report

        if out is not None or as_json:
            raise DpfedError("--watch serves the page and writes none: leave out --out and --json")
        return serve(
            folders,
            port,
            lambda: read_report(folders, public, read_study),
            lambda address: print(f"watching on {address}  (Ctrl-C ends it)", flush=True),
        )
    from dpfed.report.page import write_page

    name = "public.html" if public else "report.html"
    page = out or folders[0] / name
    made = write_page(folders, page, public, read_study)
    size = page.stat().st_size / 1e6
    figures = [figure.id for figure in made.figures]
    found = {"out": str(page), "figures": figures, "megabytes": size, "public": public}
    line = f"written to {page}: {counted(len(figures), 'figure')}, {size:.1f} MB"
    show([line], found, as_json)
