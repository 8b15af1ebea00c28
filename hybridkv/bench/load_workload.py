"""What is asked of an engine under load: prompts of random tokens and lengths, answers of random lengths, and when each
arrives. All from a seed: the same seed asks the same.

The offline workload is the one of nano-vllm's bench.py: with its defaults (seed 0, 256 requests, 100..1024 tokens in
and out) lengths and token ids are the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv.config import SamplingParams
from hybridkv.errors import HybridKVError

MOST_ID = 10000  # of prompt tokens, as far as the vocabulary goes
SPREADS = ("uniform", "log")


@dataclass(frozen=True)
class Range:
    """Lengths from low to high, both included."""

    low: int
    high: int

    @staticmethod
    def read(flag: str, text: str) -> Range:
        """`100:1024`, or `512` for one length, or HybridKVError."""
        try:
            low, high = (int(part) for part in (text.split(":") if ":" in text else (text, text)))
        except ValueError:
            raise HybridKVError(f"{flag} takes LOW:HIGH in tokens, such as 100:1024, not {text!r}") from None
        if not 1 <= low <= high:
            raise HybridKVError(f"{flag} {text}: the lower end must be at least 1 and not above the upper one")
        return Range(low, high)

    def draw(self, dice: random.Random, spread: str = "uniform") -> int:
        """`log`: every factor of two has as many."""
        if spread == "uniform":
            return dice.randint(self.low, self.high)
        drawn = round(math.exp(dice.uniform(math.log(self.low), math.log(self.high))))
        return min(max(drawn, self.low), self.high)

    def mean(self, spread: str = "uniform") -> float:
        """Of many that are drawn."""
        if spread == "uniform" or self.low == self.high:
            return (self.low + self.high) / 2
        return (self.high - self.low) / math.log(self.high / self.low)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"


@dataclass(frozen=True)
class Asked:
    """One request before it is made."""

    prompt: list[int]
    answer: int  # tokens


@dataclass(frozen=True)
class Mix:
    """Lengths in and out, and how they are spread."""

    prompts: Range
    answers: Range
    spread: str = "uniform"  # of prompts

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return self.prompts.high + self.answers.high

    def draw(self, count: int, vocab: int, seed: int) -> list[Asked]:
        """All prompts first, then the lengths of the answers."""
        dice = random.Random(seed)
        most = min(MOST_ID, vocab - 1)
        prompts = [[dice.randint(0, most) for _ in range(self.prompts.draw(dice, self.spread))] for _ in range(count)]
        return [Asked(prompt, self.answers.draw(dice)) for prompt in prompts]


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Seconds at which requests arrive, `rate` a second by chance (Poisson): gaps are exponential. At least one.

    The same seed gives the same pattern at any rate, in another measure of time.
    """
    dice, at, found = random.Random(seed), 0.0, []
    while (at := at + dice.expovariate(1.0) / rate) <= seconds:
        found.append(at)
    return found or [0.0]


def sampling(answers: Sequence[int], sampled: bool, seed: int) -> list[SamplingParams]:
    """Greedy, or temperature 0.6 and top-p 0.95 with a seed for each; answers end at their length alone."""
    if not sampled:
        return [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in answers]
    return [
        SamplingParams(max_tokens=n, temperature=0.6, top_p=0.95, seed=seed + i, ignore_eos=True)
        for i, n in enumerate(answers)
    ]
