"""The notebook runs from top to bottom, and ships small outputs. `make notebook` writes them anew."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "quickstart.ipynb"


def executed(folder: Path) -> nbformat.NotebookNode:
    """The notebook after a run in `folder`, without what went to standard error: progress bars and warnings."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The kernel chooses how plots are drawn, whatever the environment of the caller says: a notebook shows them inline.
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    nbclient.NotebookClient(
        notebook, timeout=900, record_timing=False, resources={"metadata": {"path": str(folder)}}
    ).execute(env=environment)
    for cell in code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def has_picture(notebook: nbformat.NotebookNode) -> bool:
    return any("image/png" in output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    assert has_picture(executed(tmp_path))


def test_the_notebook_ships_small_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert has_picture(notebook)
    assert all(output.get("name") != "stderr" for cell in code_cells(notebook) for output in cell.outputs)
    assert NOTEBOOK.stat().st_size < 100_000


if __name__ == "__main__":
    nbformat.write(executed(Path(sys.argv[1])), NOTEBOOK)
