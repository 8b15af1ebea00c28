"""Old turns of a conversation: each at its own budget, all else whole, whatever happens to the cache in between."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.conversation import Conversation, turn_begins
from hybridkv.embedded import FILE_NAME, cache_folder
from hybridkv.engine.engine import Engine
from hybridkv.errors import HybridKVError, RequestError
from hybridkv.eviction.named import AUTO, find_policy
from hybridkv.eviction.sizes import STREAMS
from hybridkv.request import Request

KINDS = ("llama", "qwen3_5")
ASK = SamplingParams(max_tokens=10, ignore_eos=True)
SYSTEM = "Be brief and kind."
SAID = ("Hello, how are you? I am well.", "And now?", "Tell me of the sea and of its birds.", "Why?", "Go on, go on.")
KEEP, BUDGET = 2, 6
# leaves out what the model said in earlier turns, as templates do that drop thoughts
REWRITING = (
    "{{ bos_token }}{% for m in messages if m.role != 'assistant' %}[{{ m.role }}]{{ m.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """`model("llama", exact=True, page_size=4)`: a tiny model with a chat template, opened once for each."""
    folders: dict[tuple[str, str], Path] = {}
    opened: dict[Any, LLM] = {}

    def build(kind: str, template: str = TEMPLATE, exact: bool = False, requests: int = 3, **cache: Any) -> LLM:
        if (kind, template) not in folders:
            folders[kind, template] = tmp_path_factory.mktemp(kind)
            tiny.save(kind, folders[kind, template])
            write_tokenizer(folders[kind, template], template)
        key = (kind, template, exact, requests, *sorted(cache.items()))
        if key not in opened:
            config = CacheConfig(**{"kv_dtype": "f32", "page_size": 4, **cache})
            folder = str(folders[kind, template])
            opened[key] = LLM(folder, "cpu", "float32", exact, config, requests, max_context=512)
        return opened[key]

    return build


def talk_with(llm: LLM, **how: Any) -> Conversation:
    return Conversation(llm, SYSTEM, ASK, **{"keep_turns": KEEP, "turn_budget": BUDGET, **how})


def say(talk: Conversation, *texts: str) -> list[list[int]]:
    """The tokens of each answer."""
    found = []
    for text in texts:
        list(talk.send(text))
        assert talk.last is not None
        found.append(talk.last.token_ids)
    return found


def held(talk: Conversation) -> list[np.ndarray]:
    """Positions that each stream holds."""
    assert talk._request is not None
    return talk.llm.manager.entry_positions(talk._request.key, STREAMS)


def in_turn(talk: Conversation, turn: int) -> list[int]:
    """How many entries of a turn each stream holds."""
    assert talk._begins is not None
    begin, end = [*talk._begins, 1 << 30][turn : turn + 2]
    return [int(((at >= begin) & (at < end)).sum()) for at in held(talk)]


def length(talk: Conversation, turn: int) -> int:
    """Tokens of a turn that have been read."""
    assert talk._begins is not None and talk._request is not None
    ends = [*talk._begins[1:], talk.llm.manager.position(talk._request.key)]
    return ends[turn] - talk._begins[turn]


def check_held(talk: Conversation, keep: int = KEEP, budget: int = BUDGET) -> None:
    assert talk._begins is not None
    turns = len(talk._begins)
    for turn in range(turns):
        whole = length(talk, turn)
        want = whole if turn >= turns - keep else min(budget, whole)
        assert set(in_turn(talk, turn)) == {want}, f"turn {turn} of {turns}"
    assert all((at[: talk._begins[0]] == np.arange(talk._begins[0])).all() for at in held(talk)), "the system prompt"


def finish(*talks: Conversation) -> None:
    for talk in talks:
        talk.close()
    for llm in {talk.llm for talk in talks}:
        assert_nothing_held(llm.engine)


def entries(engine: Engine, request: Request) -> dict[tuple[int, int, int], torch.Tensor]:
    """(layer, head, position) -> its key and value, as they are stored."""
    assert engine.evictor is not None
    found = {}
    for layer in engine.evictor.layers(request, engine.manager, window=0):
        both = torch.cat((layer.keys, layer.values), -1)
        for head, at in enumerate(layer.positions.tolist()):
            found |= {(layer.layer, head, p): both[head, i] for i, p in enumerate(at) if p >= 0}
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_chat_holds_the_system_prompt_the_last_turns_and_a_budget_of_each_older_one(
    kind: str, model: Callable
) -> None:
    llm = model(kind)
    talk, pages = talk_with(llm), []
    for i, text in enumerate(SAID):
        say(talk, text)
        check_held(talk)
        assert talk.last is not None and talk.last.stats["old_turns"] == max(0, i + 1 - KEEP)
        assert talk.last.stats["kept_tokens"] == len(held(talk)[0])
        assert i == 0 or talk.last.stats["cached_tokens"] > 0, "it was read again"
        pages.append(talk.last.stats["kv_bytes_kept"])
    whole = talk_with(llm, keep_turns=None)
    say(whole, *SAID)
    assert pages[:KEEP] and pages[-1] < whole.last.stats["kv_bytes_kept"] * 0.7  # type: ignore[union-attr]
    finish(talk, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stays_does_not_change_by_a_bit(kind: str, model: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = model(kind)
    seen: list[int] = []
    evict = llm.engine.evict_turns

    def compared(request: Request, turns: Any, budget: int) -> Any:
        before = entries(llm.engine, request)
        found = evict(request, turns, budget)
        after = entries(llm.engine, request)
        assert after.keys() <= before.keys() and all(torch.equal(after[key], before[key]) for key in after)
        old = {p for begin, end in turns for p in range(begin, end)}
        assert {key for key in before if key[2] not in old} <= after.keys()
        seen.append(len(before) - len(after))
        return found

    monkeypatch.setattr(llm.engine, "evict_turns", compared)
    talk = talk_with(llm)
    say(talk, *SAID)
    assert [n > 0 for n in seen] == [False] * KEEP + [True] * 3
    finish(talk)


@pytest.mark.parametrize("kind", KINDS)
def test_computed_again_after_a_preemption_it_says_the_same(kind: str, model: Callable) -> None:
    llm = model(kind, exact=True)
    talk, other = talk_with(llm), talk_with(llm)
    say(talk, *SAID[:4])
    say(other, *SAID[:4])
    stream = other.pieces(SAID[4])
    next(stream)
    request = other._request
    assert request is not None
    llm.owner.run(lambda engine: engine.scheduler.preempt(request), drained=True)
    list(stream)
    assert request.preemptions == 1 and request.evictions
    assert other.last is not None and [other.last.token_ids] == say(talk, SAID[4])
    check_held(other)
    assert all(np.array_equal(a, b) for a, b in zip(held(talk), held(other), strict=True))
    finish(talk, other)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_loaded_and_forked_it_goes_on_the_same(kind: str, model: Callable, tmp_path: Path) -> None:
    llm = model(kind, requests=4)
    talk = talk_with(llm)
    say(talk, *SAID[:4])
    talk.save(tmp_path / "talk")
    fork, loaded = talk.fork(), Conversation.load(llm, tmp_path / "talk", ASK)
    want = say(talk, SAID[4], "More?")
    for other in (fork, loaded):
        assert (other.keep_turns, other.turn_budget) == (KEEP, BUDGET)
        assert say(other, SAID[4], "More?") == want and other._begins == talk._begins
        assert other.last is not None and other.last.stats["cached_tokens"] > 0
        check_held(other)
        assert all(np.array_equal(a, b) for a, b in zip(held(talk), held(other), strict=True))
    finish(talk, fork, loaded)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_was_given_up_is_read_and_evicted_again(kind: str, model: Callable) -> None:
    llm = model(kind)
    talk = talk_with(llm)
    say(talk, *SAID[:4])
    begins = talk._begins
    talk.close()
    say(talk, SAID[4])
    assert (
        talk.last is not None and talk.last.stats["cached_tokens"] == talk.last.reuse["cached"]
    )  # plain prefixes alone
    assert talk.last.stats["old_turns"] == 3 and begins is not None and len(talk._begins or ()) == len(begins) + 1
    check_held(talk)
    finish(talk)


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_that_rewrites_earlier_turns_is_answered_as_if_nothing_was_evicted(
    kind: str, model: Callable
) -> None:
    """All of it is read again with every turn, and evicted at the turn's end."""
    llm = model(kind, REWRITING)
    talk = talk_with(llm)
    for text in SAID:
        said = say(talk, text)
        assert talk._request is not None
        prompt = talk._request.tokens[: talk._request.prompt_tokens]
        assert said == [llm.generate(prompt, ASK)[0].token_ids]
        check_held(talk)
    finish(talk)


