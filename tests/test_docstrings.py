"""Examples in docstrings run."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest
import torch
from oracles import tiny_llama

import hf_kvq


def examples():
    for name in hf_kvq.__all__:
        for number, block in enumerate(
            re.findall(r"```python\n(.*?)```", inspect.getdoc(getattr(hf_kvq, name)) or "", re.DOTALL)
        ):
            yield pytest.param(textwrap.dedent(block), id=f"{name}-{number}")


@pytest.mark.parametrize("code", list(examples()))
def test_examples_run(code):
    model = tiny_llama()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    namespace = {"model": model, "inputs": inputs, "QuantizedCache": hf_kvq.QuantizedCache}
    exec(compile(code, "docstring", "exec"), namespace)
    assert namespace["cache"].tokens_coded > 0


def test_there_is_an_example():
    assert len(list(examples())) >= 1
