"""`python -m eval.gpu`: attention over codes on a CUDA GPU: is it right, and what does it take.

Three parts: the Triton kernel against the tiles and against attention in float64 over the decoded states; the time of one layer's
decode attention against PyTorch's flash attention over bfloat16 states and over states decoded for it; the time of a small model's
decode steps. All contenders of a row take turns in one run, and the second-level cache is overwritten before each. `--dry-run` does
the first part on tiny shapes on the CPU, where Triton interprets the kernel.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Nothing of hf_kvq, triton or transformers is imported here: Triton must first be told whether to interpret.

__all__ = ["main"]

CLOSE = 1e-5
"""Largest error that passes, relative to the largest output: some roundings of float32."""

LIMIT = 360.0
"""Seconds after which no further measurement starts."""

KV_HEADS, GROUPS, DIM = 8, 4, 128
LAYOUTS = ("int8", "e4m3", "int4")
GRIDS = {"q8": (8,), "q4": (4,), "q4 in tiers": (6, 4, 3, 3)}
"""Bits of each tier; one tier where these do not fill whole bytes."""

DTYPES = ("float32", "bfloat16", "float16")
CASES = [(layout, dtype) for layout in LAYOUTS for dtype in DTYPES] + [(name, "float32") for name in GRIDS]
"""Layouts and dtypes of queries; for a grid these come out of a basis, in float32."""

SHAPES = [
    # batch, kv_heads, groups, tokens, dim
    (1, 1, 1, 1, 64),
    (1, 2, 3, 37, 40),
    (3, 1, 8, 129, 80),
    (2, 2, 7, 700, 96),
    (1, 8, 4, 5000, 128),
    (2, 1, 16, 3000, 256),
    (1, 2, 20, 40_000, 64),
]
TINY = [(1, 1, 1, 1, 40), (2, 2, 3, 150, 32)]
CONTEXTS = (4096, 16_384, 32_768, 131_072)
BATCHES = (1, 8)
MODEL_CONTEXT = 16_384


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.gpu", description="Check and time attention over codes.")
    parser.add_argument("--dry-run", action="store_true", help="check tiny shapes on the CPU, without times")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds of each row (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="file to append the JSON line to")
    given = parser.parse_args(arguments)
    if given.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        print(
            "eval.gpu needs a CUDA GPU, and torch sees none; --dry-run checks the kernel on the CPU", file=sys.stderr
        )
        return 2
    if importlib.util.find_spec("triton") is None:
        print("eval.gpu needs triton, which is not installed: pip install triton", file=sys.stderr)
        return 2
    began = time.perf_counter()
    with_transformers = _find_transformers()
    device = torch.device("cpu" if given.dry_run else "cuda")
    record: dict[str, Any] = {"environment": _environment(device), "dry_run": given.dry_run}
    print(f"{record['environment']['device']}, {_versions(record['environment'])}\n")
    record["correctness"] = _correctness(device, TINY if given.dry_run else SHAPES)
    print(_correctness_table(record["correctness"]), flush=True)
    if not given.dry_run:
        record["attention"] = _attention_times(given.repeats, began)
        print("\n" + _attention_table(record["attention"]), flush=True)
        record["model"] = _model_times(given.repeats) if with_transformers and not _is_late(began) else None
        print("\n" + _model_table(record["model"]), flush=True)
    record["seconds"] = round(time.perf_counter() - began, 1)
    if given.results:
        given.results.parent.mkdir(parents=True, exist_ok=True)
        with given.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    print("\n" + json.dumps(record))
    return 0 if all(row["ok"] for row in record["correctness"]) else 1


def _find_transformers() -> bool:
    """Whether transformers imports; if not, make kernels and codecs, which need nothing of it, importable all the same."""
    try:
        importlib.import_module("hf_kvq")
    except ImportError as error:
        print(f"no model is timed: {error}", file=sys.stderr)
        package = types.ModuleType("hf_kvq")
        package.__path__ = [str(Path(__file__).parents[1] / "hf_kvq")]
        sys.modules["hf_kvq"] = package
        return False
    return True


def _is_late(began: float) -> bool:
    return time.perf_counter() - began > LIMIT


def _environment(device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    versions = {}
    for name in ("torch", "triton", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} CPU, interpreted",
        "capability": list(torch.cuda.get_device_capability(device)) if on_gpu else None,
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **versions,
    }


def _versions(environment: dict[str, Any]) -> str:
    return ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "transformers", "cuda"))


def _operand(layout: str, states: Tensor) -> Any:
    """Codes of the states, encoded some tokens at a time: encoding takes several float32 tensors of that size."""
    from hf_kvq.codecs import make_codec
    from hf_kvq.config import AffineConfig
    from hf_kvq.kernels import Operand

    if layout in GRIDS:
        return _grid_operand(GRIDS[layout], states)
    codec = make_codec(AffineConfig(mode="fp8" if layout == "e4m3" else layout))
    pieces = [codec.encode(piece) for piece in states.split(8192, dim=2)]
    # Bytes: not every torch concatenates float8.
    parts = {
        name: torch.cat([piece[name].view(torch.int8) for piece in pieces], dim=2).view(part.dtype)
        for name, part in pieces[0].items()
    }
    return Operand(codec.layout, parts, states.shape[3], codec.decode_into)


def _grid_operand(bits: tuple[int, ...], states: Tensor) -> Any:
    from hf_kvq.codecs.rotated import encode_grid, grid_for
    from hf_kvq.kernels import Operand

    grid = grid_for(bits, states.shape[3])
    pieces = [encode_grid(piece.double(), grid) for piece in states.split(8192, dim=2)]
    parts = {
        name: torch.cat(each, dim=2) for name, each in zip(("codes", "scale"), zip(*pieces, strict=True), strict=True)
    }

    def decode_into(parts: Mapping[str, Tensor], out: Tensor) -> None:
        grid.decode_into(parts["codes"], parts["scale"], out)

    return Operand("grid", parts, grid.dim, decode_into, grid)


def _decoded(operand: Any, dtype: torch.dtype) -> Tensor:
    codes = operand.parts["codes"]
    out = torch.empty(*codes.shape[:3], operand.dim, dtype=dtype, device=codes.device)
    operand.decode_into(out)
    return out


def _correctness(device: torch.device, shapes: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Errors of every layout, dtype and shape; plain, and with hidden columns (a whole row of them), a softcap and a bias."""
    rows = []
    for layout, dtype in CASES:
        checked = [_check(device, layout, dtype, shape, hard) for shape in shapes for hard in (False, True)]
        names = ("against_tiles", "against_float64", "tiles_against_float64", "lse")
        worst = {name: max(errors[name] for errors in checked) for name in names}
        # NaN passes no comparison, and max may drop it.
        ok = all(errors[name] <= CLOSE for errors in checked for name in names)
        rows.append({"layout": layout, "dtype": dtype, "cases": len(checked), **worst, "ok": ok})
    return rows


