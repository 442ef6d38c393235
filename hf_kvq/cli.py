"""The command line: the one part that prints.

    hf-kvq generate   stream text with a cache of codes, then say what the cache holds
    hf-kvq eval       perplexity receipts: a table, one JSON file a scheme, a plot
    hf-kvq allocate   a scheme for a model: bits by layer, by what each costs, in a JSON file that every --cache takes
    hf-kvq memory     bytes of each scheme at a context length, from a model's config alone

Without `--model` all four run on the embedded default, and say so. What goes wrong is one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args

import torch
from tqdm import tqdm
from transformers import AutoConfig, BatchEncoding, DynamicCache, PreTrainedConfig, TextStreamer

from hf_kvq import __version__
from hf_kvq.caches import QuantizedCache, expected_nbytes
from hf_kvq.config import PRESETS
from hf_kvq.evaluation import (
    EXACT,
    EvalConfig,
    LoadedModel,
    Receipt,
    compare,
    evaluate_schemes,
    heading,
    load_model,
    load_text,
    plot,
    rerun,
    table,
)
from hf_kvq.evaluation.allocation import (
    PROBE_BITS,
    Assigned,
    Sensitivity,
    average_bits,
    measure_and_assign,
    scheme_of,
    token_ids,
)
from hf_kvq.evaluation.candidates import Exact
from hf_kvq.evaluation.config import Attending, Bos, Dtype, Join, Prefill, Protocol
from hf_kvq.evaluation.models import cache_argument
from hf_kvq.layers import CodesUnfitWarning
from hf_kvq.states import ATTENTION

__all__ = ["main"]

_DTYPES = get_args(Dtype)
_ATTENTION = {"dense": "sdpa", "fused": ATTENTION}
_SCHEMES = f"{EXACT} {' '.join(PRESETS)}, or a scheme's JSON file"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        # transformers' messages run over several lines.
        print("hf-kvq: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _generate(args: argparse.Namespace) -> None:
    loaded = load_model(args.model, revision=args.revision, dtype=args.dtype, device=args.device)
    loaded.model.set_attn_implementation(_ATTENTION[args.attention])
    cache = _cache(loaded.model.config, args)
    inputs = _inputs(loaded, args.prompt, chat=args.chat)
    if not args.json:
        print(f"Model: {loaded.title}, {args.dtype} ({loaded.source}).")
        print(f"Prompt: {args.prompt}\n")
    prompt_tokens = inputs["input_ids"].shape[1]
    with _unfit_in_lines():
        output = cast(Any, loaded.model).generate(
            **inputs,
            **{cache_argument(loaded.model): cache},
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            streamer=None if args.json else TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    found = _cache_figures(args.cache, cache, loaded.model.config)
    if args.check and not found["tokens_coded"]:
        _warn(
            f"{args.cache} has coded none of the {found['tokens']} tokens, so nothing was checked; try a longer prompt"
        )
    if args.json:
        text = loaded.tokenizer.decode(output[0, prompt_tokens:], skip_special_tokens=True)
        _print_json({"model": loaded.title, "source": loaded.source, "prompt": args.prompt, "text": text, **found})
        return
    ratios = ", ".join(f"{exact / found['nbytes']:.2f}x in {dtype}" for dtype, exact in found["exact_nbytes"].items())
    print(
        f"\nCache: {found['scheme']}, {found['tokens']:,} tokens, {found['nbytes']:,} bytes ({found['nbytes_used']:,} of them in use), "
        f"{found['bits_per_element']:.2f} bits per element; DynamicCache takes {ratios}."
    )


def _eval(args: argparse.Namespace) -> None:
    if args.receipt is not None:
        _rerun(args)
        return
    config = EvalConfig(
        schemes=tuple(args.cache),
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(EvalConfig) if field.name in args},
    )
    with _Bar() as bar:
        receipts = evaluate_schemes(config, progress=bar)
    saved = _save(receipts, Path(args.out))
    picture = _picture(args, receipts, saved)
    if args.json:
        _print_json([json.loads(receipt.to_json()) for receipt in receipts])
        return
    print(heading(receipts), table(receipts), sep="\n\n", end="\n\n")
    print("Receipts:", *saved, sep="\n  ")
    print(f"Plot: {picture}")


def _rerun(args: argparse.Namespace) -> None:
    recorded = Receipt.load(args.receipt)
    with _Bar() as bar:
        found = rerun(recorded, model=args.model, text=args.text, progress=bar)
    if args.json:
        _print_json({"receipt": json.loads(recorded.to_json()), "rerun": json.loads(found.to_json())})
        return
    print(f"Receipt: {args.receipt}, scheme {recorded.name}, measured {recorded.date}; again {found.date}.")
    print(heading([found]), compare(recorded, found), sep="\n\n")


def _allocate(args: argparse.Namespace) -> None:
    path = Path(args.out)
    if path.suffix != ".json":
        raise ValueError(f"--out must end in .json, by which --cache knows a file, got {args.out!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    loaded = load_model(args.model, revision=args.revision, dtype=args.dtype, device=args.device)
    loaded.model.set_attn_implementation(_ATTENTION[args.attention])
    text = load_text(args.text)
    ids = token_ids(text.text, loaded.tokenizer, args.tokens)
    with _Bar() as bar:
        found, assigned = measure_and_assign(loaded.model, ids, args.bits, sinks=args.sinks, progress=bar)
    scheme = scheme_of(assigned, sinks=args.sinks, residual=args.residual, name=path.stem)
    scheme.save(path)
    average, layers = average_bits(found, assigned), _allocated_layers(found, assigned)
    if args.json:
        _print_json(
            {
                "model": loaded.title,
                "text": text.name,
                "tokens": len(ids),
                "attention": args.attention,
                "bits": args.bits,
                "average": average,
                "layers": layers,
                "path": str(path),
                "scheme": scheme.to_dict(),
            }
        )
        return
    print(f"Model: {loaded.title}, {args.dtype}, {args.attention} attention ({loaded.source}).")
    print(f"Text: {text.name}, {len(ids):,} tokens ({text.source}).\n")
    print(f"{'layer':>5}{'keys bits':>11}{'values bits':>13}{'keys KL':>11}{'values KL':>11}")
    for row in layers:
        print(
            f"{row['layer']:>5}{row['keys']['bits']:>11}{row['values']['bits']:>13}"
            f"{row['keys']['kl']:>11.2e}{row['values']['kl']:>11.2e}"
        )
    print(f"\nKL: of the predictions, in nats, with these keys or values alone at {PROBE_BITS} bits.")
    print(f"Average: {average:.3f} bits an element, scales included.\nScheme: {path}")


def _memory(args: argparse.Namespace) -> None:
    config, title = _config(args)
    dtype = getattr(torch, args.dtype)
    exact = expected_nbytes(config, EXACT, args.context, batch=args.batch, dtype=dtype)
    elements = exact // dtype.itemsize
    rows = [
        {"scheme": scheme, "nbytes": nbytes, "bits_per_element": 8 * nbytes / elements, "of_exact": nbytes / exact}
        for scheme in args.cache
        for nbytes in [expected_nbytes(config, scheme, args.context, batch=args.batch, dtype=dtype)]
    ]
    if args.json:
        _print_json(
            {"model": title, "context": args.context, "batch": args.batch, "dtype": args.dtype, "schemes": rows}
        )
        return
    print(f"Model: {title}, {args.dtype}; {args.context:,} tokens a row, batch {args.batch}.\n")
    width = max(12, *(len(row["scheme"]) + 1 for row in rows))
    print(f"{'scheme':<{width}}{'bytes':>20}{'MiB':>14}{'bits/element':>14}{'of exact':>10}")
    for row in rows:
        print(
            f"{row['scheme']:<{width}}{row['nbytes']:>20,}{row['nbytes'] / 2**20:>14,.1f}"
            f"{row['bits_per_element']:>14.3f}{row['of_exact']:>10.3f}"
        )


def _allocated_layers(found: Sequence[Sensitivity], assigned: Assigned) -> list[dict[str, Any]]:
    """What each part costs and gets, a row for each layer."""
    rows: dict[int, dict[str, Any]] = {}
    for each in found:
        row = rows.setdefault(each.layer, {"layer": each.layer})
        row[each.part] = {"bits": assigned[each.layer, each.part], "kl": each.kl}
    return list(rows.values())


def _cache(config: PreTrainedConfig, args: argparse.Namespace) -> DynamicCache | QuantizedCache:
    if args.cache == EXACT:
        return DynamicCache(config=config)
    return QuantizedCache(
        config, args.cache, sinks=args.sinks, residual=args.residual, prefill=args.prefill, check=args.check
    )


def _inputs(loaded: LoadedModel, prompt: str, *, chat: bool) -> BatchEncoding:
    if chat:
        if not loaded.tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {loaded.title} has no chat template; leave --chat out")
        turns = [{"role": "user", "content": prompt}]
        prompt = cast(str, loaded.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    # A template writes the special tokens itself.
    return loaded.tokenizer(prompt, add_special_tokens=not chat, return_tensors="pt").to(loaded.model.device)


def _cache_figures(scheme: str, cache: DynamicCache | QuantizedCache, config: PreTrainedConfig) -> dict[str, Any]:
    memory = cache if isinstance(cache, QuantizedCache) else Exact().memory(cache)
    tokens = cache.get_seq_length()
    return {
        "scheme": scheme,
        "tokens": tokens,
        "tokens_coded": memory.tokens_coded,
        "nbytes": memory.nbytes,
        "nbytes_used": memory.nbytes_used,
        "bits_per_element": memory.bits_per_element,
        "exact_nbytes": {
            dtype: expected_nbytes(config, EXACT, tokens, dtype=getattr(torch, dtype))
            for dtype in ("float32", "bfloat16")
        },
    }


def _save(receipts: Sequence[Receipt], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    # Receipts of one run stand together, runs in the order of time.
    paths = [folder / f"{r.date[:19].replace(':', '')}-{r.run[:6]}-{r.name}.json" for r in receipts]
    for receipt, path in zip(receipts, paths, strict=True):
        receipt.save(path)
    return paths


def _picture(args: argparse.Namespace, receipts: Sequence[Receipt], saved: Sequence[Path]) -> str:
    """Save the plot; returns its path, or why there is none."""
    if args.plot is None and all(receipt.name == EXACT for receipt in receipts):
        return f"none, {EXACT} alone was measured"
    if args.plot is None and importlib.util.find_spec("matplotlib") is None:
        return "none, matplotlib is not installed"
    path = Path(args.plot or str(saved[0]).removesuffix(f"-{receipts[0].name}.json") + ".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    plot(receipts, path)
    return str(path)


def _config(args: argparse.Namespace) -> tuple[PreTrainedConfig, str]:
    if args.model is None:
        loaded = load_model()
        return loaded.model.config, f"{loaded.title} ({loaded.source})"
    return AutoConfig.from_pretrained(args.model, revision=args.revision or "main"), args.model


def _print_json(data: object) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


@contextmanager
def _unfit_in_lines() -> Iterator[None]:
    """Print each warning of codes that are unfit for the model in one line on standard error; others go their way."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CodesUnfitWarning)
            yield
    finally:
        for each in caught:
            if issubclass(each.category, CodesUnfitWarning):
                _warn(str(each.message))
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def _warn(message: str) -> None:
    print("hf-kvq: warning:", " ".join(message.split()), file=sys.stderr)


