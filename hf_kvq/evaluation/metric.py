"""Perplexity with a quantized cache as a metric of the `evaluate` library, built in code: no hub is asked for a script.

Source: the interface of `evaluate.Metric` and its `perplexity` metric. Departs from that one: texts are one stream cut into
windows, which is how caches are compared, and the exact cache runs on the same windows.
"""

from __future__ import annotations

from typing import cast, final

import datasets
import evaluate
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_kvq.config import QuantConfig
from hf_kvq.evaluation.config import Dtype, EvalConfig, Protocol
from hf_kvq.evaluation.data import text_in_memory
from hf_kvq.evaluation.models import describe_model, load_model
from hf_kvq.evaluation.runner import evaluate_model

__all__ = ["CachePerplexity"]

_DESCRIPTION = """Perplexity of texts under a causal language model whose key/value cache is quantized, beside the perplexity with
transformers' exact cache on the same windows."""

_INPUTS = """
Args:
    predictions: The texts. They are joined by blank lines and cut into non-overlapping windows; the tail is dropped.
    model: A causal language model in evaluation mode, a hub id, or a folder; None for the embedded default.
    tokenizer: Its tokenizer; needed with a model object only.
    scheme: A preset of hf_kvq, or a QuantConfig.
    window: Tokens of a window.
    protocol: "windows" (one pass, every token read as codes) or "decode" (a real cache, token by token).

Returns:
    perplexity, exact_perplexity, delta_percent, kl_mean (nats), bits_per_element, tokens_coded.

Example:
    >>> CachePerplexity().compute(predictions=texts, model=model, tokenizer=tokenizer, scheme="int8", window=512)
"""


@final
class CachePerplexity(evaluate.Metric):
    """Perplexity with a quantized cache; `compute` takes what `evaluate`'s metrics take, see its docstring."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string")}),
        )

    def _compute(
        self,
        predictions: list[str],
        *,
        model: PreTrainedModel | str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        scheme: str | QuantConfig = "int8",
        window: int = 512,
        protocol: Protocol = "windows",
    ) -> dict[str, float | int]:
        if isinstance(model, PreTrainedModel):
            if tokenizer is None:
                raise ValueError(
                    "a model object comes with its tokenizer: pass tokenizer=..., or name the model instead"
                )
            loaded = describe_model(model, tokenizer, name=None)
        else:
            loaded = load_model(model)
        config = EvalConfig(
            schemes=(scheme,),
            protocol=protocol,
            window=window,
            count=None,
            dtype=cast(Dtype, str(loaded.model.dtype).removeprefix("torch.")),
            device=str(loaded.model.device),
            noise_floor_tokens=0,
            timed_tokens=0,
        )
        text = text_in_memory("\n\n".join(predictions), name=f"{len(predictions)} texts")
        results = evaluate_model(loaded, text, config)[0].results
        return {
            "perplexity": results.perplexity,
            "exact_perplexity": results.exact_perplexity,
            "delta_percent": results.delta_percent,
            "kl_mean": results.kl_mean,
            "bits_per_element": results.bits_per_element,
            "tokens_coded": results.tokens_coded,
        }