def _check(device: torch.device, layout: str, dtype: str, shape: tuple[int, ...], hard: bool) -> dict[str, float]:
    from hf_kvq.kernels import Scoring, TiledKernel, Visibility
    from hf_kvq.kernels.triton_decode import TritonDecodeKernel

    batch, kv_heads, groups, tokens, dim = shape
    generator = torch.Generator(device).manual_seed(tokens)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    query = normal(batch, kv_heads, groups, 1, dim).to(getattr(torch, dtype))
    keys, values = (_operand(layout, normal(batch, kv_heads, tokens, dim)) for _ in range(2))
    real, bias = None, None
    if hard:
        bias = normal(batch, kv_heads, groups, 1, tokens)
        real = torch.rand(batch, tokens, generator=generator, device=device) < 0.7
        real[:, -1] = True
        if batch > 1:
            real[0] = False
    visibility, scoring = Visibility(tokens - 1, 1, real=real), Scoring(dim**-0.5, 5.0 if hard else None)
    kernel = TritonDecodeKernel(device.type)
    assert kernel.supports(query, keys, values, visibility)
    got = kernel.attend(query, keys, values, 0, visibility, scoring, bias=bias)
    tiles = TiledKernel().attend(query, keys, values, 0, visibility, scoring, bias=bias)

    logits = query.double() @ _decoded(keys, torch.float64)[:, :, None].mT
    logits = (logits if bias is None else logits + bias) * scoring.scaling
    if scoring.softcap is not None:
        logits = scoring.softcap * torch.tanh(logits / scoring.softcap)
    if real is not None:
        logits = logits.masked_fill(~real[:, None, None, None], -torch.inf)
    exact = logits.softmax(dim=-1).nan_to_num(0.0) @ _decoded(values, torch.float64)[:, :, None]
    lse = logits.logsumexp(dim=-1)
    largest = exact.abs().max().item()

    def error(a: Tensor, b: Tensor) -> float:
        return (a.double() - b.double()).abs().max().item() / largest

    # Rows that see nothing: -inf in both, and a difference of 0.
    difference = torch.where(got.lse.double() == lse, 0.0, (got.lse - lse) / lse.abs().clamp(min=1.0))
    return {
        "against_tiles": error(got.output, tiles.output),
        "against_float64": error(got.output, exact),
        "tiles_against_float64": error(tiles.output, exact),
        "lse": difference.abs().max().item(),
    }


