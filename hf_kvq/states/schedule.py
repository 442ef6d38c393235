"""When tokens leave a window: in blocks at fixed positions, whatever the chunks that they came in.

Positions are a row's own token numbers. The first `sinks` never leave. A block leaves once every query that is still to come stands so far
behind it that its window, at least `window` tokens with the query itself, begins after the block.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """The rule as numbers. Step j is the stretch of `block` queries that see what is left after j blocks; it is negative while the window fills.

    Attributes:
        window: Tokens that a query sees at least, itself included and sinks not.
        sinks: First tokens, which stay.
        block: Tokens that leave together.
    """

    window: int
    sinks: int
    block: int

    def step(self, position: int) -> int:
        """The step that the query at `position` belongs to."""
        return (position + 1 - self.window - self.sinks) // self.block

    def first_query(self, step: int) -> int:
        """Position of the first query of a step."""
        return self.block * step + self.window + self.sinks - 1

    def last_query(self, step: int) -> int:
        """Position of the last query of a step."""
        return self.first_query(step + 1) - 1

    def gone(self, step: int) -> int:
        """Position of the first token that is neither a sink nor gone in a step."""
        return self.sinks + self.block * max(step, 0)
