"""What one evaluation does, as a frozen value that cannot hold a bad setting.

Protocol `windows` is the one of QuaRot (arXiv:2404.00456) and KVQuant (arXiv:2401.18079): non-overlapping windows, one
teacher-forced pass each, every position scored, every token read as codes, itself included. Protocol `decode` feeds a real
cache with its real prefill mode, chunk by chunk, as generation does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hf_kvq.config import QuantConfig, resolve_scheme

__all__ = ["EXACT", "Attending", "Bos", "Dtype", "EvalConfig", "Join", "Prefill", "Protocol"]

Attending = Literal["dense", "fused"]
Bos = Literal["none", "each window"]
Dtype = Literal["float32", "bfloat16", "float16"]
Join = Literal["raw", "rows"]
Prefill = Literal["exact", "coded"]
Protocol = Literal["windows", "decode"]

EXACT = "exact"
"""The name that stands, in evaluations only, for transformers' own `DynamicCache`: the reference of every figure."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """One evaluation: a model, a text, and the schemes that are compared on the same windows.

    Attributes:
        model: Hub id or local folder; None: the embedded default.
        revision: Of the model on the hub.
        text: Path of a local text file; None: the wikitext test split, or the text that stands in for it.
        join: How a local file is read: `"raw"` as it is, `"rows"` as wikitext rows joined by blank lines.
        schemes: Preset names, `QuantConfig`s, or `"exact"`.
        protocol: `"windows"` or `"decode"`.
        window: Tokens of one window; the stride is the same.
        first: Index of the first window.
        count: Number of windows; None: all that fit.
        bos: `"each window"` puts the tokenizer's BOS token in front of every window.
        chunk: Tokens of one forward under `"decode"` (None: 1). `"windows"` is one pass and takes none.
        prefill: `"windows"` is always `"coded"`. Under `"decode"` None means `"exact"`, the default of the cache.
        attention: `"dense"`: the model's own over decoded states. `"fused"`: over codes. The exact cache is read by sdpa either way.
        sinks: Replaces the sinks of every scheme; None leaves them.
        residual: Replaces the residual of every scheme; None leaves it.
        dtype: Of the model.
        device: Of the model, as torch writes it.
        threads: CPU threads of torch; None leaves them.
        seed: Of torch, for schemes that draw random numbers.
        noise_floor_tokens: Tokens on which exact in one pass is compared with exact token by token; 0: not measured.
        timed_tokens: Single-token forwards that the median speed is taken from; 0: not measured.
    """

    model: str | None = None
    revision: str | None = None
    text: str | None = None
    join: Join = "raw"
    schemes: tuple[str | QuantConfig, ...] = (EXACT, "int8")
    protocol: Protocol = "windows"
    window: int = 1024
    first: int = 0
    count: int | None = 12
    bos: Bos = "none"
    chunk: int | None = None
    prefill: Prefill | None = None
    attention: Attending = "dense"
    sinks: int | None = None
    residual: int | None = None
    dtype: Dtype = "float32"
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    noise_floor_tokens: int = 256
    timed_tokens: int = 9

    def __post_init__(self) -> None:
        literals = {"join": Join, "protocol": Protocol, "bos": Bos, "dtype": Dtype, "attention": Attending}
        for name, choices in literals.items():
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} must be one of {get_args(choices)}, got {getattr(self, name)!r}")
        if self.window < 2:
            raise ValueError(
                f"window must be at least 2 tokens (one is read, the next is predicted), got {self.window}"
            )
        at_least = {"first": 0, "noise_floor_tokens": 0, "timed_tokens": 0, "count": 1, "threads": 1}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.noise_floor_tokens == 1:
            raise ValueError("noise_floor_tokens=1 predicts nothing; try 2 or more, or 0 for no noise floor")
        if self.timed_tokens and self.window < 3:
            raise ValueError(
                f"window={self.window} leaves no token to time after the warm-up; try 3, or timed_tokens=0"
            )
        self._check_protocol()
        self._check_schemes()

    @property
    def cache_prefill(self) -> Prefill:
        """`prefill` of the caches: the protocol's own where None was given."""
        return self.prefill or ("coded" if self.protocol == "windows" else "exact")

    @property
    def forward_tokens(self) -> int | None:
        """Tokens of one forward; None: a whole window."""
        return None if self.protocol == "windows" else self.chunk or 1

    def _check_protocol(self) -> None:
        if self.prefill not in (None, *get_args(Prefill)):
            raise ValueError(f"prefill must be one of {get_args(Prefill)}, or None, got {self.prefill!r}")
        if self.protocol == "windows" and self.chunk is not None:
            raise ValueError(
                f"protocol='windows' is one pass over a window and takes no chunk, got {self.chunk}; try protocol='decode'"
            )
        if self.chunk is not None and not 1 <= self.chunk <= self.window:
            raise ValueError(f"chunk must be between 1 and the window of {self.window} tokens, got {self.chunk}")
        if self.cache_prefill == "exact" and self.forward_tokens in (None, self.window):
            raise ValueError(
                f"with prefill='exact' one pass over the whole window of {self.window} tokens never reads a code, and "
                "every delta would be 0; try prefill='coded', or protocol='decode' with a chunk below the window"
            )

    def _check_schemes(self) -> None:
        if not self.schemes:
            raise ValueError("schemes is empty; name at least one, as in schemes=('exact', 'int8')")
        names = [EXACT if scheme == EXACT else self._checked(scheme).name for scheme in self.schemes]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"schemes must have different names, got {', '.join(map(repr, repeated))} more than once")

    def _checked(self, scheme: str | QuantConfig) -> QuantConfig:
        config = self.resolve(scheme)
        if config.name == EXACT:
            raise ValueError(f"a QuantConfig cannot be named {EXACT!r}, which stands for the cache that codes nothing")
        if self.protocol == "windows" and config.residual:
            raise ValueError(
                f"{config.name}: residual={config.residual} under protocol='windows' measures something else than decoding: in "
                "one pass only the last tokens of the window would stay exact; try residual=0, or protocol='decode'"
            )
        return config

    def resolve(self, scheme: str | QuantConfig) -> QuantConfig:
        """`scheme` as it runs here, with this evaluation's sinks and residual."""
        return resolve_scheme(scheme, sinks=self.sinks, residual=self.residual)