def test_both_budgets_apply(model: Callable) -> None:
    """Streams then differ in length: each keeps no more than its budget of an old turn."""
    llm = model("llama", budget=48, window=8, recent=8)
    talk = talk_with(llm)
    for text in SAID * 2:
        say(talk, text)
        assert talk._begins is not None
        for turn in range(len(talk._begins) - KEEP):
            assert max(in_turn(talk, turn)) <= BUDGET
        assert talk.last is not None and talk.last.stats["kept_tokens"] <= 48 + 8 + 10
    assert len({len(at) for at in held(talk)}) > 1
    finish(talk)


def test_settings_may_change_between_turns(model: Callable) -> None:
    llm = model("llama")
    talk = talk_with(llm, keep_turns=None)
    say(talk, *SAID[:3])
    assert talk._begins is None
    talk.keep_turns, talk.turn_budget = 1, 9
    say(talk, SAID[3])
    check_held(talk, 1, 9)
    talk.turn_budget = 0
    say(talk, SAID[4])
    check_held(talk, 1, 0)
    finish(talk)


def test_what_the_model_was_opened_with_holds_for_its_conversations(model: Callable) -> None:
    llm = model("llama", keep_turns=1, turn_budget=5, query_buffers=0)
    talk = Conversation(llm, SYSTEM, ASK)
    say(talk, *SAID[:3])
    check_held(talk, 1, 5)
    with pytest.raises(RequestError, match="query_buffers=1"):
        llm.generate("A prompt with a budget of its own", ASK, eviction=8)
    finish(talk)


