"""The offline face: prompts of every form, refusals, what the memory limit does, and what kv_dtype really changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from numerics import assert_same_bytes, rel_rms

from engine.ascii_tokenizer import BOS, write_tokenizer
from engine.driving import assert_nothing_held, prompt
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.checkpoint.checkpoint import Checkpoint
from hybridkv.devices import check_fp8_cache
from hybridkv.errors import HybridKVError, ModelFileError, RequestError
from hybridkv.kernels.formats import kv_format

ASK = SamplingParams(max_tokens=8, ignore_eos=True)
KINDS = ("llama", "qwen3_5")


@pytest.fixture(scope="module", params=KINDS)
def bare(request: pytest.FixtureRequest, oracle: Callable, open_llm: Callable) -> LLM:
    """A model without a tokenizer."""
    return open_llm(oracle(request.param).folder)


@pytest.fixture(scope="module")
def texted(tmp_path_factory: pytest.TempPathFactory, open_llm: Callable) -> LLM:
    folder = tmp_path_factory.mktemp("texted")
    tiny.save("llama", folder)
    write_tokenizer(folder)
    return open_llm(folder, max_requests=4)


def answers(llm: LLM, *args: Any) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(*args)]


# ---- prompts


def test_text_and_its_ids_give_the_same_answer(texted: LLM) -> None:
    ids = texted.encode("Hello there")
    assert ids[0] == BOS and len(ids) == 12
    by_text, by_ids = texted.generate("Hello there", ASK)[0], texted.generate(ids, ASK)[0]
    assert by_text.token_ids == by_ids.token_ids and len(by_text.token_ids) == 8
    assert by_text.prompt_tokens == 12 and by_text.finish_reason == "length" and by_text.logprobs is None
    assert texted.tokenizer is not None and by_text.text == texted.tokenizer.decode(by_text.token_ids)


def test_several_prompts_are_answered_in_their_order(texted: LLM) -> None:
    prompts = ["Hello", prompt(20), "a", tuple(prompt(3, 1)), "zz", prompt(70, 2)]
    together = answers(texted, prompts, ASK)
    assert together == [answers(texted, p, ASK)[0] for p in prompts]
    assert len({tuple(t) for t in together}) > 1
    assert answers(texted, [], ASK) == []
    assert answers(texted, ["Hello"], ASK) == together[:1]
    assert_nothing_held(texted.engine)


def test_each_prompt_may_have_its_own_parameters(bare: LLM) -> None:
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    assert [len(t) for t in answers(bare, [prompt(9)] * 3, each)] == [1, 5, 3]
    for count in (0, 2, 4):
        with pytest.raises(RequestError, match=f"3 prompts .* {count} sampling parameters"):
            bare.generate([prompt(9)] * 3, [ASK] * count)
    assert_nothing_held(bare.engine)


def test_a_model_without_a_tokenizer_takes_ids_and_refuses_text(bare: LLM) -> None:
    out = bare.generate(prompt(9), ASK)[0]
    assert len(out.token_ids) == 8 and out.text == ""
    for text in ("Hello", "", ["Hello"], [prompt(3), "Hello"]):
        with pytest.raises(RequestError, match="no tokenizer; give token ids"):
            bare.generate(text, ASK)
    with pytest.raises(RequestError, match="no chat template"):
        bare.render([{"role": "user", "content": "Hello"}])
    assert_nothing_held(bare.engine)


@pytest.mark.parametrize(
    "bad",
    ([97], [-1], [2**70], [True], [[1.5]], [1.5], [None], [[1, None]], [[]], None, 7, 1.5, b"abc", {"a": 1}, [{1: 2}]),
)
def test_bad_prompts_are_refused_in_words(bad: Any, bare: LLM) -> None:
    with pytest.raises(RequestError, match="token"):
        bare.generate(bad, ASK)
    assert_nothing_held(bare.engine)


def test_one_bad_prompt_leaves_nothing_of_the_good_ones_behind(bare: LLM) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary of 97"):
        bare.generate([prompt(9), prompt(9, 1), [97]], ASK)
    with pytest.raises(RequestError, match=r"600 tokens.* 512 "):
        bare.generate([prompt(9), prompt(600)], ASK)
    assert_nothing_held(bare.engine)


def test_logprobs_come_with_every_token(bare: LLM) -> None:
    out = bare.generate(prompt(9), SamplingParams(max_tokens=8, logprobs=3, ignore_eos=True))[0]
    assert out.logprobs is not None and len(out.logprobs) == 8
    for token, found in zip(out.token_ids, out.logprobs):
        assert len(found.top) == 3 and found.top[token] == found.token == max(found.top.values())  # greedy


def test_stats_say_what_was_held(bare: LLM) -> None:
    stats = bare.generate(prompt(70), SamplingParams(max_tokens=10, ignore_eos=True))[0].stats
    assert stats["kept_tokens"] == 79  # the last token of an answer is not run
    assert stats["kv_bytes_full"] == stats["kv_bytes_kept"] == bare.plan.schema.kv_bytes(79)
    assert stats["state_bytes"] == bare.plan.schema.slot_bytes and stats["preemptions"] == 0
    assert stats["prefill_tok_s"] > 0 and stats["decode_tok_s"] > 0


def test_seeds_repeat_answers_and_no_seed_does_not(bare: LLM) -> None:
    seeded = SamplingParams(max_tokens=20, temperature=2.0, seed=5, ignore_eos=True)
    free = SamplingParams(max_tokens=20, temperature=2.0, ignore_eos=True)
    assert answers(bare, prompt(9), seeded) == answers(bare, prompt(9), seeded)
    assert answers(bare, prompt(9), free) != answers(bare, prompt(9), free)


# ---- streams


def test_pieces_join_to_the_answer(texted: LLM) -> None:
    ask = SamplingParams(max_tokens=30, ignore_eos=True)
    pieces = list(texted.stream("Hello", ask))
    assert "".join(pieces) == texted.generate("Hello", ask)[0].text
    assert len(pieces) > 10 and all(pieces)


def test_leaving_a_stream_early_gives_everything_back(texted: LLM) -> None:
    stream = texted.stream("Hello", ASK)
    next(stream)
    stream.close()
    assert_nothing_held(texted.engine)


def test_streams_side_by_side_lose_nothing(texted: LLM) -> None:
    """Each makes the engine step for both."""
    ask = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 25)]
    want = [texted.generate(p, a)[0].text for p, a in zip(("Hello", "other"), ask)]
    streams = [texted.stream(p, a) for p, a in zip(("Hello", "other"), ask)]
    got = ["", ""]
    for i in (0, 1, 0, 0, 1):
        got[i] += next(streams[i])
    assert texted.generate("third", ASK)[0].text  # runs until all are done
    for i in (0, 1):
        got[i] += "".join(streams[i])
    assert got == want
    assert_nothing_held(texted.engine)


# ---- sizes


def open_model(folder: Path, **more: Any) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32", **more)


@pytest.mark.parametrize("kind", KINDS)
def test_too_little_memory_is_an_error_before_weights_are_read(
    kind: str, oracle: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Checkpoint, "read", read)
    folder = oracle(kind).folder
    with pytest.raises(HybridKVError, match=r"weights take [\d.]+ [KM]iB in float32, the limit is 200.0 KiB"):
        open_model(folder, memory="200KiB")
    with pytest.raises(AssertionError, match="a weight was read"):  # guard: enough memory gets that far
        open_model(folder, memory="64MiB", max_context=256)
    with pytest.raises(HybridKVError, match=r"one context of 512 tokens, .*max_context \(at most \d+ tokens fit\)"):
        open_model(folder, memory=weights_of(folder) + 200_000, max_context=512, max_requests=1)


def weights_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("*.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_pools_take_what_was_planned_and_no_more_than_the_limit(kind: str, oracle: Callable) -> None:
    limit = 5 << 20
    llm = open_model(oracle(kind).folder, memory=limit, max_requests=4)
    assert llm.manager.memory_bytes() == llm.plan.nbytes
    assert llm.plan.nbytes + llm.model.nbytes <= limit
    many = [prompt(50 + i, i) for i in range(8)]
    assert all(len(t) == 8 for t in answers(llm, many, ASK))
    assert_nothing_held(llm.engine)


def test_a_context_beyond_the_model_is_refused_with_both_numbers(oracle: Callable) -> None:
    most = tiny.LLAMA["max_position_embeddings"]
    with pytest.raises(HybridKVError, match=rf"{most + 1} .* {most} "):
        open_model(oracle("llama").folder, max_context=most + 1)


@pytest.mark.parametrize(
    ("more", "words"),
    (
        ({"max_requests": 0}, "max_requests"),
        ({"max_context": -5}, "max_context"),
        ({"step_tokens": 100}, "step_tokens"),
        ({"memory": "lots"}, "lots"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "meta"}, "meta"),
        ({"dtype": "float8"}, "float8.*float32, bfloat16"),
    ),
)
def test_bad_settings_are_refused_in_words(more: dict[str, Any], words: str, oracle: Callable) -> None:
    with pytest.raises(HybridKVError, match=words):
        LLM(**{"model": str(oracle("llama").folder), "device": "cpu", "dtype": "float32", **more})


@pytest.mark.parametrize("bad", ("/no/such/model", "./nothing", "~/nothing/here", ""))
def test_a_model_that_is_not_there_is_refused_in_words(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match="there is no|no file|model|config"):
        LLM(bad, device="cpu")


# ---- the dtype of the cache


def pool_dtypes(llm: LLM) -> set[torch.dtype]:
    return {t.dtype for table in llm.manager.tables.values() for t in table.pool.tensors.values()}


@pytest.mark.parametrize("kind", KINDS)
def test_kv_dtype_is_really_in_force(kind: str, oracle: Callable, open_llm: Callable) -> None:
    folder, ids = oracle(kind).folder, oracle(kind).ids[:200]
    wide, narrow = open_llm(folder, kv_dtype="f32"), open_llm(folder, kv_dtype="bf16")
    assert pool_dtypes(wide) == {torch.float32} and pool_dtypes(narrow) == {torch.bfloat16}
    for name, table in narrow.manager.tables.items():
        assert 2 * table.schema.page_bytes == wide.manager.tables[name].schema.page_bytes
    assert all(t.dtype == torch.float32 for t in narrow.manager.state.tensors.values())  # state is never narrowed
    error = rel_rms(wide.logits(ids, chunk=64), narrow.logits(ids, chunk=64))
    # keys and values rounded at 2^-9 in each attention layer, against logits that all layers add up to
    assert 1e-4 < error < 2e-2, error
    whole, stepped = narrow.logits(ids[:80]), narrow.logits(ids[:80], prefill=60, chunk=20)
    assert rel_rms(whole, stepped) < 2e-3  # what is read back is what was stored, whichever way it went in


def test_auto_kv_dtype_is_the_models(oracle: Callable, open_llm: Callable) -> None:
    folder = oracle("llama").folder
    assert pool_dtypes(open_llm(folder, kv_dtype="auto")) == {torch.float32}
    narrow = LLM(str(folder), device="cpu", dtype="bfloat16", cache=CacheConfig(), max_requests=1, max_context=64)
    assert pool_dtypes(narrow) == {torch.bfloat16}


@pytest.mark.parametrize("page_size", (1, 7, 64, 512))
def test_page_size_changes_no_answer(page_size: int, oracle: Callable, bare: LLM) -> None:
    folder = bare.path
    llm = open_model(folder, cache=CacheConfig(page_size=page_size), max_requests=2, max_context=200)
    assert answers(llm, [prompt(70), prompt(64, 1)], ASK) == answers(bare, [prompt(70), prompt(64, 1)], ASK)
    assert_nothing_held(llm.engine)


# ---- logits


@pytest.mark.parametrize(
    ("prefill", "chunk"),
    ((-1, None), (11, None), (10, 0), (10, -3), (5, 0), (1.5, None), ("3", None), (True, None), (5, 2.0)),
)
def test_bad_cuts_of_logits_are_refused(prefill: Any, chunk: Any, bare: LLM) -> None:
    with pytest.raises(RequestError, match="prefill .*chunk"):
        bare.logits(prompt(10), prefill, chunk)
    assert_nothing_held(bare.engine)


def test_bad_ids_for_logits_are_refused_and_pages_released(bare: LLM) -> None:
    for bad, words in (
        ([], "no tokens"),
        ([97], "vocabulary of 97"),
        ([-1], "vocabulary"),
        (prompt(513), "513 .* 512"),
    ):
        with pytest.raises(RequestError, match=words):
            bare.logits(bad)
    assert_nothing_held(bare.engine)


def test_logits_of_every_cut_are_the_same_and_pages_are_released(bare: LLM) -> None:
    ids = prompt(100)
    whole = bare.logits(ids)
    assert whole.shape == (100, 97) and whole.dtype == torch.float32
    for prefill, chunk in ((0, None), (1, 1), (50, 7), (100, 64), (100, 1000), (99, 99)):
        assert rel_rms(whole, bare.logits(ids, prefill, chunk)) < 1e-5  # f32 sums in other groups, through all layers
        assert_nothing_held(bare.engine)
    assert_same_bytes(whole, bare.logits(ids))
    assert bare.logits(ids[:1]).shape == (1, 97)


def test_pages_are_released_when_a_forward_of_logits_fails(bare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(bare.engine.runner, "forward", fail)
    with pytest.raises(RuntimeError, match="injected"):
        bare.logits(prompt(10))
    monkeypatch.undo()
    assert_nothing_held(bare.engine)
    assert bare.logits(prompt(10)).isfinite().all()


def test_an_fp8_cache_is_refused_where_the_card_has_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_format, "capability", lambda device: (8, 6))
    monkeypatch.setattr(kv_format, "HAS_TRITON", True)
    with pytest.raises(HybridKVError, match=r"compute capability 8.9 or higher.*has 8.6; use kv_dtype='bf16'"):
        check_fp8_cache(CacheConfig(kv_dtype="fp8"), torch.device("cuda"))
    check_fp8_cache(CacheConfig(kv_dtype="bf16"), torch.device("cuda"))
    monkeypatch.setattr(kv_format, "capability", lambda device: (8, 9))
    check_fp8_cache(CacheConfig(kv_dtype="fp8"), torch.device("cuda"))
