"""Requests that move: an answer that was begun in one engine goes on in another, token for token."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from long_form import LONG, few

from engine.driving import assert_nothing_held, count_tokens, prompt, run
from engine.test_sessions import CACHES, EVICTING, ask, engine_with, held_positions, interrupted_at
from hybridkv import SamplingParams
from hybridkv.cache.buffers import FORMAT, Buffers, parse_head
from hybridkv.cache.session import Session
from hybridkv.cache.snapshot import Snapshot, restore_request, snapshot_request
from hybridkv.config import EvictionConfig
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.request import Request
from hybridkv.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("weights_measured_once")

LONG_ANSWER = 24
NAMED = CACHES | {"ada": EVICTING | dict(policy="heads")}  # no policy that is code
PARAMS = {
    "greedy": SamplingParams(max_tokens=LONG_ANSWER),
    "seeded": SamplingParams(max_tokens=LONG_ANSWER, temperature=1.2, top_p=0.95, seed=11),
    "own seed": SamplingParams(max_tokens=LONG_ANSWER, temperature=1.5, top_k=40),
    "penalties": SamplingParams(
        max_tokens=LONG_ANSWER, temperature=0.8, seed=3, repetition_penalty=1.3, frequency_penalty=0.5,
        logit_bias={5: 3.0}, logprobs=2,
    ),
}  # fmt: skip


def sent(session: Session) -> Session:
    """As another process would get it: bytes, and nothing else."""
    buffers = session.to_buffers().seal()
    copied = [torch.frombuffer(bytearray(part.numpy().tobytes() or b"\0"), dtype=torch.uint8) for part in buffers.parts]
    parts = [copy[: part.nbytes] for copy, part in zip(copied, buffers.parts, strict=True)]
    return Session.from_buffers(Buffers(parse_head(buffers.head_bytes), parts))


def begun(engine: Engine, answer: int, params: SamplingParams, words: int = 40, **how: Any) -> Request:
    """A request with so many tokens of its answer."""
    request = engine.add(prompt(words, words), params, **how)
    for _ in range(200):
        if request.answer_tokens >= answer:
            return request
        engine.step()
    raise AssertionError("no answer came")


def gone_on(engine: Engine, request: Request) -> Request:
    run(engine)
    assert request.finish_reason == "length" and request.error is None
    return request


@few("cache, params", list(NAMED), list(PARAMS))
@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_an_answer_goes_on_elsewhere_with_the_same_tokens(kind: str, cache: str, params: str) -> None:
    here, there = engine_with(kind, **NAMED[cache]), engine_with(kind, **NAMED[cache] | dict(page_size=6))
    ask(there, None, 11)  # other pages, another slot
    first = begun(here, 7, PARAMS[params])
    session = sent(here.export(first))
    assert session.snapshot is not None and session.snapshot.position == len(session.tokens) - 1
    moved, computed = there.resume(session), count_tokens(there)
    assert moved.seed == first.seed and moved.generated == session.tokens[40:]
    gone_on(there, moved)
    assert computed == [1] * (LONG_ANSWER - 7), "something was read again"
    assert moved.cached_tokens == moved.stats["cached_tokens"] == 40
    want = gone_on(here, first)
    assert moved.tokens == want.tokens and moved.logprobs == want.logprobs
    assert list(moved.evictions) == list(want.evictions) and moved.policy == want.policy
    for request in list(there.scheduler.held):
        there.abort(request)
    assert_nothing_held(there)


def test_a_seed_that_is_not_sent_gives_another_answer() -> None:
    """What the test before this one guards is seen to matter."""
    here, there = engine_with("llama"), engine_with("llama")
    session = sent(here.export(begun(here, 7, PARAMS["own seed"])))
    assert session.going is not None
    other = replace(session, going=session.going | {"seed": session.going["seed"] ^ 1})
    assert gone_on(there, there.resume(other)).tokens != gone_on(there, there.resume(session)).tokens


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_requests_move_from_wherever_they_stand(kind: str) -> None:
    """Not yet admitted, in the middle of the prompt, preempted, and finished with the cache held."""
    params = PARAMS["seeded"]
    reference = engine_with(kind, **EVICTING)
    want = gone_on(reference, reference.add(prompt(150, 150), params)).tokens
    for state in ("waiting", "reading", "preempted"):
        here, there = engine_with(kind, **EVICTING), engine_with(kind, **EVICTING)
        first = here.add(prompt(150, 150), params)
        for _ in range({"waiting": 0, "reading": 1, "preempted": 9}[state]):
            here.step()
        if state == "preempted":
            here.scheduler.preempt(first)
            assert first.evictions
        session = sent(here.export(first))
        assert (session.snapshot is not None) == (state == "reading")
        here.abort(first)
        assert_nothing_held(here)
        moved = gone_on(there, there.resume(session))
        assert moved.tokens == want and moved.cached_tokens == (64 if state == "reading" else 0)
        assert_nothing_held(there)


@pytest.mark.parametrize("kind", ("llama", "qwen3_5"))
def test_a_moved_request_that_is_preempted_later_drops_the_same_entries(kind: str) -> None:
    here, there = engine_with(kind, **CACHES["while decoding"]), engine_with(kind, **CACHES["while decoding"])
    first = begun(here, 10, PARAMS["greedy"], hold=True)
    assert len(first.evictions) > 1
    moved = there.resume(sent(here.export(first)), hold=True)
    there.step()
    there.step()
    there.scheduler.preempt(moved)
    gone_on(there, moved)
    gone_on(here, first)
    assert moved.preemptions == 1 and moved.tokens == first.tokens
    assert held_positions(there, moved) == held_positions(here, first)


def test_a_request_moves_on_and_back_again() -> None:
    engines = [engine_with("qwen3_5", **EVICTING) for _ in range(2)]
    reference = engine_with("qwen3_5", **EVICTING)
    want = gone_on(reference, reference.add(prompt(40, 40), PARAMS["penalties"])).tokens
    request, at = begun(engines[0], 3, PARAMS["penalties"]), 0
    for _ in range(5):
        for _ in range(3):
            engines[at].step()
        session = sent(engines[at].export(request))
        engines[at].abort(request)
        assert_nothing_held(engines[at])
        at = 1 - at
        request = engines[at].resume(session)
    assert gone_on(engines[at], request).tokens == want


def test_on_a_gpu_a_step_in_flight_is_waited_for_first() -> None:
    here, there = engine_with("qwen3_5"), engine_with("qwen3_5")
    here.launches_ahead = True  # as on a GPU
    first = begun(here, 4, PARAMS["greedy"])
    with pytest.raises(RequestError, match="in flight"):
        here.export(first)
    here.drain()
    moved = there.resume(sent(here.export(first)))
    assert gone_on(there, moved).tokens == gone_on(here, first).tokens


def test_text_stop_strings_and_held_back_text_are_where_they_were(
    engine_of: Callable[..., Engine], ascii_tokenizer: Tokenizer
) -> None:
    here, there = (engine_of("llama", tokenizer=ascii_tokenizer) for _ in range(2))
    plain = here.add(prompt(20), SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=2))
    run(here)
    text = plain.text.text
    stop = text[12:16]  # its first half is held back when the request moves
    params = replace(plain.params, stop=(stop,), min_tokens=2)
    first = begun_with(here, prompt(20), params, 14)
    assert len(first.text.text) < 14
    session = sent(here.export(first))
    moved = there.resume(session)
    assert moved.text.text == session.text == first.text.text
    run(there)
    assert moved.finish_reason == "stop" and moved.text.stopped == stop
    assert moved.text.text == text[: text.index(stop)]


def begun_with(engine: Engine, tokens: list[int], params: SamplingParams, answer: int) -> Request:
    request = engine.add(tokens, params)
    while request.answer_tokens < answer and not engine.idle:
        engine.step()
    assert request.answer_tokens == answer
    return request


def test_another_tokenizer_is_refused(engine_of: Callable[..., Engine], ascii_tokenizer: Tokenizer) -> None:
    here = engine_of("llama", tokenizer=ascii_tokenizer)
    session = sent(here.export(begun_with(here, prompt(20), PARAMS["greedy"], 5)))
    there = engine_of("llama", tokenizer=ascii_tokenizer)
    with pytest.raises(RequestError, match="tokenizers"):
        there.resume(replace(session, text="?" + session.text[:-1] + "~~"))
    assert_nothing_held(there)


def test_code_is_not_sent_and_has_to_be_given_again(engine_of: Callable[..., Engine]) -> None:
    def hook(generated: list[int], logits: torch.Tensor) -> None:
        logits[len(generated) % 7] += 100.0

    params = SamplingParams(max_tokens=12, logits_hook=hook)
    here, there = engine_of("llama"), engine_of("llama")
    first = begun_with(here, prompt(20), params, 5)
    session = sent(here.export(first))
    with pytest.raises(RequestError, match="logits_hook"):
        there.resume(session)
    assert_nothing_held(there)
    moved = there.resume(session, params)
    run(there), run(here)
    assert moved.tokens == first.tokens and moved.generated[5:] == [(i % 7) for i in range(5, 12)]


def test_a_grammar_goes_on_where_it_was(engine_of: Callable[..., Engine], ascii_tokenizer: Tokenizer) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=30, structured_outputs={"regex": "[ab]{4}-[cd]{5}"}, temperature=1.0, seed=4)
    here, there = (engine_of("llama", tokenizer=ascii_tokenizer, eos=frozenset({2})) for _ in range(2))
    first = begun_with(here, prompt(20), params, 6)
    moved = there.resume(sent(here.export(first)), params)
    run(here), run(there)
    assert moved.tokens == first.tokens and moved.finish_reason == first.finish_reason == "stop"
    assert len(moved.text.text) == 10


def test_an_answer_that_is_over_with_its_last_token_ends_at_once(engine_of: Callable[..., Engine]) -> None:
    """As where a node reads a prompt and samples one token, and that is the end token for who goes on."""
    here, there = engine_of("qwen3_5"), engine_of("qwen3_5")
    first = here.add(prompt(30), SamplingParams(max_tokens=1), hold=True)
    run(here)
    session = sent(here.export(first))
    assert session.snapshot is not None and first.finish_reason == "length"
    for params, reason in ((SamplingParams(max_tokens=1), "length"),
                           (SamplingParams(stop_token_ids=(first.tokens[-1],)), "stop")):  # fmt: skip
        moved = there.resume(session, params)
        assert moved.finished and moved.finish_reason == reason
        assert_nothing_held(there)
    longer = there.resume(session, SamplingParams(max_tokens=9))
    want = here.add(prompt(30), SamplingParams(max_tokens=9))
    run(there), run(here)
    assert longer.tokens == want.tokens and longer.cached_tokens == 30
    here.abort(first)


@pytest.mark.long
@pytest.mark.parametrize("call", ("export", "resume"))
def test_an_interrupt_at_any_line_leaves_nothing_behind(call: str) -> None:
    here = engine_with("qwen3_5", **EVICTING)
    session = sent(here.export(begun(here, 5, PARAMS["seeded"])))
    rng, line, seen = random.Random(1), 1, 0
    while True:
        engine = engine_with("qwen3_5", **EVICTING)
        other = begun(engine, 3, PARAMS["greedy"], words=12)
        given: Any = session if call == "resume" else other
        if not interrupted_at(line, partial(getattr(engine, call), given)):
            break
        seen += 1
        engine.manager.check_integrity()
        run(engine)
        assert other.finish_reason == "length" and not engine.scheduler.held
        assert_nothing_held(engine)
        line += rng.randint(1, 12 if LONG else {"export": 80, "resume": 300}[call])
    assert seen > 5


# ---- refused


def test_several_answers_to_one_prompt_and_failed_ones_stay() -> None:
    engine = engine_with("llama")
    several = engine.add(prompt(20), SamplingParams(max_tokens=4, n=2))
    with pytest.raises(RequestError, match="n=1"):
        engine.export(several)
    run(engine)
    bad = engine.add(prompt(20), SamplingParams(max_tokens=4))
    engine.step()
    bad.finish_reason, bad.error = "error", "broken"
    with pytest.raises(RequestError, match="broken"):
        engine.export(bad)
    engine.abort(bad)
    assert_nothing_held(engine)


def damaged(buffers: Buffers) -> dict[str, Buffers]:
    """What may go wrong on the way, by the words of the refusal."""
    head, parts = buffers.head, buffers.parts
    large = max(range(len(parts)), key=lambda i: parts[i].nbytes)
    flipped = parts[large].clone()
    flipped[flipped.numel() // 2] ^= 1

    def tensors(change: Callable[[list], list]) -> dict[str, Any]:
        listed = [list(each) for each in head["tensors"]]
        listed[large] = change(listed[large])
        return head | {"tensors": listed}

    def parts_with(part: torch.Tensor | None) -> list[torch.Tensor]:
        return [*parts[:large], *([] if part is None else [part]), *parts[large + 1 :]]

    return {
        "checksum": Buffers(head, parts_with(flipped)),
        "as long as": Buffers(head, parts_with(parts[large][:-1])),
        "or some are missing": Buffers(head, parts_with(None)),
        f"format is not {FORMAT}": Buffers(head | {"format": "other"}, parts),
        "version '2'": Buffers(head | {"version": 2}, parts),
        "too large": Buffers(tensors(lambda t: [t[0], t[1], [1 << 40, 1 << 40]]), parts),
        "dtype that is not known": Buffers(tensors(lambda t: [t[0], "pickle", t[2]]), parts),
        "same name": Buffers(tensors(lambda t: [head["tensors"][large - 1][0], *t[1:]]), parts),
        "not those of the tensors": Buffers(head | {"sha256": head["sha256"][:-1]}, parts),
        "no object of texts": Buffers(head | {"meta": {"model": 3}}, parts),
    }


def test_what_was_damaged_on_the_way_is_refused_and_nothing_is_taken() -> None:
    here, there = engine_with("qwen3_5", **EVICTING), engine_with("qwen3_5", **EVICTING)
    request = begun(here, 5, PARAMS["seeded"])
    session, snapshot = here.export(request), snapshot_request(here.manager, request.key)
    for buffers, read in ((session.to_buffers(), Session.from_buffers), (snapshot.to_buffers(), Snapshot.from_buffers)):
        buffers = buffers.seal()
        read(buffers)  # as it is, it can be read
        for words, other in damaged(buffers).items():
            with pytest.raises(HybridKVError, match=words):
                read(other)
        with pytest.raises(HybridKVError, match="can belong to a request here"):
            read(buffers, room=buffers.nbytes // 2)
        with pytest.raises(HybridKVError, match=", not a s"):
            read((snapshot if read is Session.from_buffers else session).to_buffers())
    assert there.manager.free_slots == there.manager.slots
    assert_nothing_held(there)
    restore_request(there.manager, Snapshot.from_buffers(snapshot.to_buffers().seal()), "back")
    there.manager.release_request("back")


def test_a_foreign_request_is_refused_and_nothing_is_taken() -> None:
    here = engine_with("llama", **EVICTING)
    session = sent(here.export(begun(here, 5, PARAMS["seeded"])))
    assert session.going is not None and session.snapshot is not None
    going, other_weights = session.going, engine_with("llama", **EVICTING)
    other_weights.manager.model_fingerprint = lambda: "f" * 64
    for engine, words in (
        (other_weights, "another model"),
        (engine_with("qwen3_5", **EVICTING), "stores other things"),
        (engine_with("llama", **EVICTING | dict(kv_dtype="fp8")), "stores other things"),
        (engine_with("llama", context=32, **EVICTING), "the context here holds 32"),
        (engine_with("llama"), "without a budget|other things"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.resume(session)
        assert_nothing_held(engine)
    there = engine_with("llama", **EVICTING)
    for change, words in (
        ({"going": None}, "has ended"),
        ({"going": going | {"seed": -1}}, "seed"),
        ({"going": going | {"params": {"temperature": "hot"}}}, "no sampling parameters"),
        ({"going": going | {"params": going["params"] | {"max_tokens": 0}}}, "max_tokens"),
        ({"going": going | {"params": going["params"] | {"never": 0}}}, "never"),
        ({"going": going | {"eviction": {"policy": "never"}}}, "eviction"),
        ({"going": going | {"logprobs": [None]}}, "log probabilities"),
        ({"going": going | {"params": going["params"] | {"logprobs": 1}}}, "were not sent"),
        ({"going": going | {"params": going["params"] | {"max_tokens": 3}}}, "would have ended"),
        ({"tokens": [*session.tokens[:-1], 1 << 20]}, "outside the vocabulary"),
        ({"evictions": {}}, "records of evictions"),
        ({"snapshot": replace(session.snapshot, position=session.snapshot.position - 1)}, "do not agree"),
    ):
        with pytest.raises(RequestError, match=words):
            there.resume(replace(session, **change))  # type: ignore[arg-type]
        assert_nothing_held(there)
    with pytest.raises(RequestError, match="n=1"):
        there.resume(session, SamplingParams(n=2))
    assert gone_on(there, there.resume(session)).tokens == gone_on(here, here.scheduler.running[0]).tokens


def test_a_policy_of_ones_own_is_given_again() -> None:
    cache = CACHES["ada"]
    here, there = engine_with("llama", **cache), engine_with("llama", **cache)
    config = EvictionConfig(budget=12, window=4, recent=4, policy=cache["policy"])
    first = begun(here, 5, PARAMS["greedy"], eviction=config)
    session = sent(here.export(first))
    with pytest.raises(RequestError, match="give it again"):
        there.resume(session)
    moved = there.resume(session, eviction=config)
    assert gone_on(there, moved).tokens == gone_on(here, first).tokens


def test_without_room_for_its_cache_a_request_is_refused_and_goes_on_without_it() -> None:
    here, there = engine_with("qwen3_5"), engine_with("qwen3_5", pool=64)
    session = sent(here.export(begun(here, 5, PARAMS["seeded"])))
    other = there.add(prompt(40), SamplingParams(max_tokens=20))
    there.step()
    with pytest.raises(RequestError, match="no room"):
        there.resume(session)
    moved = there.resume(replace(session, snapshot=None))
    run(there)
    assert other.finish_reason == "length" and moved.cached_tokens == 0
    assert moved.tokens == gone_on(here, here.scheduler.running[0]).tokens
    assert_nothing_held(there)
