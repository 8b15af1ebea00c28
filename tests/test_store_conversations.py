"""Conversations in a store: saved under a name, loaded by another model, forked; each goes on token for token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cache import manifest
from hybridkv.conversation import Conversation
from hybridkv.errors import RequestError

GREEDY = SamplingParams(max_tokens=10)
SEEDED = SamplingParams(max_tokens=10, temperature=1.0, seed=3)
EVICTING = dict(budget=24, window=8, recent=8)
CACHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": dict(kv_dtype="bf16"),
    "fp8": dict(kv_dtype="fp8"),
    "bf16 state": dict(state_dtype="bf16"),
    "evicted": EVICTING,
    "bounded fp8": EVICTING | dict(kv_dtype="fp8", bounded=True),
}
FAMILIES = ("llama", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_next")
CASES = [*((kind, "plain") for kind in FAMILIES), *(("qwen3_5", cache) for cache in ("fp8", "evicted", "bounded fp8"))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """`model("llama", "evicted")`: opened once for each; `number` tells several alike apart."""
    folders: dict[str, Path] = {}
    opened: dict[Any, LLM] = {}

    def build(kind: str, cache: str = "plain", number: int = 0, page_size: int = 8, **more: Any) -> LLM:
        key = (kind, cache, number, page_size, *sorted(more.items()))
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            tiny.save(kind, folders[kind])
            write_tokenizer(folders[kind], TEMPLATE)
        if key not in opened:
            config = CacheConfig(**{"kv_dtype": "f32", "page_size": page_size, **CACHES[cache]})
            more = {"max_requests": 3, "max_context": 512, "exact": True, **more}
            opened[key] = LLM(folders[kind], device="cpu", dtype="float32", cache=config, **more)
        return opened[key]

    return build


def in_store(llm: LLM, folder: Path) -> LLM:
    from hybridkv.cache.store import Store

    llm.store = Store(folder)
    return llm


def say(talk: Conversation, text: str, params: SamplingParams | None = None) -> list[int]:
    talk.params = params or talk.params
    list(talk.send(text))
    assert talk.last is not None
    return talk.last.token_ids


def turns(talk: Conversation) -> list[list[int]]:
    return [say(talk, "And now?", SEEDED), say(talk, "Go on", GREEDY)]


def cached(talk: Conversation) -> int:
    assert talk._request is not None
    return talk._request.cached_tokens


def close(*talks: Conversation) -> None:
    for talk in talks:
        talk.close()
    for llm in {talk.llm for talk in talks}:
        assert_nothing_held(llm.engine)


def begun(llm: LLM) -> Conversation:
    talk = Conversation(llm, "Be brief, but say all that there is to say of it.", GREEDY)
    say(talk, "Hello, how are you? I am well."), say(talk, "Really?")
    return talk


@pytest.mark.parametrize(("kind", "cache"), CASES)
def test_a_loaded_conversation_goes_on_as_the_one_that_stayed(
    kind: str, cache: str, model: Callable, tmp_path: Path
) -> None:
    """Also in pages of another size, with fewer slots and a longer context."""
    here = in_store(model(kind, cache), tmp_path / "store")
    there = in_store(model(kind, cache, 1, page_size=16, max_requests=2, max_context=640), tmp_path / "store")
    talk = begun(here)
    assert bool(talk._request and talk._request.evictions) == (cache in ("evicted", "bounded fp8"))
    here.save(talk, "talk")
    other = there.load("talk", GREEDY)
    assert other.messages == talk.messages and other.last.token_ids == talk.last.token_ids
    want, found = turns(talk), turns(other)
    assert found == want and other.messages == talk.messages
    assert cached(other) == cached(talk) > 0, "the cache was computed again"
    close(talk, other)


def test_a_second_save_writes_only_what_is_new(
    model: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "PART_BYTES", 64 << 10)  # 64 tokens; this small cache would be one part
    llm = in_store(model("qwen3_5"), tmp_path)
    talk = begun(llm)
    say(talk, "A long beginning. " * 9)
    first = llm.save(talk, "talk")
    assert first > 0 and llm.save(talk, "talk") == 0 and llm.save(talk, "copy") == 0
    say(talk, "More")
    again = llm.save(talk, "talk")
    assert 0 < again < first
    close(talk)


@pytest.mark.parametrize(("cache", "part"), [("bf16", "kv_dtype"), ("fp8", "kv_dtype"), ("bf16 state", "state_dtype")])
def test_another_dtype_is_refused_or_converted(cache: str, part: str, model: Callable, tmp_path: Path) -> None:
    here = in_store(model("qwen3_5", exact=False), tmp_path)
    other = in_store(model("qwen3_5", cache, exact=False), tmp_path)
    talk = begun(here)
    here.save(talk, "talk")
    with pytest.raises(RequestError, match=f"another {part}.*convert=True"):
        other.load("talk")
    assert_nothing_held(other.engine)
    back = other.load("talk", GREEDY, convert=True)
    say(back, "And now?")
    assert cached(back) > 0
    other.save(back, "again")
    assert part in other.open_store().manifest("again").converted[0]
    close(talk, back)
