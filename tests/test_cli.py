"""The command line: what it prints, what it leaves on disk, and how it fails."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_kvq import AffineConfig, QuantConfig
from hf_kvq.cli import main
from hf_kvq.evaluation import Receipt

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with an untrained two-layer model and a tokenizer of one token a byte."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 8, encoding="utf-8")
    return str(path)


@pytest.fixture
def evaluate(model, text, tmp_path):
    """Run `hf-kvq eval` on two small windows; returns its exit code."""
    fixed = [
        "eval",
        "--model",
        model,
        "--text",
        text,
        "--window",
        "64",
        "--windows",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    return lambda *arguments: main([*fixed, *arguments])


@pytest.fixture
def allocate(model, text, tmp_path):
    """Run `hf-kvq allocate` on 150 tokens; returns its exit code."""
    fixed = [
        "allocate",
        "--model",
        model,
        "--text",
        text,
        "--tokens",
        "150",
        "--out",
        str(tmp_path / "new" / "mine.json"),
    ]
    return lambda *arguments: main([*fixed, *arguments])


def biased(model, folder):
    """The same model with a large constant in two channels of its keys, and queries that look sharply."""
    tiny = LlamaForCausalLM.from_pretrained(model, attention_bias=True)
    with torch.no_grad():
        for layer in tiny.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.self_attn.o_proj):
                projection.bias.zero_()
            bias = layer.self_attn.k_proj.bias.zero_().view(KV_HEADS, HEAD_DIM)
            bias[:, 30], bias[:, 31] = 100.0, -60.0
            layer.self_attn.q_proj.weight.mul_(300.0)
    tiny.save_pretrained(folder / "biased")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "biased")
    return str(folder / "biased")


def bits_of(scheme, layer):
    """Mean bits of a layer's keys and values."""
    tiers = [codec.tiers for codec in (scheme.for_layer(layer, LAYERS).keys, scheme.for_layer(layer, LAYERS).values)]
    return tuple(sum(bits) // len(bits) for bits in tiers)


def test_generate_prints_the_model_the_text_and_what_the_cache_holds(model, capsys):
    assert main(["generate", "--model", model, "--cache", "int8", "--prompt", "Once", "--max-new-tokens", "9"]) == 0
    out = capsys.readouterr().out
    assert "Model: tiny" in out
    assert "Prompt: Once" in out
    # 4 tokens of the prompt and 9 more, of which the last one was never fed back.
    assert "Cache: int8, 12 tokens" in out
    assert f"{8 + 16 / HEAD_DIM:.2f} bits per element" in out


def test_generate_uses_the_scheme_that_the_cache_has_by_default(model, capsys):
    assert main(["generate", "--model", model, "--max-new-tokens", "2"]) == 0
    assert "Cache: q8, " in capsys.readouterr().out


@pytest.mark.parametrize("scheme", ["exact", "identity", "int8", "fp8", "seed_int8", "seed_fp8"])
def test_generate_takes_every_scheme_and_counts_its_bytes(model, capsys, scheme):
    assert main(["generate", "--model", model, "--cache", scheme, "--max-new-tokens", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    elements = found["tokens"] * LAYERS * 2 * KV_HEADS * HEAD_DIM
    assert found["exact_nbytes"] == {"float32": 4 * elements, "bfloat16": 2 * elements}
    assert found["nbytes_used"] == round(found["bits_per_element"] * elements / 8)
    assert found["nbytes"] >= found["nbytes_used"]
    assert found["tokens_coded"] == (0 if scheme == "exact" else found["tokens"] * LAYERS)


def test_generate_keeps_sinks_and_residual_exact(model, capsys):
    arguments = ["--cache", "int8", "--max-new-tokens", "9", "--sinks", "2", "--residual", "3", "--json"]
    assert main(["generate", "--model", model, *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_coded"] == (found["tokens"] - 5) * LAYERS


def test_generate_checks_codes_in_one_line_a_warning(model, tmp_path, capsys):
    config = AffineConfig(mode="int4")
    scheme = str(tmp_path / "int4.json")
    QuantConfig(keys=config, values=config, name="int4").save(scheme)
    arguments = ["generate", "--model", biased(model, tmp_path), "--prompt", "abcdefg" * 20, "--max-new-tokens", "2"]
    assert main([*arguments, "--cache", scheme, "--check", "--json"]) == 0
    captured = capsys.readouterr()
    found = [line for line in captured.err.splitlines() if line.startswith("hf-kvq: warning: ")]
    assert [line.split(",")[0] for line in found] == [f"hf-kvq: warning: layer {index}" for index in range(LAYERS)]
    assert json.loads(captured.out)["scheme"] == scheme
    assert main([*arguments, "--cache", scheme]) == 0
    assert "hf-kvq: warning" not in capsys.readouterr().err


def test_generate_checks_in_silence_what_fits(model, capsys):
    assert main(["generate", "--model", model, "--cache", "q8", "--prompt", "x" * 140, "--check"]) == 0
    assert "hf-kvq: warning" not in capsys.readouterr().err


def test_generate_says_that_nothing_was_there_to_check(model, capsys):
    assert main(["generate", "--model", model, "--cache", "q8", "--max-new-tokens", "2", "--check"]) == 0
    assert "hf-kvq: warning: q8 has coded none of the 21 tokens" in capsys.readouterr().err


def test_generate_says_when_there_is_no_chat_template(model, capsys):
    assert main(["generate", "--model", model, "--chat"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("hf-kvq: error: the tokenizer of tiny")


def test_eval_prints_a_table_and_saves_receipts_and_a_plot(evaluate, text, tmp_path, capsys):
    assert evaluate("--cache", "exact", "int8") == 0
    out = capsys.readouterr().out
    assert "Model: tiny" in out
    assert "Text: text.txt" in out
    assert {"| exact", "| int8 "} <= {line[:7] for line in out.splitlines()}
    receipts = sorted((tmp_path / "out").glob("*.json"))
    assert [Receipt.load(path).name for path in receipts] == ["exact", "int8"]
    assert all(str(path) in out for path in receipts)
    assert len(list((tmp_path / "out").glob("*.png"))) == 1


def test_eval_saves_the_plot_where_it_is_told(evaluate, tmp_path):
    picture = tmp_path / "pictures" / "bits.png"
    assert evaluate("--cache", "int8", "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_eval_of_the_exact_cache_alone_draws_nothing_and_says_so(evaluate, tmp_path, capsys):
    assert evaluate("--cache", "exact") == 0
    assert "Plot: none, exact alone was measured" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*.png"))


def test_eval_prints_json_alone(evaluate, capsys):
    assert evaluate("--cache", "int8", "fp8", "--protocol", "decode", "--chunk", "16", "--json") == 0
    receipts = [Receipt.from_json(json.dumps(data)) for data in json.loads(capsys.readouterr().out)]
    assert [receipt.name for receipt in receipts] == ["int8", "fp8"]
    assert {(r.settings.protocol, r.settings.chunk, r.settings.count) for r in receipts} == {("decode", 16, 2)}


def test_eval_measures_a_receipt_again(evaluate, tmp_path, capsys):
    assert evaluate("--cache", "int8") == 0
    (path,) = (tmp_path / "out").glob("*.json")
    capsys.readouterr()
    assert main(["eval", "--receipt", str(path)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| perplexity"))
    _, _, recorded, found, _ = (cell.strip() for cell in line.split("|"))
    assert float(found) == pytest.approx(float(recorded), rel=1e-4)


def test_eval_prints_a_receipt_and_its_rerun_as_json(evaluate, tmp_path, capsys):
    assert evaluate("--cache", "int8") == 0
    (path,) = (tmp_path / "out").glob("*.json")
    capsys.readouterr()
    assert main(["eval", "--receipt", str(path), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["receipt"]["run"] != both["rerun"]["run"]
    recorded, found = both["receipt"]["results"], both["rerun"]["results"]
    assert found["perplexity"] == pytest.approx(recorded["perplexity"], rel=1e-5)


def test_allocate_prints_a_table_and_saves_a_scheme(allocate, tmp_path, capsys):
    assert allocate("--bits", "4.6") == 0
    captured = capsys.readouterr()
    path = tmp_path / "new" / "mine.json"
    scheme = QuantConfig.load(path)
    assert (scheme.name, scheme.sinks, scheme.residual) == ("mine", 4, 0)
    lines = [line.split() for line in captured.out.splitlines()]
    assert ["layer", "keys", "bits", "values", "bits", "keys", "KL", "values", "KL"] in lines
    rows = [line for line in lines if line and line[0].isdigit()]
    assert [row[:3] for row in rows] == [[str(i), *map(str, bits_of(scheme, i))] for i in range(LAYERS)]
    assert all(0 < float(kl) < 1 for row in rows for kl in row[3:])
    # Codes of a head_dim of 40 take a byte of scale for all of it.
    average = sum(sum(bits_of(scheme, i)) for i in range(LAYERS)) / 4 + 8 / HEAD_DIM
    assert f"Average: {average:.3f} bits an element" in captured.out
    assert captured.out.splitlines()[-1] == f"Scheme: {path}"


def test_allocate_prints_json_alone(allocate, tmp_path, capsys):
    assert allocate("--bits", "3.7", "--sinks", "2", "--residual", "1", "--attention", "dense", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    scheme = QuantConfig.from_dict(found["scheme"])
    assert scheme == QuantConfig.load(found["path"])
    assert (scheme.sinks, scheme.residual) == (2, 1)
    assert (found["tokens"], found["bits"], found["attention"]) == (150, 3.7, "dense")
    assert found["average"] <= 3.7
    assert [layer["layer"] for layer in found["layers"]] == list(range(LAYERS))
    for layer in found["layers"]:
        assert (layer["keys"]["bits"], layer["values"]["bits"]) == bits_of(scheme, layer["layer"])
        assert layer["keys"]["kl"] > 0


def test_every_command_takes_the_file_of_a_scheme(allocate, evaluate, model, tmp_path, capsys):
    assert allocate() == 0
    path = str(tmp_path / "new" / "mine.json")
    capsys.readouterr()
    assert main(["generate", "--model", model, "--cache", path, "--prompt", "x" * 140, "--max-new-tokens", "2"]) == 0
    assert f"Cache: {path}, 141 tokens" in capsys.readouterr().out
    assert evaluate("--cache", "exact", path, "--window", "160") == 0
    assert "| mine " in capsys.readouterr().out
    assert main(["memory", "--model", model, "--context", "1000", "--cache", "exact", path]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["exact", path]
    assert float(rows[1][3]) < 16


def test_memory_counts_from_the_config_alone(model, tmp_path, capsys):
    # No weights in this folder.
    LlamaConfig.from_pretrained(model).save_pretrained(tmp_path)
    arguments = ["--context", "128", "--batch", "3", "--cache", "exact", "int8", "seed_int8"]
    assert main(["memory", "--model", str(tmp_path), *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    elements = 3 * 128 * LAYERS * 2 * KV_HEADS * HEAD_DIM
    bits = [16, 8 + 16 / HEAD_DIM, 8 + 32 / (KV_HEADS * HEAD_DIM)]
    assert [row["nbytes"] for row in found["schemes"]] == [elements * bit / 8 for bit in bits]
    assert [row["bits_per_element"] for row in found["schemes"]] == pytest.approx(bits)


def test_memory_agrees_with_a_live_cache(model, capsys):
    prompt = ["--cache", "int8", "--prompt", "x" * 128, "--max-new-tokens", "1", "--json"]
    assert main(["generate", "--model", model, *prompt]) == 0
    live = json.loads(capsys.readouterr().out)
    assert main(["memory", "--model", model, "--context", str(live["tokens"]), "--cache", "int8", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["schemes"]
    assert row["nbytes"] == pytest.approx(live["nbytes"], rel=0.01)


def test_memory_prints_a_line_for_each_scheme(model, capsys):
    assert main(["memory", "--model", model, "--context", "4096"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    nbytes = 4096 * LAYERS * 2 * KV_HEADS * HEAD_DIM
    assert ["exact", f"{2 * nbytes:,}", f"{2 * nbytes / 2**20:.1f}", "16.000", "1.000"] in lines
    assert [line[0] for line in lines if line][-3:] == ["exact", "int8", "fp8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memory", "--cache", "int9"], "unknown scheme 'int9'"),
        (["memory", "--context", "0"], "context must be at least 1"),
        (["generate", "--cache", "int9"], "unknown scheme 'int9'"),
        (["eval", "--cache", "int9"], "unknown scheme 'int9'"),
        (["eval", "--window", "1"], "window must be at least 2"),
        (["eval", "--text", "no/such/file.txt"], "no/such/file.txt"),
        (["eval", "--receipt", "no/such/receipt.json"], "no/such/receipt.json"),
        (["eval", "--chunk", "4"], "takes no chunk"),
        (["generate", "--cache", "no/such/scheme.json"], "no file no/such/scheme.json"),
        (["eval", "--cache", "no/such/scheme.json"], "no file no/such/scheme.json"),
        (["allocate", "--out", "scheme.yaml"], "--out must end in .json"),
        (["allocate", "--out", "unwritten.json", "--bits", "1"], "bits must be at least 2.2"),
        (["allocate", "--out", "unwritten.json", "--tokens", "100"], "100 tokens are too few"),
        (["allocate", "--out", "unwritten.json", "--text", "no/such/file.txt"], "no/such/file.txt"),
    ],
)
def test_what_goes_wrong_is_one_line_and_exit_code_2(model, capsys, arguments, message):
    assert main([*arguments, "--model", model]) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("hf-kvq: error: ")
    assert message in last
    assert "Traceback" not in captured.err
    assert not captured.out


@pytest.mark.parametrize("command", ["generate", "memory"])
def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys, command):
    assert main([command, "--model", str(tmp_path / "nothing")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("hf-kvq: error: ")
    assert "nothing" in last


@pytest.mark.parametrize(
    "arguments", [[], ["no-such-command"], ["eval", "--windows", "many"], ["generate", "--dtype", "int8"]]
)
def test_an_argument_that_does_not_parse_exits_with_2(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
