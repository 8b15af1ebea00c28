"""Documents: read and cut once, asked any number of times, from any thread, saved and loaded."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_v4
from long_form import spread

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, Conversation, EvictionConfig, SamplingParams
from hybridkv.cache.session import Session
from hybridkv.document import Document
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.request import Request

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SYSTEM = "Be brief."
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
QUESTIONS = ["Which month?", "What struck?", "And the weather?"]
KINDS = ("llama", "qwen3_5")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder_of("llama")`: a tiny model with a character tokenizer and a chat template, or without the template."""
    folders: dict[Any, Path] = {}

    def build(kind: str, template: str | None = TEMPLATE) -> Path:
        if (kind, template) not in folders:
            folders[kind, template] = folder = tmp_path_factory.mktemp(kind)
            tiny.save(kind, folder)
            write_tokenizer(folder, template)
        return folders[kind, template]

    return build


@pytest.fixture(scope="module")
def model(folder_of: Callable[..., Path]) -> Callable[..., LLM]:
    """`model("llama")`: opened once for each set of arguments; `number` tells several alike apart."""
    opened: dict[Any, LLM] = {}

    def build(kind: str = "llama", number: int = 0, template: str | None = TEMPLATE, **more: Any) -> LLM:
        key = (kind, number, template, *sorted(more.items()))
        if key not in opened:
            cache = CacheConfig(page_size=8, kv_dtype=more.pop("kv_dtype", "f32"))
            more = {"max_requests": 4, "max_context": 1024, "step_tokens": 64, "cache": cache, **more}
            opened[key] = LLM(folder_of(kind, template), device="cpu", dtype="float32", **more)
        return opened[key]

    return build


def answers(document: Document, questions: list[str] = QUESTIONS) -> list[list[int]]:
    return [answer.token_ids for answer in document.generate(questions, GREEDY)]


def entries(llm: LLM, document: Document) -> list[np.ndarray]:
    """Positions of the entries that each stream of the document holds."""
    return llm.manager.entry_positions(document.held().key, "attention")


# ---- what is kept and what is answered


@pytest.mark.parametrize("kind", KINDS)
def test_at_ratio_one_answers_are_those_of_a_chat(kind: str, model: Callable[..., LLM]) -> None:
    llm = model(kind)
    with llm.compress(TEXT, ratio=1, system=SYSTEM) as document:
        assert document.stats["kept_tokens"] == document.stats["tokens"] == len(document.tokens)
        for question, found in zip(QUESTIONS, answers(document), strict=True):
            said = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{TEXT.strip()}\n\n{question}"},
            ]
            assert found == llm.chat(said, GREEDY).token_ids
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("policy", ("replay", "replay:spread=even:chunk=64", "keydiff", "auto", "streaming"))
@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_is_kept_and_answers_go_on_in_it(kind: str, policy: str, model: Callable[..., LLM]) -> None:
    llm = model(kind)
    with llm.compress(TEXT, ratio=4, policy=policy) as document:
        stats = document.stats
        budget = round(stats["tokens"] / 4)
        assert budget - 1 <= stats["kept_tokens"] <= budget
        assert stats["kv_bytes_kept"] < stats["kv_bytes_full"] and stats["policy"].split(":")[0] != "auto"
        first = answers(document)
        found = document.generate(QUESTIONS, GREEDY)
        assert [answer.token_ids for answer in found] == first, "the document did not stay as it was"
        assert all(answer.stats["cached_tokens"] == stats["tokens"] for answer in found)
        kept = found[0].stats["kept_tokens"]
        assert kept < budget + 64, "a question had more than the document's entries and its own"
    assert_nothing_held(llm.engine)


def test_the_system_prompt_and_the_best_entries_stay(model: Callable[..., LLM]) -> None:
    llm = model("llama")
    head = len(llm.encode(f"[system]{SYSTEM}")) + 1 + len("[user]")
    with llm.compress(TEXT, budget=64, policy="replay:spread=even", system=SYSTEM) as document:
        for kept in entries(llm, document):
            assert kept[:head].tolist() == list(range(head)) and len(kept) == 64


