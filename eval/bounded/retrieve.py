"""Two things that only a token that is still there can answer: a passkey, and a passage that comes again.

Source: the passkey of Landmark Attention, arXiv:2305.16300, and the repeated sequences of induction heads, arXiv:2209.11895. Departs from both: the filler is the
text itself, and distances are in tokens.

Passkey: `LEAD` tokens of text, the sentence with a random key, `distance` tokens of text, and the question, which is answered greedily. The score is the share of
digits that are right at their place; a guess gets a tenth of them.
Copy: `LEAD` tokens of text, a passage of `PASSAGE` tokens, text, and the passage again, each token `distance` tokens behind its first copy. Both copies are scored from
their token `SETTLED` on, by nll.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from eval.bounded.policies import FULL, Policy
from eval.bounded.quality import nll_of
from hf_kvq.evaluation.models import forward

__all__ = ["DISTANCES", "TRIALS", "answer", "digits_right", "prompts", "retrieve", "table"]

DISTANCES, TRIALS = (100, 400, 750, 1500), 5
CHUNK = 512
LEAD, PASSAGE, SETTLED = 200, 64, 8
DIGITS = 5
LONGEST = 12
"""Tokens of an answer: a digit each, and a few for spaces, or words before them."""
SENTENCE = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What all policies get at one distance in one trial.

    Attributes:
        key: The digits.
        passkey: `[tokens]`, from the lead to the end of the question.
        copy: `[tokens]`, which end with the second copy.
        first: Index of the first token of the first copy in `copy`.
    """

    key: str
    passkey: Tensor
    copy: Tensor
    first: int = LEAD


def prompts(tokenizer: PreTrainedTokenizerBase, ids: Tensor, distance: int, trial: int, seed: int) -> Prompts:
    """The prompts of a trial. Key, lead and passage are the same at all distances.

    Raises:
        ValueError: If copies would overlap, or the text is too short.
    """
    if distance < PASSAGE:
        raise ValueError(
            f"distance must be at least {PASSAGE}, the length of the passage that is repeated, got {distance}"
        )
    chance = random.Random(f"{seed} {trial}")
    key = "".join(chance.choices("0123456789", k=DIGITS))
    needed = LEAD + distance + PASSAGE
    if len(ids) < needed:
        raise ValueError(f"the text has {len(ids)} tokens, {needed} are needed; try smaller distances or another text")
    begin = min(int(chance.random() * len(ids)), len(ids) - needed)
    text = ids[begin : begin + needed]

    def coded(sentence: str) -> Tensor:
        return torch.tensor(tokenizer(sentence, add_special_tokens=False)["input_ids"], dtype=ids.dtype)

    passkey = [text[:LEAD], coded(SENTENCE.format(key=key)), text[LEAD : LEAD + distance], coded(QUESTION)]
    copy = [text[: LEAD + distance], text[LEAD : LEAD + PASSAGE]]
    return Prompts(key=key, passkey=torch.cat(passkey), copy=torch.cat(copy))


@torch.inference_mode()
def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor, cache: Cache, *, chunk: int = CHUNK
) -> str:
    """What the model says greedily after `ids`: until there are `DIGITS` digits, or `LONGEST` tokens."""
    for part in ids.split(chunk):
        logits = forward(model, part[None], cache)
    said: list[int] = []
    while True:
        said.append(int(logits[0, -1].argmax()))
        text = tokenizer.decode(said)
        if len(said) == LONGEST or len(re.sub(r"\D", "", text)) >= DIGITS:
            return text
        logits = forward(model, ids.new_tensor([[said[-1]]]), cache)


def digits_right(text: str, key: str) -> float:
    """Share of the key's digits that the first digits of `text` have at the same place."""
    found = re.sub(r"\D", "", text)
    return sum(a == b for a, b in zip(found, key, strict=False)) / len(key)


def retrieve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    policies: Sequence[Policy],
    *,
    distances: Sequence[int] = DISTANCES,
    trials: int = TRIALS,
    seed: int = 0,
    scheme: str = "int8",
    chunk: int = CHUNK,
    progress: Any = None,
) -> list[dict[str, Any]]:
    """One row a policy and distance; all policies get the same prompts.

    Args:
        model: Its attention is set for each policy, and stays as the last one needed it.
        tokenizer: Of the model.
        ids: `[tokens]`, the text that fills.
        policies: What to compare.
        distances: In tokens, from the end of the sentence to the question, and from copy to copy.
        trials: Prompts of a distance.
        seed: Of keys, and of places in the text.
        scheme: Of the bounded caches.
        chunk: Tokens of a forward before the answer.
        progress: Gets `update(1)` for every trial.

    Raises:
        ValueError: If there is no trial, or as `prompts` does.
    """
    if trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    asked = {distance: [prompts(tokenizer, ids, distance, trial, seed) for trial in range(trials)] for distance in distances}  # fmt: skip
    rows = []
    for policy in policies:
        model.set_attn_implementation("sdpa" if policy.kind == FULL else "hf_kvq")
        for distance, given in asked.items():
            answers, first, second = [], [], []
            for prompt in given:
                answers.append(
                    answer(model, tokenizer, prompt.passkey, policy.make(model.config, scheme), chunk=chunk)
                )
                nll = nll_of(model, prompt.copy, policy.make(model.config, scheme), chunk=chunk).double()
                first.append(_nll(nll, prompt.first))
                second.append(_nll(nll, prompt.first + distance))
                if progress is not None:
                    progress.update(1)
            rights = [digits_right(text, prompt.key) for text, prompt in zip(answers, given, strict=True)]
            rows.append(
                {
                    "kind": policy.kind,
                    "budget": policy.budget,
                    "label": policy.label,
                    "scheme": None if policy.kind == FULL else scheme,
                    "distance": distance,
                    "trials": trials,
                    "digits_right": sum(rights) / trials,
                    "nll_copy": sum(second) / trials,
                    "nll_first": sum(first) / trials,
                    "keys": [prompt.key for prompt in given],
                    "answers": answers,
                    "nll_copy_by_trial": second,
                    "nll_first_by_trial": first,
                }
            )
    return rows


def table(record: dict[str, Any]) -> str:
    """The `rows` of a record as markdown: a row a policy, a column a distance; digits right, and nll of the second copy."""
    distances = list(dict.fromkeys(row["distance"] for row in record["rows"]))
    by_policy: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}
    for row in record["rows"]:
        by_policy.setdefault((row["kind"], row["budget"], row["label"]), {})[row["distance"]] = row
    lines = [["policy", "budget", "kept", *(f"{distance:,} tokens back" for distance in distances)]]
    lines.append(["---", "---:", "---", *("---:" for _ in distances)])
    for (kind, budget, label), found in by_policy.items():
        cells = [_cell(found[distance]) if distance in found else "" for distance in distances]
        lines.append([kind, f"{budget:,}" if budget else "-", label or "all", *cells])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _nll(nll: Tensor, begin: int) -> float:
    """Mean over a copy that begins at token `begin`; entry i is the nll of token i + 1."""
    return nll[begin + SETTLED - 1 : begin + PASSAGE - 1].mean().item()


def _cell(row: dict[str, Any]) -> str:
    return f"{100 * row['digits_right']:.0f} % / {row['nll_copy']:.2f}"
