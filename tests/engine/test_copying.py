"""How much each stream copies: against the attention matrices of transformers; nothing of the engine is touched."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from engine.driving import KINDS, alone, assert_nothing_held, prompt, run
from hybridkv import LLM, CacheConfig, EvictionConfig, SamplingParams
from hybridkv.engine.copying import LEAST, SINKS, TOKENS, calibration_tokens, copying_weights
from hybridkv.text.tokenizer import Tokenizer

TEXT = 90  # tokens
SAY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(oracle: Callable[[str], tiny.Oracle]) -> Callable[..., LLM]:
    """`model("llama", exact=True)`: opened once for each."""
    opened: dict[Any, LLM] = {}

    def build(kind: str, exact: bool = False, budget: int | None = None) -> LLM:
        key = (kind, exact, budget)
        if key not in opened:
            config = CacheConfig(kv_dtype="f32", page_size=8, budget=budget, recent=8)
            opened[key] = LLM(oracle(kind).folder, device="cpu", dtype="float32", cache=config, exact=exact,
                              max_requests=3, max_context=512, step_tokens=64)  # fmt: skip
        return opened[key]

    return build


@torch.no_grad()
def by_definition(oracle: tiny.Oracle, tokens: list[int]) -> Tensor:
    """[streams] from whole attention rows: the most that a query of the second reading pays to an entry of the first,
    of any head of the group, on average over the entries after the sinks; relative to the best stream."""
    n, G = len(tokens), oracle.model.config.num_key_value_heads
    layers = oracle.model(torch.tensor([tokens * 2]), use_cache=False, output_attentions=True).attentions
    found = []
    for rows in (layer[0] for layer in layers if layer is not None):  # [H, 2n, 2n]
        folds = len(rows) // G
        for g in range(G):
            paid = [rows[h, n:, j].max() for j in range(SINKS, n) for h in range(g * folds, (g + 1) * folds)]
            found.append(torch.stack(paid).view(-1, folds).amax(1).mean())
    return (torch.stack(found) / max(found)).clamp(min=LEAST)


@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_attention_of_a_second_reading(
    kind: str, exact: bool, model: Callable[..., LLM], oracle: Callable[[str], tiny.Oracle]
) -> None:
    engine, tokens = model(kind, exact).engine, prompt(TEXT)
    found = copying_weights(engine.runner.model, engine.manager, tokens)
    table = engine.manager.tables["attention"].schema
    assert found.shape == (table.heads * len(table.layers),) and found.dtype == torch.float32
    assert found.max() == 1 and found.min() >= LEAST and found.unique().numel() > 1
    torch.testing.assert_close(found, by_definition(oracle(kind), tokens), atol=1e-5, rtol=1e-3)
    assert torch.equal(found, copying_weights(engine.runner.model, engine.manager, tokens)), "the same twice"


@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_no_page_or_slot_of_the_engine_is_touched(kind: str, exact: bool, model: Callable[..., LLM]) -> None:
    engine = model(kind, exact).engine
    request = engine.add(prompt(70), SAY, hold=True, eviction=None)
    run(engine)
    manager = engine.manager
    free = {name: table.allocator.free for name, table in manager.tables.items()}
    pools = [t for table in manager.tables.values() for t in table.pool.tensors.values()]
    before = [t.clone() for t in (*pools, *manager.state.tensors.values())]
    slots = dict(manager.slot_of)
    copying_weights(engine.runner.model, manager, prompt(TEXT))
    for old, now in zip(before, (*pools, *manager.state.tensors.values()), strict=True):
        assert torch.equal(old.view(torch.uint8), now.view(torch.uint8))
    assert {name: table.allocator.free for name, table in manager.tables.items()} == free
    assert manager.slot_of == slots
    manager.check_integrity()
    engine.abort(request)
    assert_nothing_held(engine)


@pytest.mark.parametrize("count", (1, SINKS, SINKS + 1))
def test_a_text_of_a_few_tokens_has_weights(count: int, model: Callable[..., LLM]) -> None:
    engine = model("llama").engine
    found = copying_weights(engine.runner.model, engine.manager, prompt(count))
    assert not found.isnan().any() and found.max() == 1


def test_an_engine_measures_once_and_only_when_a_policy_asks(
    model: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*args: Any) -> Tensor:
        calls.append(len(args[2]))
        return copying_weights(*args)

    monkeypatch.setattr("hybridkv.engine.engine.copying_weights", counted)
    engine = model("llama", budget=48).engine
    vars(engine).pop("stream_weights", None)
    alone(engine, prompt(20), SAY)  # short: nothing is evicted
    engine.add(prompt(150), SAY, eviction=EvictionConfig(48, recent=8, policy="snapkv"))
    run(engine)
    assert calls == []
    first = alone(engine, prompt(150), SAY)
    second = alone(engine, prompt(150), SAY)
    assert len(calls) == 1 and first.evictions and first.tokens == second.tokens
    assert_nothing_held(engine)


# ---- which text


def test_without_a_tokenizer_the_tokens_are_spread_over_the_vocabulary() -> None:
    found = calibration_tokens(None, 32000, 4096)
    assert len(found) == TOKENS and min(found) >= 0 and max(found) < 32000
    assert len(set(found)) > TOKENS * 0.95 and found == calibration_tokens(None, 32000, 4096)
    assert max(calibration_tokens(None, 3, 4096)) < 3


def test_the_text_is_read_twice_within_the_models_positions(ascii_tokenizer: Tokenizer) -> None:
    assert len(calibration_tokens(None, 100, 200)) == len(calibration_tokens(ascii_tokenizer, 1000, 200)) == 100


def test_the_text_is_in_the_models_own_tokens(ascii_tokenizer: Tokenizer) -> None:
    found = calibration_tokens(ascii_tokenizer, 1000, 4096)
    assert len(found) == TOKENS and found != calibration_tokens(None, 1000, 4096)
    again = ascii_tokenizer.encode(ascii_tokenizer.decode(found), bos=False)
    assert again == found, "words, not single ids"
    small = calibration_tokens(ascii_tokenizer, 5, 4096)  # a tokenizer that has more tokens than the model
    assert len(small) == TOKENS and max(small) < 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_a_tokenizer_evicts_by_its_weights(kind: str, model: Callable[..., LLM]) -> None:
    engine = model(kind, budget=48).engine
    tokenizer, engine.tokenizer = engine.tokenizer, None
    try:
        vars(engine).pop("stream_weights", None)
        request = alone(engine, prompt(150), SAY)
    finally:
        engine.tokenizer = tokenizer
    assert request.evictions[150].counts().mean() <= 48
    tokens = calibration_tokens(None, engine.vocab, engine.runner.model.config.max_positions)
    assert torch.equal(engine.stream_weights, copying_weights(engine.runner.model, engine.manager, tokens))
    vars(engine).pop("stream_weights")
    assert_nothing_held(engine)
