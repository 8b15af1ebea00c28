"""No policy reuses more of a trace than the bound says, and the bound is what can be reused where that is plain."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from reuse_bound import bound
from reuse_simulation import Simulator, Sizes
from reuse_traces import TRACES, Asked, Segment

SMALL = Sizes(q=256, token_bytes=1, state_bytes=1)


def in_turn(texts: int, times: int) -> list[Asked]:
    """Texts of four columns, each asked about in turn, with a question that fills none."""
    found = []
    for i in range(texts * times):
        prompt = Segment(i % texts, 1024, "system"), Segment(1000 + i, 64, "user")
        found.append(Asked(float(i), i, prompt, (Segment(2000 + i, 1, "answer"),)))
    return found


@pytest.mark.parametrize(
    ("texts", "columns", "kept"),
    [(2, 8, 1.0), (2, 4, 0.0), (2, 6, 0.5), (3, 8, 0.5), (3, 12, 1.0), (1, 4, 1.0)],
)
def test_the_bound_is_what_room_allows(texts: int, columns: int, kept: float) -> None:
    """A request has its own four columns; what others keep of theirs must fit beside it."""
    trace = in_turn(texts, 20)
    reused = kept * 1024 * (len(trace) - texts) / sum(asked.tokens for asked in trace)
    found = bound(trace, columns * SMALL.column_bytes, SMALL)
    assert reused - 1e-9 <= found <= reused + 0.01, (reused, found)


@pytest.mark.parametrize("name", ["chat", "documents"])
@pytest.mark.parametrize("gib", [16, 6])
def test_no_policy_exceeds_it(name: str, gib: int) -> None:
    sizes, trace = Sizes(q=256), TRACES[name](2)
    most = bound(trace, gib << 30, sizes)
    for policy in ("value", "lru"):
        assert 0.2 < Simulator(gib << 30, policy, policy == "value", sizes=sizes).run(trace).share <= most
    assert most <= Simulator(0, sizes=sizes).run(trace).share + 1e-9
