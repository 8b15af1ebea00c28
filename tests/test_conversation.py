"""Conversations: a turn runs only what is new, and gets the answer that the whole conversation would get at once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny

from engine.ascii_tokenizer import BOS, EOS, TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.conversation import Conversation
from hybridkv.embedded import FILE_NAME, cache_folder
from hybridkv.engine.runner import StepInputs
from hybridkv.errors import RequestError

ASK = SamplingParams(max_tokens=10)
KINDS = ("llama", "qwen3_5")
# writes only the last message: the beginning of the prompt changes with every turn
FORGETFUL = "{{ bos_token }}[{{ messages | length }}]{{ messages[-1].content }}{{ eos_token }}[assistant]"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory, open_llm: Callable) -> Callable[..., LLM]:
    """`chat_model("llama")`: a tiny model with a character tokenizer and a chat template."""
    folders: dict[tuple[str, str], Any] = {}

    def build(kind: str, template: str = TEMPLATE) -> LLM:
        if (kind, template) not in folders:
            folders[kind, template] = tmp_path_factory.mktemp(kind)
            tiny.save(kind, folders[kind, template])
            write_tokenizer(folders[kind, template], template)
        return open_llm(folders[kind, template])

    return build


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], list[int]]:
    """`ran(llm)`: a list that grows by the number of tokens of each forward pass."""

    def watch(llm: LLM) -> list[int]:
        counts: list[int] = []
        forward = llm.engine.runner.forward

        def counted(inputs: StepInputs) -> object:
            counts.append(len(inputs.tokens))
            return forward(inputs)

        monkeypatch.setattr(llm.engine.runner, "forward", counted)
        return counts

    return watch


def asked(talk: Conversation) -> list[int]:
    """The tokens that the last turn was asked with."""
    assert talk._request is not None
    return talk._request.tokens[: talk._request.prompt_tokens]


def reads(llm: LLM, talk: Conversation) -> str:
    """Those tokens as text with control tokens written out, but not those that the model put into its own answers."""
    ids = asked(talk)
    assert llm.tokenizer is not None
    return llm.tokenizer.decode([t for i, t in enumerate(ids) if t != BOS or i == 0], skip_special=False)


def check_against_a_fresh_run(llm: LLM, talk: Conversation, text: str) -> None:
    assert talk.last is not None
    fresh = llm.generate(asked(talk), talk.params)[0]
    assert talk.last.token_ids == fresh.token_ids and talk.last.text == fresh.text == text
    assert talk.last.finish_reason == fresh.finish_reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_runs_only_what_is_new(kind: str, chat_model: Callable, ran: Callable) -> None:
    llm = chat_model(kind)
    talk = Conversation(llm, system="Be brief.", params=ASK)
    text = "".join(talk.send("Hello, how are you?"))
    check_against_a_fresh_run(llm, talk, text)
    for words in ("And now?", "Third turn", "4"):
        before = talk._request
        assert before is not None
        held = llm.manager.position(before.key)
        counts = ran(llm)
        text = "".join(talk.send(words))
        assert talk.last is not None
        assert sum(counts) == len(asked(talk)) - held + len(talk.last.token_ids) - 1
        assert counts[0] < 40 < len(asked(talk))
        check_against_a_fresh_run(llm, talk, text)
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 4]
    talk.close()
    talk.close()
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_of_a_turn_reads_as_the_template_writes_it(kind: str, chat_model: Callable) -> None:
    """Tokens that were kept and tokens that are new make up the same text, without a control token twice."""
    llm = chat_model(kind)
    talk = Conversation(llm, params=ASK)
    for words in ("Hello", "And now?", "Go on"):
        list(talk.send(words))
        assert reads(llm, talk) == llm.render(talk.messages[:-1])
    talk.close()


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_spells_a_control_token_does_not_cost_the_cache(
    kind: str, chat_model: Callable, ran: Callable
) -> None:
    """A prompt with such text is encoded in pieces. The turns after it still run only what is new, in the tokens that
    the model wrote, which another encoding of its text would not be.
    """
    llm = chat_model(kind)
    talk = Conversation(llm, params=SamplingParams(max_tokens=10, logit_bias={BOS: 4.0}))
    list(talk.send("What is </s> in this <s> text?"))
    assert asked(talk).count(EOS) == 1 and len(talk._rendered(talk.messages)) > 1
    for words in ("And now </s>?", "Go on"):
        before, counts = talk._request, ran(llm)
        assert before is not None
        held = llm.manager.position(before.key)
        text = "".join(talk.send(words))
        assert talk.last is not None and talk.last.stats["cached_tokens"] == held > 0
        assert talk.last.reuse["cached"] + talk.last.reuse["read"] == len(asked(talk))
        assert sum(counts) == len(asked(talk)) - held + len(talk.last.token_ids) - 1
        assert reads(llm, talk) == llm.render(talk.messages[:-1])
        check_against_a_fresh_run(llm, talk, text)
    assert asked(talk).count(EOS) == 5  # those of the template alone
    assert asked(talk).count(BOS) > 1  # without a text of their own
    talk.close()
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_ended_itself_is_continued_with_one_end_token(
    kind: str, chat_model: Callable, ran: Callable
) -> None:
    llm = chat_model(kind)
    first = Conversation(llm, params=ASK)
    list(first.send("Hello there"))
    assert first.last is not None
    ends = SamplingParams(max_tokens=10, stop_token_ids=(first.last.token_ids[4],))
    first.close()
    talk = Conversation(llm, params=ends)
    text = "".join(talk.send("Hello there"))
    assert talk.last is not None and talk.last.finish_reason == "stop"
    assert talk.messages[-1]["content"] == text == llm.tokenizer.decode(talk.last.token_ids[:-1])
    counts = ran(llm)
    text = "".join(talk.send("Go on"))
    assert counts[0] < 30
    assert reads(llm, talk) == llm.render(talk.messages[:-1])
    assert asked(talk).count(EOS) == 3
    check_against_a_fresh_run(llm, talk, text)
    talk.close()
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", (1, 4))
def test_an_answer_stopped_early_is_kept_and_continued(
    kind: str, pieces: int, chat_model: Callable, ran: Callable
) -> None:
    llm = chat_model(kind)
    talk = Conversation(llm, params=ASK)
    stream: Iterator[str] = talk.send("Tell me everything")
    heard = "".join(next(stream) for _ in range(pieces))
    stream.close()  # type: ignore[attr-defined]
    said = talk.messages[-1]  # the engine may have been a step or two ahead of who listened
    assert said["role"] == "assistant" and said["content"].startswith(heard) and talk.last is not None
    assert talk.last.text == said["content"]
    assert talk._request is not None and talk._request.finish_reason == "abort"
    counts = ran(llm)
    text = "".join(talk.send("Go on"))
    assert counts[0] < 30, "the first turn was computed again"
    assert reads(llm, talk) == llm.render(talk.messages[:-1])
    check_against_a_fresh_run(llm, talk, text)
    talk.close()
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_cut_by_a_stop_string_is_continued_without_what_was_cut(kind: str, chat_model: Callable) -> None:
    llm = chat_model(kind)
    talk = Conversation(llm, params=ASK)
    whole = "".join(talk.send("Hello there"))
    talk.close()
    talk = Conversation(llm, params=SamplingParams(max_tokens=10, stop=whole[4:6]))
    text = "".join(talk.send("Hello there"))
    assert text == whole[: whole.index(whole[4:6])]
    text = "".join(talk.send("Go on"))
    assert reads(llm, talk) == llm.render(talk.messages[:-1])
    check_against_a_fresh_run(llm, talk, text)
    talk.close()
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_rewrites_the_past_is_still_answered_right(kind: str, chat_model: Callable) -> None:
    llm = chat_model(kind, FORGETFUL)
    talk = Conversation(llm, params=ASK)
    for words in ("Hello", "And now?", "Go on"):
        text = "".join(talk.send(words))
        assert reads(llm, talk) == llm.render(talk.messages[:-1])
        check_against_a_fresh_run(llm, talk, text)
    talk.close()
    assert_nothing_held(llm.engine)


def test_a_turn_that_is_refused_did_not_happen(chat_model: Callable, ran: Callable) -> None:
    llm = chat_model("llama")
    talk = Conversation(llm, params=ASK)
    list(talk.send("Hello"))
    before = [dict(m) for m in talk.messages]
    with pytest.raises(RequestError, match="512"):
        list(talk.send("x" * 600))
    assert talk.messages == before
    counts = ran(llm)
    text = "".join(talk.send("Short again"))
    assert counts[0] < 40, "the cache of the first turn was lost"
    check_against_a_fresh_run(llm, talk, text)
    talk.close()
    assert_nothing_held(llm.engine)


def test_a_turn_that_failed_did_not_happen(chat_model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = chat_model("qwen3_5")
    talk = Conversation(llm, params=ASK)
    list(talk.send("Hello"))
    before = [dict(m) for m in talk.messages]
    forward, calls = llm.engine.runner.forward, 0

    def fail(inputs: StepInputs) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("injected")
        return forward(inputs)

    monkeypatch.setattr(llm.engine.runner, "forward", fail)
    heard = []
    with pytest.raises(RuntimeError, match="injected"):
        heard.extend(talk.send("Second"))
    assert talk.messages == before
    text = "".join(talk.send("Second"))
    check_against_a_fresh_run(llm, talk, text)
    assert [m["content"] for m in talk.messages][2:] == ["Second", text]
    talk.close()
    assert_nothing_held(llm.engine)


@pytest.mark.parametrize("kind", KINDS)
def test_two_conversations_do_not_mix_and_may_lose_their_caches(kind: str, chat_model: Callable) -> None:
    """Two slots: a third user takes both; the conversations are computed again and go on."""
    llm = chat_model(kind)
    talks = [Conversation(llm, system=s, params=ASK) for s in ("One", "Other")]
    for words in ("Hello", "And now?"):
        for talk in talks:
            check_against_a_fresh_run(llm, talk, "".join(talk.send(words)))
    llm.generate([[5, 6, 7], [8, 9]], ASK)
    for talk in talks:
        check_against_a_fresh_run(llm, talk, "".join(talk.send("Go on")))
        talk.close()
    assert_nothing_held(llm.engine)


def test_a_model_without_a_template_is_refused_in_words(oracle: Callable, open_llm: Callable) -> None:
    talk = Conversation(open_llm(oracle("llama").folder))
    with pytest.raises(RequestError, match="no chat template"):
        next(iter(talk.send("Hello")))
    assert talk.messages == []


@pytest.mark.skipif(not (cache_folder() / FILE_NAME).exists(), reason="the embedded model was not fetched")
def test_the_embedded_model_talks_from_its_cache(ran: Callable) -> None:
    cache = CacheConfig(kv_dtype="f32")
    llm = LLM(device="cpu", dtype="float32", cache=cache, max_requests=2, max_context=512)
    talk = Conversation(llm, params=SamplingParams(max_tokens=6))
    text = "".join(talk.send("Name three colours."))
    check_against_a_fresh_run(llm, talk, text)
    held = llm.manager.position(talk._request.key) if talk._request else 0
    counts = ran(llm)
    text = "".join(talk.send("And one more?"))
    assert counts[0] == len(asked(talk)) - held < 30
    check_against_a_fresh_run(llm, talk, text)
    talk.close()
    assert_nothing_held(llm.engine)
