"""A request alone and in a mixed, captured, preempted crowd on the GPU: the same tokens, in every family, with every
way of sampling. In f32; near-ties have to be shown (tests/support/crowd.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from crowd import (
    EVICTING,
    FAMILIES,
    assert_distinct,
    assert_same_bits,
    bound,
    count_near_ties,
    engines,
    lone_and_crowd,
    open_family,
    wishes,
)

from hybridkv import LLM
from hybridkv.engine import mixed_graphs, sampler

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def capture_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape is captured when it is first asked for."""
    monkeypatch.setattr(mixed_graphs, "ASKED", 1)


@pytest.fixture
def family(oracle: Callable, tmp_path: Path) -> Callable[..., LLM]:
    return lambda kind, **how: open_family(kind, "cuda", oracle, tmp_path, **how)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_same_tokens_but_for_near_ties(kind: str, family: Callable) -> None:
    lonely, small = engines(family(kind))
    pairs, seen = lone_and_crowd(lonely, small, wishes(tiny.token_ids))
    assert small.runner.mixed is not None and (seen.replayed > 3) == (kind != "deepseek_v4")
    ties = sum(count_near_ties(mine, its, lonely, bound(kind)) for mine, its in pairs)
    assert_distinct(pairs)
    assert ties <= 3, "so many near-ties are none"


@pytest.mark.parametrize("kind", FAMILIES[:-1])
def test_exact_mode_gives_the_same_bits(kind: str, family: Callable) -> None:
    llm = family(kind, exact=True, **EVICTING)
    pairs, _ = lone_and_crowd(*engines(llm, pool=176), wishes(tiny.token_ids))
    assert_distinct(pairs)
    for mine, its in pairs:
        assert_same_bits(mine, its)
    assert sum(bool(mine.evictions) for mine, _ in pairs) > 6


def test_a_mistake_is_no_near_tie(family: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are drawn together draw one position too early."""
    plain = sampler.sample_rows

    def early(logits: Any, rows: Any, found: Any) -> None:
        for row in rows if len(rows) > 1 else ():
            row.position -= 1
        plain(logits, rows, found)

    monkeypatch.setattr(sampler, "sample_rows", early)
    lonely, small = engines(family("llama"))
    lonely.pipeline.draw = small.pipeline.draw = None  # sample_rows, and no graph of it
    pairs, _ = lone_and_crowd(lonely, small, wishes(tiny.token_ids))
    with pytest.raises(AssertionError, match="its logits give"):
        for mine, its in pairs:
            count_near_ties(mine, its, lonely, bound("llama"))
