"""Slow and obvious references for low-bit grids and bases: bit by bit, level by level, whole matrices, float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from oracles import states
from oracles_bounded import turned
from torch import Tensor
from transformers import LlamaConfig

from hf_kvq.basis import Basis
from hf_kvq.config import LayerQuant, QuantConfig, RotatedConfig
from hf_kvq.kernels import Visibility
from hf_kvq.layers import QuantizedLayer
from hf_kvq.layers.live import LiveConfig
from hf_kvq.packing import CURVES, TRELLIS_CURVES, Grid, pack_int4
from hf_kvq.rope import Rope

PLANES = {8: [8], 6: [4, 2], 5: [4, 1], 4: [4], 3: [2, 1], 2: [2], 1: [1]}


def rope_of(dim: int, kind: str) -> Rope | None:
    """A rotation of some kind for heads of `dim` channels."""
    pairs = dim // 8 if kind == "partial" else dim // 2
    inv_freq = [10_000.0 ** (-j / pairs) for j in range(pairs)]
    if kind == "llama3":
        inv_freq = [f if 2 * math.pi / f < 64 else f / 8 for f in inv_freq]
    return None if kind == "none" else Rope(tuple(inv_freq), kind == "interleaved")


ROPES = ["full", "partial", "interleaved", "llama3", "none"]


def any_basis(
    dim: int, kind: str, *, tiers: int = 1, keys: bool = True, seed: int = 0, order: torch.dtype = torch.int16
) -> Basis:
    """A basis of two rows and three heads that nothing taught: any numbers in all its parts."""
    generator = torch.Generator().manual_seed(seed)
    rope = rope_of(dim, kind) if keys else None
    units = 1 if not keys else dim // 2 if rope is not None and rope.rotary_dim == dim else dim
    mean = torch.randint(-127, 128, (2, 3, dim), generator=generator, dtype=torch.int8)
    places = torch.rand(2, 3, units if keys else dim, generator=generator).argsort(dim=-1).to(order)
    return Basis(
        mean=mean if keys else pack_int4((mean // 19).clamp(-7, 7)),
        mean_scale=torch.randint(70, 100, (2, 3, 1), generator=generator, dtype=torch.uint8),
        gain=torch.randint(100, 156, (2, 3, units), generator=generator, dtype=torch.uint8),
        order=places if tiers > 1 else None,
        aims=torch.zeros(2, 3, 0, dim // 2, dtype=torch.uint8),
        aim_scale=torch.zeros(2, 3, 0, dtype=torch.uint8),
        origin=torch.zeros(2, dtype=torch.int32),
        tiers=tiers,
        rope=rope,
    )


def any_codes(batch: int, kv_heads: int, tokens: int, grid: Grid, seed: int = 0) -> dict[str, Tensor]:
    """Codes and scales that nothing was encoded to: any bytes, and scales of a quarter to four."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (batch, kv_heads, tokens, grid.width), generator=generator, dtype=torch.uint8)
    scale = torch.randint(112, 145, (batch, kv_heads, tokens, grid.groups), generator=generator, dtype=torch.uint8)
    return {"codes": codes, "scale": scale}


