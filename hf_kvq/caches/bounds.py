"""What a layer keeps, once the first update shows the size of a token: from a window, or from a budget in bytes.

A quarter of the tokens that a budget pays for goes to the window, 32 to 256 of them, and the rest to the far field; of that an eighth to clusters where there are
heavy hitters too. It is the split of `python -m eval.bounded quality`, where a window of half the budget did no better; the eighth is a choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_kvq.codecs import Codec, make_codecs
from hf_kvq.config import Clusters, FarField, HeavyHitters, LayerQuant
from hf_kvq.far_field import MASS_BYTES, POSITION_BYTES, cluster_bytes
from hf_kvq.layers import LiveConfig
from hf_kvq.layers.rotary import rope_of_layer, trained_length
from hf_kvq.states import Bounds, StateShape

__all__ = ["BoundsRule", "check_far_field"]

SHARE_OF_CLUSTERS = 1 / 8


@dataclass(frozen=True, kw_only=True)
class BoundsRule:
    """Says what one layer keeps.

    Attributes:
        model: The model's config, for how keys are turned and how far they may stand.
        index: Index of the layer.
        quant: Codecs of the layer.
        sinks: First real tokens of every row that stay exact.
        residual: Newest tokens that stay exact.
        block: Tokens that leave together.
        window: Tokens that a query sees at least; None where a budget says it.
        far_field: What becomes of tokens that leave; under a budget only its kind counts.
        budget_bytes_per_head: Bytes of keys and values of one kv head and row, or None.
    """

    model: LiveConfig
    index: int
    quant: LayerQuant
    sinks: int
    residual: int
    block: int
    window: int | None
    far_field: FarField | None
    budget_bytes_per_head: int | None

    def __call__(self, shape: StateShape) -> Bounds:
        """The bounds for states of this shape.

        Raises:
            ValueError: If the budget does not pay for sinks and the smallest window.
        """
        rope = rope_of_layer(self.model.config, self.index, shape.key_dim)
        trained = trained_length(self.model.config)
        longest = None if rope is None or trained is None else trained - 1
        heavy, clusters = Bounds.far(self.far_field)
        window = self.window
        if window is None:
            window, heavy, clusters = self._split(shape, heavy, clusters, make_codecs(self.quant, rope))
        return Bounds(
            window=window,
            sinks=self.sinks,
            block=self.block,
            heavy_hitters=heavy,
            clusters=clusters,
            rope=rope,
            longest=longest,
        )

    def _split(
        self,
        shape: StateShape,
        heavy: HeavyHitters | None,
        clusters: Clusters | None,
        codecs: tuple[Codec, Codec],
    ) -> tuple[int, HeavyHitters | None, Clusters | None]:
        assert self.budget_bytes_per_head is not None
        dims = list(zip(codecs, (shape.key_dim, shape.value_dim), strict=True))
        token = -(-sum(codec.bits_per_token(1, dim, shape.dtype) for codec, dim in dims) // 8)
        token += MASS_BYTES if heavy else 0
        exact = (shape.key_dim + shape.value_dim) * shape.dtype.itemsize
        sinks = self.sinks * exact + sum(codec.bits_per_row(1, dim) for codec, dim in dims) // 8
        sinks += self.residual * max(exact - token, 0)
        left = self.budget_bytes_per_head - sinks
        waiting = self.block - 1
        smallest = token * (32 + waiting)
        if left < smallest:
            raise ValueError(
                f"layer {self.index}: budget_bytes_per_head={self.budget_bytes_per_head} does not pay for {self.sinks} sinks and {self.residual} exact tokens ({sinks} bytes) and a window of 32 in blocks "
                f"of {self.block} ({smallest} bytes); give at least {sinks + smallest}, fewer sinks, or residual=0"
            )
        if heavy is None and clusters is None:
            return left // token - waiting, None, None
        quarter = round(left / token / 4 / 32) * 32
        window = min(max(quarter, 32), 256, left // token - waiting)
        left -= token * (window + waiting)
        if clusters is not None:
            # What its bank knows of the queries: a float32 sum, and the mean that it last used.
            left -= 2 * 4 * shape.key_dim
            share = int(left * SHARE_OF_CLUSTERS) if heavy else left
            count = share // cluster_bytes(clusters, shape.key_dim, shape.value_dim)
            clusters = Clusters(count, clusters.closure) if count >= 2 else None
            left -= share
        if heavy is not None:
            tokens = left // (token + POSITION_BYTES)
            heavy = HeavyHitters(tokens, heavy.decay) if tokens >= 1 else None
        return window, heavy, clusters


def check_far_field(far_field: object) -> None:
    """Refuse what is no far field.

    Raises:
        ValueError: If it is neither HeavyHitters, nor Clusters, nor a pair of one each.
    """
    parts = far_field if isinstance(far_field, tuple) else () if far_field is None else (far_field,)
    kinds = [type(part) for part in parts]
    known = all(kind in (HeavyHitters, Clusters) for kind in kinds)
    if not known or len(set(kinds)) != len(kinds) or far_field == ():
        raise ValueError(
            f"far_field must be None, HeavyHitters(tokens), Clusters(count), or a pair of both, got {far_field!r}"
        )
