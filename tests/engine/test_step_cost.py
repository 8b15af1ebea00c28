"""How much of prompts is read beside decoding requests: what was measured decides."""

from types import SimpleNamespace

import pytest

from hybridkv.engine import step_cost
from hybridkv.engine.step_cost import DEFAULT, LEAST, REAL, WAIT, StepCost
from hybridkv.models.config import ModelConfig
from hybridkv.models.known import KNOWN, known_config

SIZES = [64, 128, 256, 512, 1024, 2048]


def measured() -> StepCost:
    """Weights of 1 GB are read in a millisecond; from 200 tokens on every token takes 5 us."""
    cost = StepCost(10**9)
    cost.seconds = {rows: 1e-3 * max(1, rows / 200) for rows in (1, 8, 64, 256, 512, 1024, 2048)}
    return cost


def test_between_two_sizes_a_line_is_taken() -> None:
    """What a step takes beyond the reading of weights is longer with real tokens than on padding."""
    cost = measured()
    assert cost.predicted(1) == pytest.approx(1e-3) and cost.predicted(512) == pytest.approx(1e-3 + REAL * 1.56e-3)
    assert cost.predicted(768) == pytest.approx(1e-3 + REAL * 2.84e-3)
    assert cost.predicted(4096) == pytest.approx(1e-3 + REAL * 19.48e-3)  # beyond the last one, too
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


def test_what_prompts_attend_to_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a token's products more at 1000 keys, at half the rate: each token takes twice as long."""
    monkeypatch.setattr(step_cost, "LEAST", 0.0)
    monkeypatch.setattr(step_cost, "REAL", 1.0)
    cost = measured()
    cost.key_share = 0.5 / 1000
    assert cost.predicted(2048, 0, 1000) == pytest.approx(2 * cost.predicted(2048))  # type: ignore[operator]
    assert cost.predicted(512, 1e9, 500) == pytest.approx(2.56e-3 * 1.5 + 1e-3)
    near, far = (cost.tokens_beside(64, 5e9, SIZES, 2048, keys) for keys in (0, 1000))
    assert far == near // 2


@pytest.mark.parametrize("name", KNOWN)
def test_the_share_of_attention_is_counted_for_every_family(name: str) -> None:
    found = known_config(name)
    assert found is not None
    config = ModelConfig.from_dict(found[1])
    share = StepCost.of(SimpleNamespace(config=config, nbytes=1)).key_share  # type: ignore[arg-type]
    assert (share == 0) == (not config.attention_layers) and 0 <= 16384 * share < 10
    if name == "Qwen3.5-27B":  # 64 layers, 16 of which attend with 24 heads of 256; 25.6e9 weights multiply a token
        assert share == pytest.approx(4 * 16 * 24 * 256 / (2 * 25.6e9), rel=0.01)


def test_a_size_is_measured_once_and_a_long_step_by_one_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) * 1000

    monkeypatch.setattr(step_cost.torch.cuda, "Event", Event)
    cost, runs = StepCost(1), []

    def step(seconds: float) -> None:
        runs.append(seconds)
        clock[0] += seconds * (10 if len(runs) == 1 else 1)  # the first replay is not the others

    cost.measure(64, lambda: step(1e-3), 3)
    assert cost.seconds == {64: pytest.approx(1e-3)} and len(runs) == 4
    cost.measure(64, lambda: step(9e-3), 3)
    cost.measure(2048, lambda: step(0.16), 3)
    assert len(runs) == 6 and cost.seconds[2048] == pytest.approx(0.16)
