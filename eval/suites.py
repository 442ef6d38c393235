"""Suites as data: a name, and the evaluation that it stands for.

A suite leaves model and text at their defaults; `python -m eval.run SUITE --text FILE` puts a local text in. Figures of one suite
compare over time as long as its entry here does not change: a new setting is a new name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hf_kvq.evaluation import EXACT, EvalConfig

__all__ = ["SUITES"]

_EIGHT_BITS = (EXACT, "int8", "fp8", "seed_int8", "seed_fp8")

SUITES: Mapping[str, EvalConfig] = MappingProxyType(
    {
        # A minute on two cores: shows that everything runs; too few tokens to tell 8-bit schemes apart.
        "demo": EvalConfig(schemes=_EIGHT_BITS, window=256, count=8, noise_floor_tokens=64, timed_tokens=5),
        # The field's protocol on the test split: one pass over each window, every token read as codes.
        "wikitext8": EvalConfig(schemes=_EIGHT_BITS, window=1024, count=12),
        # What a user of the cache gets: token by token, the cache's own prefill mode.
        "decode8": EvalConfig(schemes=_EIGHT_BITS, protocol="decode", chunk=1, window=256, count=4),
    }
)
