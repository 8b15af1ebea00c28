"""Held requests taken out of an engine and brought into another, or doubled: each goes on as if nothing had been."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interrupting import interrupted_at
from long_form import LONG, few
from safetensors import safe_open
from torch import Tensor

from cache.machine_model import snapshot as facts
from engine.driving import assert_nothing_held, prompt, run
from engine.test_interrupts import model_of
from hybridkv import CacheConfig, SamplingParams
from hybridkv.cache import KVCacheManager, Snapshot
from hybridkv.cache.session import Session
from hybridkv.cache.snapshot_file import with_checksum
from hybridkv.cache.tiers import HostTier
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction import Ada, Evictor, SnapKV
from hybridkv.eviction_record import EvictionRecord
from hybridkv.models import cache_schema
from hybridkv.request import Request

GREEDY = SamplingParams(max_tokens=9)
SEEDED = SamplingParams(max_tokens=9, temperature=1.0, seed=5)
PLAIN = dict(kv_dtype="f32", page_size=4)
EVICTING = PLAIN | dict(budget=12, window=4, recent=4)
CACHES = {
    "plain": PLAIN,
    "fp8": PLAIN | dict(kv_dtype="fp8"),
    "evicted": EVICTING,
    "evicted fp8": EVICTING | dict(kv_dtype="fp8"),
    "bounded": EVICTING | dict(bounded=True),
    "while decoding": EVICTING | dict(decode_every=3),
    "ada": EVICTING | dict(policy=Ada(SnapKV())),
}


pytestmark = pytest.mark.usefixtures("weights_measured_once")


def engine_with(kind: str, pool: int = 256, slots: int = 3, context: int = 256, **cache: Any) -> Engine:
    """A small engine on random weights; the same model for every call."""
    model, config = model_of(kind), CacheConfig(**{**PLAIN, **cache})
    schema = cache_schema(model.config, config, torch.float32)
    manager = KVCacheManager(schema, schema.pool_pages(1, pool), slots, context)
    evictor = Evictor.make(config, manager, scale=model.config.attention_scale)
    return Engine(model, manager, step_tokens=64, evictor=evictor)


def ask(engine: Engine, before: Request | None, words: int, params: SamplingParams = GREEDY) -> Request:
    """A turn: what was said before, and `words` more tokens."""
    said = before.tokens if before is not None else []
    turn = engine.add(said + prompt(words, words), params, hold=True, after=before)
    run(engine)
    assert turn.error is None
    return turn


def through_a_file(engine: Engine, request: Request, folder: Path, **conversation: Any) -> Session:
    engine.session(request, conversation).save(folder / "session")
    return Session.load(folder / "session")


def held_positions(engine: Engine, request: Request) -> list[list[int]]:
    return [at.tolist() for at in engine.manager.entry_positions(request.key, "attention")]


@pytest.mark.long
@few("cache, kind", [*CACHES], ("llama", "qwen3_5"))
def test_a_restored_request_goes_on_as_the_first_one_does(kind: str, cache: str, tmp_path: Path) -> None:
    here, there = engine_with(kind, **CACHES[cache]), engine_with(kind, **CACHES[cache] | dict(page_size=6))
    first = ask(here, None, 40)
    session = through_a_file(here, first, tmp_path, messages=["x"])
    assert session.conversation == {"messages": ["x"]} and session.nbytes > 0
    ask(there, None, 11)  # other pages, another slot
    back = there.restore_held(session)
    there.manager.check_integrity()
    assert (back.tokens, back.prompt_tokens, back.finish_reason) == (first.tokens, 40, first.finish_reason)
    assert back.finished and there.scheduler.held[-1] is back
    assert there.manager.position(back.key) == here.manager.position(first.key)
    assert bool(back.evictions) == ("budget" in CACHES[cache]) == (back.policy is not None)
    assert back.policy == first.policy
    for params in (SEEDED, GREEDY, SEEDED):
        position = there.manager.position(back.key)
        first, back = ask(here, first, 7, params), ask(there, back, 7, params)
        assert back.tokens == first.tokens
        assert back.cached_tokens == first.cached_tokens == position
        assert held_positions(here, first) == held_positions(there, back)
    for request in list(there.scheduler.held):
        there.abort(request)
    assert_nothing_held(there)


@pytest.mark.parametrize("cache", ("evicted", "bounded", "while decoding", "ada"))
@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_restored_request_that_is_preempted_later_drops_the_same_entries(
    kind: str, cache: str, tmp_path: Path
) -> None:
    here, there = engine_with(kind, **CACHES[cache]), engine_with(kind, **CACHES[cache])
    first = ask(here, ask(here, None, 40), 30)
    assert len(first.evictions) > 1
    back = there.restore_held(through_a_file(here, first, tmp_path))
    want = ask(here, first, 5, SEEDED)
    turn = there.add(back.tokens + prompt(5, 5), SEEDED, hold=True, after=back)
    for _ in range(3):
        there.step()
    there.scheduler.preempt(turn)
    run(there)
    assert turn.preemptions == 1 and turn.tokens == want.tokens
    assert held_positions(there, turn) == held_positions(here, want)


def test_without_the_records_a_preempted_request_would_hold_other_entries(tmp_path: Path) -> None:
    """What the test before this one guards is seen to matter."""
    here, there = engine_with("llama", **EVICTING), engine_with("llama", **EVICTING)
    first = ask(here, ask(here, None, 40), 30)
    back = there.restore_held(through_a_file(here, first, tmp_path))
    back.evictions = {}
    want = ask(here, first, 5)
    turn = there.add(back.tokens + prompt(5, 5), GREEDY, hold=True, after=back)
    there.step()
    there.scheduler.preempt(turn)
    run(there)
    assert held_positions(there, turn) != held_positions(here, want)


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_an_answer_that_was_stopped_early_is_restored_where_it_stood(kind: str, tmp_path: Path) -> None:
    """In the middle of its answer, of its prompt, and before it had begun."""
    for steps in (4, 1, 0):
        here, there = engine_with(kind), engine_with(kind)
        first = here.add(prompt(150, 1), GREEDY, hold=True)
        for _ in range(steps):
            here.step()
        here.stop(first)
        session = through_a_file(here, first, tmp_path)
        assert (session.snapshot is None) == (steps == 0) and session.finish_reason == "abort"
        back = there.restore_held(session)
        assert ask(there, back, 5, SEEDED).tokens == ask(here, first, 5, SEEDED).tokens


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_session_whose_cache_was_given_up_is_computed_again(kind: str, tmp_path: Path) -> None:
    here, there = engine_with(kind), engine_with(kind)
    first = ask(here, None, 40)
    want = ask(engine_with(kind), None, 40)
    here.scheduler.release_held(first)
    session = through_a_file(here, first, tmp_path)
    assert session.snapshot is None and not session.evictions
    back = there.restore_held(session)
    assert not there.manager.slot_of and back.tokens == want.tokens
    turn = ask(there, back, 6)
    assert turn.cached_tokens == 0 and turn.tokens == ask(here, first, 6).tokens


def test_a_compressed_cache_is_saved_where_its_pages_are_full_and_left_out_elsewhere(tmp_path: Path) -> None:
    """DeepSeek-V4 shares and saves at whole blocks alone; a session elsewhere is computed again, and right."""
    kept = []
    for words in (40, 41):
        here, there = (engine_with("deepseek_v4", kv_dtype="f32", page_size=64, block=16) for _ in range(2))
        first = ask(here, None, words)
        session, fork = through_a_file(here, first, tmp_path), here.fork_held(first)
        kept.append(session.snapshot is not None)
        back = there.restore_held(session)
        assert ask(there, back, 6).tokens == ask(here, first, 6).tokens == ask(here, fork, 6).tokens
    assert kept == [True, False]


# ---- forks


@pytest.mark.long
@few("cache, kind", [*CACHES], ("qwen3_5", "llama"))
def test_a_fork_and_its_origin_go_on_as_each_would_alone(kind: str, cache: str) -> None:
    engine, other = engine_with(kind, **CACHES[cache]), engine_with(kind, **CACHES[cache])
    first = ask(engine, None, 40)
    pages = engine.manager.free_pages()
    fork = engine.fork_held(first)
    assert engine.manager.free_pages() == pages, "a fork takes no pages of its own"
    engine.manager.check_integrity()
    a, b = ask(engine, first, 5, SEEDED), ask(engine, fork, 6, GREEDY)
    assert a.cached_tokens > 0 and b.cached_tokens > 0
    assert ask(other, ask(other, None, 40), 5, SEEDED).tokens == a.tokens
    assert ask(other, ask(other, None, 40), 6, GREEDY).tokens == b.tokens
    for request in list(engine.scheduler.held):
        engine.abort(request)
    assert_nothing_held(engine)


def test_a_fork_needs_no_slot() -> None:
    engine = engine_with("qwen3_5", slots=2)
    first = ask(engine, None, 20)
    running = engine.add(prompt(9, 1), SamplingParams(max_tokens=30))
    engine.step()
    free = engine.manager.free_pages()
    fork = engine.fork_held(first)
    assert engine.manager.free_slots == 1 and engine.scheduler.held == [first, fork], "both are frozen"
    assert engine.manager.free_pages()["attention"] >= free["attention"], "a fork copies no page"
    run(engine)
    assert running.finish_reason == "length"
    turn = ask(engine, fork, 5)
    assert turn.cached_tokens == 28
    assert turn.tokens == ask(engine_with("qwen3_5"), ask(engine_with("qwen3_5"), None, 20), 5).tokens
    assert ask(engine, first, 5).tokens == turn.tokens


def test_a_fork_of_a_cache_that_the_host_has_no_room_for_is_still_right() -> None:
    engine = engine_with("qwen3_5", slots=1)
    engine.manager.host = HostTier(0, engine.manager.device)
    first = ask(engine, None, 20)
    fork = engine.fork_held(first)
    assert engine.scheduler.held == [] and engine.scheduler.counts["given_up"] == 1
    turn = ask(engine, fork, 5)
    assert turn.cached_tokens == 0 and turn.stats["cache_given_up"] == 1
    assert turn.tokens == ask(engine_with("qwen3_5"), ask(engine_with("qwen3_5"), None, 20), 5).tokens


def test_a_fork_takes_the_slot_of_no_other_cache() -> None:
    engine = engine_with("llama", slots=2)
    old, first = ask(engine, None, 20), ask(engine, None, 21)
    fork = engine.fork_held(first)
    assert engine.scheduler.held == [old, first, fork]
    assert [ask(engine, held, 5).cached_tokens for held in (old, first, fork)] == [28, 29, 29]


def test_forks_that_share_every_page_give_way_to_a_request_that_needs_them() -> None:
    """Giving up one of them frees nothing: what both give back counts together."""
    engine = engine_with("llama", pool=64, slots=3)
    first = ask(engine, None, 50)
    forks = [first, engine.fork_held(first)]
    assert engine.scheduler.held == forks
    big = ask(engine, None, 48)
    assert big.finish_reason == "length" and engine.scheduler.held == [big]


def test_a_turn_in_pages_that_a_fork_shares_may_take_them_from_it() -> None:
    """The pool is full of shared pages: no copy can be made of the open ones, so the fork gives way."""
    engine = engine_with("llama", pool=60, slots=3)
    first = ask(engine, None, 46)  # 54 of 60 tokens are held, the last page of each stream is half full
    fork = engine.fork_held(first)
    turn = engine.add(first.tokens + prompt(4, 4), SamplingParams(max_tokens=1), hold=True, after=first)
    run(engine)
    assert turn.finish_reason == "length" and turn.cached_tokens == 54
    assert fork not in engine.scheduler.held


# ---- room


def test_restoring_gives_up_as_few_older_caches_as_will_do(tmp_path: Path) -> None:
    """12 pages of a stream are needed, 5 of 25 are free; the caches that are held have 6, 7 and 7."""
    source, engine = engine_with("llama"), engine_with("llama", pool=100, slots=4)
    session = through_a_file(source, ask(source, None, 40), tmp_path)
    old = [ask(engine, None, n) for n in (16, 17, 18)]
    back = engine.restore_held(session)
    assert engine.scheduler.held == [old[2], back]
    engine.manager.check_integrity()


def test_restoring_counts_what_forks_give_back_together(tmp_path: Path) -> None:
    """Two forks hold the same pages: one of them gives nothing back, both give all."""
    source, engine = engine_with("llama"), engine_with("llama", pool=64, slots=3)
    session = through_a_file(source, ask(source, None, 40), tmp_path)
    first = ask(engine, None, 50)
    engine.fork_held(first)
    back = engine.restore_held(session)
    assert engine.scheduler.held == [back]
    engine.manager.check_integrity()


@pytest.mark.parametrize("short", ("slots", "pages"))
def test_a_session_that_finds_no_room_is_refused_and_nothing_is_given_up(short: str, tmp_path: Path) -> None:
    source = engine_with("llama")
    session = through_a_file(source, ask(source, None, 40), tmp_path)
    engine = engine_with("llama", pool=96, slots=2 if short == "slots" else 4)
    old = ask(engine, None, 5) if short == "pages" else None
    running = [engine.add(prompt(30, n), SamplingParams(max_tokens=6)) for n in range(2)]
    engine.step()
    before = facts(engine.manager)
    with pytest.raises(RequestError, match="no room for the session's cache beside the 2 requests that are running"):
        engine.restore_held(session)
    assert facts(engine.manager) == before and engine.scheduler.held == ([old] if old else [])
    run(engine)
    assert all(r.finish_reason == "length" for r in running)
    engine.restore_held(session)


def test_a_session_larger_than_the_pool_or_the_context_is_refused(tmp_path: Path) -> None:
    source = engine_with("llama")
    session = through_a_file(source, ask(source, None, 40), tmp_path)
    with pytest.raises(RequestError, match="takes 48 pages of 'attention', the pool has 32"):
        engine_with("llama", pool=32).restore_held(session)
    with pytest.raises(RequestError, match="49 tokens, the context here holds 48"):
        engine_with("llama", context=48).restore_held(session)


def test_what_is_running_or_failed_is_neither_saved_nor_forked() -> None:
    engine = engine_with("llama")
    request = engine.add(prompt(9), GREEDY, hold=True)
    engine.step()
    for call in (engine.session, engine.fork_held):
        with pytest.raises(RequestError, match="still being written"):
            call(request)
    request.error, request.finish_reason = "broken", "error"
    engine.abort(request)
    for call in (engine.session, engine.fork_held):
        with pytest.raises(RequestError, match="failed cannot be"):
            call(request)
    assert_nothing_held(engine)


# ---- interrupts


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "apart"), (("session", 24), ("restore_held", 72), pytest.param("fork_held", 40, marks=pytest.mark.slow))
)
def test_an_interrupt_at_any_line_leaves_nothing_behind(call: str, apart: int, tmp_path: Path) -> None:
    source = engine_with("qwen3_5", **EVICTING)
    session = through_a_file(source, ask(source, None, 40), tmp_path)
    rng, line, seen = random.Random(1), 1, 0
    while True:
        engine = engine_with("qwen3_5", slots=3, **EVICTING)
        old, first = ask(engine, None, 10), ask(engine, None, 40)
        other = engine.add(prompt(8, 1), SamplingParams(max_tokens=5))
        engine.step()
        given: Any = session if call == "restore_held" else first
        if not interrupted_at(line, partial(getattr(engine, call), given)):
            break
        seen += 1
        engine.manager.check_integrity()
        run(engine)
        assert other.finish_reason == "length" and first in engine.scheduler.held
        getattr(engine, call)(given)
        for request in [*engine.scheduler.held, old]:
            engine.abort(request)
        assert_nothing_held(engine)
        line += rng.randint(1, 12 if LONG else apart)
    assert seen > 15


# ---- files that are not what they should be


def rewritten(path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> Path:
    """A copy of the file with its contents changed and a checksum that agrees."""
    with safe_open(path, "pt") as file:
        tensors, meta = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change(tensors, meta)
    del meta["sha256"]
    path = path.with_name("changed")
    path.write_bytes(b"".join(with_checksum({name: t.contiguous() for name, t in tensors.items()}, meta)))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine]:
    folder = tmp_path_factory.mktemp("saved")
    source = engine_with("llama", **EVICTING)
    through_a_file(source, ask(source, ask(source, None, 40), 30), folder)
    return folder / "session", engine_with("llama", **EVICTING)


def refusal(path: Path, engine: Engine) -> str:
    """What was said against the file, and nothing is taken; "": it was restored, whole."""
    before = facts(engine.manager)
    try:
        request = engine.restore_held(Session.load(path))
    except HybridKVError as problem:
        assert facts(engine.manager) == before and not engine.scheduler.held
        assert "\n" not in str(problem) and len(str(problem)) < 1000
        return str(problem)
    engine.manager.check_integrity()
    engine.abort(request)
    return ""


def _meta(key: str, value: str, tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    meta[key] = value


REQUEST = '{"prompt_tokens": %s, "finish_reason": "%s", "text": %s, "stopped": %s}'
BAD_META = [
    *[("session", text) for text in ("", "[]", "1", "{", "{}", "[" * 10**5, '{"prompt_tokens": NaN}', "9" * 5000)],
    *[("session", REQUEST % (n, "stop", '""', "null")) for n in ("0", "-1", "80000", "1.5", "true", '"4"', "null")],
    *[("session", REQUEST % (5, end, '""', "null")) for end in ("error", "", "other")],
    *[("session", REQUEST % (5, "stop", text, "null")) for text in ("null", "1", "[]")],
    ("session", REQUEST % (5, "stop", '""', "3")),
    *[("session", REQUEST % (5, "stop", '""', f'null, "policy": {text}')) for text in ("3", "[]", "true")],
    *[("conversation", text) for text in ("", "[]", "null", "{" * 10**5)],
    *[("about", text) for text in ("", "[]", '"x"')],
    *[("position", text) for text in ("", "x", "1", "100", "9" * 18)],
    ("compacted_at", "3"),
    ("model", "0" * 64),
    ("fingerprint", "0" * 64),
    ("version", "2"),
    ("version", "4"),
    ("format", "other"),
]


@pytest.mark.parametrize(("key", "value"), BAD_META, ids=lambda v: v[:40])
def test_odd_metadata_is_refused(key: str, value: str, saved: tuple[Path, Engine]) -> None:
    path, engine = saved
    assert refusal(rewritten(path, partial(_meta, key, value)), engine)


def test_a_file_from_before_policies_had_their_names_in_it_is_read(saved: tuple[Path, Engine]) -> None:
    path, engine = saved
    assert Session.load(path).policy is not None
    older = rewritten(path, lambda _, meta: meta.update(session=json.dumps(without_policy(meta))))
    assert refusal(older, engine) == "" and Session.load(older).policy is None


def without_policy(meta: dict[str, str]) -> dict[str, Any]:
    return {key: value for key, value in json.loads(meta["session"]).items() if key != "policy"}


@pytest.mark.parametrize("key", ("session", "conversation", "about", "model", "position", "fingerprint"))
def test_missing_metadata_is_refused(key: str, saved: tuple[Path, Engine]) -> None:
    path, engine = saved
    assert refusal(rewritten(path, lambda _, meta: meta.pop(key) and None), engine)


def _evicted(tensors: dict[str, Tensor], group: str = "evicted") -> str:
    return max(name for name in tensors if name.startswith(f"{group}/"))


def _change(name: str, how: Callable[[Tensor], Tensor], tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    found = name if name in tensors else _evicted(tensors, name)
    tensors[found] = how(tensors[found])


def _moved(name: str, target: str, tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
    tensors[target.format(_evicted(tensors, name).split("/")[1])] = tensors.pop(_evicted(tensors, name))


BAD_TENSORS = {
    "tokens past the vocabulary": partial(_change, "session/tokens", lambda t: t + 97),
    "negative tokens": partial(_change, "session/tokens", lambda t: t - 97),
    "fewer tokens": partial(_change, "session/tokens", lambda t: t[:60]),
    "more tokens": partial(_change, "session/tokens", lambda t: t.repeat(9)),
    "tokens as floats": partial(_change, "session/tokens", lambda t: t.float()),
    "tokens in rows": partial(_change, "session/tokens", lambda t: t[None]),
    "no tokens": partial(_change, "session/tokens", lambda t: t[:0]),
    "longer": partial(_change, "evicted_lengths", lambda t: t + 1),
    "negative": partial(_change, "evicted_lengths", lambda t: -t),
    "huge": partial(_change, "evicted_lengths", lambda t: t + 2**40),
    "lengths as floats": partial(_change, "evicted_lengths", lambda t: t.float()),
    "lengths of other heads": partial(_change, "evicted_lengths", lambda t: t[:, :1]),
    "lengths of very many": partial(_change, "evicted_lengths", lambda t: t[:1, :1].expand(1000, 1000)),
    "no lengths": partial(_change, "evicted_lengths", lambda t: t[:0]),
    "data of another size": partial(_change, "evicted", lambda t: t[1:]),
    "data as floats": partial(_change, "evicted", lambda t: t.float()),
    "data in rows": partial(_change, "evicted", lambda t: t[None]),
    "all dropped": partial(_change, "evicted", lambda t: torch.zeros_like(t)),
    "another form": partial(_moved, "evicted", "evicted/{}/other"),
    "form without a name": partial(_moved, "evicted", "evicted/{}"),
    "position past the tokens": partial(_moved, "evicted", "evicted/99999/mask"),
    "position that is none": partial(_moved, "evicted", "evicted/x/mask"),
    "lengths elsewhere": partial(_moved, "evicted_lengths", "evicted_lengths/1"),
    "another tensor": partial(_moved, "evicted_lengths", "session/{}"),
    "an unknown group": partial(_moved, "evicted_lengths", "other/{}"),
}


@pytest.mark.parametrize("how", BAD_TENSORS)
def test_odd_tensors_are_refused(how: str, saved: tuple[Path, Engine]) -> None:
    path, engine = saved
    assert not refusal(path, engine)
    assert refusal(rewritten(path, BAD_TENSORS[how]), engine)


def test_missing_records_are_refused(saved: tuple[Path, Engine]) -> None:
    path, engine = saved

    def drop_all(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
        for name in [name for name in tensors if name.startswith("evicted")]:
            del tensors[name]

    def drop_one(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
        del tensors[_evicted(tensors)], tensors[_evicted(tensors, "evicted_lengths")]

    for change in (drop_all, drop_one):
        assert "records of evictions do not lead" in refusal(rewritten(path, change), engine)


def test_records_that_stand_for_far_more_than_the_file_holds_are_refused_before_they_are_unpacked(
    saved: tuple[Path, Engine],
) -> None:
    """A million streams of a hundred entries, none of them dropped: 100 MB of mask from 8 MB, and again for each."""
    path, engine = saved

    def change(tensors: dict[str, Tensor], meta: dict[str, str]) -> None:
        for name in [name for name in tensors if name.startswith("evicted")]:
            del tensors[name]
        for at in (40, 70):
            tensors[f"evicted_lengths/{at}"] = torch.full((1000, 1000), at)
            tensors[f"evicted/{at}/dropped"] = torch.zeros(0, dtype=torch.int32)

    assert "does not fit what was held then" in refusal(rewritten(path, change), engine)


def test_a_damaged_file_is_refused_wherever_it_is_damaged(saved: tuple[Path, Engine]) -> None:
    path, engine = saved
    whole, broken = path.read_bytes(), path.with_name("broken")
    header = int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    for cut in (0, 4, 8, 20, 7 + header, 8 + header, len(whole) // 2, len(whole) - 1):
        broken.write_bytes(whole[:cut])
        assert refusal(broken, engine)
    for at in [*range(8), *rng.integers(8, 8 + header, 80), *rng.integers(8 + header, len(whole), 40)]:
        altered = bytearray(whole)
        altered[at] ^= 1 << int(rng.integers(0, 8))
        broken.write_bytes(altered)
        assert refusal(broken, engine)
    broken.write_bytes(whole + b"\0")
    assert refusal(broken, engine)


def test_a_file_is_refused_by_its_header_before_it_is_read(saved: tuple[Path, Engine], tmp_path: Path) -> None:
    """A terabyte that is not there: the length is looked at, not the content."""
    path, engine = saved
    large = tmp_path / "large"
    large.write_bytes(path.read_bytes())
    with large.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(HybridKVError, match="has 1099511627776 bytes, and no more than 1000000"):
        Session.load(large, room=1000000)

    def other_model(model: str, about: dict[str, str], files: str) -> None:
        raise RequestError("another model")

    with pytest.raises(RequestError, match="another model"):
        Session.load(large, other_model)


def test_texts_that_look_like_the_checksum_do_no_harm(tmp_path: Path) -> None:
    engine = engine_with("llama")
    text = '"sha256":"' + "0" * 64 + '"' + "0" * 200
    session = through_a_file(engine, ask(engine, None, 9), tmp_path, messages=[text], more={text: text})
    assert session.conversation == {"messages": [text], "more": {text: text}}


def test_a_snapshot_is_no_session_and_a_session_is_a_snapshot(saved: tuple[Path, Engine], tmp_path: Path) -> None:
    path, _ = saved
    snapshot = Snapshot.load(path)
    assert snapshot.position == 87
    snapshot.save(tmp_path / "plain")
    assert Snapshot.load(tmp_path / "plain").position == 87
    with pytest.raises(HybridKVError, match="not a session"):
        Session.load(tmp_path / "plain")
    Session("", {}, [1, 2], 1).save(tmp_path / "empty")
    with pytest.raises(HybridKVError, match="without its cache"):
        Snapshot.load(tmp_path / "empty")


@pytest.mark.parametrize("other", (dict(kv_dtype="fp8"), dict(window=8), dict(budget=None)), ids=str)
def test_another_cache_refuses_and_says_what_differs(other: dict, saved: tuple[Path, Engine]) -> None:
    path, _ = saved
    found = refusal(path, engine_with("llama", **EVICTING | other))
    assert "stores other things" in found and ("in f32 there and" in found or "queries" in found), found


def test_another_model_refuses_and_says_what_differs(saved: tuple[Path, Engine]) -> None:
    path, engine = saved
    other = engine_with("qwen3_5", **EVICTING)
    other.manager.model_fingerprint = lambda: "a" * 64
    assert "architecture llama there and qwen3_5 here" in refusal(path, other)
    same = engine_with("llama", **EVICTING)
    same.manager.model_fingerprint = lambda: "a" * 64
    assert "other weights (fingerprint - there and aaaaaaaaaaaa here)" in refusal(path, same)


def test_places_that_cannot_be_written_are_refused_in_a_line(tmp_path: Path) -> None:
    session = Session("", {}, [1, 2], 1)
    for place, words in (
        (tmp_path, "a folder has that name"),
        (tmp_path / "none" / "a", "there is no folder"),
        (tmp_path / ("a" * 300), "name too long"),
        (tmp_path / "a\0b", "null"),
    ):
        with pytest.raises(HybridKVError, match=words) as problem:
            session.save(place)
        assert "\n" not in str(problem.value)
        with pytest.raises(HybridKVError, match="cannot be read"):
            Session.load(place)
    with pytest.raises(HybridKVError, match="plain JSON"):
        replace(session, conversation={"a": object()}).save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


# ---- records


@pytest.mark.parametrize("keep", (0, 1, 30, 63, 64))
def test_a_session_is_sent_whatever_an_eviction_has_kept(keep: int) -> None:
    """Nothing and everything too, whose records are packed into no numbers at all."""
    lists = [[np.arange(min(keep, n)) for n in layer] for layer in ((64, 3), (64, 64))]
    record = EvictionRecord(lists, np.array([[64, 3], [64, 64]]))
    sent = Session("m", {}, list(range(99)), 70, evictions={64: record}, going={}).to_buffers()
    back = Session.from_buffers(sent.seal()).evictions[64]
    assert [[e.tolist() for e in layer] for layer in back] == [[e.tolist() for e in layer] for layer in lists]


@pytest.mark.parametrize("keep", (1, 5, 30, 58, 64))
def test_a_record_survives_its_packed_form(keep: int) -> None:
    rng = np.random.default_rng(keep)
    lengths = np.array([[64, 60], [64, 3]])
    lists = [[np.sort(rng.permutation(n)[:keep]) for n in layer] for layer in lengths.tolist()]
    record = EvictionRecord(lists, lengths)
    for _ in range(2):
        back = EvictionRecord.of_packed(*record.packed())
        assert [[e.tolist() for e in layer] for layer in back] == [[e.tolist() for e in layer] for layer in lists]
        assert (back.kept, back.even) == (record.kept, record.even)
        assert back.counts().tolist() == record.counts().tolist() == [[len(e) for e in layer] for layer in lists]
        assert (back.lengths == lengths).all()
        record.pack()
