"""Threads of compiled code: as many as torch has, and one launch at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numba
import torch

__all__ = ["in_threads", "launch"]

PARALLEL_FROM = 2**14
"""Numbers to encode below which starting threads costs more than they save."""

_LAUNCH = threading.Lock()


@contextmanager
def in_threads(threads: int) -> Iterator[None]:
    """Let numba use so many threads. One launch at a time: not every threading layer of numba bears two."""
    with _LAUNCH:
        before = numba.get_num_threads()
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
        try:
            yield
        finally:
            numba.set_num_threads(before)


def launch(alone: Any, in_parallel: Any, arguments: tuple[Any, ...], numbers: int) -> None:
    """Run compiled code over so many numbers, with threads where they pay."""
    threads = torch.get_num_threads() if numbers >= PARALLEL_FROM else 1
    if threads == 1:
        alone(*arguments)
    else:
        with in_threads(threads):
            in_parallel(*arguments)
