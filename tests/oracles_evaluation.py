"""What the evaluation's tests share: obvious references, and a random model with a tokenizer of characters."""

from __future__ import annotations

import math
import random
import string
from pathlib import Path

from oracles import tiny_llama
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hf_kvq.evaluation import EvalConfig, LoadedModel, describe_model

CHARACTERS = string.ascii_lowercase + string.digits + " \n.,"


def log_softmax(logits: list[float]) -> list[float]:
    """In Python's float64, one number at a time."""
    largest = max(logits)
    total = math.fsum(math.exp(x - largest) for x in logits)
    return [x - largest - math.log(total) for x in logits]


def nll(logits: Tensor, targets: Tensor) -> list[float]:
    """Negative log-likelihood of each target."""
    return [-log_softmax(row.tolist())[int(target)] for row, target in zip(logits, targets, strict=True)]


def kl(exact: Tensor, coded: Tensor) -> list[float]:
    """KL(exact || coded) at each position, from its definition."""
    found = []
    for exact_row, coded_row in zip(exact, coded, strict=True):
        p, q = log_softmax(exact_row.tolist()), log_softmax(coded_row.tolist())
        found.append(math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
    return found


def prose(characters: int = 600) -> str:
    """Random text over the tokenizer's characters."""
    return "".join(random.Random(0).choices(CHARACTERS, k=characters))


def character_tokenizer(*, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a character, ids below 97; with `adds_bos` it puts `<s>` first unless it is told not to."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def tiny_loaded() -> LoadedModel:
    """A random Llama with the tokenizer of characters."""
    return describe_model(tiny_llama(), character_tokenizer(), name=None, title="tiny")


def tiny_folder(folder: Path, *, seed: int = 0) -> str:
    """The same on disk, where `load_model` finds it."""
    tiny_llama(seed=seed).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


def tiny_config(**changes: object) -> EvalConfig:
    """Three windows of 32 tokens, without the slow extras."""
    settings = {"schemes": ("exact", "int8"), "window": 32, "count": 3, "noise_floor_tokens": 0, "timed_tokens": 0}
    return EvalConfig(**{**settings, **changes})
