"""What a checkpoint is worth: seconds of reading that it saves, for each byte that it keeps, aged by use.

    gain(k)  = tokens from the next shallower checkpoint on its path to this one
    bytes(k) = its state, and the columns that only it keeps useful
    H(k)     = L at its last use + gain(k) / R / bytes(k)            R: tokens read a second

Where another checkpoint lies below it, only a fifth of its gain counts (INTERIOR): that one is found first, and its own
columns stay for the other's sake, so it seems to cost nothing but its state. Counted whole, states inside a document
that is taken up at its end outlive the documents.

The one with the least H goes, and L becomes its H. So what is used keeps ahead of L, and what is not is overtaken, the
sooner the less it saves. R is a constant, so it scales every H alike and decides nothing: gains are counted in tokens.
Nothing here looks at a clock, and machines that are asked the same drop the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache.checkpoints import Checkpoint, LeastRecentlyUsed, Policy
from hybridkv.cache.schema import CacheSchema, column_tokens

INTERIOR = 0.2  # of its gain, that one with others below it counts


class ByWorth:
    """The policy "value".

    Args:
        state_bytes: of one checkpoint.
        column_bytes: pages of one column, of all streams.
    """

    def __init__(self, state_bytes: int, column_bytes: int) -> None:
        self.state_bytes, self.column_bytes = state_bytes, column_bytes
        self.level = 0.0  # L

    def made(self, checkpoint: Checkpoint) -> None:
        """It begins where what was dropped last stood."""
        checkpoint.value = self.level

    def used(self, checkpoint: Checkpoint) -> None:
        """It begins again there."""
        checkpoint.value = self.level

    def worth(self, checkpoint: Checkpoint) -> float:
        """H: its gain and its bytes depend on which others are there, so it is worked out when it is asked for."""
        nbytes = self.state_bytes + checkpoint.own_columns() * self.column_bytes
        gain = checkpoint.gain * (INTERIOR if checkpoint.column.covers > 1 else 1.0)
        return checkpoint.value + gain / max(1, nbytes)

    def victim(self, candidates: Sequence[Checkpoint]) -> Checkpoint:
        """The one that is worth least; of equals the one used longest ago."""
        worth, _, _, found = min((self.worth(c), c.stamp, c.row, c) for c in candidates)
        self.level = max(self.level, worth)
        return found


def policy_of(name: str, schema: CacheSchema) -> Policy:
    """The policy of `ReuseConfig.policy`, for the bytes of a model."""
    if name == "lru":
        return LeastRecentlyUsed()
    return ByWorth(schema.slot_bytes, schema.kv_bytes(column_tokens(schema)))
