"""Codecs: states to codes and back. One file a method; this one finds the codec that a config names."""

from __future__ import annotations

from hf_kvq.codecs.affine import PerTokenAffineCodec, PerTokenInt4Codec, PerUpdateAffineCodec
from hf_kvq.codecs.base import Codec, Codes
from hf_kvq.codecs.identity import IdentityCodec
from hf_kvq.codecs.kivi import KiviKeyCodec, KiviValueCodec
from hf_kvq.codecs.rotated import RotatedCodec
from hf_kvq.config import CodecConfig, IdentityConfig, KiviConfig, LayerQuant, RotatedConfig
from hf_kvq.rope import Rope

__all__ = ["Codec", "Codes", "make_codec", "make_codecs"]


def make_codecs(quant: LayerQuant, rope: Rope | None = None) -> tuple[Codec, Codec]:
    """Codecs of one layer's keys and values.

    Args:
        quant: What they are.
        rope: How the model turned the keys, for codecs that keep them in a basis.
    """
    return make_codec(quant.keys, keys=True, rope=rope), make_codec(quant.values)


def make_codec(config: CodecConfig, *, keys: bool = False, rope: Rope | None = None) -> Codec:
    """A codec of its own for one layer's keys or values."""
    if isinstance(config, IdentityConfig):
        return IdentityCodec()
    if isinstance(config, RotatedConfig):
        return RotatedCodec(config, rope=rope, balance=keys)
    if isinstance(config, KiviConfig):
        return KiviKeyCodec(config) if keys else KiviValueCodec(config)
    if config.mode == "int4":
        return PerTokenInt4Codec()
    per_granularity = {"per_token": PerTokenAffineCodec, "per_update": PerUpdateAffineCodec}
    return per_granularity[config.granularity](config.mode)
