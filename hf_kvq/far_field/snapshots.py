"""The generation hook: what leaves the window, as the seed's encodings, in memory or in a folder.

Source: the "once-per-chunk ClusterBank outlier snapshot" of I2 in the seed (the document of `mixle.experimental.kv_cache_quant`).
Departs from it: chunks are split by row and kv head, so one row's content never touches another's encodings. With a bank's receipt a
chunk is the tokens that the bank took in. Without one it is the block, as one cluster, and its outliers are the tokens with the largest
attention mass, or, where nobody asked for the mass, those whose keys lie farthest from the mean key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hf_kvq.codecs.affine import Mode, quantize_kv_cache
from hf_kvq.far_field.block import EvictedBlock
from hf_kvq.far_field.outliers import quantize_cluster_outliers
from hf_kvq.far_field.receipt import OUTLIERS, OutlierTokens
from hf_kvq.far_field.snapshot_files import ChunkSnapshot, HeadSnapshot, append_snapshot, read_snapshots, start_folder

__all__ = ["ChunkSnapshot", "HeadSnapshot", "OutlierSnapshots"]

CAPACITY = 4096
"""Chunks held in memory unless the caller says otherwise."""


@final
class OutlierSnapshots:
    """Encodes every block that it is called with.

    Args:
        outliers: Tokens of a chunk that are kept as outliers where no receipt says which.
        mode: Of the outliers, as in `quantize_kv_cache`.
        tail_family: Of the tails, as in `fit_sorted_profile`.
        tail_top_k: Likewise, its `top_k`.
        tail_gof_threshold: Likewise; with the seed's 0.05 most tails of real keys are kept as they are, in float32.
        tail_rank_bits: Likewise, its `rank_bits`; with a few bits, and a threshold of 1.0, a snapshot is smaller than int8 codes would be.
        capacity: Chunks of all layers held in memory, `CAPACITY` unless given; the oldest are dropped, and `dropped` counts them.
        folder: Where to write them instead: a folder that is empty, or is not there yet. Nothing is then held in memory.
    """

    def __init__(
        self,
        *,
        outliers: int = 4,
        mode: Mode = "int8",
        tail_family: Any = None,
        tail_top_k: int = 0,
        tail_gof_threshold: float = 0.05,
        tail_rank_bits: int | None = None,
        capacity: int | None = None,
        folder: str | Path | None = None,
    ) -> None:
        if outliers < 0:
            raise ValueError(f"outliers must be at least 0, got {outliers}")
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be at least 1 chunk, got {capacity}")
        if capacity is not None and folder is not None:
            raise ValueError(f"a folder keeps every chunk, so capacity={capacity} says nothing; give one of the two")
        # An unknown mode fails now instead of in the middle of a generation.
        quantize_kv_cache(torch.zeros(1), mode=mode)
        self.outliers = outliers
        self.mode: Mode = mode
        self.tail_family = tail_family
        self.tail_top_k = tail_top_k
        self.tail_gof_threshold = tail_gof_threshold
        self.tail_rank_bits = tail_rank_bits
        self.folder = None if folder is None else Path(folder)
        self.chunks = 0
        """Chunks encoded, those dropped included."""
        self._held: deque[ChunkSnapshot] = deque(maxlen=capacity or CAPACITY)
        if self.folder is not None:
            start_folder(self.folder)

    def __repr__(self) -> str:
        where = f"folder={str(self.folder)!r}" if self.folder else f"held={len(self._held)}, dropped={self.dropped}"
        return f"OutlierSnapshots(chunks={self.chunks}, {where})"

    @property
    def dropped(self) -> int:
        """Chunks that are kept nowhere any more."""
        return 0 if self.folder is not None else self.chunks - len(self._held)

    @property
    def encodings(self) -> dict[int, list[ChunkSnapshot]]:
        """Chunks by layer, oldest first; read from the folder if there is one."""
        return _by_layer(self._held if self.folder is None else read_snapshots(self.folder))

    @staticmethod
    def read(folder: str | Path) -> dict[int, list[ChunkSnapshot]]:
        """The encodings that a folder holds, equal to those that were written.

        Raises:
            ValueError: If the folder is none of this package's, or something in it is missing, cut off or damaged.
        """
        return _by_layer(read_snapshots(Path(folder)))

    def __call__(self, block: EvictedBlock) -> None:
        """Encode one block.

        Raises:
            ValueError: If the block's receipt and the block disagree.
        """
        heads = tuple(
            self._encode(block, row, head) for row in range(len(block.rows)) for head in range(block.keys.shape[1])
        )
        snapshot = ChunkSnapshot(layer=block.layer, heads=heads)
        if self.folder is None:
            self._held.append(snapshot)
        else:
            append_snapshot(self.folder, self.chunks, snapshot)
        self.chunks += 1

    def _encode(self, block: EvictedBlock, row: int, head: int) -> HeadSnapshot:
        if block.receipt is not None and OUTLIERS in block.receipt:
            keys, values, positions, split = _of_receipt(block, block.receipt, row, head)
        else:
            keys, values = (states[row, head].detach().cpu()[:, None] for states in (block.keys, block.values))
            positions = block.positions[row].cpu()
            split = self._own_split(keys, values, None if block.mass is None else block.mass[row, head].detach().cpu())
        return HeadSnapshot(
            row=int(block.rows[row]),
            head=head,
            positions=positions.numpy().astype(np.int64),
            clusters=quantize_cluster_outliers(
                split,
                keys,
                values,
                mode=self.mode,
                tail_family=self.tail_family,
                tail_top_k=self.tail_top_k,
                tail_gof_threshold=self.tail_gof_threshold,
                tail_rank_bits=self.tail_rank_bits,
            ),
        )

    def _own_split(
        self,
        keys: Float[Tensor, "tokens 1 key_dim"],
        values: Float[Tensor, "tokens 1 value_dim"],
        mass: Float[Tensor, " tokens"] | None,
    ) -> OutlierTokens:
        """The rule without a receipt: one cluster, its outliers by mass, or else by distance."""
        if mass is None:
            mass = (keys.float() - keys.float().mean(dim=0)).square().sum(dim=(1, 2))
        indices = mass.topk(min(self.outliers, len(keys))).indices.sort().values
        return {0: {"k": keys[indices], "v": values[indices], "indices": indices, "members": torch.arange(len(keys))}}


def _of_receipt(
    block: EvictedBlock, receipt: Mapping[str, Any], row: int, head: int
) -> tuple[Tensor, Tensor, Tensor, OutlierTokens]:
    """Keys, values and positions of the tokens that a bank took, and its split of them, in their numbering.

    A bank's own receipt brings its tokens along, since they need not be the block's: where heavy hitters are kept, they are those that the
    block displaced. "assignments" is -1 for a token that the bank was not given. A receipt without either is of the whole block.
    """
    split: OutlierTokens = receipt[OUTLIERS][row][head]
    keys, values = receipt.get("chunk_keys", block.keys), receipt.get("chunk_values", block.values)
    keys, values = (states[row, head].detach().cpu()[:, None] for states in (keys, values))
    positions = receipt["positions"][row, head] if "positions" in receipt else block.positions[row]
    assignments = receipt["assignments"][row, head].cpu() if "assignments" in receipt else torch.zeros(len(keys))
    if not len(keys) == len(positions) == len(assignments):
        raise ValueError(
            f"a receipt must be of one chunk: it has {len(assignments)} assignments and {len(positions)} positions for {len(keys)} tokens; "
            'a bank whose tokens are not the block\'s gives "chunk_keys", "chunk_values" and "positions"'
        )
    kept = (assignments >= 0).nonzero()[:, 0]
    place = torch.full((len(keys),), -1).index_put((kept,), torch.arange(len(kept)))
    renumbered = {
        cluster: {
            name: place[part.cpu()] if name in ("indices", "members") else part.cpu() for name, part in entry.items()
        }
        for cluster, entry in split.items()
    }
    return keys[kept], values[kept], positions.cpu()[kept], renumbered


def _by_layer(snapshots: Any) -> dict[int, list[ChunkSnapshot]]:
    found: dict[int, list[ChunkSnapshot]] = {}
    for snapshot in snapshots:
        found.setdefault(snapshot.layer, []).append(snapshot)
    return found