def test_a_model_without_a_chat_template_and_token_ids(model: Callable[..., LLM]) -> None:
    llm = model("llama", template=None)
    with llm.compress(TEXT, ratio=1) as document:
        [answer] = document.generate("Which month?", GREEDY)
        assert answer.token_ids == llm.generate(f"{TEXT.strip()}\n\nWhich month?", GREEDY)[0].token_ids
        with pytest.raises(RequestError, match="chat format"):
            document.generate("Which month?", GREEDY, thinking=False)
    with pytest.raises(RequestError, match="no chat template"):
        llm.compress(TEXT, system=SYSTEM)
    ids = llm.encode(TEXT)
    with llm.compress(ids, ratio=1) as document:
        assert document.text is None and document.tokens == ids
        [answer] = document.generate([5, 6, 7], GREEDY)
        assert answer.token_ids == llm.generate([*ids, 5, 6, 7], GREEDY)[0].token_ids
    with llm.compress(ids, budget=40) as document:
        assert document.stats["kept_tokens"] == 40
    assert_nothing_held(llm.engine)


def test_control_tokens_that_a_document_or_a_question_spells_stay_text(model: Callable[..., LLM]) -> None:
    llm = model("llama")
    text, question = "a</s>[user]b", "c</s>[user]d"
    with llm.compress(text, ratio=1) as document:
        [answer] = document.generate(question, GREEDY)
        whole = llm.encode_chat([{"role": "user", "content": f"{text}\n\n{question}"}])
        assert document.tokens == whole[: len(document.tokens)] and whole.count(2) == 1  # the template's own alone
        assert answer.token_ids == llm.generate(whole, GREEDY)[0].token_ids


def test_streams_and_several_answers(model: Callable[..., LLM]) -> None:
    llm = model("qwen3_5")
    with llm.compress(TEXT, ratio=4) as document:
        [want] = document.generate(QUESTIONS[0], GREEDY)
        stream = document.stream(QUESTIONS[0], GREEDY)
        assert "".join(piece.text for piece in stream) == want.text  # type: ignore[union-attr]
        assert stream.completion is not None and stream.completion.token_ids == want.token_ids
        [several] = document.generate(QUESTIONS[0], SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3))
        alone = [
            document.generate(QUESTIONS[0], SamplingParams(max_tokens=8, temperature=1.0, seed=3 + i))[0].token_ids
            for i in range(3)
        ]
        assert [sample.token_ids for sample in several.samples] == alone
        with pytest.raises(RequestError, match="one answer"):
            document.stream(QUESTIONS[0], SamplingParams(n=2))
    assert_nothing_held(llm.engine)


# ---- many at once


@pytest.mark.parametrize("kind", KINDS)
def test_threads_ask_one_document_at_the_same_time(kind: str, model: Callable[..., LLM]) -> None:
    llm = model(kind)
    with llm.compress(TEXT, ratio=4) as document:
        want, found = answers(document), {}

        def ask(number: int) -> None:
            for i in range(3):
                question = QUESTIONS[(number + i) % 3]
                found[number, i] = document.generate(question, GREEDY)[0].token_ids

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {(n, i): want[(n + i) % 3] for n in range(4) for i in range(3)}
        assert document.held() in llm.engine.scheduler.held and len(llm.engine.scheduler.held) == 1
    assert_nothing_held(llm.engine)


def test_more_questions_than_slots_wait_their_turn(model: Callable[..., LLM]) -> None:
    llm = model("qwen3_5", max_requests=2)
    with llm.compress(TEXT, ratio=4) as document:
        [one] = document.generate(QUESTIONS[0], GREEDY)
        found = document.generate([QUESTIONS[0]] * 5, GREEDY)
        assert all(answer.token_ids == one.token_ids for answer in found)
        assert all(answer.stats["cached_tokens"] == document.stats["tokens"] for answer in found)


# ---- caches that are given up, saved and loaded


def give_up(llm: LLM, request: Request) -> None:
    """As where its pages are needed."""
    llm.owner.run(lambda engine: engine.scheduler.give_up(request))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ("replay", "keydiff"))
def test_a_cache_that_was_given_up_is_read_again_and_drops_the_same_entries(
    kind: str, policy: str, model: Callable[..., LLM]
) -> None:
    llm = model(kind)
    with llm.compress(TEXT, ratio=4, policy=policy) as document:
        want, kept, old = answers(document), entries(llm, document), document.held()
        give_up(llm, old)
        assert old not in llm.engine.scheduler.held
        assert answers(document) == want
        assert document.held() is not old
        assert all((a == b).all() for a, b in zip(entries(llm, document), kept, strict=True))
    assert_nothing_held(llm.engine)


