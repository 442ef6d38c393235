"""Codecs: states to codes and back. One file a method; this one finds the codec that a config names."""

from __future__ import annotations

from collections.abc import Callable

from hf_kvq.codecs.affine import PerTokenAffineCodec, PerTokenInt4Codec, PerUpdateAffineCodec
from hf_kvq.codecs.base import Codec, Codes
from hf_kvq.codecs.identity import IdentityCodec
from hf_kvq.codecs.kivi import KiviKeyCodec, KiviValueCodec
from hf_kvq.codecs.rotated import GridEncoder, RotatedCodec
from hf_kvq.config import CodecConfig, IdentityConfig, KiviConfig, LayerQuant, RotatedConfig
from hf_kvq.rope import Rope

__all__ = ["Codec", "Codes", "make_codec", "make_codecs"]


def make_codecs(
    quant: LayerQuant,
    rope: Rope | None = None,
    compiled: Callable[[str], GridEncoder | None] = lambda device_type: None,
) -> tuple[Codec, Codec]:
    """Codecs of one layer's keys and values.

    Args:
        quant: What they are.
        rope: How the model turned the keys, for codecs that keep them in a basis.
        compiled: A compiled encoder of low-bit codes for a type of device, or None.
    """
    return (
        make_codec(quant.keys, keys=True, rope=rope, compiled=compiled),
        make_codec(quant.values, compiled=compiled),
    )


def make_codec(
    config: CodecConfig,
    *,
    keys: bool = False,
    rope: Rope | None = None,
    compiled: Callable[[str], GridEncoder | None] = lambda device_type: None,
) -> Codec:
    """A codec of its own for one layer's keys or values."""
    if isinstance(config, IdentityConfig):
        return IdentityCodec()
    if isinstance(config, RotatedConfig):
        return RotatedCodec(config, rope=rope, balance=keys, compiled=compiled)
    if isinstance(config, KiviConfig):
        return KiviKeyCodec(config) if keys else KiviValueCodec(config)
    if config.mode == "int4":
        return PerTokenInt4Codec()
    per_granularity = {"per_token": PerTokenAffineCodec, "per_update": PerUpdateAffineCodec}
    return per_granularity[config.granularity](config.mode)
