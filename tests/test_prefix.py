"""LLM.prefix: read once, kept however short memory is, given back by `drop`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from thinking_template import THINKING_TEMPLATE

from engine.ascii_tokenizer import write_tokenizer
from engine.driving import count_tokens
from engine.reusing import check, poison
from hybridkv import LLM, Completion, ReuseConfig, SamplingParams
from hybridkv.errors import HybridKVError, RequestError

ASK = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=8)
TEXT = tiny.token_ids(200, seed=3)


def opened(oracle: Callable, kind: str, **how: Any) -> LLM:
    how = {"max_requests": 2, "max_context": 512, "exact": True} | how
    return LLM(str(oracle(kind).folder), "cpu", "float32", **how)


def ask(llm: LLM, tokens: list[int], **how: Any) -> Completion:
    [found] = llm.generate([tokens], ASK, **how)
    check(llm.engine)
    return found


def same(one: Completion, other: Completion) -> bool:
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs


def crowd_out(llm: LLM) -> None:
    """Somebody needs every page and every row that can be had, and gives them back."""

    def crowd(engine: Any) -> None:
        manager = engine.manager
        for table in manager.tables.values():
            most = table.allocator.free + table.allocator.reclaimable
            table.allocator.release(table.allocator.acquire(most))
        rows = []
        while (row := manager.reuse.checkpoints.reserve()) is not None:
            rows.append(row)
        for row in rows:
            manager.reuse.checkpoints.give_back(row)

    llm.owner.run(crowd)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_it_is_read_once_and_outlives_what_is_not_pinned(oracle: Callable, kind: str) -> None:
    with opened(oracle, kind) as llm:
        counts = count_tokens(llm.engine)
        prefix = llm.prefix(TEXT)
        reuse = llm.manager.reuse
        assert reuse is not None
        q = reuse.q
        assert prefix.tokens == 200 // q * q == sum(counts), "it was not read once"
        state = llm.plan.schema.slot_bytes if kind != "llama" else 0
        assert prefix.pinned and prefix.bytes == llm.plan.schema.kv_bytes(prefix.tokens) + state
        crowd_out(llm)
        poison(llm.engine)
        tokens = [*TEXT, *tiny.token_ids(30, seed=4)]
        warm = ask(llm, tokens)
        assert warm.stats["cached_tokens"] == prefix.tokens and same(warm, ask(llm, tokens, cache=False))
        prefix.drop()
        prefix.drop()
        crowd_out(llm)
        check(llm.engine)
        assert not reuse.pins and ask(llm, tokens).stats["cached_tokens"] == 0, "what was dropped is still kept"


def test_its_state_may_be_in_bf16(oracle: Callable) -> None:
    folder = oracle("qwen3_5").folder
    with LLM(str(folder), "cpu", "float32", max_context=512, reuse=ReuseConfig(checkpoint_dtype="bf16")) as llm:
        prefix, schema = llm.prefix(TEXT), llm.plan.schema
        assert prefix.bytes == schema.kv_bytes(prefix.tokens) + schema.checkpoint_bytes
        assert schema.checkpoint_bytes < schema.slot_bytes
        assert ask(llm, [*TEXT, 5]).stats["cached_tokens"] == prefix.tokens


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_what_is_there_already_is_not_read_again(oracle: Callable, kind: str) -> None:
    with opened(oracle, kind) as llm:
        first, counts = llm.prefix(TEXT), count_tokens(llm.engine)
        again, plain = llm.prefix(TEXT), llm.prefix(TEXT, pin=False)
        assert not counts[1:] and again.tokens == first.tokens == plain.tokens and not plain.pinned
        first.drop()
        plain.drop()
        crowd_out(llm)
        assert ask(llm, [*TEXT, 5]).stats["cached_tokens"] == again.tokens, "another pin was lost with it"
        longer = llm.prefix([*TEXT, *tiny.token_ids(100, seed=9)])
        again.drop()
        crowd_out(llm)
        assert ask(llm, [*TEXT, *tiny.token_ids(100, seed=9), 5]).stats["cached_tokens"] == longer.tokens
        check(llm.engine)


def test_a_failed_request_and_forgetting_leave_no_half_of_it(oracle: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(oracle, "qwen3_5") as llm:
        prefix, forward = llm.prefix(TEXT), llm.engine.runner.forward
        monkeypatch.setattr(llm.engine.runner, "forward", lambda inputs: forward(inputs) * float("nan"))
        [bad] = llm.generate([[*TEXT, *TEXT[:90]]], ASK)
        monkeypatch.undo()
        assert bad.finish_reason == "error"
        check(llm.engine)
        assert ask(llm, [*TEXT, *TEXT[:90]]).stats["cached_tokens"] == prefix.tokens, "a pinned prefix went with it"
        llm.owner.run(lambda engine: engine.manager.reuse.forget())
        check(llm.engine)
        assert ask(llm, TEXT).stats["cached_tokens"] == 0
        prefix.drop()
        check(llm.engine)


def test_half_of_the_rows_and_of_the_pages_may_be_pinned(oracle: Callable) -> None:
    with opened(oracle, "qwen3_5") as llm:
        row = llm.plan.schema.slot_bytes
    with opened(oracle, "qwen3_5", reuse=ReuseConfig(checkpoints=4 * row)) as llm:
        kept = [llm.prefix(tiny.token_ids(64, seed=seed)) for seed in range(2)]
        with pytest.raises(HybridKVError, match="2 of 4 are pinned, and half may be. Drop another prefix"):
            llm.prefix(TEXT)
        check(llm.engine)
        kept[0].drop()
        assert llm.prefix(TEXT).pinned
    with opened(oracle, "llama", max_requests=1, max_context=256) as llm:
        first = llm.prefix(tiny.token_ids(130, seed=1))
        with pytest.raises(HybridKVError, match="shorten this one, or give more memory"):
            llm.prefix(tiny.token_ids(64, seed=2))
        with pytest.raises(RequestError, match="beside the 128 tokens of pinned prefixes"):
            [found] = llm.generate([tiny.token_ids(230, seed=5)], ASK)
            raise RequestError(found.error or "it ran")
        first.drop()
        assert ask(llm, tiny.token_ids(230, seed=5)).finish_reason == "length"


def test_what_cannot_be_kept_is_refused(oracle: Callable) -> None:
    with opened(oracle, "qwen3_5", reuse=None) as llm, pytest.raises(HybridKVError, match="without reuse=None"):
        llm.prefix(TEXT)
    with (
        opened(oracle, "qwen3_5", reuse=ReuseConfig(checkpoints=0)) as llm,
        pytest.raises(HybridKVError, match="there is no room for any"),
    ):
        llm.prefix(TEXT)
    with opened(oracle, "qwen3_5") as llm:
        for given, what in (
            (TEXT[:63], "columns of 64 tokens, and this one has 63"),
            ([], "no tokens"),
            ([*TEXT, 10**6], "outside the vocabulary"),
            (tiny.token_ids(600), "of 576 tokens needs .* and half may be"),
            ({"role": "user"}, "text or a list of token ids"),
        ):
            with pytest.raises(HybridKVError, match=what):
                llm.prefix(given)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="the context holds 512"):
            llm.prefix(tiny.token_ids(600), pin=False)
        assert llm.prefix(TEXT).pinned and repr(llm.prefix(TEXT)).endswith("bytes, pinned)")


def test_messages_are_what_all_chats_begin_with_that_begin_with_them(tmp_path: Path) -> None:
    tiny.save("qwen3_5", tmp_path)
    write_tokenizer(tmp_path, THINKING_TEMPLATE)
    short = replace(ASK, max_tokens=1)
    with LLM(tmp_path, device="cpu", dtype="float32", max_context=1024) as llm:
        system: list[dict[str, Any]] = [{"role": "system", "content": "You count sheep. " * 10}]
        prefix = llm.prefix(system)
        assert prefix.tokens > 64
        for question in ("How many?", "\nWhy?"):
            found = llm.chat([*system, {"role": "user", "content": question}], short)
            assert found.stats["cached_tokens"] == prefix.tokens
        asked = [*system, {"role": "user", "content": "How many sheep are there? " * 10}]
        both = llm.prefix(asked)
        assert both.tokens > prefix.tokens + 64
        assert llm.chat(asked, short).stats["cached_tokens"] >= both.tokens
        with pytest.raises(RequestError, match="role"):
            llm.prefix([{"content": "no role"}])