class _Bar:
    """A progress bar on standard error, where that is a terminal."""

    def __enter__(self) -> _Bar:
        self._bar = tqdm(
            disable=None, leave=False, bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def __call__(self, done: int, total: int, what: str) -> None:
        self._bar.total, self._bar.n = total, done
        self._bar.set_description(what)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hf-kvq", description="A quantized KV cache for Hugging Face transformers.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"hf-kvq {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_generate(commands)
    _add_eval(commands)
    _add_allocate(commands)
    _add_memory(commands)
    return parser


def _add_generate(commands: Any) -> None:
    command = _add_command(commands, "generate", _generate, "stream text with a quantized cache, then the memory line")
    command.add_argument("--cache", default="q8", metavar="SCHEME", help=f"{_SCHEMES} (default: %(default)s)")
    command.add_argument("--prompt", default="A key-value cache is", help="(default: %(default)r)")
    command.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    command.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default: %(default)s)")
    _add_exact_tokens(command)
    command.add_argument(
        "--prefill", choices=get_args(Prefill), default="exact", help="what the prompt's tokens see of each other"
    )
    command.add_argument(
        "--check", action="store_true", help="warn where attention over the first codes is far from exact attention"
    )
    _add_attention(command)
    _add_placement(command)


def _add_eval(commands: Any) -> None:
    defaults = EvalConfig()
    command = _add_command(commands, "eval", _eval, "perplexity receipts: a table, JSON files, a plot")
    command.add_argument(
        "--cache", nargs="+", default=[EXACT, "int8", "fp8"], metavar="SCHEME", help=f"any of {_SCHEMES}"
    )
    command.add_argument(
        "--text", metavar="FILE", help="a UTF-8 file (default: the wikitext-2 test split, or a stand-in)"
    )
    command.add_argument(
        "--join", choices=get_args(Join), default=defaults.join, help="a file as it is, or its lines as wikitext rows"
    )
    command.add_argument(
        "--protocol", choices=get_args(Protocol), default=defaults.protocol, help="(default: %(default)s)"
    )
    command.add_argument(
        "--window", type=int, default=defaults.window, metavar="N", help="tokens (default: %(default)s)"
    )
    command.add_argument(
        "--windows",
        dest="count",
        type=lambda text: None if text == "all" else int(text),
        default=defaults.count,
        metavar="N",
        help="how many, or all (default: %(default)s)",
    )
    command.add_argument("--first", type=int, default=defaults.first, metavar="N", help="index of the first window")
    command.add_argument("--chunk", type=int, metavar="N", help="tokens of one forward under decode (default: 1)")
    command.add_argument("--prefill", choices=get_args(Prefill), help="under decode (default: exact)")
    command.add_argument(
        "--attention", choices=get_args(Attending), default=defaults.attention, help="(default: %(default)s)"
    )
    command.add_argument("--bos", choices=get_args(Bos), default=defaults.bos, help="(default: %(default)s)")
    _add_exact_tokens(command)
    command.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    command.add_argument("--seed", type=int, default=defaults.seed, metavar="N", help="(default: %(default)s)")
    command.add_argument("--out", default="receipts", metavar="FOLDER", help="for receipts (default: %(default)s)")
    command.add_argument("--plot", metavar="FILE", help="(default: beside the receipts)")
    command.add_argument(
        "--receipt", metavar="FILE", help="measure this receipt again; --model and --text say where they are now"
    )
    _add_placement(command)