def _correctness_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"Largest errors, relative to the largest output (at most {CLOSE:g} passes)",
        "",
        "| layout | query | cases | Triton - tiles | Triton - float64 | tiles - float64 | lse | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['layout']} | {row['dtype']} | {row['cases']} | {row['against_tiles']:.1e} | {row['against_float64']:.1e} "
        f"| {row['tiles_against_float64']:.1e} | {row['lse']:.1e} | {'ok' if row['ok'] else 'FAILED'} |"
        for row in rows
    ]
    return "\n".join(lines)


def _timed(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each; all take turns, in an order that rotates."""
    # Overwriting it empties the second-level cache, and takes longer than the host needs to launch what is timed next.
    other = torch.empty(2**30, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in contenders}
    for run in contenders.values():  # compiles
        for _ in range(2):
            run()
    order = list(contenders)
    for _ in range(repeats):
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            other.zero_()
            start.record()
            contenders[name]()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
        order.append(order.pop(0))
    return {name: statistics.median(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}


@torch.inference_mode()
def _attention_times(repeats: int, began: float) -> list[dict[str, Any]]:
    rows = []
    for batch in BATCHES:
        for tokens in CONTEXTS:
            if _is_late(began):
                print(f"batch {batch}, {tokens} tokens: left out, {LIMIT:.0f} s are over", file=sys.stderr)
                continue
            try:
                rows += _attention_time(batch, tokens, repeats)
            except torch.cuda.OutOfMemoryError:
                print(f"batch {batch}, {tokens} tokens: left out, too little memory", file=sys.stderr)
            torch.cuda.empty_cache()
    return rows


def _attention_time(batch: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from hf_kvq.kernels import Scoring, Visibility
    from hf_kvq.kernels.triton_decode import TritonDecodeKernel

    bfloat16 = {"dtype": torch.bfloat16, "device": "cuda"}
    query = torch.randn(batch, KV_HEADS, GROUPS, 1, DIM, **bfloat16)
    keys, values = (torch.randn(batch, KV_HEADS, tokens, DIM, **bfloat16) for _ in range(2))
    layouts = (*LAYOUTS, *GRIDS)
    coded = {layout: (_operand(layout, keys), _operand(layout, values)) for layout in layouts}
    # What keys in a basis come with.
    wide, bias = query.float(), torch.randn(batch, KV_HEADS, GROUPS, 1, tokens, device="cuda")
    decoded = torch.empty_like(keys), torch.empty_like(values)
    kernel, visibility, scoring = TritonDecodeKernel(), Visibility(tokens - 1, 1), Scoring(DIM**-0.5)

    def flash(keys: Tensor, values: Tensor) -> Tensor:
        # The groups as queries of their kv head: keys and values are read once.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query[:, :, :, 0], keys, values)

    def over_codes(layout: str) -> Tensor:
        if layout in GRIDS:
            return kernel.attend(wide, *coded[layout], 0, visibility, scoring, bias=bias).output
        return kernel.attend(query, *coded[layout], 0, visibility, scoring).output

    def decode_then_flash(layout: str) -> Tensor:
        for operand, out in zip(coded[layout], decoded, strict=True):
            operand.decode_into(out)
        return flash(*decoded)

    contenders: dict[str, Callable[[], Any]] = {"bf16": lambda: flash(keys, values)}
    for layout in layouts:
        contenders[layout] = lambda layout=layout: over_codes(layout)
        contenders[f"decode {layout}"] = lambda layout=layout: decode_then_flash(layout)
    times = _timed(contenders, repeats)
    sizes = {
        layout: sum(x.nbytes for operand in pair for x in operand.parts.values()) for layout, pair in coded.items()
    }
    sizes["bf16"] = keys.nbytes + values.nbytes
    return [
        {
            "batch": batch,
            "tokens": tokens,
            "states": name,
            "ms": times[name],
            "gb_per_s": sizes[name] / times[name] / 1e6,
            "times_bf16": times["bf16"] / times[name],
            "decode_then_flash_ms": times.get(f"decode {name}"),
        }
        for name in ("bf16", *layouts)
    ]


def _attention_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"Decode attention of one layer, {KV_HEADS} kv heads, {GROUPS} query heads each, head_dim {DIM}, bfloat16 queries, for grids (q) float32 and a bias; GB/s of codes and scales",
        "",
        "| batch | tokens | states | ms | GB/s | x flash over bf16 | decoded, then flash: ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        decoding = row["decode_then_flash_ms"]
        lines.append(
            f"| {row['batch']} | {row['tokens']} | {row['states']} | {row['ms']:.3f} | {row['gb_per_s']:.0f} | {row['times_bf16']:.2f} "
            f"| {'' if decoding is None else f'{decoding:.3f}'} |"
        )
    return "\n".join(lines)


@torch.inference_mode()
def _model_times(repeats: int) -> dict[str, Any]:
    """Decode steps of a random model, with DynamicCache under sdpa and with codes under this package's attention."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    from hf_kvq import QuantizedCache
    from hf_kvq.evaluation.models import cache_argument

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=KV_HEADS * GROUPS * DIM,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=KV_HEADS * GROUPS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        vocab_size=32_000,
        max_position_embeddings=2 * MODEL_CONTEXT,
    )
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    argument = cache_argument(model)
    steps = repeats + 3  # the first ones compile
    ids = torch.randint(0, config.vocab_size, (1, MODEL_CONTEXT + steps), device="cuda")
    exact = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    for part in ids[:, :MODEL_CONTEXT].split(2048, dim=1):
        model(part, **{argument: exact}, use_cache=True, logits_to_keep=1)
    model.set_attn_implementation("hf_kvq")
    coded = QuantizedCache(model.config, "int8")
    for index, layer in enumerate(exact.layers):
        coded.update(layer.keys, layer.values, index)
    caches = {"sdpa": exact, "hf_kvq": coded}
    taken: dict[str, list[float]] = {name: [] for name in caches}
    differences, spreads, agreements = [], [], []
    for token in ids[0, MODEL_CONTEXT:]:
        logits = {}
        for name, cache in caches.items():
            model.set_attn_implementation(name)
            torch.cuda.synchronize()
            start = time.perf_counter()
            logits[name] = model(token.view(1, 1), **{argument: cache}, use_cache=True).logits.float()
            torch.cuda.synchronize()
            taken[name].append(1000 * (time.perf_counter() - start))
        differences.append((logits["hf_kvq"] - logits["sdpa"]).abs().max().item())
        spreads.append(logits["sdpa"].std().item())
        agreements.append(bool(logits["hf_kvq"].argmax() == logits["sdpa"].argmax()))
    return {
        "layers": config.num_hidden_layers,
        "context": MODEL_CONTEXT,
        "cache": repr(coded),
        "dynamic_cache_ms": statistics.median(taken["sdpa"][3:]),
        "int8_ms": statistics.median(taken["hf_kvq"][3:]),
        "max_logit_difference": max(differences),
        "logit_spread": statistics.median(spreads),
        "same_best_token": statistics.mean(agreements),
    }


def _model_table(row: dict[str, Any] | None) -> str:
    if row is None:
        return "No model was timed."
    return "\n".join(
        [
            f"Decode step of a random Llama, {row['layers']} layers, bfloat16, {row['context']} tokens of context",
            "",
            "| DynamicCache, sdpa: ms | int8, hf_kvq: ms | largest difference of logits | their standard deviation | same best token |",
            "|---|---|---|---|---|",
            f"| {row['dynamic_cache_ms']:.2f} | {row['int8_ms']:.2f} | {row['max_logit_difference']:.3f} | {row['logit_spread']:.3f} "
            f"| {row['same_best_token']:.0%} |",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
