"""Records of `eval.bounded`: one JSON line each, appended, never changed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from eval.speed.records import append
from hf_kvq.evaluation import LoadedModel
from hf_kvq.evaluation.data import Text
from hf_kvq.evaluation.environment import current_environment

__all__ = ["RESULTS", "append", "context_of"]

RESULTS = Path(__file__).resolve().parents[1] / "results" / "bounded.jsonl"


def context_of(loaded: LoadedModel, text: Text | None) -> dict[str, Any]:
    """What it takes to repeat a measurement."""
    return {
        "model": loaded.title,
        "weights_sha256": loaded.weights_sha256,
        "text": None if text is None else text.name,
        "text_sha256": None if text is None else text.sha256,
        "threads": torch.get_num_threads(),
        "when": time.strftime("%Y-%m-%d"),
        "environment": vars(current_environment(torch.device("cpu"))),
    }
