"""`python -m eval.speed.resident`: the peak of one prefill's resident memory, in this process. `eval.speed prefill` starts it.

Read from /proc: `ru_maxrss` keeps the highest that the process has ever been, and across fork and exec that of the process which
started it, so that a peak below either is lost. Linux resets its own mark, VmHWM, on request.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.speed.model import add_sources, sources
from eval.speed.prefill import CACHES, one_forward

__all__ = ["main", "peak_of"]

PROCESS = Path("/proc/self")


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.speed.resident", description="Peak memory of one prefill.")
    add_sources(parser)
    parser.add_argument("--cache", choices=CACHES, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    model, ids, _ = sources(given, given.tokens)
    one_forward(model, given.cache, ids[:64])  # what a first call loads and keeps
    print(peak_of(lambda: one_forward(model, given.cache, ids)))
    return 0


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes of resident memory that `run` takes at most, beyond what was there before.

    Raises:
        OSError: If there is no /proc with a mark that can be reset: Linux with glibc is what this measures on.
    """
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that is still resident would hide as much of the peak
    (PROCESS / "clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    for line in (PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{PROCESS / 'status'} has no line {name}; measure on Linux")


if __name__ == "__main__":
    sys.exit(main())
