"""Documents over several ranks: what is kept, answered and saved is what one process keeps, answers and saves."""

import copy
import gc
import io
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from numerics import assert_same_bytes
from tiny_ranks import saved_model

from cli.commands import TINY
from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, Conversation, EvictionConfig, SamplingParams
from hybridkv.cache.session import Session
from hybridkv.cli import main
from hybridkv.document import Document
from hybridkv.engine.engine import Engine
from hybridkv.engine.lock_step import LockStepEngine
from hybridkv.engine.replay import ReplayPart
from hybridkv.errors import RequestError
from hybridkv.request import Request
from server.running import SECONDS
from server.test_command import port_of, started
from server.test_killed import turn

pytestmark = pytest.mark.usefixtures("ready_ranks")
HOW: dict[str, Any] = dict(device="cpu", dtype="float32", exact=True, max_requests=4, max_context=640, step_tokens=64)
CACHE = CacheConfig(page_size=8, kv_dtype="f32")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SEVERAL = SamplingParams(max_tokens=6, temperature=0.9, seed=3, n=2, ignore_eos=True)
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
REPLAYED = EvictionConfig(90, window=8, recent=8, policy="replay")
QUESTIONS = ["Which month?", "What struck?", "And the weather?"]


def kept(llm: LLM, document: Document) -> dict[int, list[list[list[int]]]]:
    """The entries that stayed, of all layers and KV heads."""
    request = document.held()
    records = llm.owner.run(lambda engine: engine.evictions_of(request))
    return {at: [[head.tolist() for head in layer] for layer in record] for at, record in records.items()}


def answers(document: Document) -> list[Any]:
    """Of several questions together, two samples of one, and a conversation's two turns."""
    found: list[Any] = [
        [[sample.token_ids for sample in answer.samples], answer.stats["cached_tokens"], answer.stats["kv_bytes_kept"]]
        for answer in document.generate([*QUESTIONS, "Why?"], [GREEDY] * 3 + [SEVERAL])
    ]
    talk = Conversation(document.llm, params=GREEDY, document=document)  # type: ignore[arg-type]
    for question in QUESTIONS[:2]:
        found.append("".join(talk.send(question)))
        assert talk.last is not None
        found.append(talk.last.stats["cached_tokens"])
    talk.close()
    return found


def told(document: Document) -> dict[str, Any]:
    return {name: value for name, value in document.stats.items() if name != "seconds"}


def assert_same_files(one: Path, other: Path) -> None:
    """Sessions of the same text, cut the same way, of the same bytes."""
    a, b = Session.load(one), Session.load(other)
    assert a.snapshot is not None and b.snapshot is not None and a.files == b.files
    assert (a.tokens, a.prompt_tokens, a.conversation["document"]["rendered"]) == (
        b.tokens, b.prompt_tokens, b.conversation["document"]["rendered"]
    )  # fmt: skip
    assert a.snapshot.position == b.snapshot.position and a.policy == b.policy
    mine, theirs = a.snapshot.contents()[0], b.snapshot.contents()[0]
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert_same_bytes(tensor, theirs[name])


