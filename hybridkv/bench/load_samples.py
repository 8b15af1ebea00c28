"""What requests saw, in numbers: waiting, time to the first token, time between tokens, who kept the limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TTFT_TIMES = 5.0  # of the prompt's own prefill that a first token may take, if no limit is given
TBT_TIMES = 2.5  # of the pure decode step at the same batch that the next token may take, if no limit is given
Curve = Callable[[float], float]


@dataclass
class Sample:
    """One request as it was served. Times in seconds of one clock."""

    prompt: int  # tokens
    answer: int  # tokens that were asked for
    arrived: float
    started: float | None = None  # its first step was launched
    times: list[float] = field(default_factory=list)  # of its tokens
    batches: list[int] = field(default_factory=list)  # requests that decoded in the step that gave each

    @property
    def whole(self) -> bool:
        return len(self.times) == self.answer

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Seconds between its tokens."""
        return np.diff(self.times).tolist()


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count. None: so many times what was measured of it alone."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None  # for 99 of 100 tokens of a request

    def kept(self, sample: Sample, own: Curve, step: Curve) -> bool:
        """`own`: seconds to read a prompt of that length alone. `step`: of a pure decode step of so many requests."""
        if not sample.whole:
            return False
        first = TTFT_TIMES * own(sample.prompt) if self.ttft_ms is None else self.ttft_ms / 1e3
        if sample.ttft > first:
            return False
        if self.tbt_ms is not None:
            return percentile(sample.gaps, 99) <= self.tbt_ms / 1e3
        return percentile(step_times(sample, step), 99) <= TBT_TIMES

    def __str__(self) -> str:
        first = f"{TTFT_TIMES:g} x its own prefill" if self.ttft_ms is None else f"{self.ttft_ms:g} ms"
        later = f"{TBT_TIMES:g} x the decode step at its batch" if self.tbt_ms is None else f"{self.tbt_ms:g} ms"
        return f"first token within {first}, p99 between tokens within {later}"


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values; 0 where there are none."""
    return float(np.percentile(values, share)) if len(values) else 0.0


def curve(points: dict[int, float]) -> Curve:
    """Straight lines between measured points, and the nearest one beyond them."""
    xs = sorted(points)
    return lambda x: float(np.interp(x, xs, [points[i] for i in xs]))


def step_times(sample: Sample, step: Curve) -> list[float]:
    """Every gap between its tokens as a multiple of the pure decode step at that batch."""
    return [gap / step(batch) for gap, batch in zip(sample.gaps, sample.batches[1:], strict=True)]


def summary(samples: Sequence[Sample], seconds: float, own: Curve, step: Curve, limits: Limits) -> dict[str, Any]:
    """`seconds`: from the first arrival's clock to the last token."""
    begun = [s for s in samples if s.times]
    gaps = [gap for s in begun for gap in s.gaps]
    waits = [s.started - s.arrived for s in begun if s.started is not None]
    batches = [b for s in begun for b in s.batches[1:]]
    good = [s for s in begun if limits.kept(s, own, step)]
    batch = float(np.mean(batches)) if batches else 0.0
    p99 = percentile(gaps, 99)
    return {
        "tok_s": sum(len(s.times) for s in begun) / seconds,
        "prompt_tok_s": sum(s.prompt for s in begun) / seconds,
        "req_s": sum(s.whole for s in samples) / seconds,
        "ms": percentile(gaps, 50) * 1e3,
        "p99_ms": p99 * 1e3,
        "ttft_ms": percentile([s.ttft for s in begun], 50) * 1e3,
        "ttft_p99_ms": percentile([s.ttft for s in begun], 99) * 1e3,
        "ttft_times": percentile([s.ttft / own(s.prompt) for s in begun], 50),
        "wait_ms": percentile(waits, 50) * 1e3,
        "wait_p99_ms": percentile(waits, 99) * 1e3,
        "wait_times": percentile([(s.started - s.arrived) / own(s.prompt) for s in begun if s.started is not None], 50),
        "batch": batch,
        "step_ms": step(batch) * 1e3,
        "tbt_times": percentile([t for s in begun for t in step_times(s, step)], 99),
        "tbt_times_mean_batch": p99 / step(batch),
        "good": len(good) / max(len(samples), 1),
        "good_tok_s": sum(len(s.times) for s in good) / seconds,
        "unfinished": sum(not s.whole for s in samples),
    }
