"""What a scheme is: frozen value objects, and the presets by name.

A scheme says how keys and values are coded, how many tokens stay exact, and which layers depart from the rule. It holds no
tensor and imports nothing of the package, so a receipt can record it as JSON and read it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

__all__ = [
    "PRESETS",
    "AffineConfig",
    "Band",
    "Clusters",
    "CodecConfig",
    "FarField",
    "HeavyHitters",
    "IdentityConfig",
    "KiviConfig",
    "LayerQuant",
    "QuantConfig",
    "RotatedConfig",
    "resolve_scheme",
]


def _one_of(label: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{label} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _not_negative(label: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{label} must be a whole number of at least 0, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class IdentityConfig:
    """States kept as they are: the oracle that all plumbing is tested against."""

    kind: Literal["identity"] = "identity"


@dataclass(frozen=True, kw_only=True)
class AffineConfig:
    """Eight or four bits an element and one scale for a group.

    Attributes:
        mode: `"int8"`: integers -127 to 127, symmetric. `"fp8"`: `torch.float8_e4m3fn`. `"int4"`: integers -7 to 7, two in a byte, per token only; a
            plain baseline whose loss most models show.
        granularity: `"per_token"`: a bfloat16 scale for every token of every head. `"per_update"`: the seed's per-tensor
            rule, one float32 scale for all that one row stores in one update.
    """

    kind: Literal["affine"] = "affine"
    mode: Literal["int8", "fp8", "int4"] = "int8"
    granularity: Literal["per_token", "per_update"] = "per_token"

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, ("int8", "fp8", "int4"))
        _one_of("granularity", self.granularity, ("per_token", "per_update"))
        if self.mode == "int4" and self.granularity != "per_token":
            raise ValueError("mode 'int4' needs granularity 'per_token', got 'per_update'; leave granularity out")


@dataclass(frozen=True, kw_only=True)
class RotatedConfig:
    """Low-bit codes in a basis of each head's own, which the first tokens teach; until then they are kept exactly.

    Attributes:
        bits: 8, 6, 5, 4, 3 or 2 for all channels, or bits of equal tiers of channels, the weightiest ones first: (6, 4, 3, 3) are 4 bits on average. A head_dim
            that tiers do not fit (80) takes their mean for all channels.
        trellis: Whether the codes of a token lie on a path, which saves a third of the squared error and makes encoding slower; not with 8 bits.
    """

    kind: Literal["rotated"] = "rotated"
    bits: int | tuple[int, ...] = 4
    trellis: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int):
            object.__setattr__(self, "bits", tuple(self.bits))
        known = (8, 6, 5, 4, 3, 2)
        allowed = known if isinstance(self.bits, int) else (*known, 1)
        if not self.tiers or any(isinstance(each, bool) or each not in allowed for each in self.tiers):
            raise ValueError(
                f"bits must be one of {', '.join(map(str, known))}, or a tuple of them (and 1), got {self.bits!r}"
            )

        if self.trellis and 8 in self.tiers:
            raise ValueError(f"codes of 8 bits lie on no trellis, got bits {self.bits!r}; leave trellis out")

    @property
    def tiers(self) -> tuple[int, ...]:
        """`bits` of each tier."""
        return (self.bits,) if isinstance(self.bits, int) else self.bits


@dataclass(frozen=True, kw_only=True)
class KiviConfig:
    """Asymmetric integers with a float16 scale and minimum for a group, after KIVI (arXiv:2402.02750); keys per channel, values per token.

    Attributes:
        bits: 4 or 2.
        group_size: Tokens of a group of keys, a multiple of 8; tokens are exact until as many are there. Channels of a group of values, or the most below that divide head_dim.
    """

    kind: Literal["kivi"] = "kivi"
    bits: int = 4
    group_size: int = 32

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in (4, 2):
            raise ValueError(f"bits must be 4 or 2, got {self.bits!r}")
        _not_negative("group_size", self.group_size)
        if self.group_size == 0 or self.group_size % 8:
            raise ValueError(f"group_size must be a multiple of 8, got {self.group_size}; the default is 32")


CodecConfig = IdentityConfig | AffineConfig | RotatedConfig | KiviConfig
_CODEC_CONFIGS: Mapping[str, type[CodecConfig]] = MappingProxyType(
    {"identity": IdentityConfig, "affine": AffineConfig, "rotated": RotatedConfig, "kivi": KiviConfig}
)


@dataclass(frozen=True, kw_only=True)
class LayerQuant:
    """How one layer departs from the scheme: its codec for keys and for values."""

    keys: CodecConfig
    values: CodecConfig


@dataclass(frozen=True, kw_only=True)
class Band:
    """Layers at some depth of a model: layer i of n is at (i + 1/2) / n.

    Attributes:
        begin: Depth from which on.
        end: Depth before which.
        quant: Their codecs.
    """

    begin: float
    end: float
    quant: LayerQuant

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end <= 1:
            raise ValueError(
                f"a band must go from a depth of at least 0 to a larger one of at most 1, got {self.begin} to {self.end}"
            )
        if not isinstance(self.quant, LayerQuant):
            raise ValueError(f"quant must be a LayerQuant, got {self.quant!r}")


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """A scheme.

    Attributes:
        keys: Codec of the keys.
        values: Codec of the values; keys and values may differ.
        sinks: First real tokens of every row, kept exactly in the model's dtype.
        residual: Newest tokens, kept exactly until they leave it.
        bands: Codecs of layers by their depth in a model, which holds for models of any number of layers.
        layers: Overrides by layer index; a mapping is kept as sorted pairs.
        name: How tables call it.
    """

    keys: CodecConfig
    values: CodecConfig
    sinks: int = 0
    residual: int = 0
    bands: tuple[Band, ...] = ()
    layers: Mapping[int, LayerQuant] | tuple[tuple[int, LayerQuant], ...] = field(default=())
    name: str = "custom"

    def __post_init__(self) -> None:
        for label in ("keys", "values"):
            if not isinstance(getattr(self, label), tuple(_CODEC_CONFIGS.values())):
                raise ValueError(
                    f"{label} must be a codec config, got {getattr(self, label)!r}; try AffineConfig(mode='int8'), or a preset by name"
                )
        _not_negative("sinks", self.sinks)
        _not_negative("residual", self.residual)
        if not all(isinstance(band, Band) for band in self.bands):
            raise ValueError(f"bands must be a tuple of Band, got {self.bands!r}")
        overrides = tuple(sorted(self.overrides, key=lambda item: item[0]))
        for index, override in overrides:
            _not_negative("layers", index)
            if not isinstance(override, LayerQuant):
                raise ValueError(f"layers[{index}] must be a LayerQuant, got {override!r}")
        object.__setattr__(self, "layers", overrides)

    @property
    def overrides(self) -> tuple[tuple[int, LayerQuant], ...]:
        """`layers` as sorted pairs."""
        return tuple(self.layers.items() if isinstance(self.layers, Mapping) else self.layers)

    def for_layer(self, index: int, layers: int) -> LayerQuant:
        """The codecs of layer `index` of a model of so many layers."""
        depth = (index + 0.5) / max(layers, index + 1)
        banded = (band.quant for band in self.bands if band.begin <= depth < band.end)
        rule = next(banded, LayerQuant(keys=self.keys, values=self.values))
        return dict(self.overrides).get(index, rule)

    def to_dict(self) -> dict[str, Any]:
        """This scheme as JSON values; `from_dict` reads it back."""
        return {
            "name": self.name,
            "keys": _codec_to_dict(self.keys),
            "values": _codec_to_dict(self.values),
            "sinks": self.sinks,
            "residual": self.residual,
            "bands": [
                {"begin": band.begin, "end": band.end, "quant": _layer_to_dict(band.quant)} for band in self.bands
            ],
            "layers": {str(index): _layer_to_dict(layer) for index, layer in self.overrides},
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> QuantConfig:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: If a field is missing or unknown; the message names it.
        """
        known = {f.name for f in fields(QuantConfig)}
        if unknown := set(data) - known:
            raise ValueError(f"unknown fields of a scheme: {sorted(unknown)}; known are {sorted(known)}")
        if missing := {"keys", "values"} - set(data):
            raise ValueError(f"a scheme needs the fields {sorted(missing)}, got {sorted(data)}")
        layers = {int(index): _layer_from_dict(layer) for index, layer in data.get("layers", {}).items()}
        bands = tuple(
            Band(begin=band["begin"], end=band["end"], quant=_layer_from_dict(band["quant"]))
            for band in data.get("bands", ())
        )
        return QuantConfig(
            keys=_codec_from_dict(data["keys"]),
            values=_codec_from_dict(data["values"]),
            sinks=data.get("sinks", 0),
            residual=data.get("residual", 0),
            bands=bands,
            layers=tuple(layers.items()),
            name=data.get("name", "custom"),
        )

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file; one that is there already is replaced once the new one is complete."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)

    @staticmethod
    def load(path: str | Path) -> QuantConfig:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file holds no scheme; the message names it.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no file {path}; QuantConfig.save and hf-kvq allocate write schemes")
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise ValueError(f"expected an object, got {type(data).__name__}")
            return QuantConfig.from_dict(data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # Fields may hold anything: what is wrong with them shows where they are used.
            raise ValueError(
                f"{path} holds no scheme ({error}); give a file that QuantConfig.save or hf-kvq allocate wrote"
            ) from error


@dataclass(frozen=True)
class HeavyHitters:
    """Tokens that left the window and stay individually, as codes: for every kv head those of the largest attention mass.

    Source: H2O, arXiv:2306.14048. Departs from it: mass decays, so that what mattered long ago makes room.

    Attributes:
        tokens: How many stay, for each kv head.
        decay: Factor of the mass for every block of tokens that passes; .9 goes with blocks of 32.
    """

    tokens: int
    decay: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool) or self.tokens < 1:
            raise ValueError(
                f"tokens must be a whole number of at least 1, got {self.tokens!r}; leave HeavyHitters out to keep none"
            )
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be above 0 and at most 1, got {self.decay!r}; the default is 0.9")


