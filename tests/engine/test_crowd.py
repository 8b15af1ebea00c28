"""A request alone and in a crowd that is preempted and whose steps with prompts are graphs: the same tokens, in every
family, with every way of sampling. Captures are stood in for, as in test_mixed_graphs.py; tests/gpu has real ones.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tiny
from crowd import (
    EVICTING,
    FAMILIES,
    Wish,
    assert_distinct,
    assert_same_bits,
    bound,
    count_near_ties,
    engines,
    lone_and_crowd,
    open_family,
    run_alone,
    wishes,
    with_seed,
)
from long_form import LONG

from engine.driving import with_graphs
from hybridkv import LLM, SamplingParams
from hybridkv.engine import sampler
from hybridkv.kernels.step_index import StepShape
from hybridkv.models.decoder import Decoder
from hybridkv.request import TokenLogprobs

pytestmark = pytest.mark.usefixtures("weights_measured_once")
# the long form has all; the others have the same kinds of layers
MOST = tuple(kind for kind in FAMILIES if LONG or kind not in ("qwen3", "qwen3_5_moe"))


@pytest.fixture(scope="module")
def family(oracle: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """`family("qwen3_5", exact=True)`."""
    return cache(lambda kind, **how: open_family(kind, "cpu", oracle, tmp_path_factory.mktemp(kind), **how))


def check_crowd(llm: LLM, kind: str, graphs: bool) -> int:
    """Near-ties that were shown."""
    lonely, small = engines(llm)
    if graphs:
        with_graphs(small)
    pairs, _ = lone_and_crowd(lonely, small, wishes(tiny.token_ids))
    ties = sum(count_near_ties(mine, its, lonely, bound(kind)) for mine, its in pairs)
    assert_distinct(pairs)
    return ties


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", MOST)
def test_the_same_tokens_but_for_near_ties(kind: str, family: Callable, replays: list[StepShape]) -> None:
    ties = check_crowd(family(kind), kind, graphs=kind != "deepseek_v4")  # whose prompts are not captured
    assert ties <= 3, "so many near-ties are none"
    assert bool(replays) == (kind != "deepseek_v4")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", MOST[:-1])
def test_exact_mode_gives_the_same_bits(kind: str, family: Callable) -> None:
    """With eviction: what is kept is the same, too."""
    pairs, _ = lone_and_crowd(*engines(family(kind, exact=True, **EVICTING), pool=176), wishes(tiny.token_ids))
    assert_distinct(pairs)
    for mine, its in pairs:
        assert_same_bits(mine, its)
    assert sum(bool(mine.evictions) for mine, _ in pairs) > 6


def test_answer_i_has_seed_i(family: Callable) -> None:
    """A sibling in a crowd is what its seed gives alone."""
    [wish] = [wish for wish in wishes(tiny.token_ids) if wish.params.n == 3]
    lonely, small = engines(family("llama"))
    pairs, _ = lone_and_crowd(lonely, small, wishes(tiny.token_ids)[:9])
    siblings = [mine for mine, _ in pairs if mine.tokens[: mine.prompt_tokens] == wish.tokens]
    assert len(siblings) == 3
    for i, sibling in enumerate(siblings):
        [alone] = run_alone(lonely, with_seed(wish, i))
        assert count_near_ties(sibling, alone, lonely, bound("llama")) == 0


@pytest.mark.parametrize(("gap", "near"), [(1e-6, True), (0.05, False)])
@pytest.mark.parametrize("ask", ({}, {"temperature": 0.7, "top_k": 1}))
def test_a_near_tie_is_one_within_the_bound(ask: dict[str, Any], gap: float, near: bool, family: Callable) -> None:
    """The second best token of a prompt, biased until it is almost the best, in the place of the best."""
    lonely, _ = engines(family("llama"))
    tokens = tiny.token_ids(20)
    x = lonely.score(tokens)[-1]
    best, second = x.topk(2).indices.tolist()
    bias = {second: float(x[best] - x[second]) - gap}
    alone, other = (
        Wish(tokens, SamplingParams(max_tokens=1, logprobs=0, logit_bias=bias, seed=1, **ask), ()).add(lonely)[0]
        for _ in range(2)
    )
    while not lonely.idle:
        lonely.step()
    assert alone.generated == other.generated == [best]
    other.tokens[-1] = second
    other.logprobs = [TokenLogprobs(float(x.double().log_softmax(-1)[second]), {})]
    if near:
        assert count_near_ties(other, alone, lonely, bound("llama")) == 1
    else:
        with pytest.raises(AssertionError, match="its logits give"):
            count_near_ties(other, alone, lonely, bound("llama"))


def break_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a batch draw with the first one's seed."""
    plain = sampler.sample_rows

    def shared(logits: Any, rows: Any, found: Any) -> None:
        for row in rows[1:]:
            row.words[4] = rows[0].words[4]
            row.seed = rows[0].seed
        plain(logits, rows, found)

    monkeypatch.setattr(sampler, "sample_rows", shared)


def break_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that only the device knows do not count in the position at which is drawn."""
    plain = sampler.sample_rows

    def late(logits: Any, rows: Any, found: Any) -> None:
        for row in rows if len(rows) > 1 else ():
            row.position -= 1
        plain(logits, rows, found)

    monkeypatch.setattr(sampler, "sample_rows", late)


def break_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of several requests the last token is one place too far."""
    plain = Decoder.hidden

    def shifted(self: Decoder, tokens: Any, positions: Any, *more: Any) -> Any:
        if (positions[1:] != positions[:-1] + 1).any():
            positions = positions.clone()
            positions[0] += 1
        return plain(self, tokens, positions, *more)

    monkeypatch.setattr(Decoder, "hidden", shifted)


def break_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was preempted forgets what it has said."""
    plain = sampler.seen_tokens
    monkeypatch.setattr(sampler, "seen_tokens", lambda vocab, prompt, answer, device: plain(vocab, prompt, [], device))


@pytest.mark.slow
@pytest.mark.parametrize("fault", (break_seeds, break_counts, break_positions, break_penalties))
def test_a_mistake_is_no_near_tie(
    fault: Callable, family: Callable, replays: list[StepShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="its logits give|more than rounding"):
        check_crowd(family("llama"), "llama", graphs=True)
