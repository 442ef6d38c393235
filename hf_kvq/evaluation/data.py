"""Text for evaluations: the wikitext-2 test split, a local file, or prose that every Python carries.

The field's perplexity string is the rows of `wikitext-2-raw-v1`, test, joined by blank lines: a blank row is `""` and every
other row keeps its final newline. Where the hub cannot be reached the help topics of `pydoc` stand in, and the name says so.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_kvq.evaluation.config import Join

__all__ = ["Text", "join_rows", "load_text", "text_in_memory", "tokenize", "windows"]

_DATASET, _SUBSET, _SPLIT = "Salesforce/wikitext", "wikitext-2-raw-v1", "test"
_PROBE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Text:
    """One string to evaluate on, and what identifies it.

    Attributes:
        name: File name, or data set with subset and split.
        path: As the user gave it; None where the text came from no file.
        source: One sentence on where it came from.
        sha256: Of the string in UTF-8, after joining.
        join: How rows became one string.
    """

    name: str
    path: str | None
    source: str
    join: Join
    text: str = field(repr=False)
    sha256: str


def load_text(path: str | None = None, *, join: Join = "raw") -> Text:
    """Read a text: a local file, or wikitext through `datasets`, or the stand-in for it.

    Args:
        path: A UTF-8 text file.
        join: `"raw"`: the file as it is. `"rows"`: its lines as wikitext rows, joined by the standard rule.

    Raises:
        ValueError: If the file cannot be read, is not UTF-8, or holds nothing but white space; the message names it.
    """
    if path is None:
        return _wikitext()
    try:
        content = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the text file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the text file {path} is not UTF-8 (byte {error.start} is {error.object[error.start]:#04x}); convert it first"
        ) from error
    if not content.strip():
        raise ValueError(f"the text file {path} is empty; a perplexity needs text")
    if join == "rows":
        content = join_rows(_lines(content))
    name = Path(path).name
    return _text(name=name, path=path, source=f"the local file {name}, read as {join}", join=join, text=content)


def text_in_memory(text: str, *, name: str) -> Text:
    """A `Text` from a string that the caller holds."""
    return _text(name=name, path=None, source="a text held in memory", join="raw", text=text)


def join_rows(rows: list[str]) -> str:
    """The field's perplexity string: blank rows become `""`, the others keep their final newline, blank lines join them."""
    return "\n\n".join(row if row.strip() else "" for row in rows)


def tokenize(text: Text, tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " tokens"]:
    """The whole text as one stream of token ids, without special tokens."""
    ids = tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def windows(
    ids: Int[Tensor, " tokens"], size: int, first: int = 0, count: int | None = None, *, bos_id: int | None = None
) -> Int[Tensor, "windows size"]:
    """Cut a stream into non-overlapping windows; the tail that fills none is dropped.

    Args:
        ids: The stream.
        size: Tokens of a window.
        first: Index of the first window wanted.
        count: Number of windows wanted; None: all from `first` on.
        bos_id: Token to put in front of every window, whose rows then have `size + 1` tokens.

    Raises:
        ValueError: If the stream has too few tokens; the message says how many windows it has.
    """
    if size < 2:
        raise ValueError(f"window must be at least 2 tokens (one is read, the next is predicted), got {size}")
    available = len(ids) // size
    last = available if count is None else first + count
    if not 0 <= first < last <= available:
        wanted = f"window {first} and all after it" if count is None else f"{count} from window {first} on"
        raise ValueError(
            f"the text has {len(ids)} tokens, which make {available} windows of {size}; asked for {wanted}; "
            "try a smaller window, fewer windows, or a longer text"
        )
    cut = ids[first * size : last * size].reshape(-1, size)
    return cut if bos_id is None else torch.cat([cut.new_full((len(cut), 1), bos_id), cut], dim=1)


def _lines(content: str) -> list[str]:
    """Lines with their newline. Only a line feed ends one: `str.splitlines` cuts at eight other characters as well."""
    lines = [line + "\n" for line in content.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


def _wikitext() -> Text:
    if importlib.util.find_spec("datasets") is None:
        return _pydoc_topics("the package datasets is not installed")
    from datasets import config, load_dataset

    offline = config.HF_HUB_OFFLINE
    cached = (Path(config.HF_DATASETS_CACHE) / _DATASET.replace("/", "___")).is_dir()
    if not (offline or cached or _hub_answers(config.HF_ENDPOINT)):
        return _pydoc_topics("the hub cannot be reached")
    try:
        rows = load_dataset(_DATASET, _SUBSET, split=_SPLIT)["text"]
    except (ConnectionError, FileNotFoundError):  # offline and not in the local cache
        return _pydoc_topics("the hub cannot be reached")
    name = f"{_DATASET} {_SUBSET} {_SPLIT}"
    return _text(name=name, path=None, source=f"{name}, through datasets", join="rows", text=join_rows(list(rows)))


def _hub_answers(endpoint: str) -> bool:
    """Whether a connection opens. datasets itself retries for tens of seconds before it says that it does not."""
    url = urlsplit(endpoint)
    if getproxies().get(url.scheme):
        return True  # the name is then resolved behind the proxy: leave the attempt to datasets
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def _pydoc_topics(reason: str) -> Text:
    from pydoc_data.topics import topics

    return _text(
        name=f"pydoc_data.topics (Python {platform.python_version()})",
        path=None,
        source=f"Python's own help topics, in place of wikitext, since {reason}",
        join="raw",
        text="\n\n".join(topics[topic] for topic in sorted(topics)),
    )


def _text(*, name: str, path: str | None, source: str, join: Join, text: str) -> Text:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Text(name=name, path=path, source=source, join=join, text=text, sha256=digest)