@dataclass(frozen=True)
class Clusters:
    """Tokens that left the window, merged into clusters of one mean key and one mean value.

    A summary, no memory: with hundreds of clusters most are single tokens still, and a passage of a few hundred tokens ago is found in part; further back it is not.

    Attributes:
        count: Clusters of each kv head.
        closure: How a cluster answers. `"bounded"`: means before RoPE, and a term for the spread that grows with its logarithm. `"mgf"`: the seed's formulas,
            for parity and research: its term for the spread has no bound, and a cluster is larger than a hundred tokens.
    """

    count: int
    closure: Literal["bounded", "mgf"] = "bounded"

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or self.count < 2:
            raise ValueError(
                f"count must be a whole number of at least 2, got {self.count!r}; leave Clusters out to have none"
            )
        _one_of("closure", self.closure, ("bounded", "mgf"))


FarField = HeavyHitters | Clusters | tuple[HeavyHitters, Clusters]
"""What becomes of tokens that leave the window; with both, clusters take what heavy hitters leave."""


def _preset(name: str, codec: CodecConfig, *, sinks: int = 0) -> QuantConfig:
    return QuantConfig(keys=codec, values=codec, sinks=sinks, name=name)


Bits = int | tuple[int, ...]


def _rotated(keys: Bits, values: Bits) -> LayerQuant:
    return LayerQuant(
        keys=RotatedConfig(bits=keys, trellis=keys != 8), values=RotatedConfig(bits=values, trellis=values != 8)
    )


