"""Random sequences of operations on a bounded cache: every token of every row, head and layer is somewhere, and memory stays bounded."""

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
from transformers import LlamaConfig

from hf_kvq import Clusters, HeavyHitters, QuantizedSlidingWindowCache
from hf_kvq.kernels import Visibility

LAYERS, HEADS, DIM, WINDOW, SINKS, BLOCK = 2, 2, 4, 9, 2, 6
CONFIG = LlamaConfig(
    num_hidden_layers=LAYERS,
    num_attention_heads=2 * HEADS,
    num_key_value_heads=HEADS,
    head_dim=DIM,
    hidden_size=4 * DIM,
    max_position_embeddings=64,
    attn_implementation="hf_kvq",
)
MAX_ROWS = 6
FAR_FIELDS = {
    "none": None,
    "heavy hitters": HeavyHitters(6),
    "clusters": Clusters(3),
    "both": (HeavyHitters(5), Clusters(3)),
}


class BoundedMachine(RuleBasedStateMachine):
    """Keeps its own count of each row's tokens."""

    far_field: object = None
    sequences = 0
    operations = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).sequences += 1
        self.generator = torch.Generator().manual_seed(0)
        self.cache = QuantizedSlidingWindowCache(
            CONFIG, "int8", window=WINDOW, sinks=SINKS, block=BLOCK, far_field=self.far_field
        )
        self.blocks: list[tuple[int, int]] = []
        self.cache.register_chunk_hook(lambda block: self.blocks.append((block.layer, len(block.rows))))
        self.tokens: list[int] = []
        self.padding: list[int] = []
        self.recording = False
        self.last = 0

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    @initialize(padding=st.lists(st.sampled_from([0, 4]), min_size=1, max_size=3), recording=st.booleans())
    def start(self, padding: list[int], recording: bool) -> None:
        self.padding = [number - min(padding) for number in padding]
        mask = torch.arange(8) >= torch.tensor(self.padding)[:, None]
        self.cache.set_padding(mask)
        self.tokens = [-number for number in self.padding]
        self.recording = recording
        if recording:
            self.cache.activate_past_recording()
        self.forward(8)

    def forward(self, tokens: int) -> None:
        rows, seen = len(self.tokens), self.cache.get_seq_length()
        for layer in range(LAYERS):
            keys, values = self.normal(rows, HEADS, tokens, DIM), self.normal(rows, HEADS, tokens, DIM)
            handle, _ = self.cache.update(keys, values, layer)
            query = self.normal(rows, 2 * HEADS, tokens, DIM)
            output = handle.view.attend(query, Visibility(seen, tokens), scaling=0.5)
            assert output.isfinite().all()
        self.tokens = [count + tokens for count in self.tokens]
        self.last = tokens

    @rule(tokens=st.sampled_from([1, 1, 1, 1, 2, 5, 17]))
    def update(self, tokens: int) -> None:
        type(self).operations += 1
        self.forward(tokens)

    @precondition(lambda self: self.recording and self.last > 1)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        type(self).operations += 1
        # As assisted decoding does: tokens of the last forward, and of rows that have as many.
        remove = data.draw(st.integers(0, min(self.last - 1, 20, min(self.tokens) - 1)))
        self.cache.crop(-remove)
        self.tokens = [count - remove for count in self.tokens]
        self.last = 0

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        type(self).operations += 1
        rows = len(self.tokens)
        order = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=MAX_ROWS))
        self.cache.reorder_cache(torch.tensor(order))
        self.tokens = [self.tokens[row] for row in order]
        self.last = 0

    @rule()
    def copy(self) -> None:
        type(self).operations += 1
        twin = copy.deepcopy(self.cache)
        self.cache.reset()
        self.cache = twin
        self.last = 0

    @rule()
    def undo(self) -> None:
        type(self).operations += 1
        before = self.cache.accounting()
        seen = self.cache.get_seq_length()
        self.forward(5)
        self.tokens = [count - 5 for count in self.tokens]
        for layer in self.cache.bounded_layers:
            assert layer.undo_update()
        assert self.cache.get_seq_length() == seen
        after = self.cache.accounting()
        assert all(torch.equal(after[i][place], before[i][place]) for i in before for place in before[i])
        self.last = 0

    @invariant()
    def every_token_is_somewhere(self) -> None:
        if not self.tokens:
            return
        for index, counts in self.cache.accounting().items():
            parts = sum(number for place, number in counts.items() if place != "seen")
            assert torch.equal(counts["seen"], parts)
            assert counts["seen"].tolist() == [[count] * HEADS for count in self.tokens]
            assert all((number >= 0).all() for number in counts.values())
            # The counts are of what is there: every column of the window, and each kept token once, from before it.
            self.look_into(index, counts)
            # A crop may find the block that was kept for it still there.
            assert counts["window"].max() < WINDOW + BLOCK + (40 if self.recording else 0)

    def look_into(self, index: int, counts: dict[str, torch.Tensor]) -> None:
        store, padded = self.cache.layers[index].held, [self.cache.get_seq_length() - count for count in self.tokens]
        for row, first in enumerate(padded):
            gone = int(counts["seen"][row, 0] - counts["window"][row, 0])
            held = store.tokens.segments(first + gone, store.seen)
            assert sum(segment.keys.tokens for segment in held) == max(self.tokens[row] - SINKS, 0) - (
                gone - SINKS if gone > SINKS else 0
            )
            if store.far.kept is None or store.far.kept.positions is None:
                continue
            kept = self.cache.kept_positions()[index][row]
            assert kept.shape[1] == counts["kept"][row, 0]
            if kept.shape[1]:
                assert (kept.diff(dim=1) > 0).all()
                assert kept.min() >= SINKS
                assert kept.max() < gone


def drive(far_field, sequences: int) -> type[BoundedMachine]:
    machine = type("Machine", (BoundedMachine,), {"far_field": far_field, "sequences": 0, "operations": 0})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"\n{far_field}: {machine.sequences} sequences, {machine.operations} operations, every token accounted for")
    return machine


@pytest.mark.parametrize("far_field", FAR_FIELDS.values(), ids=FAR_FIELDS)
def test_every_token_is_accounted_for(far_field):
    assert drive(far_field, 6).operations > 50


@pytest.mark.slow
@pytest.mark.parametrize("far_field", FAR_FIELDS.values(), ids=FAR_FIELDS)
def test_every_token_is_accounted_for_after_thousands_of_operations(far_field):
    assert drive(far_field, 130).operations > 2500
