"""A receipt: one measurement of one scheme as JSON, with everything that is needed to repeat it.

Every field is mandatory, also where its value is null: a perplexity whose window, join rule or weights are not known cannot be
compared with another. `runner.rerun` repeats a measurement from its receipt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from hf_kvq.evaluation.config import Attending, Bos, Dtype, Join, Prefill, Protocol
from hf_kvq.evaluation.environment import Environment
from hf_kvq.evaluation.protocols import NoiseFloor

__all__ = ["SCHEMA", "ModelRecord", "PositionBucket", "Receipt", "Results", "Settings", "TextRecord"]

SCHEMA = 2

Section = TypeVar("Section")


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """Which model: `name` loads it again (null: the embedded default), the hashes tell whether it is the same one."""

    name: str | None
    title: str
    source: str
    revision: str | None
    weights_sha256: str
    tokenizer_sha256: str
    dtype: Dtype


@dataclass(frozen=True, kw_only=True)
class TextRecord:
    """Which text: `path` as the user gave it (null: not from a file), its hash after joining, and its number of tokens."""

    name: str
    path: str | None
    source: str
    join: Join
    sha256: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How it was measured.

    Attributes:
        scheme: The scheme as JSON values; `{"name": "exact"}` is transformers' own cache.
        schemes: Names of all schemes of the run, in its order.
        protocol: `"windows"` or `"decode"`.
        window: Tokens of a window.
        stride: Tokens from one window to the next.
        first: Index of the first window.
        count: Number of windows.
        windows_sha256: Over the token ids of all windows, BOS included.
        bos: BOS rule.
        prefill: What the tokens of a forward saw of each other: `"coded"` or `"exact"` states.
        chunk: Tokens of one forward; null: a whole window.
        attention: `"dense"` over decoded states, or `"fused"` over codes.
        sinks: First tokens kept exactly.
        residual: Newest tokens kept exactly.
        seed: Of torch.
        threads: Asked for; null: torch's own choice, which `environment.threads` names.
        device: Asked for.
        noise_floor_tokens: Asked for; 0: none.
        timed_tokens: Asked for; 0: none.
    """

    scheme: dict[str, Any]
    schemes: tuple[str, ...]
    protocol: Protocol
    window: int
    stride: int
    first: int
    count: int
    windows_sha256: str
    bos: Bos
    prefill: Prefill
    chunk: int | None
    attention: Attending
    sinks: int
    residual: int
    seed: int
    threads: int | None
    device: str
    noise_floor_tokens: int
    timed_tokens: int


@dataclass(frozen=True, kw_only=True)
class PositionBucket:
    """Mean negative log-likelihood of the tokens predicted from positions `first` to `last` of a window."""

    first: int
    last: int
    exact_nll: float
    coded_nll: float


