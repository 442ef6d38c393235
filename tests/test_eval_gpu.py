"""The GPU check: what of it can run without one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eval.gpu


def test_without_a_gpu_it_says_so_in_one_line_and_stops(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert eval.gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "eval.gpu needs a CUDA GPU, and torch sees none; --dry-run checks the kernel on the CPU"
    ]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_dry_run_checks_every_layout_and_ends_with_a_line_of_json(tmp_path):
    # A process of its own: Triton decides at its first import whether it interprets.
    command = [sys.executable, "-W", "ignore", "-m", "eval.gpu", "--dry-run", "--results", str(tmp_path / "gpu.jsonl")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "gpu.jsonl").read_text()) == record
    assert [(row["layout"], row["dtype"]) for row in record["correctness"]] == eval.gpu.CASES
    assert {layout for layout, _ in eval.gpu.CASES} == {*eval.gpu.LAYOUTS, *eval.gpu.GRIDS}
    assert all(row["ok"] and 0 < row["against_float64"] <= eval.gpu.CLOSE for row in record["correctness"])
    assert "| int4 | float16 | 4 |" in done.stdout
    assert "| q4 | float32 | 4 |" in done.stdout


@pytest.mark.parametrize("states", ["int8", "bf16"])
def test_the_table_shows_what_decoding_takes_where_there_is_anything_to_decode(states):
    decoding = None if states == "bf16" else 0.5
    row = {"batch": 1, "tokens": 4096, "states": states, "ms": 0.02, "gb_per_s": 2000.0, "times_bf16": 1.5}
    line = eval.gpu._attention_table([{**row, "decode_then_flash_ms": decoding}]).splitlines()[-1]
    assert line == f"| 1 | 4096 | {states} | 0.020 | 2000 | 1.50 | {'0.500' if decoding else ''} |"
