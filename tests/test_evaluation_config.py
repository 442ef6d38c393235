"""An `EvalConfig` cannot hold a bad setting."""

from __future__ import annotations

import pytest

from hf_kvq import PRESETS, QuantConfig
from hf_kvq.evaluation import EvalConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 1}, "window must be at least 2 tokens .* got 1"),
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"first": -1}, "first must be at least 0, got -1"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"noise_floor_tokens": -1}, "noise_floor_tokens must be at least 0, got -1"),
        ({"noise_floor_tokens": 1}, "noise_floor_tokens=1 predicts nothing"),
        ({"window": 2}, "window=2 leaves no token to time"),
        ({"schemes": ()}, "schemes is empty"),
        ({"schemes": ("int8", "int8")}, "different names, got 'int8'"),
        ({"schemes": ("int7",)}, "unknown scheme 'int7'"),
        ({"chunk": 4}, "takes no chunk, got 4; try protocol='decode'"),
        ({"protocol": "decode", "chunk": 0}, "chunk must be between 1 and the window of 1024 tokens, got 0"),
        ({"protocol": "decode", "chunk": 1025}, "got 1025"),
        ({"protocol": "decode", "chunk": 1024}, "never reads a code, and every delta would be 0"),
        ({"prefill": "exact"}, "never reads a code, and every delta would be 0"),
        ({"residual": 8}, "int8: residual=8 under protocol='windows'"),
    ],
)
def test_a_bad_setting_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig(**settings)


@pytest.mark.parametrize("name", ["join", "protocol", "bos", "dtype", "prefill"])
def test_a_choice_that_is_none_is_refused_by_name(name):
    # Past the type check that runs in the tests, as a caller without it would come.
    config = EvalConfig()
    object.__setattr__(config, name, "neither")
    with pytest.raises(ValueError, match=f"{name} must be one of .* got 'neither'"):
        config.__post_init__()


def test_a_scheme_cannot_take_the_name_of_the_exact_cache():
    codec = PRESETS["int8"].keys
    with pytest.raises(ValueError, match="cannot be named 'exact'"):
        EvalConfig(schemes=(QuantConfig(keys=codec, values=codec, name="exact"),))


@pytest.mark.parametrize(
    ("settings", "prefill", "tokens"),
    [
        ({}, "coded", None),
        ({"protocol": "decode"}, "exact", 1),
        ({"protocol": "decode", "chunk": 7, "prefill": "coded"}, "coded", 7),
    ],
)
def test_a_protocol_settles_prefill_and_chunk(settings, prefill, tokens):
    config = EvalConfig(**settings)
    assert (config.cache_prefill, config.forward_tokens) == (prefill, tokens)


def test_sinks_and_residual_replace_those_of_every_scheme():
    config = EvalConfig(protocol="decode", sinks=4, residual=16)
    assert (config.resolve("int8").sinks, config.resolve("int8").residual) == (4, 16)
    assert EvalConfig().resolve("int8") == PRESETS["int8"]
