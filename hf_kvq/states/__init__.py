"""What a layer holds: a store of sinks, coded tokens and a residual, over token buffers."""

from __future__ import annotations

from hf_kvq.states.buffer import round_up
from hf_kvq.states.store import ROLLBACK, StateShape, StoreMark, TokenStore

__all__ = ["ROLLBACK", "StateShape", "StoreMark", "TokenStore", "round_up"]