def _add_allocate(commands: Any) -> None:
    command = _add_command(commands, "allocate", _allocate, "a scheme for a model: bits by layer, by what each costs")
    command.add_argument(
        "--bits",
        type=float,
        default=4.2,
        metavar="B",
        help="of an element on average, scales included (default: %(default)s)",
    )
    command.add_argument(
        "--out", default="scheme.json", metavar="FILE", help="the scheme, which --cache takes (default: %(default)s)"
    )
    command.add_argument(
        "--text", metavar="FILE", help="a UTF-8 file (default: the wikitext-2 test split, or a stand-in)"
    )
    command.add_argument(
        "--tokens", type=int, default=1024, metavar="N", help="of the text, at most (default: %(default)s)"
    )
    command.add_argument("--sinks", type=int, default=4, metavar="N", help="of the scheme (default: %(default)s)")
    command.add_argument("--residual", type=int, default=0, metavar="N", help="of the scheme (default: %(default)s)")
    _add_attention(command)
    _add_placement(command)


def _add_memory(commands: Any) -> None:
    command = _add_command(commands, "memory", _memory, "bytes of each scheme, from the config alone")
    command.add_argument(
        "--context", type=int, default=32768, metavar="N", help="tokens of a row (default: %(default)s)"
    )
    command.add_argument("--batch", type=int, default=1, metavar="N", help="rows (default: %(default)s)")
    command.add_argument(
        "--cache", nargs="+", default=[EXACT, "int8", "fp8"], metavar="SCHEME", help=f"any of {_SCHEMES}"
    )
    command.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of exact states (default: %(default)s)")


def _add_command(commands: Any, name: str, run: Any, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
    )
    command.set_defaults(run=run)
    command.add_argument("--model", metavar="M", help="hub id or folder (default: the embedded default)")
    command.add_argument("--revision", metavar="R", help="of the model on the hub")
    command.add_argument("--json", action="store_true", help="JSON and nothing else on standard output")
    return command


def _add_attention(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--attention",
        choices=get_args(Attending),
        default="fused",
        help="over codes, or over decoded states (default: %(default)s)",
    )


def _add_exact_tokens(command: argparse.ArgumentParser) -> None:
    command.add_argument("--sinks", type=int, metavar="N", help="first tokens kept exactly (default: the scheme's)")
    command.add_argument(
        "--residual", type=int, metavar="N", help="newest tokens kept exactly (default: the scheme's)"
    )


def _add_placement(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the model (default: %(default)s)")
    command.add_argument("--device", default="cpu", metavar="D", help="as torch writes it (default: %(default)s)")