def _low_bit(
    name: str, keys: Bits, values: Bits, *, residual: int = 0, bands: tuple[tuple[float, float, Bits, Bits], ...] = ()
) -> QuantConfig:
    rule = _rotated(keys, values)
    return QuantConfig(
        keys=rule.keys,
        values=rule.values,
        sinks=4,
        residual=residual,
        bands=tuple(Band(begin=begin, end=end, quant=_rotated(k, v)) for begin, end, k, v in bands),
        name=name,
    )


# The second to the fourth of 30 layers lose most by few bits, the first and the last two least (`python -m eval.bits`, eval/LOG.md).
_SENSITIVE, _FIRST, _LAST = (0.034, 0.134), (0.0, 0.034), (0.933, 1.0)

PRESETS: Mapping[str, QuantConfig] = MappingProxyType(
    {
        "identity": _preset("identity", IdentityConfig()),
        "int8": _preset("int8", AffineConfig(mode="int8")),
        "fp8": _preset("fp8", AffineConfig(mode="fp8")),
        "seed_int8": _preset("seed_int8", AffineConfig(mode="int8", granularity="per_update")),
        "seed_fp8": _preset("seed_fp8", AffineConfig(mode="fp8", granularity="per_update")),
        "q8": _low_bit("q8", 8, 8),
        "q6": _low_bit("q6", 6, 6),
        "q4": _low_bit("q4", 4, 4, residual=64, bands=((*_SENSITIVE, 5, 5), (*_FIRST, 3, 3), (*_LAST, 3, 3))),
        "q3": _low_bit(
            "q3",
            (4, 3, 3, 2),
            3,
            residual=64,
            bands=((*_SENSITIVE, (5, 4, 4, 3), 4), (*_FIRST, (3, 2, 2, 1), 2), (*_LAST, (3, 2, 2, 1), 2)),
        ),
        "q2": _low_bit("q2", (3, 2, 2, 1), 2, residual=64, bands=((_FIRST[1], 0.5, (4, 3, 3, 2), 3),)),
        "kivi4": _preset("kivi4", KiviConfig(bits=4), sinks=4),
        "kivi2": _preset("kivi2", KiviConfig(bits=2), sinks=4),
    }
)


