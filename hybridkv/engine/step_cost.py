"""StepCost: what a step takes, and so how much of a prompt is read in a step in which others decode.

A step costs what its products cost, which follows from its number of tokens, and the reading of what its decoding
requests hold. The first is measured whenever a graph is captured, by replaying it on padding; between two sizes the
line through them is taken. The tokens of that padding differ from each other, as a card multiplies rows that are alike
faster; recurrent layers and attention do next to nothing for it, so what a step takes beyond the reading of weights
counts REAL times. The second is counted in bytes, at the rate at which the smallest step reads the weights. What
prompts attend to is counted in products, at half the rate of those with weights.

A request that decodes waits for the prompts read beside it: a step may take WAIT times what it would take without them,
or LEAST seconds where that is longer: forty tokens a second are faster than anyone reads, and small models read prompts
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
from hybridkv.models.decoder import Model
from hybridkv.planner import matrix_elements

DEFAULT = 512  # tokens of a step in which requests decode
WAIT = 2.4  # times as long as without prompts
ATTENDING = 2.0  # times what a product with weights takes (H200: 16K keys make a 27B prompt's step a fifth longer)
LEAST = 0.025  # seconds
TIMED = 3  # replays of a graph, at the most
REAL = 1.2  # H200, 27B: 256 to 384 tokens beside 3 to 9 decoding requests then take 0.97 to 1.1 of the prediction
ENOUGH = 0.01  # seconds of replays after which no more are timed: a long step is measured well by one


def unlike_tokens(count: int, vocab: int, device: torch.device) -> torch.Tensor:
    """[count] tokens for padding that is timed: no two of them are the same, if there are so many."""
    return torch.arange(count, dtype=torch.int64, device=device) * 7919 % vocab  # a prime, so that they spread


class StepCost:
    def __init__(self, weight_bytes: int, key_share: float = 0.0) -> None:
        self.weight_bytes = weight_bytes
        self.key_share = key_share  # products of a token with one key, in all layers, as a share of those with weights
        self.seconds: dict[int, float] = {}  # of a step of so many tokens, without what requests hold

    def measure(self, tokens: int, run: Callable[[], object], times: int) -> None:
        """Take the time of a captured step on padding, unless one of so many tokens was measured before."""
        if tokens in self.seconds:
            return
        run()
        taken: list[float] = []
        while len(taken) < times and sum(taken) < ENOUGH:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1000)
        self.seconds[tokens] = statistics.median(taken)

    @staticmethod
    def of(model: Model) -> StepCost:
        """Nothing is measured yet."""
        c = model.config
        attended = 4 * c.heads * c.head_dim * len(c.attention_layers)
        return StepCost(model.nbytes, attended / (2 * matrix_elements(c)) if attended else 0.0)

    def predicted(self, tokens: int, held_bytes: float = 0, keys: float = 0) -> float | None:
        """Seconds of a step of so many tokens whose decoding requests hold so many bytes, and whose other tokens attend
        to so many keys each; None: not known.
        """
        sizes = sorted(self.seconds)
        if len(sizes) < 2:
            return None
        held = held_bytes * self.seconds[sizes[0]] / max(self.weight_bytes, 1)
        at = min(max(bisect_left(sizes, tokens), 1), len(sizes) - 1)
        low, high = sizes[at - 1], sizes[at]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        each = min(taken / size for size, taken in self.seconds.items())
        attending = ATTENDING * self.key_share * keys * each * tokens
        least = self.seconds[sizes[0]]  # that of reading the weights
        products = max(self.seconds[low] + slope * (tokens - low) - least, 0.0) * REAL
        return least + products + held + attending

    def tokens_beside(self, decodes: int, held_bytes: float, sizes: Sequence[int], most: int, keys: float = 0) -> int:
        """Tokens of a step in which so many requests decode: as many of `sizes` as they may wait for, `most` at the
        most, and always some of a prompt, whose tokens attend to so many keys.
        """
        least = decodes + CHUNK_QUANTUM
        alone = self.predicted(decodes, held_bytes)
        if alone is None or not sizes:
            return max(min(DEFAULT, most), least)
        longest, limit = sizes[0], max(WAIT * alone, LEAST)
        for size in sizes:
            taken = self.predicted(size, held_bytes, keys)
            assert taken is not None
            if size <= most and taken <= limit:
                longest = size
        return max(longest, least)
