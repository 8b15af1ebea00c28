"""Long prompts that begin with what is kept, of which nothing can be used: one warning a minute while that goes on.

What became of each prompt is in its own log line, and in `usage.hybridkv.reuse`.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from hybridkv.cache.checkpoints import NEAR
from hybridkv.server.generation import Usage
from hybridkv.server.record import log

LONG = 2048  # tokens of a prompt that counts
LAST = 20  # of these are looked at
LEAST = NEAR  # tokens that begin alike; for fewer no checkpoint is taken
EVERY = 60.0  # seconds from one warning to the next


@dataclass
class Misses:
    """What the last long prompts found."""

    _found: deque[tuple[bool, str]] = field(default_factory=lambda: deque(maxlen=LAST))  # a hit, the reason of a miss
    _quiet_until: float = 0.0

    def saw(self, usage: Usage) -> None:
        """A request has ended."""
        said = usage.reuse
        if not said or said["cached"] + said["read"] < LONG:
            return
        missed = not said["cached"] and said["matched"] >= LEAST
        self._found.append((said["cached"] > 0, said["reason"] if missed else ""))
        reasons = Counter(reason for _, reason in self._found if reason)
        alike = reasons.total()
        now = time.monotonic()
        full = len(self._found) == self._found.maxlen
        if not full or any(hit for hit, _ in self._found) or 2 * alike < len(self._found) or now < self._quiet_until:
            return
        self._quiet_until = now + EVERY
        log.warning(
            "nothing was reused by the last %d prompts of %d tokens or more, though %d of them began with %d or more "
            "that are kept; the reason most often: %s (docs/reuse.md says what each means)",
            len(self._found), LONG, alike, LEAST, reasons.most_common(1)[0][0],
        )  # fmt: skip
