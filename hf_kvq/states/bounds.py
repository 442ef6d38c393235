"""What a bounded layer keeps, and what it is asked."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from hf_kvq.config import Clusters, FarField, HeavyHitters
from hf_kvq.kernels import Query, Scoring
from hf_kvq.rope import Rope

__all__ = ["Asked", "Bounds", "HookError"]


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a layer keeps.

    Attributes:
        window: Tokens that a query sees at least, itself included and sinks not.
        sinks: First real tokens of every row that stay exact.
        block: Tokens that leave together.
        heavy_hitters: Tokens that left and stay individually.
        clusters: Where the others go.
        rope: How keys were turned; None where they were not.
        longest: Distance beyond which no key may stand from a query; None for any.
    """

    window: int
    sinks: int
    block: int
    heavy_hitters: HeavyHitters | None = None
    clusters: Clusters | None = None
    rope: Rope | None = None
    longest: int | None = None

    @staticmethod
    def far(far_field: FarField | None) -> tuple[HeavyHitters | None, Clusters | None]:
        """The two parts of a far field."""
        parts = far_field if isinstance(far_field, tuple) else (far_field,)
        heavy = next((part for part in parts if isinstance(part, HeavyHitters)), None)
        return heavy, next((part for part in parts if isinstance(part, Clusters)), None)

    @property
    def has_far_field(self) -> bool:
        return self.heavy_hitters is not None or self.clusters is not None


class HookError(RuntimeError):
    """A chunk hook raised; the cache is what it was before the forward."""


@dataclass(frozen=True)
class Asked:
    """Queries at columns `column` and on, and how they score.

    Attributes:
        query: Unscaled.
        column: Of the first query.
        scoring: Scaling and softcap.
        sink_logits: One learned logit a query head that takes weight and gives nothing.
    """

    query: Query
    column: int
    scoring: Scoring
    sink_logits: Float[Tensor, "kv_heads groups"] | None = None
