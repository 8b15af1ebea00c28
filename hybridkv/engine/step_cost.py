"""StepCost: what a step takes, and so how much of a prompt is read in a step in which others decode.

A step costs what its products cost, which follows from its number of tokens, the reading of what its decoding requests
hold, and the attention of its prompts over what was read of them before. The first is measured whenever a graph is
captured, by replaying it on padding; between two sizes the line through them is taken. The second is counted in bytes,
at the rate at which the smallest step reads the weights, the third in operations, at ATTENTION_RATE times the rate at
which long steps multiply.

A request that decodes waits for the prompts read beside it: a step may take WAIT times what it would take without them,
or LEAST seconds where that is longer: fifty tokens a second are faster than anyone reads, and small models read prompts
at half their speed in steps that are shorter.
Before anything has been measured, and on a CPU, a step has DEFAULT tokens: there the division of prompts, and with it
the last bits of results, must not depend on a clock.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from hybridkv.config import CHUNK_QUANTUM
from hybridkv.models.config import ModelConfig

DEFAULT = 512  # tokens of a step in which requests decode
WAIT = 2.3  # times as long as without prompts
LEAST = 0.02  # seconds
TIMED = 3  # replays of a graph
ATTENTION_RATE = 0.75  # of a prompt over long histories, beside that of products


class StepCost:
    def __init__(self, weight_bytes: int, key_share: float = 0.0) -> None:
        """`key_share`: operations of a token's attention to one key, as a share of those of its products."""
        self.weight_bytes, self.key_share = weight_bytes, key_share
        self.seconds: dict[int, float] = {}  # of a step of so many tokens, without what requests hold

    def measure(self, tokens: int, run: Callable[[], object], times: int) -> None:
        """Take the time of a captured step on padding."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
        run()
        for mark in marks[:-1]:
            mark.record()
            run()
        marks[-1].record()
        marks[-1].synchronize()
        taken = [a.elapsed_time(b) / 1000 for a, b in zip(marks, marks[1:])]
        self.seconds[tokens] = min(self.seconds.get(tokens, float("inf")), statistics.median(taken))

    def predicted(self, tokens: int, held_bytes: float = 0) -> float | None:
        """Seconds of a step of so many tokens whose decoding requests hold so many bytes; None: not known."""
        sizes = sorted(self.seconds)
        if len(sizes) < 2:
            return None
        held = held_bytes * self.seconds[sizes[0]] / max(self.weight_bytes, 1)
        at = min(max(bisect_left(sizes, tokens), 1), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return max(self.seconds[low] + slope * (tokens - low), self.seconds[sizes[0]]) + held

    def attention(self, tokens: int, keys: int) -> float:
        """Seconds in which so many tokens of prompts attend to so many keys each, the products' rate being known."""
        sizes = sorted(self.seconds)
        each = (self.seconds[sizes[-1]] - self.seconds[sizes[0]]) / (sizes[-1] - sizes[0])
        return max(each, 0.0) * tokens * keys * self.key_share / ATTENTION_RATE

    def tokens_beside(self, decodes: int, held_bytes: float, sizes: Sequence[int], most: int, keys: int = 0) -> int:
        """Tokens of a step in which so many requests decode: as many of `sizes` as they may wait for, `most` at the
        most, and always some of a prompt. `keys`: of the longest prompt, read before.
        """
        least = decodes + CHUNK_QUANTUM
        alone = self.predicted(decodes, held_bytes)
        if alone is None or not sizes:
            return max(min(DEFAULT, most), least)
        longest, limit = sizes[0], max(WAIT * alone, LEAST)
        for size in sizes:
            taken = self.predicted(size, held_bytes)
            assert taken is not None
            if size <= most and taken + self.attention(size - decodes, keys) <= limit:
                longest = size
        return max(longest, least)


def key_share(config: ModelConfig) -> float:
    """What a token's attention to one key costs beside its products, in operations, about; norms and gates are free."""
    c, gdn, moe = config, config.gdn, config.moe
    attends = len(c.attention_layers)
    feed = 3 * c.intermediate
    if moe is not None:
        feed = 3 * (moe.per_token * moe.intermediate + moe.shared_intermediate)
    width = attends * (2 * c.heads + 2 * c.kv_heads) * c.head_dim + c.layers * feed
    if gdn is not None:
        width += (c.layers - attends) * (gdn.channels + 2 * gdn.value_heads * gdn.value_dim)
    return 2 * attends * c.heads * c.head_dim / (c.hidden * width)
