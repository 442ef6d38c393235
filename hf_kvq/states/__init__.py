"""What a layer holds: a store of sinks, coded tokens and a residual, over token buffers; and what a forward reads of it."""

from __future__ import annotations

from hf_kvq.states.bounded import BoundedSnapshot, BoundedStore
from hf_kvq.states.bounds import Asked, Bounds, HookError
from hf_kvq.states.buffer import round_up
from hf_kvq.states.handle import ATTENTION, CodedStates, View
from hf_kvq.states.store import ROLLBACK, StateShape, StoreMark, TokenStore
from hf_kvq.states.view import StoreView

__all__ = [
    "ATTENTION",
    "ROLLBACK",
    "Asked",
    "BoundedSnapshot",
    "BoundedStore",
    "Bounds",
    "CodedStates",
    "HookError",
    "StateShape",
    "StoreMark",
    "StoreView",
    "TokenStore",
    "View",
    "round_up",
]
