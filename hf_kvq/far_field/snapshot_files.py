"""Snapshots of chunks in a folder: one safetensors file for each, and an index of JSON lines.

The index opens with a line that names the format and its version; line n + 1 says what is in file n. A file is complete before its line is
written, so a generation that stops halfway leaves a folder that can be read. Nothing is unpickled, and no name in the index is opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from jaxtyping import Int64
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_kvq.codecs.affine import AffineQuantized
from hf_kvq.codecs.sorted_profile import SortedProfileEncoding
from hf_kvq.far_field.outliers import QuantizedClusterOutliers

__all__ = ["ChunkSnapshot", "HeadSnapshot", "append_snapshot", "read_snapshots", "start_folder"]

INDEX = "index.jsonl"
FORMAT = "hf_kvq.outlier_snapshots"
VERSION = 1

AFFINE = ("outlier_k", "outlier_v")
PROFILES = ("tail_k", "tail_v")
INDICES = ("outlier_indices", "member_indices", "tail_indices")


@dataclass(frozen=True, eq=False)
class HeadSnapshot:
    """A chunk's tokens of one row and kv head.

    Attributes:
        row: Row of the batch.
        head: The kv head.
        positions: Numbers of the tokens in their row; indices in `clusters` count along it.
        clusters: Their encodings by cluster.
    """

    row: int
    head: int
    positions: Int64[np.ndarray, " tokens"]
    clusters: Mapping[int, QuantizedClusterOutliers]


@dataclass(frozen=True, eq=False)
class ChunkSnapshot:
    """One chunk that left the window of one layer, in each row that it left in and each kv head."""

    layer: int
    heads: tuple[HeadSnapshot, ...]


def start_folder(folder: Path) -> None:
    """Make a folder ready for snapshots.

    Raises:
        ValueError: If there is something in it, or it is no folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{folder} must be an empty folder, or not be there yet, since snapshots are never mixed; give another"
        )
    folder.mkdir(parents=True, exist_ok=True)
    _append_line(folder, {"format": FORMAT, "version": VERSION})


def append_snapshot(folder: Path, number: int, snapshot: ChunkSnapshot) -> None:
    """Write snapshot `number`, counted from 0."""
    tensors: dict[str, Tensor] = {}
    heads = [_dump_head(head, f"{place}.", tensors) for place, head in enumerate(snapshot.heads)]
    path = _file(folder, number)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)
    _append_line(folder, {"layer": snapshot.layer, "heads": heads})


def read_snapshots(folder: Path) -> list[ChunkSnapshot]:
    """All snapshots of a folder, oldest first.

    Raises:
        ValueError: If it is no folder of snapshots, or is damaged.
    """
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(
            f"{folder} holds no snapshots: there is no {INDEX}; give a folder that OutlierSnapshots wrote"
        )
    lines = [_parse(line, index, number) for number, line in enumerate(index.read_bytes().splitlines(), start=1)]
    header = lines[0] if lines else {}
    if header.get("format") != FORMAT:
        raise ValueError(
            f"{index} does not open with format {FORMAT!r}, but with {header!r}; give a folder that OutlierSnapshots wrote"
        )
    if header.get("version") != VERSION:
        raise ValueError(
            f"{folder} has format version {header.get('version')}, this hf_kvq reads {VERSION}; write it again with this version"
        )
    return [_read_one(_file(folder, number), line) for number, line in enumerate(lines[1:])]


def _read_one(path: Path, line: dict[str, Any]) -> ChunkSnapshot:
    if not path.is_file():
        raise ValueError(f"{path} is missing, and the index names it; copy the whole folder")
    try:
        tensors = load_file(path)
        heads = tuple(_fill_head(head, f"{place}.", tensors) for place, head in enumerate(line["heads"]))
        return ChunkSnapshot(layer=line["layer"], heads=heads)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is cut off, damaged, or not what the index says of it ({error!r}); copy it again"
        ) from error


def _dump_head(head: HeadSnapshot, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Add a head's tensors and return what else it takes to read it."""
    tensors[f"{prefix}positions"] = torch.from_numpy(head.positions)
    clusters = [
        _dump_cluster(cluster, f"{prefix}{cluster.cluster_id}.", tensors) for cluster in head.clusters.values()
    ]
    return {"row": head.row, "head": head.head, "clusters": clusters}


def _dump_cluster(cluster: QuantizedClusterOutliers, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    held: dict[str, Any] = {"id": cluster.cluster_id}
    for name in AFFINE:
        part: AffineQuantized | None = getattr(cluster, name)
        if part is not None:
            tensors[prefix + name] = part.codes.cpu().contiguous()
            held[name] = {"scale": part.scale, "mode": part.mode}
    for name in PROFILES:
        profile: SortedProfileEncoding | None = getattr(cluster, name)
        if profile is not None:
            tensors[prefix + name] = torch.frombuffer(bytearray(profile.to_bytes()), dtype=torch.uint8)
            held[name] = {"bytes": len(tensors[prefix + name])}
    for name in INDICES:
        indices: np.ndarray | None = getattr(cluster, name)
        if indices is not None:
            tensors[prefix + name] = torch.from_numpy(indices)
            held[name] = {"tokens": len(indices)}
    return held


def _fill_head(head: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> HeadSnapshot:
    clusters = [_fill_cluster(cluster, f"{prefix}{cluster['id']}.", tensors) for cluster in head["clusters"]]
    return HeadSnapshot(
        row=head["row"],
        head=head["head"],
        positions=tensors[f"{prefix}positions"].numpy(),
        clusters={cluster.cluster_id: cluster for cluster in clusters},
    )


def _fill_cluster(held: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> QuantizedClusterOutliers:
    parts: dict[str, Any] = dict.fromkeys((*AFFINE, *PROFILES, *INDICES))
    for name in held.keys() & set(AFFINE):
        parts[name] = AffineQuantized(codes=tensors[prefix + name], scale=held[name]["scale"], mode=held[name]["mode"])
    for name in held.keys() & set(PROFILES):
        parts[name] = SortedProfileEncoding.from_bytes(tensors[prefix + name].numpy().tobytes())
    for name in held.keys() & set(INDICES):
        parts[name] = tensors[prefix + name].numpy()
    return QuantizedClusterOutliers(cluster_id=held["id"], **parts)


def _parse(line: bytes, index: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:  # no JSON, or no text at all
        raise ValueError(
            f"line {number} of {index} is cut off or no JSON ({error}); without it the snapshots before it can be read"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"line {number} of {index} must be a JSON object, got {found!r}; give a folder that OutlierSnapshots wrote"
        )
    return found


def _append_line(folder: Path, line: dict[str, Any]) -> None:
    with (folder / INDEX).open("a", encoding="utf-8") as index:
        index.write(json.dumps(line) + "\n")


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:08d}.safetensors"
