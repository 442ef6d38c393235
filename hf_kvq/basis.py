"""The basis in which the keys, or the values, of one head are coded: shifted, balanced and turned, so that few bits lose little.

For keys x at position t, with R(t) their rotary embedding: `z = H P Lambda (x - R(t) m)`.

- m: the mean before RoPE, where a bias of the key projection lives. `R(t) m` needs no storage, and what it adds to a score depends on the query and the
  position alone.
- Lambda: one gain for both channels of a pair, so that it commutes with R(t); `sqrt(sqrt(w) / E)` for queries of energy w and keys of energy E makes the error of a
  score least where every channel of z has the same error (the optimum of w / gain^2 summed, times E^2 gain^2 summed).
- P: channels in the order of what they weigh in a score, where tiers of them get more or fewer bits.
- H: an orthonormal Hadamard matrix within each tier (QuaRot, arXiv:2404.00456), after which the channels are close to normally distributed. Sizes that
  are no power of two: the Kronecker product with a cosine transform of the odd factor.

Values are shifted by their mean and turned by H. Reading never leaves the basis: `q . x = (H P Lambda^-1 q) . z + q . R(t) m`, and the weighted sum of the values is
turned back once. Whatever m, Lambda, P or R are, the round trip is exact algebra: a wrong one costs quality alone.
Departs from QuaRot, KVQuant (arXiv:2401.18079) and KIVI: the basis is each head's own, learned from the first tokens, and then fixed; a token is coded alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import scipy.fft
import scipy.linalg
import torch
from jaxtyping import Float, Int, Int8, Integer, Shaped, UInt8
from torch import Tensor

from hf_kvq.packing import Grid, pack_int4, scale_bytes, scale_of, unpack_int4
from hf_kvq.rope import Rope

__all__ = ["BLOCK", "Basis", "PlacedBasis", "block_table", "block_waves", "fit_basis", "hadamard"]

BLOCK = 64
"""Positions that share one turn of the query in the score of the mean."""

_CPU = torch.device("cpu")

_LEAST_ENERGY = 1e-4
"""Of a pair, in its head's mean: a channel that was silent so far may speak later."""

_LEAST_QUERY = 1e-3

_MOST_EXCESS = 1e4


