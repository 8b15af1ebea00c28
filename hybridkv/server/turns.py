"""Who is next, where several API keys are served: their requests take turns, however many one of them sends."""

from __future__ import annotations

from collections import Counter, deque

from hybridkv.engine.engine import Engine

SHARE = 2  # one key has at most one in so many of the places to run or to wait


def share_of(room: int) -> int:
    """Answers of one key that are taken at once; one request alone may ask for more."""
    return max(1, room // SHARE)


def take_turns(engine: Engine) -> None:
    """Sort those that wait, on the engine's thread, between steps: first those that had to make room and run again,
    then whoever's key has fewest before them, running ones counted; in order of arrival where that is the same.
    """
    scheduler = engine.scheduler
    if len(scheduler.waiting) < 2:
        return
    before, rank = Counter(request.whose for request in scheduler.running), {}
    for request in sorted(scheduler.waiting, key=lambda request: request.order):
        rank[request] = before[request.whose]
        before[request.whose] += 1
    fair = sorted(scheduler.waiting, key=lambda request: (not request.preemptions, rank[request], request.order))
    scheduler.waiting = deque(fair)
