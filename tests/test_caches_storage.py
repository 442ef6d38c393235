"""A cache in a file."""

from __future__ import annotations

import pytest
import torch
from oracles import tiny_llama
from safetensors.torch import save_file
from test_caches_quantized import SCHEMES, ids, tiny_gemma

from hf_kvq import QuantizedCache


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("settings", [{}, {"sinks": 2, "residual": 3}, {"skip_layers": [0]}])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma])
def test_a_loaded_cache_gives_the_same_next_logits(make, scheme, settings, tmp_path):
    model = make()
    cache = QuantizedCache(model.config, scheme, prefill="coded", **settings)
    model(ids(tokens=30), past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", model.config)
    assert (loaded.scheme, loaded.prefill, loaded.tokens_coded, loaded.nbytes_used) == (
        cache.scheme,
        cache.prefill,
        cache.tokens_coded,
        cache.nbytes_used,
    )
    for step in range(12):
        token = ids(tokens=1, seed=step)
        assert torch.equal(model(token, past_key_values=loaded).logits, model(token, past_key_values=cache).logits)


def test_sinks_of_padded_rows_are_saved(tmp_path):
    model = tiny_llama()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    cache = QuantizedCache(model.config, "int8", sinks=3)
    cache.set_padding(mask)
    model(ids(tokens=12), attention_mask=mask, past_key_values=cache)
    cache.save(tmp_path / "c")
    loaded = QuantizedCache.load(tmp_path / "c", model.config)
    step, longer = ids(tokens=1, seed=3), torch.nn.functional.pad(mask, (0, 1), value=1)
    got, expected = (model(step, attention_mask=longer, past_key_values=each).logits for each in (loaded, cache))
    assert torch.equal(got, expected)


def test_an_empty_cache_survives(tmp_path):
    model = tiny_llama()
    QuantizedCache(model.config, "int8").save(tmp_path / "c")
    loaded = QuantizedCache.load(tmp_path / "c", model.config)
    assert (loaded.get_seq_length(), loaded.nbytes) == (0, 0)


def test_foreign_truncated_and_other_files_are_refused(tmp_path):
    model = tiny_llama()
    cache = QuantizedCache(model.config, "int8")
    model(ids(), past_key_values=cache)
    whole = tmp_path / "cache"
    cache.save(whole)
    cut = tmp_path / "cut"
    cut.write_bytes(whole.read_bytes()[:-100])
    foreign = tmp_path / "foreign"
    save_file({"weight": torch.ones(2)}, foreign)
    noise = tmp_path / "noise"
    noise.write_bytes(b"PK not a cache" * 10)
    for path, message in [
        (cut, "not a complete safetensors file"),
        (noise, "not a complete safetensors file"),
        (foreign, "no cache saved by hf_kvq"),
    ]:
        with pytest.raises(ValueError, match=message):
            QuantizedCache.load(path, model.config)
    with pytest.raises(FileNotFoundError, match="no file"):
        QuantizedCache.load(tmp_path / "absent", model.config)
    with pytest.raises(ValueError, match=r"2 layers \(2 x full_attention\), the config has 3"):
        QuantizedCache.load(whole, tiny_gemma().config)


def test_a_newer_version_is_refused_by_its_number(tmp_path):
    save_file({}, tmp_path / "c", metadata={"hf_kvq": '{"version": 3}'})
    with pytest.raises(ValueError, match="format version 3, this hf_kvq reads 2"):
        QuantizedCache.load(tmp_path / "c", tiny_llama().config)
