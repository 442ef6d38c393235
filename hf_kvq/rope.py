"""Rotary position embedding, as a value: which channels of a state turn together, and how fast.

Source: RoFormer, arXiv:2104.09864. Channels come in pairs; at position p, pair j is turned by the angle `p * inv_freq[j]`. Turning by
a difference of positions therefore moves a key that is already in the cache, exactly: `rotate(rotate(k, p), d) == rotate(k, p + d)`.
Departs from it: angles are computed in float64. Models compute them in float32, where the fastest pair is off by 0.06 radian
at position 10^6; a difference of positions taken here adds nothing to that.

What YaRN and LongRoPE multiply cosine and sine with (`attention_factor`) is in the keys already. It is a plain factor, so it passes
through `rotate` untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

__all__ = ["Rope", "position_dtype"]


@dataclass(frozen=True)
class Rope:
    """How one layer turns the channels of its keys and queries.

    Attributes:
        inv_freq: Radians per position of each pair. Channels past the `2 * len(inv_freq)` first ones are never turned.
        interleaved: Which channels are pair j: j and j + len(inv_freq) if False (Llama), 2j and 2j + 1 if True (GPT-J, Cohere).
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """Channels that are turned."""
        return 2 * len(self.inv_freq)

    def frequencies(self, device: torch.device) -> Float[Tensor, " pairs"]:
        """`inv_freq` on a device, in `position_dtype`."""
        return _frequencies(self.inv_freq, device)

    def pairs(self, head_dim: int) -> Int[Tensor, " head_dim"]:
        """For each channel the number of its pair, -1 for a channel that is never turned."""
        number = torch.arange(len(self.inv_freq))
        return self.spread(number, torch.full((head_dim - self.rotary_dim,), -1))

    def spread(self, per_pair: Tensor, rest: Tensor) -> Tensor:
        """`[..., pairs]` to `[..., head_dim]`: both channels of a pair get its number, the channels past them `rest`."""
        turned = per_pair.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((per_pair, per_pair), dim=-1)
        return torch.cat((turned, rest), dim=-1)

    def pool(self, states: Float[Tensor, "*axes head_dim"]) -> Float[Tensor, "*axes head_dim"]:
        """The mean over the two channels of each pair, in both of them; squares pooled so are the same before and after `rotate`."""
        first, second, rest = self.split(states)
        return self.spread((first + second) / 2, rest)

    def rotate(
        self, states: Float[Tensor, "*axes head_dim"], by: Tensor | int | float
    ) -> Float[Tensor, "*axes head_dim"]:
        """The states `by` positions further on, in their dtype; computed in at least float32.

        Args:
            states: Keys or queries, at any positions.
            by: Positions to move by, integers or not, negative to move back; a tensor has a shape that expands to `states.shape[:-1]`.

        Raises:
            ValueError: If a state has fewer channels than are turned.
        """
        if states.shape[-1] < self.rotary_dim:
            raise ValueError(
                f"states must have at least the {self.rotary_dim} channels that are turned, got {states.shape[-1]}; "
                f"build the Rope with this layer's head_dim"
            )
        wide = torch.promote_types(states.dtype, torch.float32)
        by = torch.as_tensor(by, device=states.device)
        cos, sin = self.waves(by, wide)
        first, second, _ = self.split(states.to(wide))
        out = states.clone()
        turned_first, turned_second, _ = self.split(out)
        turned_first.copy_(first * cos - second * sin)
        turned_second.copy_(second * cos + first * sin)
        return out

    def waves(
        self, positions: Shaped[Tensor, "*axes"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "*axes pairs"], Float[Tensor, "*axes pairs"]]:
        """Cosine and sine of the angle of each pair at positions, integers or not, rounded to `dtype`."""
        frequencies = self.frequencies(positions.device)
        angles = positions.to(frequencies.dtype)[..., None] * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def split(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views: the first channels of all pairs, the second ones, and the channels that are never turned."""
        half = len(self.inv_freq)
        rest = states[..., 2 * half :]
        if self.interleaved:
            return states[..., : 2 * half : 2], states[..., 1 : 2 * half : 2], rest
        return states[..., :half], states[..., half : 2 * half], rest


def position_dtype(device: torch.device) -> torch.dtype:
    """What positions and angles are computed in: float64, or float32 on a device that has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


@lru_cache(maxsize=64)
def _frequencies(inv_freq: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept, since a copy from the host at every decode step would make an accelerator wait."""
    return torch.tensor(inv_freq, dtype=position_dtype(device), device=device)
