"""Random sequences of operations: with the identity codec the cache equals `DynamicCache` bit for bit."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import DynamicCache, Gemma3TextConfig

from hf_kvq import QuantizedCache

WINDOW = 8
CONFIG = Gemma3TextConfig(
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    hidden_size=8,
    sliding_window=WINDOW,
    layer_types=["full_attention", "sliding_attention", "full_attention"],
)
MAX_ROWS = 12


class CacheMachine(RuleBasedStateMachine):
    """Drives both caches through the same operations; subclasses choose dtype, sinks and residual."""

    dtype = torch.float32
    settings_of_cache: dict[str, int] = {}
    sequences = 0
    operations = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).sequences += 1
        self.generator = torch.Generator().manual_seed(0)
        self.ours = QuantizedCache(CONFIG, "identity", **self.settings_of_cache)
        self.theirs = DynamicCache(config=CONFIG)
        self.rows = 1
        self.length = 0
        self.recording = False
        self.since_crop = 0

    def normal(self, tokens: int) -> torch.Tensor:
        return torch.randn(self.rows, 2, tokens, 4, generator=self.generator).to(self.dtype)

    @initialize(rows=st.integers(1, 3), recording=st.booleans())
    def start(self, rows: int, recording: bool) -> None:
        self.rows, self.recording = rows, recording
        if recording:
            self.ours.activate_past_recording()
            self.theirs.activate_past_recording()

    @rule(tokens=st.sampled_from([1, 1, 1, 2, 3, 7, 8, 9, 70]))
    def update(self, tokens: int) -> None:
        type(self).operations += 1
        for layer in range(3):
            assert self.ours.get_mask_sizes(tokens, layer) == self.theirs.get_mask_sizes(tokens, layer)
            keys, values = self.normal(tokens), self.normal(tokens)
            got, expected = self.ours.update(keys, values, layer), self.theirs.update(keys, values, layer)
            for mine, other in zip(got, expected, strict=True):
                assert mine.dtype == other.dtype == self.dtype
                assert torch.equal(mine, other)
        self.length += tokens
        self.since_crop += tokens

    @precondition(lambda self: self.length > 0)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        # transformers refuses a crop of a filled window that did not record, and cuts too much if more than was recorded goes.
        free = self.length - 1 if self.length < WINDOW else (self.since_crop if self.recording else -1)
        if free < 0:
            return
        removed = data.draw(st.integers(0, max(min(free, self.length - 1), 0)))
        if self.length >= WINDOW and self.length - removed < WINDOW and not self.recording:
            return
        type(self).operations += 1
        self.ours.crop(-removed)
        self.theirs.crop(-removed)
        self.length -= removed
        self.since_crop = 0

    @precondition(lambda self: self.length > 0)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        type(self).operations += 1
        order = torch.tensor(
            data.draw(st.lists(st.integers(0, self.rows - 1), min_size=self.rows, max_size=self.rows))
        )
        self.ours.reorder_cache(order)
        self.theirs.reorder_cache(order)

    @precondition(lambda self: self.length > 0)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats: int) -> None:
        if self.rows * repeats > MAX_ROWS:
            return
        type(self).operations += 1
        self.ours.batch_repeat_interleave(repeats)
        self.theirs.batch_repeat_interleave(repeats)
        self.rows *= repeats

    @precondition(lambda self: self.length > 0)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        type(self).operations += 1
        kept = data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=self.rows))
        self.ours.batch_select_indices(torch.tensor(kept))
        self.theirs.batch_select_indices(torch.tensor(kept))
        self.rows = len(kept)

    @rule(rows=st.integers(1, 3))
    def reset(self, rows: int) -> None:
        type(self).operations += 1
        self.ours.reset()
        self.theirs.reset()
        self.length = self.since_crop = 0
        self.rows = rows

    @rule()
    def go_on_with_copies(self) -> None:
        type(self).operations += 1
        before = self.ours, self.theirs
        self.ours, self.theirs = copy.deepcopy(self.ours), copy.deepcopy(self.theirs)
        if self.length:
            # What happens to the originals must not reach the copies.
            before[0].reorder_cache(torch.zeros(self.rows, dtype=torch.long))
            before[0].reset()

    @rule()
    def offload_and_fetch_back(self) -> None:
        type(self).operations += 1
        for layer in self.ours.layers:
            layer.offload()
            layer.prefetch()

    @invariant()
    def lengths_agree(self) -> None:
        for layer in range(3):
            assert self.ours.get_seq_length(layer) == self.theirs.get_seq_length(layer) == self.length


SETTINGS = [{}, {"sinks": 3}, {"residual": 5}, {"sinks": 3, "residual": 5}]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAST = [(torch.float32, 3), (torch.bfloat16, 0), (torch.bfloat16, 2), (torch.float16, 1)]


@pytest.mark.parametrize(
    ("dtype", "cache_settings"),
    [
        pytest.param(dtype, each, marks=() if (dtype, number) in FAST else pytest.mark.slow, id=f"{dtype}-{each}")
        for dtype in DTYPES
        for number, each in enumerate(SETTINGS)
    ],
)
def test_every_sequence_of_operations_equals_dynamic_cache(dtype, cache_settings, record_property, shown):
    machine = type("Machine", (CacheMachine,), {"dtype": dtype, "settings_of_cache": cache_settings})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
    assert machine.sequences >= 100
    shown(f"{dtype} {cache_settings}: {machine.sequences} sequences, {machine.operations} operations, bit-equal")
