"""Receipts: what a quantized cache costs on a real text, measured beside transformers' exact cache on the same tokens.

`evaluate_schemes` runs an `EvalConfig` and returns one `Receipt` a scheme; `report` turns receipts into a table or a picture.
`allocate` makes a scheme for a model: bits by layer, by what each costs.
`hf_kvq.evaluation.metric` offers the same as a metric of the `evaluate` library and is imported on its own, since it needs it.
"""

from hf_kvq.evaluation.allocation import Sensitivity, allocate, assign_bits, sensitivities
from hf_kvq.evaluation.config import EXACT, EvalConfig
from hf_kvq.evaluation.data import Text, load_text
from hf_kvq.evaluation.models import LoadedModel, describe_model, load_model
from hf_kvq.evaluation.receipts import Receipt
from hf_kvq.evaluation.report import compare, heading, plot, table
from hf_kvq.evaluation.runner import evaluate_model, evaluate_schemes, rerun

__all__ = [
    "EXACT",
    "EvalConfig",
    "LoadedModel",
    "Receipt",
    "Sensitivity",
    "Text",
    "allocate",
    "assign_bits",
    "compare",
    "describe_model",
    "evaluate_model",
    "evaluate_schemes",
    "heading",
    "load_model",
    "load_text",
    "plot",
    "rerun",
    "sensitivities",
    "table",
]
