"""How the model attends now, asked at every forward: `model.set_attn_implementation` switches the cache with the model."""

from __future__ import annotations

from transformers import PreTrainedConfig

from hf_kvq.states import ATTENTION

__all__ = ["LiveConfig"]


class LiveConfig:
    """A model's config by reference. A copy of a cache serves the same model, so a copy of this is this."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    @property
    def attends_codes(self) -> bool:
        """Whether the model is set to attention over codes."""
        return self.config._attn_implementation == ATTENTION

    def __deepcopy__(self, memo: dict[int, object]) -> LiveConfig:
        return self