def test_a_fork_that_shares_pages_gives_way_where_there_are_none_for_copies(model: Callable) -> None:
    llm = model("llama")
    talk = talk_with(llm, keep_turns=None)
    say(talk, *SAID[:4])
    fork, request = talk.fork(), talk._request
    assert request is not None
    manager = llm.manager

    def evict_without_free_pages(engine: Engine) -> None:
        if manager.reuse is not None:
            manager.reuse.forget()  # plain prefixes would give way first
        allocator = manager.tables[STREAMS].allocator
        taken = allocator.acquire(allocator.free)
        try:
            engine.evict_turns(request, [(len(SYSTEM) + 9, 60)], BUDGET)
        finally:
            allocator.release(taken)

    llm.owner.run(evict_without_free_pages)
    assert request.evictions and max(len(at) for at in held(talk)) < manager.position(request.key)
    assert request in llm.engine.scheduler.held and fork._request not in llm.engine.scheduler.held
    talk.keep_turns = KEEP
    say(talk, SAID[4])
    say(fork, SAID[4])
    assert fork.last is not None and fork.last.stats["cached_tokens"] == fork.last.reuse["cached"]
    finish(talk, fork)


@pytest.mark.parametrize(
    "wrong",
    [{"keep_turns": n} for n in (0, -1, True, "3", 1.0, 1 << 70)] + [{"turn_budget": n} for n in (-1, None, 2.5, "8")],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(wrong: dict[str, Any], model: Callable) -> None:
    [(name, value)] = wrong.items()
    with pytest.raises(HybridKVError, match=name):
        CacheConfig(**wrong)
    llm = model("llama")
    talk = talk_with(llm)
    say(talk, SAID[0])
    before = list(talk.messages)
    setattr(talk, name, value)
    with pytest.raises(HybridKVError, match=name):
        say(talk, SAID[1])
    assert talk.messages == before, "the turn did not happen"
    setattr(talk, name, 3)
    say(talk, SAID[1])
    assert talk.last is not None and talk.last.stats["cached_tokens"] > 0
    finish(talk)


def test_a_model_that_keeps_everything_says_so(model: Callable) -> None:
    talk = talk_with(model("llama", query_buffers=0))
    with pytest.raises(RequestError, match="keep_turns"):
        say(talk, SAID[0])
    assert len(talk.messages) == 1
    talk.keep_turns = None
    say(talk, SAID[0])
    finish(talk)


def test_old_turns_are_chosen_without_a_query_buffer() -> None:
    """Conversations without a budget have none."""
    assert not find_policy(AUTO["unseen"], seen=False).needs_queries


def test_where_turns_begin() -> None:
    def encode(messages: list[dict[str, Any]]) -> list[int]:
        return [ord(c) for m in messages for c in f"<{m['role'][0]}>{m['content']}."]

    messages = [
        {"role": role, "content": text}
        for role, text in (("system", "short"), ("user", "abc"), ("assistant", "fine"), ("tool", "12"), ("user", "bcd"))
    ]
    tokens = encode(messages)
    text = "".join(map(chr, tokens))
    assert turn_begins(tokens, messages, encode) == [text.index("abc"), text.index("bcd")]
    assert turn_begins(tokens[5:], messages, encode) == [0, 0], "tokens that are not those of the messages"


@pytest.mark.slow
@pytest.mark.skipif(not (cache_folder() / FILE_NAME).exists(), reason="the embedded model was not fetched")
def test_what_was_said_in_the_first_turn_is_still_known_in_the_eighth() -> None:
    cache = CacheConfig(kv_dtype="f32", page_size=16, keep_turns=2, turn_budget=64)
    llm = LLM(device="cpu", dtype="float32", cache=cache, max_requests=4, max_context=1024)
    system = "You are a helpful assistant. The name of the user is Marta."
    facts = (
        "Remember this. The secret code of the safe is 583921. My cat is called Biscuit. My sister lives in Lisbon. "
        "The meeting with the bank is on Thursday. The password of the wireless network is tulip. The weather was "
        "fine all week, and we walked along the beach every morning before breakfast."
    )
    fillers = (
        "Name three colours.",
        "What is the capital of France?",
        "What do bees make?",
        "How many days has a week?",
    )
    talk = Conversation(llm, system, SamplingParams(max_tokens=16))
    for text in (facts, *fillers):
        list(talk.send(text))
    assert length(talk, 0) > 64 + 20 and max(in_turn(talk, 0)) == 64
    code, name, without = talk.fork(), talk.fork(), talk.fork()
    assert "583921" in "".join(code.send("What is the secret code of the safe?"))
    assert "Marta" in "".join(name.send("What is the name of the user?"))
    request, begins = without._request, talk._begins
    assert request is not None and begins is not None
    llm.owner.run(lambda engine: engine.evict_turns(request, [(begins[0], begins[1])], 0))
    assert "583921" not in "".join(without.send("What is the secret code of the safe?")), "it was in that turn alone"
    finish(talk, code, name, without)
