"""What a layer holds: token buffers, regions of coded tokens, and sinks."""

from __future__ import annotations

from hf_kvq.states.buffer import round_up
from hf_kvq.states.region import Region
from hf_kvq.states.sinks import SinkStore

__all__ = ["Region", "SinkStore", "round_up"]
