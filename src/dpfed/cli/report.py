"""`dpfed report`: runs and studies as one page to look at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dpfed.errors import counted


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
        bool, typer.Option("--watch", help="serve the page on this machine while a run goes on")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port of --watch; 0: any free one")
    ] = 8050,
    debug: Annotated[bool, typer.Option(help="show the traceback of an error")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object on the last line of stdout")
    ] = False,
) -> None:
    """One HTML page of runs, seeds grouped; it needs no network. Example: dpfed report runs/a runs/b --out page.html"""
    if watch:
        from dpfed.errors import DpfedError
        from dpfed.report.watch import serve

        if out is not None or as_json:
            raise DpfedError("--watch serves the page and writes none: leave out --out and --json")
        serve(
            folders,
            public,
            port,
            lambda address: print(f"watching on {address}  (Ctrl-C ends it)", flush=True),
        )
        return
    from dpfed.report.page import write_page

    page = out or folders[0] / ("public.html" if public else "report.html")
    made = write_page(folders, page, public)
    size = page.stat().st_size / 1e6
    print(f"written to {page}: {counted(len(made.figures), 'figure')}, {size:.1f} MB")
    if as_json:
        figures = [figure.id for figure in made.figures]
        print(
            json.dumps({"out": str(page), "figures": figures, "megabytes": size, "public": public})
        )
