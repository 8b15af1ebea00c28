"""One model on one rank and over two, in exact mode: what is read, saved or begun over one number goes on over the
other, also from server to server.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from long_form import spread
from tiny_ranks import saved_model

from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, Conversation, SamplingParams
from hybridkv.cache.session import Session
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError, RequestError
from server.running import serving
from server.test_transfers import ASKED, COMPLETIONS, TEXT, alone, counted, first_leg, said

HOW: dict[str, Any] = dict(device="cpu", dtype="float32", max_requests=4, max_context=512, exact=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("ranks"), "llama", 5)


@pytest.fixture(scope="module")
def one_and_two(folder: Path, found_by_workers: None) -> Iterator[tuple[LLM, LLM]]:
    # budgets are even, so what was read is kept for others over ranks, too
    cache = CacheConfig(query_buffers=2, window=8, recent=8, policy="snapkv")
    with LLM(folder, cache=cache, **HOW) as one, LLM(folder, tp=2, cache=cache, **HOW) as two:
        yield one, two


@spread("budget, name", (None, 48), ("seeded", "chat"))
def test_one_server_reads_and_another_writes_over_another_number_of_ranks(
    name: str, budget: int | None, one_and_two: tuple[LLM, LLM]
) -> None:
    path, body = ASKED[name]
    own = {"hybridkv": {"cache": False} | ({} if budget is None else {"budget": budget})}
    for reader, writer in (one_and_two, one_and_two[::-1]):
        with serving(reader, role="prefill") as a, serving(writer, role="decode") as b:
            status, want = b.post(path, body | own)
            assert status == 200, want
            _, first = a.post(path, first_leg(body) | own)
            status, second = b.post(path, body | own | {"kv_transfer_params": first["kv_transfer_params"]})
            assert status == 200 and said(second) == said(want)
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == want["usage"]["prompt_tokens"]
            assert counted(a)["sent"] == counted(b)["fetched"] == 1 and counted(b)["missed"] == 0
            a.idle()
            b.idle()


def test_a_server_over_ranks_reads_again_what_it_cannot_fetch(one_and_two: tuple[LLM, LLM]) -> None:
    path, body = ASKED["greedy"]
    one, two = one_and_two
    with serving(one, role="prefill") as a, serving(two, role="decode") as b:
        want = said(alone(b, path, body))
        _, first = a.post(path, first_leg(body | {"prompt": "Something else. " * 9}))
        status, second = b.post(path, body | {"kv_transfer_params": first["kv_transfer_params"]})
        assert status == 200 and said(second) == want and counted(b)["missed"] == 1
        b.idle()


def test_a_saved_conversation_goes_on_over_another_number_of_ranks(
    one_and_two: tuple[LLM, LLM], tmp_path: Path
) -> None:
    params, turns = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True), ("Hello there. " * 6, "And now?")
    for here, there in (one_and_two, one_and_two[::-1]):
        talk = Conversation(here, params=params, eviction=40)
        "".join(talk.send(turns[0]))
        talk.save(tmp_path / "talk")
        again = Conversation.load(there, tmp_path / "talk", params=params)
        want, found = "".join(talk.send(turns[1])), "".join(again.send(turns[1]))
        assert found == want and again.last is not None and again.last.stats["cached_tokens"] > 60
        again.close()
        talk.close()


def test_a_conversation_that_is_to_be_forgotten_is_read_again(one_and_two: tuple[LLM, LLM]) -> None:
    """Also by a client that sends its text without its name."""
    path, body = COMPLETIONS, {"prompt": TEXT, "temperature": 0, "max_tokens": 4}
    for llm in one_and_two:
        llm.forget()
        with serving(llm) as server:

            def cached(own: dict[str, Any] | None = None, **headers: str) -> int:
                status, found = server.post(path, body | {"hybridkv": own or {}}, **headers)
                assert status == 200, found
                return found["usage"]["prompt_tokens_details"]["cached_tokens"]

            assert cached({"budget": 400}, x_session_id="mine") == 0  # with a budget it is held
            assert cached() > 100
            status, found = server.post("/v1/cache/sessions", {"action": "forget", "name": "mine"})
            assert (status, found["forgotten"]) == (200, True)
            assert cached() == 0, "it was not forgotten"
            assert cached() > 100
            llm.forget()
            assert cached() == 0
            server.idle()


def test_a_prefix_stays_on_all_ranks_until_it_is_dropped(one_and_two: tuple[LLM, LLM]) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    tokens, found = [(7 * i) % 90 + 3 for i in range(200)], []
    crowd = [[(3 * i + 11 * n) % 89 + 4 for i in range(400)] for n in range(12)]
    for llm in one_and_two:
        llm.forget()
        first, prefix = llm.prefix(tokens[:70]), llm.prefix(tokens)
        again = llm.prefix(tokens)  # it is there already
        assert prefix.tokens == again.tokens == 192 and first.tokens == 64
        llm.generate(crowd, params)
        asked = [*tokens, 5, 6, 7]
        answer = llm.generate(asked, params)[0]
        assert answer.stats["cached_tokens"] == 192, "it did not stay"
        for each in (prefix, first, again, prefix):
            each.drop()
        llm.generate(crowd, params)
        assert llm.generate(asked, params)[0].stats["cached_tokens"] == 0, "it stayed"
        large = [llm.prefix([n] * 500) for n in (4, 5)]
        with pytest.raises(HybridKVError, match="half may be"):
            llm.prefix([6] * 500)
        large[0].drop()
        llm.forget()  # the other, too
        large[1].drop()
        llm.owner.run(assert_nothing_held)
        found.append([answer.token_ids, prefix.bytes])
    assert found[0] == found[1]


def exported(llm: LLM) -> tuple[Session, list[int]]:
    """A request in the middle of its answer, and the whole of that."""

    def work(engine: Engine) -> tuple[Session, list[int]]:
        request = engine.add(list(range(5, 60)), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        while request.answer_tokens < 4:
            engine.step()
        session = engine.export(request)
        while not engine.idle:
            engine.step()
        return session, request.generated

    return llm.owner.run(work)


def gone_on(llm: LLM, session: Session) -> list[int]:
    def work(engine: Engine) -> list[int]:
        request = engine.resume(session)
        while not engine.idle:
            engine.step()
        return request.generated

    return llm.owner.run(work)


def test_another_model_is_refused_by_its_files_whatever_its_ranks(
    one_and_two: tuple[LLM, LLM], folder: Path, tmp_path: Path
) -> None:
    one, two = one_and_two
    saved_model(tmp_path, "llama", 6)
    cache = one.cache_config
    with LLM(tmp_path, cache=cache, **HOW) as other:
        foreign = replace(exported(other)[0], about=one.owner.run(lambda engine: exported_about(engine)))
    with LLM(folder, cache=cache, **HOW | {"exact": False}) as fast:
        unlike = exported(fast)[0]
    with LLM(folder, cache=cache, weight_dtype="f16", **HOW | {"exact": False}) as half:
        narrow = exported(half)[0]
    (mine, want), (theirs, same) = exported(one), exported(two)
    assert mine.files == theirs.files and mine.model != theirs.model and want == same
    assert gone_on(two, mine) == gone_on(one, theirs) == want
    for session, words in (
        (foreign, "other weights"),
        (unlike, "mode none there and exact here"),
        (narrow, "weights f16 there and float32 here"),
        (replace(mine, files=""), "ranks none there and 2 here"),  # as before the files were named
    ):
        with pytest.raises(RequestError, match=words):
            gone_on(two, session)
    with pytest.raises(RequestError, match="ranks 2 there and none here"):
        gone_on(one, replace(theirs, files=""))
    assert gone_on(two, replace(theirs, files="")) == want
    for llm in one_and_two:
        llm.owner.run(assert_nothing_held)


def exported_about(engine: Engine) -> dict[str, str]:
    """This model in words, so that another one differs in nothing but its weights."""
    return engine.session(None).about
