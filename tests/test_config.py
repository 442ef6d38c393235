"""Schemes as values."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hf_kvq import PRESETS, AffineConfig, IdentityConfig, LayerQuant, QuantConfig, resolve_scheme
from hf_kvq.config import KiviConfig


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name):
    scheme = PRESETS[name]
    assert scheme.name == name
    assert QuantConfig.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


def test_keys_values_and_layers_may_differ_and_survive_json():
    scheme = QuantConfig(
        keys=AffineConfig(mode="int8"),
        values=AffineConfig(mode="fp8"),
        sinks=4,
        residual=64,
        layers={3: LayerQuant(keys=IdentityConfig(), values=AffineConfig())},
        name="mixed",
    )
    assert QuantConfig.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert scheme.for_layer(3, 4).keys == IdentityConfig()
    assert scheme.for_layer(2, 4) == LayerQuant(keys=scheme.keys, values=scheme.values)
    assert hash(scheme) == hash(dataclasses.replace(scheme))


def test_sinks_and_residual_replace_the_schemes_own():
    assert resolve_scheme("int8").sinks == 0
    changed = resolve_scheme("int8", sinks=4, residual=8)
    assert (changed.sinks, changed.residual, changed.keys) == (4, 8, PRESETS["int8"].keys)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resolve_scheme("int7"), "unknown scheme 'int7'.*int8"),
        (lambda: resolve_scheme(8), "preset's name or a QuantConfig, got 8"),
        (lambda: resolve_scheme("int8", sinks=-1), "sinks must be a whole number of at least 0, got -1"),
        (lambda: resolve_scheme("int8", residual=1.5), "residual must be .* got 1.5"),
        (lambda: AffineConfig(mode="int5"), "mode must be one of 'int8', 'fp8', 'int4', got 'int5'"),
        (lambda: AffineConfig(granularity="per_head"), "granularity must be one of"),
        (lambda: KiviConfig(bits=3), "bits must be 4 or 2, got 3"),
        (lambda: KiviConfig(group_size=20), "group_size must be a multiple of 8, got 20"),
        (lambda: KiviConfig(group_size=0), "group_size must be a multiple of 8, got 0"),
        (lambda: QuantConfig(keys="int8", values=AffineConfig()), "keys must be a codec config, got 'int8'"),
        (
            lambda: QuantConfig(keys=AffineConfig(), values=AffineConfig(), layers={0: AffineConfig()}),
            r"layers\[0\] must be a LayerQuant",
        ),
        (lambda: QuantConfig.from_dict({"keys": {"kind": "affine"}}), r"needs the fields \['values'\]"),
        (
            lambda: QuantConfig.from_dict({"keys": {}, "values": {}, "bits": 4}),
            r"unknown fields of a scheme: \['bits'\]",
        ),
        (
            lambda: QuantConfig.from_dict({"keys": {"kind": "nf4"}, "values": {"kind": "nf4"}}),
            "unknown kind of codec 'nf4'",
        ),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
