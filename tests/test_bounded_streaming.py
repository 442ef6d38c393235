"""The notebook on endless streams runs from top to bottom, shows what it claims, and ships small outputs."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from notebooks import EXAMPLES, executed, pictures, printed, shipped

NOTEBOOK = EXAMPLES / "bounded_streaming.ipynb"
CLAIM = "equal to those in memory: True"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = executed(NOTEBOOK, tmp_path)
    assert pictures(notebook) == 2
    assert CLAIM in printed(notebook)


def test_the_notebook_ships_small_outputs():
    notebook = shipped(NOTEBOOK, most=150_000)
    assert pictures(notebook) == 2
    assert CLAIM in printed(notebook)


if __name__ == "__main__":
    nbformat.write(executed(NOTEBOOK, Path(sys.argv[1])), NOTEBOOK)
