"""The notebook runs from top to bottom, and ships small outputs. `make notebook` writes them anew."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from notebooks import EXAMPLES, executed, pictures, shipped

NOTEBOOK = EXAMPLES / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    assert pictures(executed(NOTEBOOK, tmp_path)) == 1


def test_the_notebook_ships_small_outputs():
    assert pictures(shipped(NOTEBOOK)) == 1


if __name__ == "__main__":
    nbformat.write(executed(NOTEBOOK, Path(sys.argv[1])), NOTEBOOK)