@pytest.mark.parametrize(
    ("kind", "kv_heads", "size", "policies"),
    (
        # two KV heads a rank, between layers with a state
        pytest.param("qwen3_5", 4, 2, ("replay", "heads", "keydiff"), marks=pytest.mark.slow),
        ("llama", 1, 2, ("replay",)),  # one, which both have
        pytest.param("llama", 2, 4, ("replay", "heads", "tova"), marks=pytest.mark.slow),
    ),
)
def test_a_document_over_ranks_is_that_of_one_and_goes_on_over_another_number(
    kind: str, kv_heads: int, size: int, policies: tuple[str, ...], tmp_path: Path
) -> None:
    folder = saved_model(tmp_path / "model", kind, num_key_value_heads=kv_heads)
    want: dict[str, Any] = {}
    with LLM(folder, cache=CACHE, **HOW) as one:
        for policy in policies:
            with one.compress(TEXT, ratio=4, policy=policy, system="Be brief.") as document:
                want[policy] = told(document), kept(one, document), answers(document)
                document.save(tmp_path / f"1.{policy}")
    [cut] = want[policies[0]][1].values()
    assert len({len(head) for layer in cut for head in layer}) > 1, "the heads kept equally many"
    with LLM(folder, cache=CACHE, tp=size, **HOW) as llm:
        engine = llm.engine
        assert isinstance(engine, LockStepEngine)
        for policy in policies:
            with llm.compress(TEXT, ratio=4, policy=policy, system="Be brief.") as document:
                assert told(document) == want[policy][0]
                assert kept(llm, document) == want[policy][1]
                assert answers(document) == want[policy][2]
                document.save(tmp_path / f"{size}.{policy}")
            assert_same_files(tmp_path / f"1.{policy}", tmp_path / f"{size}.{policy}")
        for policy in policies[:2]:  # of one process
            with llm.load_document(tmp_path / f"1.{policy}") as document:
                assert told(document) == want[policy][0] and answers(document) == want[policy][2]
                document.save(tmp_path / "again")
                refuses_to_read_again(llm, document.held())
            assert_same_files(tmp_path / f"1.{policy}", tmp_path / "again")
        del document
        gc.collect()
        llm.generate([5, 6, 7], GREEDY)  # the others hear of what nobody has any more
        assert not engine._there and not engine._gone, "the ranks remember what nobody has any more"
        llm.owner.run(assert_nothing_held)
    assert not dist.is_initialized()
    with LLM(folder, cache=CACHE, **HOW) as one:
        for policy in policies:
            with one.load_document(tmp_path / f"{size}.{policy}") as document:
                assert told(document) == want[policy][0] and answers(document) == want[policy][2]
        one.owner.run(assert_nothing_held)


def refuses_to_read_again(llm: LLM, request: Request) -> None:
    """And goes on with the next."""

    def ask(engine: Engine) -> None:
        scores = engine.replay(request, ReplayPart([5], [6, 7]))
        others = copy.copy(engine.replay(request, ReplayPart([5], [6, 7])))  # of which nobody has the original
        engine.replay(request, ReplayPart([5], [8]), scores)
        for part, given, said in (
            (ReplayPart([5] * 700, [6]), None, "do not fit a context of 640; shorten the text by"),
            (ReplayPart([5] * 700, [6]), scores, "do not fit a context"),
            (ReplayPart([5], []), scores, "there is no text to read again"),
            (ReplayPart([5], [6]), list(scores), "by scores from outside is not available"),
            (ReplayPart([5], [6]), others, "by scores from outside is not available"),
        ):
            with pytest.raises(RequestError, match=said):
                engine.replay(request, part, given)
        for given in (list(scores), others):
            with pytest.raises(RequestError, match="by scores from outside is not available"):
                engine.evict_held(request, EvictionConfig(64), given)
        running = engine.add([5, 6, 7], GREEDY)
        with pytest.raises(RequestError, match="an answer is still being written"):
            engine.replay(running, ReplayPart([5], [6]))
        engine.abort(running)

    llm.owner.run(ask)


def go_on_from(llm: LLM, request: Request) -> None:
    llm.owner.run(lambda engine: engine.add([*request.tokens, 5], GREEDY, eviction=None, prefix=request))


@pytest.mark.slow
def test_a_document_that_made_room_is_read_again_on_all_ranks_and_drops_the_same(tmp_path: Path) -> None:
    folder, found = saved_model(tmp_path / "model", "qwen3_5", num_key_value_heads=2), []
    for tp in (1, 2):
        with LLM(folder, cache=CACHE, tp=tp, host_cache=0, **HOW) as llm:
            document = llm.compress(TEXT, budget=60, policy="heads")
            first, lists, old = answers(document), kept(llm, document), document.held()
            llm.generate([[n] * 631 for n in range(3, 3 + llm.manager.slots)], GREEDY)  # all of the pools
            assert old not in llm.engine.scheduler.held and kept(llm, document) == lists
            assert document.held() is not old and document.held().prefix is None
            again = answers(document)
            assert again == first
            old = document.held()
            document.close()
            with pytest.raises(RequestError, match="this document was closed"):
                document.held()
            if tp > 1:  # the others have forgotten it; one process reads it again
                with pytest.raises(RequestError, match="over several ranks nobody knows this request any more"):
                    go_on_from(llm, old)
            llm.owner.run(assert_nothing_held)
            found.append((lists, again))
    assert found[0] == found[1]


