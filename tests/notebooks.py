"""Running the notebooks of `examples` and looking at what they ship; each one's test says what it must show."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat

EXAMPLES = Path(__file__).parent.parent / "examples"


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook after a run in `folder`, without what went to standard error: progress bars and warnings."""
    notebook = nbformat.read(path, as_version=4)
    # The kernel chooses how plots are drawn, whatever the environment of the caller says: a notebook shows them inline.
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    nbclient.NotebookClient(
        notebook, timeout=900, record_timing=False, resources={"metadata": {"path": str(folder)}}
    ).execute(env=environment)
    for cell in code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def shipped(path: Path, *, most: int = 100_000) -> nbformat.NotebookNode:
    """The notebook as it is in the repository, checked: valid, of `most` bytes, and with nothing from standard error."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert all(output.get("name") != "stderr" for cell in code_cells(notebook) for output in cell.outputs)
    assert path.stat().st_size < most
    return notebook


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs)


def printed(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for cell in code_cells(notebook) for output in cell.outputs)
