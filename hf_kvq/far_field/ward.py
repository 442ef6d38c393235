"""Where the tokens of a block go in a bank of clusters that keep their number: Ward's criterion, one block at a time.

Source: Ward, J. Am. Stat. Assoc. 58 (1963): merging a and b costs n_a n_b / (n_a + n_b) |f_a - f_b|^2, by which the squared
deviations from the means grow; distances to a merged cluster by Lance and Williams, Comput. J. 9 (1967).
Departs from it: online. A token takes a slot of its own only where the cheapest merge of two clusters, which frees the slot, costs less than the
token would cost in the cluster that suits it best. The dearest token comes first, and a block founds so many clusters at most.

Everything stands in lanes: one for each row and kv head, none of which reads another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

__all__ = ["Placement", "place"]


class Placement(NamedTuple):
    """Where everything went. Live slots come before empty ones, before and after.

    Attributes:
        home: Slot of each cluster that was there (the first `clusters` ones) and of each token; -1 for an invalid token.
        founded: Tokens that came as a cluster of their own.
        misfit: What Ward's criterion charged for the tokens that joined a cluster; 0 for the others.
    """

    home: Int64[Tensor, "lanes items"]
    founded: Bool[Tensor, "lanes tokens"]
    misfit: Float[Tensor, "lanes tokens"]


def place(
    clusters: Float[Tensor, "lanes clusters features"],
    counts: Float[Tensor, "lanes clusters"],
    tokens: Float[Tensor, "lanes tokens features"],
    valid: Bool[Tensor, "lanes tokens"],
    *,
    most_births: int,
) -> Placement:
    """Give each token a slot: a free one, else one that a merge frees for it, else the one of the cluster that suits it best.

    Args:
        clusters: Mean features; the empty slots are the last ones.
        counts: Tokens of each cluster, 0 in an empty slot.
        tokens: Features of the block, finite in invalid tokens as well.
        valid: False where there is no token.
        most_births: Clusters that may be founded once all slots are taken.
    """
    board = _Board(clusters, counts, tokens, valid)
    for _ in range(min(most_births, tokens.shape[1])):
        if not board.found_one():
            break
    return board.placement()


class _Board:
    """Distances between all clusters and tokens of a block, kept right while clusters merge and tokens take slots."""

    def __init__(self, clusters: Tensor, counts: Tensor, tokens: Tensor, valid: Tensor) -> None:
        lanes, slots, _ = clusters.shape
        self.slots = slots
        self.lane = torch.arange(lanes, device=tokens.device)
        free = (counts > 0).sum(dim=1, keepdim=True) + valid.cumsum(dim=1) - 1
        self.founded = valid & (free < slots)
        # One slot too many takes in whatever must go nowhere.
        at = torch.where(self.founded, free, slots)
        centre = (
            torch.where(valid[..., None], tokens, 0.0).sum(dim=1, keepdim=True)
            / valid.sum(dim=1).clamp(min=1)[:, None, None]
        )
        # Centred: the difference of large squares would have no digits left.
        tokens, clusters = tokens - centre, clusters - centre
        spare = torch.nn.functional.pad(clusters, (0, 0, 0, 1))
        clusters = spare.scatter(1, at[..., None].expand_as(tokens), tokens)[:, :slots]
        counts = torch.nn.functional.pad(counts, (0, 1)).scatter(1, at, 1.0)[:, :slots]
        items = torch.cat((clusters, tokens), dim=1)
        squares = items.square().sum(dim=2)
        distance = torch.baddbmm(squares[..., None] + squares[:, None], items, items.mT, alpha=-2).clamp_(min=0)
        self.between_tokens = distance[:, slots:, slots:]
        self.to_slot = distance[..., :slots].contiguous()
        """Squared distance of every cluster and token to every slot; infinite from a slot to itself."""
        self.to_slot.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        self.inverse = torch.cat((1 / counts.clamp(min=1), torch.ones_like(tokens[..., 0])), dim=1)
        own = torch.arange(slots, device=tokens.device).expand(lanes, slots)
        self.home = torch.cat((own, torch.where(self.founded, at, -1)), dim=1)
        self.pending = valid & ~self.founded

    def cost(self) -> Tensor:
        """Ward's cost of joining every cluster and token with every slot: a product over a sum of counts is one over the sum of inverses."""
        return self.to_slot / (self.inverse[..., None] + self.inverse[:, None, : self.slots])

    def found_one(self) -> bool:
        """Let the dearest token of each lane take a slot where that lowers the cost; False if it is known that none did."""
        slots, lane = self.slots, self.lane
        cost = self.cost()
        dearest, token = cost[:, slots:].amin(dim=2).masked_fill(~self.pending, -torch.inf).max(dim=1)
        cheapest, pair = cost[:, :slots].flatten(1).min(dim=1)
        active = cheapest < dearest
        if active.device.type == "cpu" and not active.any():  # Elsewhere, to ask is to wait for the device.
            return False
        first, second = pair // slots, pair % slots
        kept, freed = torch.minimum(first, second), torch.maximum(first, second)
        item = slots + token
        # Distances of all items to the merged cluster, and to the token in its new slot.
        a, b = self.inverse[lane, kept][:, None], self.inverse[lane, freed][:, None]
        share = a / (a + b)  # of the freed one: n_b / (n_a + n_b)
        to_kept, to_freed = self.to_slot[lane, :, kept], self.to_slot[lane, :, freed]
        apart = self.to_slot[lane, freed, kept][:, None]
        merged = (torch.lerp(to_kept, to_freed, share) - share * (1 - share) * apart).clamp_(min=0)
        alone = torch.cat((self.to_slot[lane, item], self.between_tokens[lane, token]), dim=1)
        alone = alone.scatter(1, kept[:, None], merged.gather(1, item[:, None]))
        merged = merged.scatter(1, kept[:, None], torch.inf)
        alone = alone.scatter(1, freed[:, None], torch.inf)
        acts = active[:, None]
        for slot, old, new in ((kept, to_kept, merged), (freed, to_freed, alone)):
            column = torch.where(acts, new, old)
            self.to_slot[lane, :, slot] = column
            self.to_slot[lane, slot, :] = column[:, :slots]
        inverse = torch.where(acts, a * b / (a + b), a), torch.where(acts, 1.0, b)
        self.inverse.scatter_(1, kept[:, None], inverse[0]).scatter_(1, freed[:, None], inverse[1])
        self.home = torch.where(acts & (self.home == freed[:, None]), kept[:, None], self.home)
        here = torch.zeros_like(self.pending).scatter(1, token[:, None], acts)
        self.home[:, slots:] = torch.where(here, freed[:, None], self.home[:, slots:])
        self.founded, self.pending = self.founded | here, self.pending & ~here
        return True

    def placement(self) -> Placement:
        """What is left joins the clusters that suit it best, all at once."""
        misfit, slot = self.cost()[:, self.slots :].min(dim=2)
        home = self.home.clone()
        home[:, self.slots :] = torch.where(self.pending, slot, home[:, self.slots :])
        return Placement(home, self.founded, torch.where(self.pending, misfit, 0.0))