def test_a_question_whose_document_is_given_up_while_it_waits_still_sees_the_cut_cache(
    model: Callable[..., LLM],
) -> None:
    llm = model("qwen3_5")
    with llm.compress(TEXT, ratio=4) as document:
        [want] = document.generate(QUESTIONS[0], GREEDY)
        [(add, _)] = document.requests([QUESTIONS[0]], GREEDY, None, {})
        give_up(llm, document.held())  # between asking and running
        with llm.engine.owned():
            request = add(llm.engine)
            while not llm.engine.idle:
                llm.engine.step()
        assert request.generated == want.token_ids and request.cached_tokens == 0
        assert request.stats["kept_tokens"] == want.stats["kept_tokens"]


@spread("kind, kv_dtype", KINDS, ("f32", "fp8"))
def test_a_saved_document_answers_the_same_in_another_model(
    kind: str, kv_dtype: str, model: Callable[..., LLM], tmp_path: Path
) -> None:
    here, there = model(kind, kv_dtype=kv_dtype), model(kind, 1, kv_dtype=kv_dtype)
    with here.compress(TEXT, ratio=4, system=SYSTEM) as document:
        document.save(tmp_path / "doc.kv")
        with there.load_document(tmp_path / "doc.kv") as loaded:
            assert answers(loaded) == answers(document)
            assert loaded.text == document.text == TEXT.strip() and loaded.stats == document.stats
            assert loaded.generate("x", GREEDY)[0].stats["cached_tokens"] == document.stats["tokens"]
            give_up(there, loaded.held())  # it is read again, and cut the same way
            assert answers(loaded) == answers(document)
            loaded.save(tmp_path / "again.kv")
        with here.load_document(tmp_path / "again.kv") as again:
            assert answers(again) == answers(document)
    assert_nothing_held(here.engine)
    assert_nothing_held(there.engine)


def test_a_document_runs_where_the_whole_text_would_not_fit(model: Callable[..., LLM], tmp_path: Path) -> None:
    """What was compressed on a large machine is asked on a small one."""
    cache = CacheConfig(page_size=8, kv_dtype="f32", budget=48, window=8, recent=8, bounded=True)
    here, small = model("llama"), model("llama", 1, max_requests=2, memory="2.2MiB", cache=cache)
    with here.compress(TEXT, ratio=8) as document:
        document.save(tmp_path / "doc.kv")
        need = len(document.tokens)
    assert small.engine.tokens_alone < need < small.manager.max_tokens, "the pools must be too small for the whole"
    with small.load_document(tmp_path / "doc.kv") as loaded:
        assert loaded.generate("Why?", GREEDY)[0].finish_reason in ("stop", "length")
        give_up(small, loaded.held())
        with pytest.raises(RequestError, match="given up to make room .* cannot be computed again"):
            loaded.generate("Why?", GREEDY)
    assert_nothing_held(small.engine)


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "said"),
    (
        (dict(document="  \n"), "the document is empty"),
        (dict(document=[]), "no tokens"),
        (dict(document=7), "text or a list of token ids"),
        (dict(ratio=0.5), "a number from 1 on, not 0.5"),
        (dict(ratio=float("nan")), "a number from 1 on"),
        (dict(ratio="4"), "a number from 1 on"),
        (dict(budget=0), "positive number"),
        (dict(ratio=4, budget=64), "both say how much is kept"),
        (dict(policy="repaly"), "unknown.*replay"),
        (dict(policy="replay:chunk=0"), "chunk must be"),
        (dict(policy="replay:size=9"), "no setting 'size'"),
        (dict(budget=4), "always stay, and the budget is 4"),
        (dict(document="a" * 1100), "shorten the text by [0-9]+ tokens"),
        (dict(document="a" * 960), "shorten the text by [0-9]+ tokens"),
        (dict(system=5), "system prompt must be a text"),
    ),
)
def test_bad_input_is_refused_in_one_line(settings: dict[str, Any], said: str, model: Callable[..., LLM]) -> None:
    llm = model("llama")
    with pytest.raises(HybridKVError, match=said) as problem:
        llm.compress(**{"document": TEXT, **settings})
    assert "\n" not in str(problem.value)
    assert_nothing_held(llm.engine)


def test_a_text_near_the_end_of_the_context_is_read_again_in_smaller_parts(model: Callable[..., LLM]) -> None:
    llm = model("llama")
    with llm.compress("the clocks " * 80, ratio=4) as document:
        tokens = document.stats["tokens"]
        assert tokens + 64 < llm.manager.max_tokens < 2 * tokens and document.stats["kept_tokens"] <= tokens / 4 + 1


def test_one_slot_is_too_few(model: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match="max_requests=2"):
        model("llama", max_requests=1).compress(TEXT)