@dataclass(frozen=True, kw_only=True)
class Results:
    """What came out; differences are coded minus exact on the same tokens.

    Attributes:
        perplexity: With the cache under test.
        exact_perplexity: With transformers' own cache, same windows.
        delta_perplexity: Their difference.
        delta_percent: The same in percent of the exact one.
        delta_percent_se: Its standard error over windows (delta method); null with one window.
        delta_nll: Mean difference of the negative log-likelihood, in nats.
        delta_nll_se: Its standard error over windows (paired); null with one window.
        kl_mean: Mean KL(exact || coded) of the next-token distributions, in nats.
        kl_p99: Its 99 % quantile over positions.
        kl_max: Its maximum.
        same_top1: Share of positions where both put the same token first.
        scored_tokens: Number of predictions behind every figure.
        nll_by_position: In up to eight buckets.
        noise_floor: Exact against exact; null where it was not measured.
        nbytes: Sum of the cache's storages after the last window.
        nbytes_used: The part that holds tokens.
        exact_nbytes: Bytes of the same tokens in transformers' own cache, without buffers.
        bits_per_element: All bytes in use x 8 / elements.
        tokens_coded: Tokens held as codes after the last window, summed over the layers.
        ms_per_token: Median time of a single-token forward at the end of a window; null where it was not measured.
        ms_per_token_ratio: Median of its time over the exact cache's on the same token; null where it was not measured.
    """

    perplexity: float
    exact_perplexity: float
    delta_perplexity: float
    delta_percent: float
    delta_percent_se: float | None
    delta_nll: float
    delta_nll_se: float | None
    kl_mean: float
    kl_p99: float
    kl_max: float
    same_top1: float
    scored_tokens: int
    nll_by_position: tuple[PositionBucket, ...]
    noise_floor: NoiseFloor | None
    nbytes: int
    nbytes_used: int
    exact_nbytes: int
    bits_per_element: float
    tokens_coded: int
    ms_per_token: float | None
    ms_per_token_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """One measurement of one scheme. `run` is shared by the receipts of one run, `date` is UTC."""

    run: str
    date: str
    model: ModelRecord
    text: TextRecord
    settings: Settings
    environment: Environment
    results: Results

    @property
    def name(self) -> str:
        """The scheme's name."""
        return self.settings.scheme["name"]

    def to_json(self, *, indent: int | None = 2) -> str:
        """The receipt as JSON; `indent=None` puts it on one line."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=indent, allow_nan=False, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> Receipt:
        """Read what `to_json` wrote.

        Raises:
            ValueError: If it is no receipt of this schema, or a field is missing or unknown; the message names it.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a receipt: it is no JSON ({error})") from error
        if not isinstance(data, dict) or "schema" not in data:
            raise ValueError("not a receipt: the field 'schema' is missing")
        schema = data.pop("schema")
        if schema == 1 and isinstance(data.get("settings"), dict):
            # Before attention over codes there was no choice to record.
            data["settings"].setdefault("attention", "dense")
        elif schema != SCHEMA:
            raise ValueError(f"the receipt has schema {schema}, this version of hf_kvq reads 1 and {SCHEMA}")
        nested = {"model": ModelRecord, "text": TextRecord, "settings": Settings, "environment": Environment}
        for name, section in nested.items():
            if name in data:
                data[name] = _read(section, data[name], name)
        if "results" in data:
            data["results"] = _read_results(data["results"])
        receipt = _read(Receipt, data, "")
        if "name" not in receipt.settings.scheme:
            raise ValueError("the receipt lacks the field 'settings.scheme.name'")
        return receipt

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Receipt:
        """Read it from a file.

        Raises:
            ValueError: As `from_json`, or if the file cannot be read; the message names the file.
        """
        try:
            return Receipt.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read the receipt {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _read_results(data: Any) -> Results:
    where = "results"
    if isinstance(data, Mapping):
        data = dict(data)
        if isinstance(buckets := data.get("nll_by_position"), list):
            data["nll_by_position"] = tuple(_read(PositionBucket, b, f"{where}.nll_by_position") for b in buckets)
        if data.get("noise_floor") is not None:
            data["noise_floor"] = _read(NoiseFloor, data["noise_floor"], f"{where}.noise_floor")
    return _read(Results, data, where)


def _read(section: type[Section], data: Any, where: str) -> Section:
    """A frozen section from JSON values, with every field of it and no other."""
    if not isinstance(data, Mapping):
        raise ValueError(f"the receipt's field {where!r} must be an object, got {data!r}")
    known = {field.name for field in fields(cast(Any, section))}
    prefix = f"{where}." if where else ""
    if missing := sorted(known - set(data)):
        raise ValueError(
            f"the receipt lacks {', '.join(repr(prefix + name) for name in missing)}; every field is mandatory"
        )
    if unknown := sorted(set(data) - known):
        raise ValueError(f"the receipt has unknown fields {', '.join(repr(prefix + name) for name in unknown)}")
    return section(**{name: tuple(value) if name == "schemes" else value for name, value in data.items()})
