"""Runs the notebook of the documentation from top to bottom in an empty folder; a cell that fails fails this.

python scripts/run_notebook.py            runs a copy (about twenty seconds on one core)
python scripts/run_notebook.py --write    and keeps what the cells showed
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "walkthrough.ipynb"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the outputs in the notebook")
    write = parser.parse_args().write
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": folder}})
        try:
            client.execute()
        except CellExecutionError as error:
            print(error)
            return 1
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    drawn = sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    print(f"{len(code)} cells, {drawn} pictures, {time.monotonic() - begun:.0f} s")
    if drawn < 4:
        print("the notebook should show at least four pictures")
        return 1
    if write:
        for number, cell in enumerate(notebook.cells):
            cell.metadata.pop("execution", None)  # the times of each cell, which would differ in every commit
            cell.id = f"cell-{number}"
            if cell.cell_type == "code":  # warnings of other packages name folders of the machine
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
