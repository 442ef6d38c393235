"""The README's examples run as they stand, each on its own."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks():
    text = README.read_text(encoding="utf-8")
    lines = {text.count("\n", 0, block.start(1)): block.group(1) for block in PYTHON_BLOCK.finditer(text)}
    # Blank lines in front, so that a traceback names the README's own line.
    return [pytest.param("\n" * line + code, id=f"line{line + 1}") for line, code in lines.items()]


@pytest.mark.slow
@pytest.mark.parametrize("code", python_blocks())
def test_a_readme_example_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, README, "exec"), {"__name__": "__main__"})


def test_the_results_table_has_its_markers():
    text = README.read_text(encoding="utf-8")
    assert 0 < text.index("<!-- results:wikitext8 -->") < text.index("<!-- /results -->")
