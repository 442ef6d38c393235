"""`python -m eval.bounded KIND --text FILE`: see the modules for what each kind measures.

quality    perplexity at equal bytes, every policy and budget
stream     a text much longer than the model was trained for: bytes and perplexity by position
retrieve   a passkey and a repeated passage, inside and beyond what is kept
speed      a decode step with and without a far field
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from eval.bounded import retrieve, speed, stream
from eval.bounded.policies import BUDGETS, FULL, KINDS, Policy, policies
from eval.bounded.quality import compare
from eval.bounded.records import RESULTS, append, context_of
from hf_kvq.evaluation import LoadedModel, load_model
from hf_kvq.evaluation.data import load_text, tokenize, windows
from hf_kvq.kernels import kernels_for
from hf_kvq.layers.rotary import trained_length


def quality(arguments: argparse.Namespace) -> None:
    """Append a record of one row a policy and budget."""
    loaded = load_model(arguments.model)
    text = load_text(arguments.text)
    cut = windows(tokenize(text, loaded.tokenizer), arguments.window, arguments.first, arguments.windows)
    started, kinds = context_of(loaded, text), len(arguments.budgets) * len(arguments.kinds) + arguments.full
    with tqdm(total=kinds * len(cut) * len(arguments.schemes), unit="window") as progress:
        for scheme in arguments.schemes:
            chosen = _chosen(loaded, arguments, scheme)
            rows = compare(
                loaded.model, list(cut), chosen, scored_from=arguments.scored_from, chunk=arguments.chunk, scheme=scheme,
                progress=progress,
            )  # fmt: skip
            record = {
                "kind": "quality",
                "window": arguments.window,
                "first": arguments.first,
                "windows": arguments.windows,
                "scored_from": arguments.scored_from,
                "chunk": arguments.chunk,
                "rows": rows,
                **started,
            }
            append(record, arguments.out)


def stream_text(arguments: argparse.Namespace) -> None:
    """Append a record of one row a policy, with its stretches."""
    loaded = load_model(arguments.model)
    text = load_text(arguments.text)
    ids = tokenize(text, loaded.tokenizer)
    if len(ids) <= arguments.tokens:
        raise SystemExit(
            f"{text.name} has {len(ids)} tokens, {arguments.tokens + 1} are needed; try --tokens {len(ids) - 1}"
        )
    chosen, started = _chosen(loaded, arguments, arguments.scheme), context_of(loaded, text)
    with tqdm(total=len(chosen) * -(-arguments.tokens // arguments.every), unit="stretch") as progress:
        rows = stream.stream(
            loaded.model, ids[: arguments.tokens + 1], chosen, chunk=arguments.chunk, every=arguments.every,
            exact_until=arguments.exact_until, scheme=arguments.scheme, progress=progress,
        )  # fmt: skip
    record = {
        "kind": "stream",
        "tokens": arguments.tokens,
        "chunk": arguments.chunk,
        "every": arguments.every,
        "exact_until": arguments.exact_until,
        "trained_length": trained_length(loaded.model.config.get_text_config(decoder=True)),
        "rows": rows,
        **started,
    }
    append(record, arguments.out)
    if arguments.plot is not None:
        stream.plot(record, arguments.plot)


def retrieve_all(arguments: argparse.Namespace) -> None:
    """Append a record of one row a policy and distance, and print its table."""
    loaded = load_model(arguments.model)
    text = load_text(arguments.text)
    ids = tokenize(text, loaded.tokenizer)
    chosen, started = _chosen(loaded, arguments, arguments.scheme), context_of(loaded, text)
    with tqdm(total=len(chosen) * len(arguments.distances) * arguments.trials, unit="trial") as progress:
        rows = retrieve.retrieve(
            loaded.model, loaded.tokenizer, ids, chosen, distances=arguments.distances, trials=arguments.trials,
            seed=arguments.seed, scheme=arguments.scheme, chunk=arguments.chunk, progress=progress,
        )  # fmt: skip
    record = {
        "kind": "retrieve",
        "distances": arguments.distances,
        "trials": arguments.trials,
        "seed": arguments.seed,
        "chunk": arguments.chunk,
        "rows": rows,
        **started,
    }
    append(record, arguments.out)
    print(retrieve.table(record))


def time_steps(arguments: argparse.Namespace) -> None:
    """Append a record of one row a policy, and print its table."""
    loaded = load_model(arguments.model)
    text = load_text(arguments.text)
    ids = tokenize(text, loaded.tokenizer)
    chosen, started = _chosen(loaded, arguments, arguments.scheme), context_of(loaded, text)
    rows = speed.speed(
        loaded.model, ids, chosen, context=arguments.context, steps=arguments.steps, chunk=arguments.chunk,
        scheme=arguments.scheme,
    )  # fmt: skip
    record = {
        "kind": "speed",
        "context": arguments.context,
        "steps": arguments.steps,
        "chunk": arguments.chunk,
        "rows": rows,
        **started,
        "kernels": [kernel.name for kernel in kernels_for("cpu")],
    }
    append(record, arguments.out)
    print(speed.table(record))


def _chosen(loaded: LoadedModel, arguments: argparse.Namespace, scheme: str) -> list[Policy]:
    """Full attention, then the policies that were asked for."""
    head_dim = loaded.model.config.get_text_config(decoder=True).head_dim
    chosen = [Policy(kind=FULL, budget=0)] if arguments.full else []
    for budget in arguments.budgets:
        found = policies(budget, head_dim, window=arguments.near, scheme=scheme)
        chosen += [found[kind] for kind in KINDS if kind in arguments.kinds]
    return chosen


def _add_policies(command: argparse.ArgumentParser, budgets: Sequence[int], kinds: Sequence[str]) -> None:
    """The options that `_chosen` reads."""
    command.add_argument("--budgets", type=int, nargs="+", default=list(budgets))
    command.add_argument("--kinds", nargs="+", choices=KINDS, default=list(kinds))
    command.add_argument(
        "--full", action=argparse.BooleanOptionalAction, default=True, help="measure full attention too"
    )
    command.add_argument("--near", type=int, help="window of the policies with a far field; the measured rule")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bounded", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="kind", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--text", help="a UTF-8 text file; wikitext-2, test, where the hub can be reached")
    common.add_argument("--model", help="hub id or folder; the embedded default")
    common.add_argument("--out", type=Path, default=RESULTS)
    common.add_argument("--threads", type=int, default=2)
    common.add_argument("--chunk", type=int, default=512, help="tokens of a forward")

    command = commands.add_parser("quality", parents=[common])
    command.add_argument("--window", type=int, default=4096)
    command.add_argument("--first", type=int, default=3)
    command.add_argument("--windows", type=int, default=4)
    command.add_argument("--scored-from", type=int, default=1024)
    _add_policies(command, BUDGETS, KINDS)
    command.add_argument("--schemes", nargs="+", default=["int8"])
    command.set_defaults(run=quality)

    command = commands.add_parser("stream", parents=[common])
    command.add_argument("--tokens", type=int, default=stream.TOKENS)
    command.add_argument("--every", type=int, default=stream.EVERY, help="tokens of a stretch, which is one point")
    command.add_argument("--exact-until", type=int, default=stream.EXACT_UNTIL, help="tokens of full attention")
    command.add_argument("--plot", type=Path, help="a picture of the record")
    _add_policies(command, (512,), ("sinks + window", "heavy hitters"))
    command.add_argument("--scheme", default="int8")
    command.set_defaults(run=stream_text)

    command = commands.add_parser("retrieve", parents=[common])
    command.add_argument("--distances", type=int, nargs="+", default=list(retrieve.DISTANCES))
    command.add_argument("--trials", type=int, default=retrieve.TRIALS)
    command.add_argument("--seed", type=int, default=0)
    _add_policies(command, (256, 512), KINDS)
    command.add_argument("--scheme", default="int8")
    command.set_defaults(run=retrieve_all)

    command = commands.add_parser("speed", parents=[common])
    command.add_argument("--context", type=int, default=speed.CONTEXT, help="tokens before the first step")
    command.add_argument("--steps", type=int, default=speed.STEPS, help="timed steps, whole blocks")
    _add_policies(command, (512, 1024), KINDS)
    command.add_argument("--scheme", default="int8")
    command.set_defaults(run=time_steps)

    arguments = parser.parse_args(given)
    torch.set_num_threads(arguments.threads)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