def resolve_scheme(
    scheme: str | Path | QuantConfig, *, sinks: int | None = None, residual: int | None = None
) -> QuantConfig:
    """A scheme from a preset's name, from a JSON file or from itself, with `sinks` and `residual` replaced where given.

    Args:
        scheme: A preset's name, the path of a file that ends in .json, or a scheme.
        sinks: Of the result; None for the scheme's own.
        residual: Likewise.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the name is no preset, the file holds no scheme, or a count is negative.
    """
    if isinstance(scheme, str | Path):
        name = str(scheme)
        if not name.endswith(".json") and name not in PRESETS:
            raise ValueError(
                f"unknown scheme {name!r}; the presets are {', '.join(PRESETS)}, or give a QuantConfig, or a file that ends in .json"
            )
        scheme = QuantConfig.load(scheme) if name.endswith(".json") else PRESETS[name]
    elif not isinstance(scheme, QuantConfig):
        raise ValueError(
            f"scheme must be a preset's name or a QuantConfig, got {scheme!r}; the presets are {', '.join(PRESETS)}"
        )
    changes = {label: count for label, count in (("sinks", sinks), ("residual", residual)) if count is not None}
    return replace(scheme, **changes) if changes else scheme


def _codec_to_dict(codec: CodecConfig) -> dict[str, Any]:
    return {f.name: getattr(codec, f.name) for f in fields(codec)}


def _layer_to_dict(layer: LayerQuant) -> dict[str, Any]:
    return {"keys": _codec_to_dict(layer.keys), "values": _codec_to_dict(layer.values)}


def _layer_from_dict(data: Mapping[str, Any]) -> LayerQuant:
    return LayerQuant(keys=_codec_from_dict(data["keys"]), values=_codec_from_dict(data["values"]))


def _codec_from_dict(data: Mapping[str, Any]) -> CodecConfig:
    kind = str(data.get("kind"))
    if kind not in _CODEC_CONFIGS:
        raise ValueError(f"unknown kind of codec {kind!r}; known are {', '.join(_CODEC_CONFIGS)}")
    # JSON knows no tuples.
    arguments: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in data.items()}
    return _CODEC_CONFIGS[kind](**arguments)
