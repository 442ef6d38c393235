"""From a config to receipts, and from a receipt to the same measurement again."""

from __future__ import annotations

import datetime
import hashlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from hf_kvq.config import QuantConfig
from hf_kvq.evaluation.candidates import Candidate, Exact, candidates
from hf_kvq.evaluation.config import EXACT, EvalConfig
from hf_kvq.evaluation.data import Text, load_text, tokenize, windows
from hf_kvq.evaluation.environment import current_environment
from hf_kvq.evaluation.models import LoadedModel, load_model
from hf_kvq.evaluation.protocols import DecodeSpeed, NoiseFloor, decode_speed, measure, noise_floor
from hf_kvq.evaluation.receipts import ModelRecord, Receipt, Settings, TextRecord
from hf_kvq.evaluation.summary import summarize
from hf_kvq.states import ATTENTION

__all__ = ["Progress", "evaluate_model", "evaluate_schemes", "rerun"]

Progress = Callable[[int, int, str], None]
"""Told before every step, and once at the end: steps done, steps in all, and what comes now."""


def evaluate_schemes(config: EvalConfig, *, progress: Progress | None = None) -> list[Receipt]:
    """Load the model and the text of `config` and measure its schemes: one receipt each, in its order."""
    loaded = load_model(config.model, dtype=config.dtype, revision=config.revision, device=config.device)
    return evaluate_model(loaded, load_text(config.text, join=config.join), config, progress=progress)


def evaluate_model(
    loaded: LoadedModel, text: Text, config: EvalConfig, *, progress: Progress | None = None
) -> list[Receipt]:
    """Measure the schemes of `config` on a model and a text that are loaded already.

    Raises:
        ValueError: If the text has too few tokens for the windows, the tokenizer no BOS token where one is asked for, or the
            model another type or device than `config` says.
        RuntimeError: If a scheme coded nothing.
    """
    model = loaded.model
    _check_model(loaded, config)
    ids = tokenize(text, loaded.tokenizer)
    cut = windows(ids, config.window, config.first, config.count, bos_id=_bos_id(loaded, config))
    compared = candidates(config)
    coded = [candidate for candidate in compared if candidate.name != EXACT]
    total = len(cut) * (1 + len(coded)) + bool(config.noise_floor_tokens) + bool(config.timed_tokens)
    step = _Steps(total, progress)
    with _reproducible(config, model.device), _attending(model, config):
        floor = _noise_floor(loaded, cut, config, step)
        # The exact cache always runs: it is what every figure is relative to.
        measured = measure(model, cut, [Exact(), *coded], chunk=config.forward_tokens, step=step)
        speeds = _speeds(loaded, cut, [Exact(), *coded], config, step)
        environment = current_environment(model.device)
    step.finish()
    run, date = secrets.token_hex(8), datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return [
        Receipt(
            run=run,
            date=date,
            model=_model_record(loaded, config),
            text=TextRecord(
                name=text.name,
                path=text.path,
                source=text.source,
                join=text.join,
                sha256=text.sha256,
                tokens=len(ids),
            ),
            settings=_settings(candidate, compared, cut, config),
            environment=environment,
            results=summarize(
                measured[candidate.name],
                exact_nbytes=measured[EXACT].memory.nbytes_used,
                floor=floor,
                speed=speeds.get(candidate.name),
            ),
        )
        for candidate in compared
    ]


def rerun(
    receipt: Receipt, *, model: str | None = None, text: str | None = None, progress: Progress | None = None
) -> Receipt:
    """Repeat the measurement of a receipt.

    Args:
        receipt: The one to repeat.
        model: Where the model is now, in place of the recorded name.
        text: Where the text file is now, in place of the recorded path.
        progress: As in `evaluate_schemes`.

    Raises:
        ValueError: If weights, text or tokens are not the recorded ones; the message says which.
    """
    settings = receipt.settings
    config = EvalConfig(
        model=model or receipt.model.name,
        revision=receipt.model.revision if receipt.model.name and not model else None,
        text=text or receipt.text.path,
        join=receipt.text.join,
        schemes=(EXACT if receipt.name == EXACT else QuantConfig.from_dict(settings.scheme),),
        protocol=settings.protocol,
        window=settings.window,
        first=settings.first,
        count=settings.count,
        bos=settings.bos,
        chunk=settings.chunk if settings.protocol == "decode" else None,
        prefill=settings.prefill,
        attention=settings.attention,
        dtype=receipt.model.dtype,
        device=settings.device,
        threads=settings.threads,
        seed=settings.seed,
        noise_floor_tokens=settings.noise_floor_tokens,
        timed_tokens=settings.timed_tokens,
    )
    found = load_text(config.text, join=config.join)
    _same("text", receipt.text.name, receipt.text.sha256, found.name, found.sha256)
    loaded = load_model(config.model, dtype=config.dtype, revision=config.revision, device=config.device)
    _same("weights", receipt.model.title, receipt.model.weights_sha256, loaded.title, loaded.weights_sha256)
    ids = tokenize(found, loaded.tokenizer)
    cut = windows(ids, config.window, config.first, config.count, bos_id=_bos_id(loaded, config))
    _same("tokens", receipt.model.title, settings.windows_sha256, loaded.title, _sha256(cut))
    return evaluate_model(loaded, found, config, progress=progress)[0]


