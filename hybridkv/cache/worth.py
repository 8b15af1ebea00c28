"""What a checkpoint is worth: seconds of reading that it can be expected to save, for each byte that it keeps, aged by
use.

    gain(k)   = tokens from the next shallower checkpoint on its path to this one
    bytes(k)  = its state, and the columns that only it keeps useful
    chance(k) = of checkpoints of its kind that were used as often, the share that was used once more before it went
    H(k)      = L at its last use + chance(k) gain(k) / R / bytes(k)            R: tokens read a second

The one with the least H goes, and L becomes its H. So what is used keeps ahead of L, and what is not is overtaken, the
sooner the less it saves. R is a constant, so it scales every H alike and decides nothing: gains are counted in tokens.

The chance is learned from what becomes of checkpoints (`Fates`), and keeps prompts that come once from driving out what
is asked for again: states inside them are used by nobody, so that kind soon counts little until it was used once, while
in chats, where the next turn begins at the last reply, that kind counts in full from the first.

Where another checkpoint lies below it, only a fifth of its gain counts (INTERIOR): that one is found first, and its own
columns stay for the other's sake, so it seems to cost nothing but its state. Counted whole, states inside a document
that is taken up at its end outlive the documents.

Nothing here looks at a clock, and machines that are asked the same drop the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cache.checkpoints import Checkpoint, LeastRecentlyUsed, Policy
from hybridkv.cache.schema import CacheSchema, column_tokens

INTERIOR = 0.2  # of its gain, that one with others below it counts
OFTEN = 2  # uses, from which on more of them make no difference
BELIEVED = 4.0  # fates, half of them good, that are assumed before any is known
REMEMBERED = 128.0  # fates of one class, at which all count half: what is learned follows the requests


class Fates:
    """What became of checkpoints, by their kind and how often they had been used: used once more, or dropped."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[float, float]] = {}  # used once more, and all of them

    def note(self, kind: str, uses: int, again: bool) -> None:
        """One that had been used so often was used again, or dropped."""
        key = kind, min(uses, OFTEN)
        good, known = self._known.get(key, (0.0, 0.0))
        good, known = good + again, known + 1.0
        self._known[key] = (good, known) if known < REMEMBERED else (good / 2, known / 2)

    def chance(self, kind: str, uses: int) -> float:
        """How likely one is to be used once more, more than 0 and less than 1."""
        good, known = self._known.get((kind, min(uses, OFTEN)), (0.0, 0.0))
        return (good + BELIEVED / 2) / (known + BELIEVED)


class ByWorth:
    """The policy "value".

    Args:
        state_bytes: of one checkpoint.
        column_bytes: pages of one column, of all streams.
    """

    def __init__(self, state_bytes: int, column_bytes: int) -> None:
        self.state_bytes, self.column_bytes = state_bytes, column_bytes
        self.level = 0.0  # L
        self.fates = Fates()

    def made(self, checkpoint: Checkpoint) -> None:
        """It begins where what was dropped last stood."""
        checkpoint.value = self.level

    def used(self, checkpoint: Checkpoint) -> None:
        """It begins again there."""
        checkpoint.value = self.level
        self.fates.note(checkpoint.kind, checkpoint.uses - 1, True)

    def dropped(self, kind: str, uses: int) -> None:
        """It was not used once more."""
        self.fates.note(kind, uses, False)

    def worth(self, checkpoint: Checkpoint) -> float:
        """H: its gain and its bytes depend on which others are there, so it is worked out when it is asked for."""
        nbytes = self.state_bytes + checkpoint.own_columns() * self.column_bytes
        gain = checkpoint.gain * (INTERIOR if checkpoint.column.covers > 1 else 1.0)
        return checkpoint.value + self.fates.chance(checkpoint.kind, checkpoint.uses) * gain / max(1, nbytes)

    def victim(self, candidates: Sequence[Checkpoint]) -> Checkpoint:
        """The one that is worth least; of equals the one used longest ago."""
        worth, _, _, found = min((self.worth(c), c.stamp, c.row, c) for c in candidates)
        self.level = max(self.level, worth)
        return found


def policy_of(name: str, schema: CacheSchema) -> Policy:
    """The policy of `ReuseConfig.policy`, for the bytes of a model."""
    if name == "lru":
        return LeastRecentlyUsed()
    return ByWorth(schema.checkpoint_bytes, schema.kv_bytes(column_tokens(schema)))