def packed(codes: list[int], grid: Grid) -> list[int]:
    """Bytes of the codes of one token, bit by bit."""
    out: list[int] = []
    for tier, bits in enumerate(grid.bits):
        below, channels = 0, grid.dim // len(grid.bits)
        for width in PLANES[bits]:
            run = channels * width // 8
            plane = [0] * run
            for channel in range(channels):
                for bit in range(width):
                    if codes[tier * channels + channel] >> (below + bit) & 1:
                        plane[channel % run] |= 1 << (channel // run * width + bit)
            out += plane
            below += width
    return out


def unpacked(data: list[int], grid: Grid) -> list[int]:
    """Codes of one token, bit by bit."""
    codes, start, channels = [0] * grid.dim, 0, grid.dim // len(grid.bits)
    for tier, bits in enumerate(grid.bits):
        below = 0
        for width in PLANES[bits]:
            run = channels * width // 8
            for channel in range(channels):
                for bit in range(width):
                    if data[start + channel % run] >> (channel // run * width + bit) & 1:
                        codes[tier * channels + channel] |= 1 << (below + bit)
            start += run
            below += width
    return codes


def level(bits: int, code: int) -> float:
    """What a code stands for at scale 1."""
    x = code - (2**bits - 1) / 2
    return x * (1 + CURVES[bits] * x**2)


def scale(byte: int) -> float:
    """What the byte of a scale stands for."""
    return 0.0 if byte == 0 else 2.0 ** ((byte - 128) / 8)


def group_size(dim: int) -> int:
    """Channels that share a scale."""
    size = min(dim, 64)
    while dim % size:
        size -= 1
    return size


def decoded(codes: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """Numbers in the basis, of packed codes and bytes of scales."""
    if grid.trellis:
        return walked(codes, scales, grid)
    out = torch.empty(*codes.shape[:-1], grid.dim, dtype=torch.float64)
    size, channels = group_size(grid.dim), grid.dim // len(grid.bits)
    rows = zip(codes.reshape(-1, codes.shape[-1]).tolist(), scales.reshape(-1, scales.shape[-1]).tolist(), strict=True)
    for target, (data, bytes_) in zip(out.view(-1, grid.dim), rows, strict=True):
        found = unpacked(data, grid)
        target.copy_(
            torch.tensor(
                [
                    level(grid.bits[channel // channels], code) * scale(bytes_[channel // size])
                    for channel, code in enumerate(found)
                ],
                dtype=torch.float64,
            )
        )
    return out


def walk(path: list[int]) -> list[int]:
    """The quarter of each step of a path, from a shift register that begins with zeros (Ungerboeck's 16 states: octal 23 and 04)."""
    register, found = [0] * 5, []
    for bit in path:
        register = [bit, *register[:4]]
        found.append(2 * (register[0] ^ register[1] ^ register[4]) + register[2])
    return found


def walked(codes: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """Numbers in the basis, of codes on a trellis: the path's bits first, then the other bits of each tier."""
    out = torch.empty(*codes.shape[:-1], grid.dim, dtype=torch.float64)
    size, channels, run = group_size(grid.dim), grid.dim // len(grid.bits), grid.dim // 8
    for target, data, bytes_ in zip(
        out.view(-1, grid.dim),
        codes.reshape(-1, codes.shape[-1]).tolist(),
        scales.reshape(-1, scales.shape[-1]).tolist(),
        strict=True,
    ):
        quarter = walk([data[c % run] >> (c // run) & 1 for c in range(grid.dim)])
        start = run
        for tier, bits in enumerate(grid.bits):
            others, below = [0] * channels, 0
            for width in PLANES.get(bits - 1, []):
                part = channels * width // 8
                for c in range(channels):
                    others[c] |= (data[start + c % part] >> (c // part * width) & (2**width - 1)) << below
                start, below = start + part, below + width
            for c in range(channels):
                channel = tier * channels + c
                x = 4 * others[c] + quarter[channel] - (2 ** (bits + 1) - 1) / 2
                target[channel] = x * (1 + TRELLIS_CURVES[bits] * x**2) * scale(bytes_[channel // size])
    return out


def nearest(numbers: Tensor, grid: Grid, trials: int) -> tuple[list[int], list[int]]:
    """Codes and bytes of scales of one token: every scale tried, every level of every number compared."""
    size, channels = group_size(grid.dim), grid.dim // len(grid.bits)
    codes: list[int] = []
    scales: list[int] = []
    bits = [grid.bits[channel // channels] for channel in range(grid.dim)]
    for start in range(0, grid.dim, size):
        places = range(start, start + size)
        x = [float(numbers[c]) for c in places]
        reach = max(abs(value) / level(bits[c], 2 ** bits[c] - 1) for c, value in zip(places, x, strict=True))
        largest = 0
        if reach > 0:
            largest = next((byte for byte in range(1, 256) if scale(byte) >= reach), 255)
        best: tuple[float, int, list[int]] | None = None
        for byte in [max(largest - trial, 1) for trial in range(trials)] if largest else [0]:
            found, error = [], 0.0
            for c, value in zip(places, x, strict=True):
                errors = [abs(value - level(bits[c], code) * scale(byte)) for code in range(2 ** bits[c])]
                found.append(errors.index(min(errors)))
                error += min(errors) ** 2
            if best is None or error < best[0]:
                best = error, byte, found
        assert best is not None
        scales.append(best[1])
        codes += best[2]
    return codes, scales


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix times a cosine transform of the odd factor, orthonormal."""
    odd = size
    while odd % 2 == 0:
        odd //= 2
    transform = [
        [math.cos(math.pi * (n + 0.5) * k / odd) * math.sqrt((1 if k == 0 else 2) / odd) for n in range(odd)]
        for k in range(odd)
    ]
    matrix, cosines = torch.ones(1, 1, dtype=torch.float64), torch.tensor(transform, dtype=torch.float64)
    while len(matrix) < size // odd:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1))) / math.sqrt(2)
    return torch.kron(matrix, cosines)


def restored(coded: Tensor, tensors: Mapping[str, Tensor], tiers: int, rope: Rope | None, positions: Tensor) -> Tensor:
    """Numbers in a basis taken out of it, head by head, by the inverse of the whole matrix.

    Args:
        coded: `[batch, kv_heads, tokens, dim]`.
        tensors: Of the basis.
        tiers: Of the basis.
        rope: Likewise.
        positions: `[batch, kv_heads, tokens]`.
    """
    out = torch.empty(coded.shape, dtype=torch.float64)
    for row in range(coded.shape[0]):
        for head in range(coded.shape[1]):
            matrix, mean = whole(tensors, tiers, rope, row, head)
            places = positions[row, head]
            shift = turned(mean.expand(coded.shape[2], -1), rope, places)
            out[row, head] = torch.linalg.solve(matrix, coded[row, head].double().T).T + shift
    return out


def whole(tensors: Mapping[str, Tensor], tiers: int, rope: Rope | None, row: int, head: int) -> tuple[Tensor, Tensor]:
    """The matrix H P Lambda of one head, and its mean before RoPE."""
    mean = tensors["mean"][row, head]
    if mean.dtype == torch.uint8:
        codes = mean.tolist()
        integers = [byte % 16 - 8 for byte in codes] + [byte // 16 - 8 for byte in codes]
    else:
        integers = mean.tolist()
    dim = len(integers)
    gains = [scale(byte) for byte in tensors["gain"][row, head].tolist()]
    order = tensors["order"][row, head].tolist() if "order" in tensors else list(range(dim))
    unit = _units(dim, rope, len(gains))
    gain = torch.tensor([gains[unit[channel]] for channel in range(dim)], dtype=torch.float64)
    unit = _units(dim, rope, len(order))
    channels = [channel for first in order for channel in range(dim) if unit[channel] == first]
    balanced = torch.diag(gain)[channels]
    turn = torch.block_diag(*[hadamard(dim // tiers)] * tiers)
    step = scale(int(tensors["mean_scale"][row, head]))
    return turn @ balanced, torch.tensor(integers, dtype=torch.float64) * step / gain


def _units(dim: int, rope: Rope | None, count: int) -> list[int]:
    """The unit of each channel, of so many: one for all, one each, or one a pair."""
    if count in (1, dim):
        return [0] * dim if count == 1 else list(range(dim))
    assert rope is not None
    return rope.pairs(dim).tolist()


# Layers that are fed states


Bits = int | tuple[int, ...] | RotatedConfig


def codec_of(bits: Bits) -> RotatedConfig:
    """A codec of so many bits, without a trellis, or the one that is given."""
    return bits if isinstance(bits, RotatedConfig) else RotatedConfig(bits=bits)


def quant_of(bits: Bits) -> LayerQuant:
    """Keys and values alike."""
    return LayerQuant(keys=codec_of(bits), values=codec_of(bits))


def scheme_of(bits: Bits, **settings: Any) -> QuantConfig:
    """The same as a scheme with four sinks."""
    codec = codec_of(bits)
    return QuantConfig(keys=codec, values=codec, name="rotated", **({"sinks": 4} | settings))


def llama_config(*, fused: bool, dim: int = 64) -> LiveConfig:
    """The config of a Llama of 4 heads and 2 kv heads that turns its keys as `rope_of(dim, "full")`."""
    config = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
    config._attn_implementation = "hf_kvq" if fused else "sdpa"
    return LiveConfig(config)


@dataclass
class Stream:
    """States of a few rows, as a layer gets them: `[rows, heads, tokens, dim]`."""

    query: Tensor
    keys: Tensor
    values: Tensor

    def __getitem__(self, tokens: slice) -> Stream:
        return self.map(lambda x: x[:, :, tokens])

    def map(self, change: Callable[[Tensor], Tensor]) -> Stream:
        """The same with `change(states)` for each of the three."""
        return Stream(change(self.query), change(self.keys), change(self.values))

    def rows(self, rows: list[int]) -> Stream:
        """Some of the rows, in this order."""
        return self.map(lambda x: x[rows])

    def before(self, other: Stream) -> Stream:
        """These tokens, and behind them those of another."""
        return joined(self, other, dim=2)

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]


def joined(*streams: Stream, dim: int = 0) -> Stream:
    """Streams as rows of one, or along another axis."""
    return Stream(
        *(torch.cat(parts, dim=dim) for parts in zip(*((s.query, s.keys, s.values) for s in streams), strict=True))
    )


def stream_of(
    tokens: int, *, batch: int = 2, heads: int = 2, groups: int = 2, dim: int = 64, kind: str = "full", seed: int = 0, first: int = 0
) -> Stream:  # fmt: skip
    """Keys around a mean and queries along a direction, turned for positions `first` and on."""
    keys = states(batch, heads, tokens, dim, seed=seed) + 3 * states(1, heads, 1, dim, seed=100)
    query = states(batch, heads, groups, tokens, dim, seed=seed + 1) + 2 * states(1, heads, 1, 1, dim, seed=101)
    values = states(batch, heads, tokens, dim, seed=seed + 2)
    rope = rope_of(dim, kind)
    if rope is not None:
        places = torch.arange(first, first + tokens)
        keys, query = (rope.rotate(x.double(), places).float() for x in (keys, query))
    return Stream(query.flatten(1, 2), keys, values)


def in_chunks(tokens: int, size: int) -> list[int]:
    """Sizes of chunks."""
    return [min(size, tokens - start) for start in range(0, tokens, size)]


def feed(layer: QuantizedLayer, stream: Stream, sizes: list[int]) -> list[Any]:
    """What attention gives for each chunk, or, where the model reads tensors, the tensors."""
    out: list[Any] = []
    start = 0
    for size in sizes:
        part = stream[start : start + size]
        found = layer.update(part.keys, part.values)
        if layer.attends_codes:
            view = found[0].view
            visibility = Visibility(view.end - size, size, view.window)
            found = view.attend(part.query, visibility, scaling=part.query.shape[3] ** -0.5)
        out.append(found)
        start += size
    assert start == stream.tokens
    return out


def held(layer: QuantizedLayer) -> dict[str, Tensor]:
    """Codes, scales, and what was learned."""
    store = layer.held
    assert store is not None
    codecs = {"keys": store.coded.key_codec, "values": store.coded.value_codec}
    learned = {
        f"learned.{label}.{name}": part for label, codec in codecs.items() for name, part in codec.tensors.items()
    }
    return {name: part.clone() for name, part in (store.coded.buffer.view() | learned).items()}


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are not bit for bit the same."""
    return sorted(name for name in {*a, *b} if name not in a or name not in b or not torch.equal(a[name], b[name]))


def as_read(layer: QuantizedLayer) -> tuple[Tensor, Tensor]:
    """Keys and values of all columns in float64, from bytes, one number at a time; sinks and residual as they are."""
    store = layer.held
    assert store is not None
    coded, shape = store.coded, store.shape
    out = []
    for label, codec, dim in (("key", coded.key_codec, shape.key_dim), ("value", coded.value_codec, shape.value_dim)):
        x = torch.zeros(shape.batch, shape.kv_heads, store.seen, dim, dtype=torch.float64)
        parts = coded.buffer.view()
        if len(coded):
            grid = codec.grid_of(dim)
            numbers = decoded(parts[f"{label}_codes"], parts[f"{label}_scale"], grid)
            places = torch.arange(coded.first, coded.end).expand(shape.batch, shape.kv_heads, -1)
            places = places - codec.tensors["origin"][:, None, None]
            rope = codec.basis.rope
            x[:, :, coded.first : coded.end] = restored(numbers, codec.tensors, len(grid.bits), rope, places)
        if len(store.residual):
            part = store.residual.states(store.residual.first, store.residual.end)[label == "value"]
            x[:, :, store.residual.first : store.residual.end] = part.double()
        if store.sinks is not None and store.sinks.tensors is not None:
            for row, first in enumerate(store.sinks.first):
                sinks = store.sinks.tensors[label == "value"][row]
                end = min(first + sinks.shape[1], store.seen)
                x[row, :, first:end] = sinks[:, : end - first].double()
        out.append(x)
    return out[0], out[1]
