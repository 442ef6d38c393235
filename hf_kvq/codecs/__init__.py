"""Codecs: states to codes and back. One file a method; this one finds the codec that a config names."""

from __future__ import annotations

from hf_kvq.codecs.affine import PerTokenAffineCodec, PerTokenInt4Codec, PerUpdateAffineCodec
from hf_kvq.codecs.base import Codec, Codes
from hf_kvq.codecs.identity import IdentityCodec
from hf_kvq.config import CodecConfig, IdentityConfig

__all__ = ["Codec", "Codes", "make_codec"]


def make_codec(config: CodecConfig) -> Codec:
    """A codec of its own for one layer's keys or values."""
    if isinstance(config, IdentityConfig):
        return IdentityCodec()
    if config.mode == "int4":
        return PerTokenInt4Codec()
    per_granularity = {"per_token": PerTokenAffineCodec, "per_update": PerUpdateAffineCodec}
    return per_granularity[config.granularity](config.mode)