def test_a_single_prompt_cannot_be_replayed(model: Callable[..., LLM]) -> None:
    llm = model("llama")
    with pytest.raises(RequestError, match="LLM.compress"):
        llm.generate(TEXT, GREEDY, eviction=EvictionConfig(64, policy="replay"))
    for more in (dict(bounded=True), dict(decode_every=8)):
        with pytest.raises(HybridKVError, match="bounded and decode_every"):
            Conversation(llm, eviction=EvictionConfig(64, policy="replay", **more)).send("Hi").__next__()  # type: ignore
    assert_nothing_held(llm.engine)


def test_files_of_something_else(model: Callable[..., LLM], tmp_path: Path) -> None:
    llm = model("llama")
    with llm.compress(TEXT, ratio=4) as document:
        document.save(tmp_path / "doc.kv")
        with pytest.raises(HybridKVError, match="no folder"):
            document.save(tmp_path / "nowhere" / "doc.kv")
    with pytest.raises(RequestError, match="another model"):
        model("qwen3_5").load_document(tmp_path / "doc.kv")
    with pytest.raises(RequestError, match="stores other things"):
        model("llama", kv_dtype="fp8").load_document(tmp_path / "doc.kv")
    with pytest.raises(HybridKVError, match="holds a document, not a conversation"):
        Conversation.load(llm, tmp_path / "doc.kv")
    talk = Conversation(llm, params=GREEDY)
    list(talk.send("Hello"))
    talk.save(tmp_path / "talk")
    talk.close()
    with pytest.raises(HybridKVError, match="holds no document"):
        llm.load_document(tmp_path / "talk")
    data = bytearray((tmp_path / "doc.kv").read_bytes())
    data[-100] ^= 1
    (tmp_path / "doc.kv").write_bytes(data)
    with pytest.raises(HybridKVError, match="doc.kv"):
        llm.load_document(tmp_path / "doc.kv")
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize(
    "change", ({"rendered": 5}, {"before": 10**9}, {"before": True}, {"chat": "yes"}, {"stats": []}, {"rendered": None})
)
def test_a_document_that_says_odd_things_of_itself_is_refused(
    change: dict[str, Any], model: Callable[..., LLM], tmp_path: Path
) -> None:
    llm = model("llama")
    with llm.compress(TEXT, ratio=4) as document:
        document.save(tmp_path / "doc.kv")
    session = Session.load(tmp_path / "doc.kv")
    session.conversation["document"] |= change
    session.save(tmp_path / "doc.kv")
    with pytest.raises(HybridKVError, match="not well-formed"):
        llm.load_document(tmp_path / "doc.kv")
    assert_nothing_held(llm.engine)


def test_a_closed_document_says_so(model: Callable[..., LLM], tmp_path: Path) -> None:
    llm = model("llama")
    document = llm.compress(TEXT, ratio=4)
    stream = document.stream(QUESTIONS[0], GREEDY)
    document.close()
    document.close()
    list(stream)
    assert stream.completion is not None and stream.completion.error is None, "an answer that runs goes on"
    for use in (lambda: answers(document), lambda: document.save(tmp_path / "doc.kv")):
        with pytest.raises(RequestError, match="was closed"):
            use()
    assert_nothing_held(llm.engine)


# ---- interrupts


class Torn(BaseException):
    """Ctrl-C, as it arrives in the caller's thread."""


@pytest.mark.parametrize("when", ("reading", "reading again"))
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_leaves_nothing_held(kind: str, when: str, model: Callable[..., LLM]) -> None:
    llm = model(kind)

    def torn(what: str, done: int, total: int) -> None:
        if what == when:
            raise Torn

    with pytest.raises(Torn):
        llm.compress(TEXT, policy="replay:chunk=64", progress=torn)
    llm.owner.run(lambda engine: None)  # what was left to do there has been done
    assert_nothing_held(llm.engine)
    with llm.compress(TEXT, policy="replay:chunk=64") as document:
        answers(document)


def test_progress_ends_at_all_tokens(model: Callable[..., LLM]) -> None:
    llm, seen = model("llama"), {}
    with llm.compress(TEXT, policy="replay:chunk=64", progress=lambda what, *at: seen.setdefault(what, []).append(at)):
        pass
    assert list(seen) == ["reading", "reading again"]
    for steps in seen.values():
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > len(TEXT)


