"""Schemes as values."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

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


@pytest.mark.parametrize("name", PRESETS)
def test_a_scheme_survives_its_file(name, tmp_path):
    path = tmp_path / "scheme.json"
    path.write_text("what was there before")
    PRESETS[name].save(path)
    assert QuantConfig.load(path) == PRESETS[name]
    assert json.loads(path.read_text(encoding="utf-8"))["name"] == name
    assert [each.name for each in tmp_path.iterdir()] == ["scheme.json"]


def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "scheme.json"
    PRESETS["q4"].save(path)
    monkeypatch.setattr(Path, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        PRESETS["q2"].save(path)
    assert QuantConfig.load(path) == PRESETS["q4"]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_that_ends_in_json_is_a_scheme(kind, tmp_path):
    path = tmp_path / "mine.json"
    PRESETS["q3"].save(path)
    assert resolve_scheme(kind(path)) == PRESETS["q3"]
    assert resolve_scheme(kind(path), sinks=7, residual=0) == dataclasses.replace(PRESETS["q3"], sinks=7, residual=0)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*mine.json; .* hf-kvq allocate"):
        resolve_scheme(str(tmp_path / "mine.json"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("[1, 2]", "expected an object, got list"),
        ("{}", r"needs the fields \['keys', 'values'\]"),
        ('{"keys": 8, "values": 8}', ""),
        ('{"keys": {"kind": "nf4"}, "values": {}}', "unknown kind of codec 'nf4'"),
        ('{"keys": {"kind": "kivi", "width": 4}, "values": {}}', "width"),
        ('{"keys": {"kind": "rotated", "bits": 7}, "values": {}}', "bits must be one of"),
        ('{"keys": {"kind": "identity"}, "values": {"kind": "identity"}, "layers": {"0": {}}}', "keys"),
        ('{"keys": {"kind": "identity"}, "values": {"kind": "identity"}, "layers": [3]}', ""),
        ("caf\xe9", ""),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_a_file_that_holds_no_scheme_is_named(content, message, tmp_path):
    path = tmp_path / "mine.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"mine.json holds no scheme \(.*{message}.*\); give a file that"):
        QuantConfig.load(path)


def test_sinks_and_residual_replace_the_schemes_own():
    assert resolve_scheme("int8").sinks == 0
    changed = resolve_scheme("int8", sinks=4, residual=8)
    assert (changed.sinks, changed.residual, changed.keys) == (4, 8, PRESETS["int8"].keys)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resolve_scheme("int7"), "unknown scheme 'int7'; the presets are .*int8.*q4.* ends in .json"),
        (lambda: resolve_scheme(Path("mine.yaml")), "unknown scheme 'mine.yaml'"),
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