def replayed_turns(llm: LLM) -> list[Any]:
    """A conversation whose cache is cut after an answer by reading it again, once it is half more than the budget. It
    grows by just that half, so a mean that is a little higher decides otherwise; and before that others take its slot.
    """
    talk, found, text, before = Conversation(llm, "Be brief.", GREEDY, eviction=REPLAYED), [], TEXT[:60], 0
    for number in range(5):
        stream = talk.send(text)
        next(stream)
        while not (request := talk_request(talk)).finished:
            next(stream)
        llm.generate([[n] * 5 for n in (5, 6)], GREEDY)
        assert request.key in llm.manager.frozen, "nobody has taken its slot"
        for _ in stream:
            pass
        assert talk.last is not None
        found.append([talk.last.token_ids, list(request.evictions)])
        llm.generate([[7] * 5, [8] * 9], GREEDY)
        grown, before = len(request.tokens) - before, len(request.tokens)
        if number:  # by the text, and by what stands around it
            text = "x" * (len(text) + REPLAYED.budget // 2 - grown)
        else:
            text = "And now?"
    talk.close()
    return found


def talk_request(talk: Conversation) -> Request:
    assert talk._request is not None
    return talk._request


def test_a_conversation_is_cut_by_reading_it_again_as_on_one_rank(tmp_path: Path) -> None:
    """By the mean of all heads, which keep unlike much; and from wherever its cache lies by then."""
    folder, found = saved_model(tmp_path, "llama", num_key_value_heads=4), []
    for tp in (1, 2):
        with LLM(folder, cache=CACHE, tp=tp, **HOW | dict(max_requests=2, reuse=None)) as llm:
            found.append(replayed_turns(llm))
            llm.owner.run(assert_nothing_held)
    assert found[0] == found[1]
    cuts = [len(at) for _, at in found[0]]
    assert 1 < cuts[-1] < len(cuts), f"it was cut after every turn, or hardly ever: {cuts}"


def run(*words: object) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([str(word) for word in words])
    assert not leaving.value.code and not dist.is_initialized()


def test_the_commands_write_and_ask_documents_over_ranks_as_over_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of ranks asks what the other one has written."""
    folder = saved_model(tmp_path / "model", "llama", num_key_value_heads=2)
    (tmp_path / "text").write_text(TEXT)
    model, said = ("-m", folder, *TINY, "--exact"), []
    for tp in (1, 2):
        cut = ("--ratio", 4, "--policy", "heads", "-o", tmp_path / f"{tp}.kv")
        run("compress", tmp_path / "text", *cut, *model, "--tp", tp)
        told, _, seconds = " ".join(capsys.readouterr().err.split()).partition(", in ")
        assert "kept 57 of 228 tokens a stream by heads" in told and "ask with: " in seconds
        said.append([told])
    assert_same_files(tmp_path / "1.kv", tmp_path / "2.kv")
    for tp, other in ((1, 2), (2, 1)):
        about = ("--document", tmp_path / f"{other}.kv", "--max-tokens", 8, "--tp", tp)
        run("generate", QUESTIONS[0], *about, *model)
        shown = capsys.readouterr()
        assert "228 tokens were in the cache already" in " ".join(shown.err.split())
        said[tp - 1].append(shown.out)
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Which month?\nWhy?\n")))
            run("chat", *about, *model)
        said[tp - 1].append(capsys.readouterr().out)
    assert said[0] == said[1] and all(said[0])


@pytest.mark.slow
def test_a_server_over_ranks_answers_from_documents_as_one_does(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model", "qwen3_5", num_key_value_heads=2)
    llm = LLM(folder, cache=CacheConfig(kv_dtype="f32"), **HOW)
    with llm, llm.compress(TEXT, ratio=4, policy="heads") as document:
        document.save(tmp_path / "report.kv")
        [want] = document.generate(QUESTIONS[0], SamplingParams(max_tokens=8, temperature=0.0))
    settings = ("--device", "cpu", "--dtype", "float32", "--exact", "--context", 640, "--tp", 2)
    with started("-m", folder, *settings, "--document", tmp_path / "report.kv") as (process, lines):
        asked = [{"role": "user", "content": QUESTIONS[0]}]
        for _ in range(2):
            answer, cached = turn(port_of(lines), asked, hybridkv={"prefix": "report"})
            assert answer == want.text and cached == want.stats["cached_tokens"] > 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