@dataclass(frozen=True)
class Basis:
    """Bases of all rows and heads of one layer. Small tensors in bytes, since they count like codes.

    Attributes:
        mean: The shift times its gain, as a multiple of `mean_scale`: a signed byte a channel where gains are each channel's own, else as `packing.pack_int4` packs.
        mean_scale: `[batch, kv_heads, 1]`, a byte as `packing.scale_of` reads it.
        gain: `[batch, kv_heads, units]`, likewise. A unit is a pair where RoPE turns all channels, a channel where it does not, everything where there is one.
        order: `[batch, kv_heads, units]`: which unit stands first, second...; None where they stay.
        aims: The directions, in the basis, that queries look along most, `[batch, kv_heads, aims, dim / 2]`, as `packing.pack_int4` packs multiples of
            `aim_scale`: an error along one costs as much more than another error as its square says. Only encoding needs them.
        aim_scale: `[batch, kv_heads, aims]`, a byte likewise.
        origin: Column at which each row's positions begin, `[batch]`: what is learned of a row does not depend on how it is padded.
        tiers: Equal runs of channels that are turned each by itself.
        rope: How the model turned the states; None where it did not.
        offset: Whether an origin is not 0.
    """

    mean: Int8[Tensor, "batch kv_heads dim"] | UInt8[Tensor, "batch kv_heads bytes"]
    mean_scale: UInt8[Tensor, "batch kv_heads one"]
    gain: UInt8[Tensor, "batch kv_heads units"]
    order: Integer[Tensor, "batch kv_heads places"] | None
    aims: UInt8[Tensor, "batch kv_heads aims bytes"]
    aim_scale: UInt8[Tensor, "batch kv_heads aims"]
    origin: Int[Tensor, " batch"]
    tiers: int
    rope: Rope | None
    offset: bool = False

    @property
    def dim(self) -> int:
        return self.mean.shape[2] * (2 if self.mean.dtype == torch.uint8 else 1)

    @property
    def is_plain(self) -> bool:
        """Whether a kernel that reads the bytes as they are can do without more: no row has an origin of its own, and an order is in single bytes."""
        return not self.offset and (self.order is None or self.order.dtype == torch.uint8)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it takes to keep, by name."""
        tensors = {
            "mean": self.mean, "mean_scale": self.mean_scale, "gain": self.gain, "aims": self.aims, "aim_scale": self.aim_scale,
            "origin": self.origin,
        }  # fmt: skip
        return tensors if self.order is None else tensors | {"order": self.order}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def map(self, move: Callable[[Tensor], Tensor]) -> Basis:
        """The same with every tensor replaced by `move(tensor)`."""
        return replace(self, **{name: move(tensor) for name, tensor in self.tensors.items()})

    def at(self, positions: int | Int[Tensor, "batch kv_heads tokens"], tokens: int) -> PlacedBasis:
        """For states at consecutive positions from a number on, or at positions of each head's own."""
        return PlacedBasis(self, positions, tokens)

    def gains(self, dtype: torch.dtype) -> Float[Tensor, "batch kv_heads dim"]:
        """The gain of each channel."""
        gain = scale_of(self.gain, dtype)
        if gain.shape[2] in (1, self.dim):
            return gain.expand(-1, -1, self.dim)
        assert self.rope is not None
        return self.rope.spread(gain, gain[..., :0])

    def means(self, dtype: torch.dtype) -> Float[Tensor, "batch kv_heads dim"]:
        """The shift, before RoPE, for positions that are columns."""
        mean = unpack_int4(self.mean) if self.mean.dtype == torch.uint8 else self.mean
        means = mean.to(dtype) * (scale_of(self.mean_scale, dtype) / self.gains(dtype))
        if not self.offset or self.rope is None:
            return means
        return self.rope.rotate(means, -self.origin[:, None])

    def aimed(self, dtype: torch.dtype) -> Float[Tensor, "batch kv_heads aims dim"]:
        """The directions along which errors cost more."""
        return unpack_int4(self.aims).to(dtype) * scale_of(self.aim_scale, dtype)[..., None]

    def spread(self, states: Float[Tensor, "batch kv_heads *axes dim"]) -> Float[Tensor, "batch kv_heads *axes dim"]:
        """Channels into their order, and turned within their tiers: H P."""
        if (order := self._channels()) is not None:
            states = states.gather(-1, _like(order, states).expand(states.shape))
        return self._turned(states, inverse=False)

    def gathered(self, states: Float[Tensor, "batch kv_heads *axes dim"]) -> Float[Tensor, "batch kv_heads *axes dim"]:
        """What `spread` took."""
        states = self._turned(states, inverse=True)
        if (order := self._channels()) is None:
            return states
        return torch.empty_like(states).scatter_(-1, _like(order, states).expand(states.shape), states)

    def _turned(self, states: Tensor, *, inverse: bool) -> Tensor:
        matrix = hadamard(self.dim // self.tiers, states.dtype, states.device)
        matrix = matrix if inverse else matrix.T
        return (states.unflatten(-1, (self.tiers, -1)) @ matrix).flatten(-2)

    def _channels(self) -> Tensor | None:
        """`order` by channel."""
        if self.order is None or self.order.shape[2] == self.dim:
            return None if self.order is None else self.order.long()
        assert self.rope is not None
        first = self.order.long()
        pair = (2 * first, 2 * first + 1) if self.rope.interleaved else (first, first + self.order.shape[2])
        return torch.stack(pair, dim=-1).flatten(-2)


@dataclass(frozen=True)
class PlacedBasis:
    """A basis, and the positions of the states that are coded in it.

    Attributes:
        basis: The basis.
        positions: Of the first state, the others following; or of every state in every head.
        tokens: How many there are.
    """

    basis: Basis
    positions: int | Int[Tensor, "batch kv_heads tokens"]
    tokens: int

    def slice(self, first: int, end: int) -> PlacedBasis:
        """For tokens `first` to `end` of these."""
        held = self.positions
        positions = held + first if isinstance(held, int) else held[:, :, first:end]
        return replace(self, positions=positions, tokens=end - first)

    def moved(self, positions: Int[Tensor, "batch kv_heads tokens"]) -> PlacedBasis:
        """For states at positions of each head's own."""
        return replace(self, positions=positions, tokens=positions.shape[2])

    def of_rows(self, rows: Int[Tensor, " rows"]) -> PlacedBasis:
        """For some rows."""
        positions = self.positions if isinstance(self.positions, int) else self.positions[rows]
        return replace(self, basis=self.basis.map(lambda tensor: tensor[rows]), positions=positions)

    def code(self, states: Float[Tensor, "batch kv_heads tokens dim"]) -> Float[Tensor, "batch kv_heads tokens dim"]:
        """States in the basis."""
        basis = self.basis
        return basis.spread((states - self._shift(states.dtype)) * basis.gains(states.dtype)[:, :, None])

    def restore(self, coded: Float[Tensor, "batch kv_heads tokens dim"]) -> Float[Tensor, "batch kv_heads tokens dim"]:
        """What `code` took."""
        basis = self.basis
        return basis.gathered(coded) / basis.gains(coded.dtype)[:, :, None] + self._shift(coded.dtype)

    def query(
        self, query: Float[Tensor, "batch kv_heads groups queries dim"]
    ) -> Float[Tensor, "batch kv_heads groups queries dim"]:
        """Queries for keys that stay in the basis; their scores lack `bias`."""
        return self.basis.spread(query / self.basis.gains(query.dtype)[:, :, None, None])

    def output(
        self, output: Float[Tensor, "batch kv_heads groups queries dim"]
    ) -> Float[Tensor, "batch kv_heads groups queries dim"]:
        """The mean of values by weights that sum to one, from the mean of what they are in the basis; of values, which no RoPE turns."""
        assert self.basis.rope is None
        basis, dtype = self.basis, output.dtype
        shift = basis.means(dtype)[:, :, None, None]
        return basis.gathered(output) / basis.gains(dtype)[:, :, None, None] + shift

    def bias(
        self, query: Float[Tensor, "batch kv_heads groups queries dim"]
    ) -> Float[Tensor, "batch kv_heads groups queries tokens"]:
        """The scores of the queries, as they came, with the shift of every token: `q . R(t) m`."""
        means, rope = self.basis.means(query.dtype)[:, :, None, None], self.basis.rope
        if rope is None:
            return (query * means).sum(dim=-1, keepdim=True).expand(*query.shape[:4], self.tokens)
        q1, q2, q_rest = rope.split(query)
        m1, m2, m_rest = rope.split(means)
        # For a pair and an angle a: q . R(a) m = (q1 m1 + q2 m2) cos a + (q2 m1 - q1 m2) sin a.
        even, odd = q1 * m1 + q2 * m2, q2 * m1 - q1 * m2
        if isinstance(self.positions, int):
            bias = _consecutive(even, odd, rope, self.positions, self.tokens)
        else:
            cos, sin = rope.waves(self.positions, query.dtype)
            bias = torch.cat((even, odd), -1) @ torch.cat((cos, sin), -1).transpose(-1, -2)[:, :, None]
        if q_rest.shape[-1]:
            bias = bias + (q_rest * m_rest).sum(dim=-1, keepdim=True)
        return bias

    def _shift(self, dtype: torch.dtype) -> Float[Tensor, "batch kv_heads tokens dim"]:
        """R(t) m of every token."""
        means, rope = self.basis.means(dtype)[:, :, None], self.basis.rope
        if rope is None:
            return means
        positions = self.positions
        if isinstance(positions, int):
            positions = torch.arange(positions, positions + self.tokens, device=means.device)
        return rope.rotate(means.expand(-1, -1, self.tokens, -1), positions)


def fit_basis(
    states: Float[Tensor, "batch kv_heads tokens dim"],
    positions: Int[Tensor, "batch tokens"],
    *,
    grid: Grid,
    rope: Rope | None = None,
    queries: Float[Tensor, "batch kv_heads queries dim"] | None = None,
    balance: bool = True,
    aims: int = 0,
    origin: Int[Tensor, " batch"] | None = None,
) -> Basis:
    """The basis of some tokens' states, computed in float64.

    Args:
        states: Keys as they are cached, or values.
        positions: At which the keys were turned, up to a constant for each row.
        grid: Of the codes; the gains make a scale of 1 the best for the tokens of average size.
        rope: How they were turned.
        queries: Some queries as they are asked, of all query heads of a kv head; None where none are known. One that is zero counts for nothing.
        balance: Whether channels get gains of their own; for keys.
        aims: Directions of the queries to keep.
        origin: Column of each row's position 0; None for column 0.
    """
    states = states.double()
    dim, tiers = states.shape[3], len(grid.bits)
    before = states if rope is None else rope.rotate(states, -positions[:, None])
    mean = before.mean(dim=2)
    energy = (before - mean[:, :, None]).square().mean(dim=2)
    if rope is not None:
        energy = rope.pool(energy)
    energy = energy.clamp(min=_LEAST_ENERGY * energy.mean(dim=-1, keepdim=True))
    silent = energy == 0
    energy = energy.masked_fill(silent, 1.0)
    weight = torch.ones_like(energy)
    covariance = None if queries is None else _covariance(queries.double())
    if covariance is not None and balance:
        weight = covariance.diagonal(dim1=2, dim2=3)
        if rope is not None:
            weight = rope.pool(weight)
        weight = weight.clamp(min=_LEAST_QUERY * weight.mean(dim=-1, keepdim=True)).masked_fill(silent, 1.0)
        weight = weight.masked_fill(weight == 0, 1.0)
    gain = (weight.sqrt() / energy.sqrt()).sqrt() if balance else torch.ones_like(energy)
    # A pair has two channels of one gain: where all channels are paired, one number for each pair is kept.
    paired = rope if rope is not None and rope.rotary_dim == dim else None
    order = None
    if tiers > 1:
        importance = weight * energy
        order = (importance if paired is None else paired.split(importance)[0]).argsort(
            dim=-1, descending=True, stable=True
        )
        order = order.to(torch.uint8 if order.shape[-1] <= 256 else torch.int16)
    draft = Basis(
        mean=torch.zeros_like(mean, dtype=torch.int8), mean_scale=torch.zeros_like(mean[..., :1], dtype=torch.uint8),
        gain=torch.zeros_like(mean[..., :1], dtype=torch.uint8), order=order, tiers=tiers, rope=rope,
        aims=mean.new_zeros(*mean.shape[:2], 0, dim // 2, dtype=torch.uint8),
        aim_scale=mean.new_zeros(*mean.shape[:2], 0, dtype=torch.uint8),
        origin=mean.new_zeros(mean.shape[0], dtype=torch.int32) if origin is None else origin.clone(),
        offset=origin is not None and bool(origin.any()),
    )  # fmt: skip
    gain = gain * _levelled(draft, gain, energy, grid)
    units = gain[..., :1] if not balance else gain if paired is None else paired.split(gain)[0]
    basis = replace(draft, gain=scale_bytes(units * 2 ** (-0.5 / 8)).clamp(min=1))
    packed = not balance and dim % 2 == 0
    shift, mean_scale = _integers(mean * basis.gains(torch.float64), 7 if packed else 127)
    basis = replace(basis, mean=pack_int4(shift) if packed else shift, mean_scale=mean_scale)
    if not aims or not balance or dim % 2:
        return basis
    # Without queries they are zeros, so that a basis has the same size however the model attends.
    directions = mean.new_zeros(*mean.shape[:2], aims, dim) if covariance is None else _aims(basis, covariance, aims)
    directions, aim_scale = _integers(directions, 7)
    return replace(basis, aims=pack_int4(directions), aim_scale=aim_scale.squeeze(-1))


def _covariance(queries: Float[Tensor, "batch kv_heads queries dim"]) -> Tensor | None:
    """Mean of q q^T over the queries; None if all are zero in some head."""
    covariance = queries.mT @ queries / queries.shape[2]
    return covariance if bool((covariance.diagonal(dim1=2, dim2=3).sum(-1) > 0).all()) else None


def _aims(basis: Basis, covariance: Tensor, count: int) -> Float[Tensor, "batch kv_heads aims dim"]:
    """The main directions of queries in the basis. An error e of a key costs e . C e in squared score, of which C's smaller directions take `|e|^2` each alike."""
    gains = basis.gains(covariance.dtype)[:, :, None]
    for _ in range(2):  # rows, then columns
        covariance = basis.spread(covariance / gains).mT
    values, vectors = torch.linalg.eigh(covariance)
    rest = values[..., :-count].mean(dim=-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    excess = (values[..., -count:] / rest - 1).clamp(min=0, max=_MOST_EXCESS)
    return (vectors[..., -count:] * excess.sqrt()[..., None, :]).mT


def _integers(
    x: Float[Tensor, "*axes dim"], most: int
) -> tuple[Int8[Tensor, "*axes dim"], UInt8[Tensor, "*axes one"]]:
    """Integers of at most this magnitude, and the byte of their scale."""
    scale = scale_bytes(x.abs().amax(dim=-1, keepdim=True) / most)
    step = scale_of(scale, x.dtype)
    codes = torch.where(step > 0, x / step.clamp(min=torch.finfo(x.dtype).tiny), 0.0)
    return codes.round().clamp(-most, most).to(torch.int8), scale


def _levelled(basis: Basis, gain: Tensor, energy: Tensor, grid: Grid) -> Tensor:
    """The factor of each channel that makes the best scale of its tier 1."""
    order = basis._channels()
    spread = gain.square() * energy
    by_tier = (spread if order is None else spread.gather(-1, order)).unflatten(-1, (basis.tiers, -1))
    best = torch.tensor([grid.best_scale(bits) for bits in grid.bits], dtype=gain.dtype, device=gain.device)
    factor = (1 / (by_tier.mean(dim=-1).sqrt() * best))[..., None].expand(by_tier.shape).flatten(-2)
    return factor if order is None else torch.empty_like(factor).scatter_(-1, order, factor)


def _consecutive(even: Tensor, odd: Tensor, rope: Rope, first: int, tokens: int) -> Tensor:
    """Sums of `even cos(w t) + odd sin(w t)` over pairs for t = first and on: a turn for each block, then one product with a constant table."""
    begin = first // BLOCK
    blocks = (first + tokens - 1) // BLOCK - begin + 1
    waves = block_waves(rope, begin + blocks, even.dtype, even.device)[begin : begin + blocks]
    cos, sin = waves.chunk(2, dim=-1)
    even, odd = even[..., None, :], odd[..., None, :]
    turned = torch.cat((even * cos + odd * sin, odd * cos - even * sin), dim=-1)
    table = block_table(rope, even.dtype, even.device)
    offset = first - begin * BLOCK
    return (turned @ table).flatten(-2)[..., offset : offset + tokens]


def block_waves(
    rope: Rope, blocks: int, dtype: torch.dtype = torch.float32, device: torch.device = _CPU
) -> Float[Tensor, "blocks waves"]:
    """Cosines, then sines, at the first position of each block, of at least so many blocks. Kept like any table of a model's positions: no row's own."""
    return _block_waves(rope, 1 << max(blocks - 1, 0).bit_length(), dtype, device)


@lru_cache(maxsize=16)
def _block_waves(rope: Rope, blocks: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.cat(rope.waves(torch.arange(blocks, device=device) * BLOCK, dtype), dim=-1)


@lru_cache(maxsize=64)
def block_table(rope: Rope, dtype: torch.dtype = torch.float32, device: torch.device = _CPU) -> Tensor:
    """Cosines and sines of the positions of a block, `[2 pairs, BLOCK]`."""
    with torch.inference_mode(False):
        return torch.cat(rope.waves(torch.arange(BLOCK, device=device), dtype), dim=-1).T.contiguous()


@lru_cache(maxsize=64)
def hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Shaped[Tensor, "size size"]:
    """An orthonormal matrix whose entries are of about the same magnitude: Hadamard's times a cosine transform of the odd factor of `size`."""
    even = size & -size
    odd = scipy.fft.dct(np.eye(size // even), axis=0, norm="ortho")
    matrix = np.kron(scipy.linalg.hadamard(even) / even**0.5, odd)
    with torch.inference_mode(False):
        return torch.tensor(matrix, dtype=dtype, device=device)


def _like(order: Tensor, states: Tensor) -> Tensor:
    """`[batch, kv_heads, dim]` with the axes of `states`."""
    return order.view(*order.shape[:2], *(1,) * (states.ndim - 3), order.shape[2])