class _Steps:
    """Counts steps and tells whoever listens."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def __call__(self, what: str) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total, what)
        self._done += 1

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total, "done")


@contextmanager
def _reproducible(config: EvalConfig, device: torch.device) -> Iterator[None]:
    """The config's seed and threads inside, the caller's again afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        try:
            torch.set_num_threads(config.threads or threads)
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _attending(model: PreTrainedModel, config: EvalConfig) -> Iterator[None]:
    """The model set to attention over codes inside, if the config says so, and as it was afterwards."""
    if config.attention == "dense":
        yield
        return
    before = cast(str, model.config._attn_implementation)
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _noise_floor(
    loaded: LoadedModel, cut: Int[Tensor, "windows tokens"], config: EvalConfig, step: _Steps
) -> NoiseFloor | None:
    if not config.noise_floor_tokens:
        return None
    step("noise floor: exact in one pass against exact token by token")
    return noise_floor(loaded.model, cut[0, : config.noise_floor_tokens])


def _speeds(
    loaded: LoadedModel,
    cut: Int[Tensor, "windows tokens"],
    compared: list[Candidate],
    config: EvalConfig,
    step: _Steps,
) -> dict[str, DecodeSpeed]:
    if not config.timed_tokens:
        return {}
    step("milliseconds per token")
    return decode_speed(loaded.model, cut[-1], compared, timed=config.timed_tokens)


def _check_model(loaded: LoadedModel, config: EvalConfig) -> None:
    found = (str(loaded.model.dtype).removeprefix("torch."), loaded.model.device.type)
    if found != (config.dtype, torch.device(config.device).type):
        raise ValueError(
            f"{loaded.title} is {found[0]} on {found[1]}, and the config says dtype={config.dtype!r}, device={config.device!r}; "
            "a receipt records the config, so they must agree"
        )


def _bos_id(loaded: LoadedModel, config: EvalConfig) -> int | None:
    if config.bos == "none":
        return None
    bos_id = loaded.tokenizer.bos_token_id
    if not isinstance(bos_id, int):
        raise ValueError(
            f"bos='each window' needs a BOS token, and the tokenizer of {loaded.title} has none; try bos='none'"
        )
    return bos_id


def _model_record(loaded: LoadedModel, config: EvalConfig) -> ModelRecord:
    return ModelRecord(
        name=loaded.name,
        title=loaded.title,
        source=loaded.source,
        revision=loaded.revision,
        weights_sha256=loaded.weights_sha256,
        tokenizer_sha256=loaded.tokenizer_sha256,
        dtype=config.dtype,
    )


def _settings(
    candidate: Candidate,
    compared: tuple[Candidate, ...],
    cut: Int[Tensor, "windows tokens"],
    config: EvalConfig,
) -> Settings:
    scheme = candidate.to_dict()
    return Settings(
        scheme=scheme,
        schemes=tuple(other.name for other in compared),
        protocol=config.protocol,
        window=config.window,
        stride=config.window,
        first=config.first,
        count=len(cut),
        windows_sha256=_sha256(cut),
        bos=config.bos,
        prefill=config.cache_prefill,
        chunk=config.forward_tokens,
        attention=config.attention,
        sinks=scheme.get("sinks", 0),
        residual=scheme.get("residual", 0),
        seed=config.seed,
        threads=config.threads,
        device=config.device,
        noise_floor_tokens=config.noise_floor_tokens,
        timed_tokens=config.timed_tokens,
    )


def _sha256(tokens: Int[Tensor, "windows tokens"]) -> str:
    return hashlib.sha256(tokens.long().numpy().astype("<i8").tobytes()).hexdigest()


def _same(what: str, recorded_name: str, recorded: str, found_name: str, found: str) -> None:
    if recorded != found:
        raise ValueError(
            f"not the receipt's {what}: it has {recorded_name} with SHA-256 {recorded[:16]}..., here {found_name} "
            f"has {found[:16]}...; a rerun needs the same {what}"
        )