# ---- conversations


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_begin_with_a_document_and_leave_it_as_it_is(kind: str, model: Callable[..., LLM]) -> None:
    llm = model(kind)
    with llm.compress(TEXT, ratio=4, system=SYSTEM) as document:
        want = answers(document)
        talks = [Conversation(llm, params=GREEDY, document=document) for _ in range(2)]
        for talk, question, first in zip(talks, QUESTIONS, want, strict=False):
            list(talk.send(question))
            assert talk.last is not None and talk.last.token_ids == first
            list(talk.send("And then?"))
            assert talk.last.stats["cached_tokens"] > document.stats["tokens"], "the turn before was computed again"
            assert talk.last.stats["kept_tokens"] < document.stats["tokens"], "the document is whole again"
        assert answers(document) == want
        fork = talks[0].fork()
        assert "".join(fork.send("More?")) == "".join(talks[0].send("More?"))
        for talk in (*talks, fork):
            talk.close()
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_whose_cache_was_given_up_goes_on_from_the_cut_document(kind: str, model: Callable[..., LLM]) -> None:
    llm = model(kind)
    with llm.compress(TEXT, ratio=4) as document:
        talks = [Conversation(llm, params=GREEDY, document=document) for _ in range(2)]
        for talk in talks:
            list(talk.send(QUESTIONS[0]))
        request = talks[1]._request
        assert request is not None
        llm.owner.run(lambda engine: engine.abort(request))  # its room is needed
        found = ["".join(talk.send("And then?")) for talk in talks]
        assert found[0] == found[1] and talks[1].last is not None
        assert talks[1].last.stats["cached_tokens"] == document.stats["tokens"]
        assert talks[1].last.stats["kept_tokens"] == talks[0].last.stats["kept_tokens"]  # type: ignore[union-attr]
        for talk in talks:
            talk.close()


def test_what_does_not_go_with_a_document(model: Callable[..., LLM]) -> None:
    llm = model("llama")
    with llm.compress(TEXT, ratio=4) as document, llm.compress(llm.encode(TEXT)) as ids:
        for more, said in (
            (dict(system=SYSTEM), "its own system prompt"),
            (dict(eviction=64), "kept whole"),
            (dict(document=ids), "without a chat format"),
        ):
            with pytest.raises(RequestError, match=said):
                Conversation(llm, **{"document": document, **more})  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="another LLM"):
            Conversation(model("llama", 1), document=document)
        talk = Conversation(llm, document=document)
        talk.messages = [{"role": "system", "content": "Other."}]
        with pytest.raises(RequestError, match="does not begin as the document was read"):
            next(talk.send("Hi"))
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_cut_by_replay_at_the_end_of_a_turn(kind: str, model: Callable[..., LLM]) -> None:
    llm = model(kind)
    talk = Conversation(llm, SYSTEM, GREEDY, eviction=EvictionConfig(64, recent=8, policy="replay"))
    whole = Conversation(llm, SYSTEM, GREEDY, eviction=None)
    first = ["".join(each.send(TEXT)) for each in (talk, whole)]
    assert first[0] == first[1], "a turn keeps everything until its answer is written"
    assert talk.last is not None and whole.last is not None
    assert talk.last.stats["kept_tokens"] == 64 < whole.last.stats["kept_tokens"]
    list(talk.send("Why?"))
    assert talk.last.stats["cached_tokens"] > len(TEXT) and talk.last.stats["kept_tokens"] < 96, "it was cut again"
    list(talk.send("Why did the clocks strike thirteen, if they did at all?"))
    assert talk.last.stats["kept_tokens"] == 64
    for each in (talk, whole):
        each.close()
    assert_nothing_held(llm.engine)


def test_log_probabilities_of_a_question_are_those_of_the_cut_cache(model: Callable[..., LLM]) -> None:
    """They need every token's logits, so the text is read again, and cut where it was cut."""
    llm = model("qwen3_5")
    with llm.compress(TEXT, ratio=4) as document:
        [plain] = document.generate(QUESTIONS[0], GREEDY)
        [asked] = document.generate(QUESTIONS[0], SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0))
        assert asked.token_ids == plain.token_ids and asked.stats["cached_tokens"] == 0
        assert asked.stats["kept_tokens"] == plain.stats["kept_tokens"]
        assert asked.prompt_logprobs is not None and len(asked.prompt_logprobs) == asked.prompt_tokens
    assert_nothing_held(llm.engine)


def test_a_model_that_compresses_its_cache_itself(tmp_path: Path) -> None:
    tiny_v4.build("mini").save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", max_requests=2, max_context=512) as llm:
        with pytest.raises(RequestError, match="compresses its cache itself"):
            llm.compress([5] * 200, ratio=4)
        assert_nothing_held(llm.engine)
