"""How much of prompts is read beside decoding requests: what was measured decides."""

import pytest

from hybridkv.engine import step_cost
from hybridkv.engine.step_cost import ATTENTION_RATE, DEFAULT, LEAST, WAIT, StepCost, key_share
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN

SIZES = [64, 128, 256, 512, 1024, 2048]


def measured() -> StepCost:
    """Weights of 1 GB are read in a millisecond; from 200 tokens on every token takes 5 us."""
    cost = StepCost(10**9)
    cost.seconds = {rows: 1e-3 * max(1, rows / 200) for rows in (1, 8, 64, 256, 512, 1024, 2048)}
    return cost


def test_between_two_sizes_a_line_is_taken() -> None:
    cost = measured()
    assert cost.predicted(1) == pytest.approx(1e-3) and cost.predicted(512) == pytest.approx(2.56e-3)
    assert cost.predicted(768) == pytest.approx(3.84e-3)
    assert cost.predicted(4096) == pytest.approx(20.48e-3)  # beyond the last one, too
    assert cost.predicted(1, held_bytes=2e9) == pytest.approx(3e-3)  # at the rate at which weights are read


def test_a_small_model_reads_prompts_in_long_steps() -> None:
    """Its decode steps are short, but nobody needs a thousand tokens a second."""
    chosen = measured().tokens_beside(8, 1e8, SIZES, 2048)
    assert chosen == 2048 and (measured().predicted(2048, 1e8) or 1) <= LEAST


def test_decoding_requests_wait_no_longer_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "LEAST", 0.0)
    cost = measured()
    for decodes, held in ((1, 0.0), (8, 1e8), (64, 5e9), (256, 20e9)):
        chosen = cost.tokens_beside(decodes, held, SIZES, 2048)
        alone, taken = cost.predicted(decodes, held), cost.predicted(chosen, held)
        assert alone is not None and taken is not None and taken <= WAIT * alone
        larger = [size for size in SIZES if size > chosen]
        assert all((cost.predicted(size, held) or 0) > WAIT * alone for size in larger)
    # the longer a decode step takes anyway, the more is read beside it
    assert cost.tokens_beside(1, 0, SIZES, 2048) < cost.tokens_beside(64, 5e9, SIZES, 2048)


def test_some_of_a_prompt_is_always_read_and_no_step_is_longer_than_it_may_be() -> None:
    slow = StepCost(10**9)
    slow.seconds = {1: 1e-3, 64: 50e-3, 512: 400e-3}  # a card on which prompts take long
    assert slow.tokens_beside(1, 0, SIZES, 2048) == 65
    assert slow.tokens_beside(200, 0, SIZES, 2048) == 264
    assert measured().tokens_beside(256, 1e12, SIZES, 512) == 512


@pytest.mark.parametrize("seconds", ({}, {1: 1e-3}))
def test_before_anything_is_measured_it_is_a_constant(seconds: dict[int, float]) -> None:
    cost = StepCost(10**9)
    cost.seconds = dict(seconds)
    assert cost.tokens_beside(3, 0, SIZES, 2048) == DEFAULT
    assert cost.tokens_beside(3, 0, [], 256) == 256 and measured().tokens_beside(3, 0, [], 4096) == DEFAULT


def test_a_prompt_that_has_long_been_read_takes_fewer_tokens_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens attend to all that came before, and those who decode wait for that, too."""
    monkeypatch.setattr(step_cost, "LEAST", 0.0)
    cost = measured()
    cost.key_share = 1e-5
    assert cost.attention(100, 75_000) == pytest.approx(100 * 5e-6, rel=0.1), "75,000 keys of 1e-5 cost as the products"
    sizes = range(64, 2049, 64)
    tokens = [cost.tokens_beside(8, 2e9, list(sizes), 2048, keys) for keys in (0, 16_384, 262_144)]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] > tokens[1] > tokens[2]
    for chosen, keys in zip(tokens, (0, 16_384, 262_144)):
        alone, taken = cost.predicted(8, 2e9), cost.predicted(chosen, 2e9)
        assert alone is not None and taken is not None and taken + cost.attention(chosen - 8, keys) <= WAIT * alone


def test_what_attention_costs_beside_products_follows_from_the_widths() -> None:
    """Counted by hand for Qwen3.5-27B: 16 layers of 24 heads of 256 channels, 26 billion numbers that multiply."""
    share = key_share(ModelConfig.from_dict(KNOWN["Qwen3.5-27B"]))
    by_hand = 4 * 16 * 24 * 256 / (2 * 25.6e9)
    assert share == pytest.approx(by_hand, rel=0.1)  # norms, gates and the head are not counted
    assert 0.6 < ATTENTION_RATE <= 1
