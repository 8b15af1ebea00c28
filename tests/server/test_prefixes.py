"""Compressed documents on a server: a request names one, and its answer is what Python gives."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, CacheConfig, SamplingParams
from hybridkv.cli import main
from hybridkv.document import Document
from hybridkv.engine.engine import Engine
from hybridkv.request import Request
from hybridkv.server.documents import load_documents
from server.running import Running, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SYSTEM = "Be brief."
REPORT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model that holds two documents, loaded from files: one with a system prompt, and one of token ids."""
    folder = tmp_path_factory.mktemp("model")
    tiny.save("qwen3_5", folder)
    write_tokenizer(folder, TEMPLATE)
    with LLM(folder, device="cpu", dtype="float32", max_requests=4, max_context=1024, exact=True) as opened:
        files = {}
        for name, text, more in (("report", REPORT, {"system": SYSTEM}), ("ids", opened.encode(REPORT), {})):
            files[name] = str(folder / f"{name}.kv")
            with opened.compress(text, ratio=4, **more) as document:  # type: ignore[arg-type]
                document.save(files[name])
        load_documents(opened, files)
        yield opened
        for document in opened.documents.values():
            document.close()
        opened.owner.run(assert_nothing_held)


@pytest.fixture
def server(llm: LLM) -> Iterator[Running]:
    with serving(llm, names=("tiny",)) as running:
        yield running


def chat(server: Running, *said: str, name: str = "report", **more: Any) -> tuple[int, Any]:
    roles = ("user", "assistant") * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said)]
    asked = {"messages": messages, "temperature": 0, "max_tokens": 8, "hybridkv": {"prefix": name}, **more}
    return server.post(CHAT, asked)


def test_a_chat_goes_on_from_a_document_as_in_python(llm: LLM, server: Running) -> None:
    document = llm.documents["report"]
    [want] = document.generate(["Which month?"], GREEDY)
    for _ in range(2):
        status, found = chat(server, "Which month?")
        assert status == 200 and found["choices"][0]["message"]["content"] == want.text
        usage = found["usage"]
        read = len(document.tokens)
        assert usage["prompt_tokens"] > usage["prompt_tokens_details"]["cached_tokens"] == read
        kept = document.stats["kept_tokens"]
        assert (
            usage["hybridkv"]["prefix"] == {"name": "report", "tokens": read, "kept_tokens": kept} and kept < read / 2
        )
        assert kept < usage["hybridkv"]["kept_tokens"] < kept + usage["total_tokens"] - read + 1
        said = usage["hybridkv"]["reuse"]
        assert said["cached"] == read and said["why"] == "a held prefix goes on"
        # a cache that was given up is read again, and gives the same
        llm.owner.run(lambda engine: [engine.scheduler.give_up(each) for each in list(engine.scheduler.held)])
    answer = found["choices"][0]["message"]["content"]
    assert chat(server, "Which month?", answer, "And then?")[0] == 200
    path = "/v1/messages"
    other = {
        "model": "tiny",
        "max_tokens": 8,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Which month?"}],
    }
    status, found = server.post(path, {**other, "hybridkv": {"prefix": "report"}})
    assert status == 200 and found["content"][0]["text"] == want.text


def test_a_completion_goes_on_from_text_and_from_token_ids(llm: LLM, server: Running) -> None:
    for name, question in (("report", "Which month?"), ("ids", [5, 6, 7]), ("ids", "Which month?")):
        [want] = llm.documents[name].generate([question], GREEDY)
        asked = {"prompt": question, "temperature": 0, "max_tokens": 8, "hybridkv": {"prefix": name}}
        status, found = server.post(TEXT, asked)
        assert status == 200 and found["choices"][0]["text"] == want.text, name
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == len(llm.documents[name].tokens)


def test_threads_that_read_requests_wait_for_no_document(
    llm: LLM, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are few of them; a document whose cache was given up is read again, which may take long."""
    held, threads = Document.held, list[str]()

    def watched(document: Document) -> Request:
        threads.append(threading.current_thread().name)
        return held(document)

    monkeypatch.setattr(Document, "held", watched)
    llm.owner.run(lambda engine: [engine.scheduler.give_up(each) for each in list(engine.scheduler.held)])
    asked = {"prompt": ["Which month?", "Why?"], "temperature": 0, "max_tokens": 4, "hybridkv": {"prefix": "report"}}
    status, found = server.post(TEXT, asked)
    assert status == 200 and len(found["choices"]) == 2 and chat(server, "Which month?")[0] == 200
    assert len(threads) == 2 and all(name.startswith("hybridkv-move") for name in threads), threads


def test_a_document_is_asked_where_the_whole_text_would_not_fit(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    write_tokenizer(tmp_path, TEMPLATE)
    cache = CacheConfig(page_size=8, kv_dtype="f32", budget=48, window=8, recent=8, bounded=True)
    common: Any = {"device": "cpu", "dtype": "float32", "max_context": 1024, "step_tokens": 64}
    whole = CacheConfig(page_size=8, kv_dtype="f32")
    with LLM(tmp_path, max_requests=4, **common, cache=whole) as large, large.compress(REPORT, ratio=8) as document:
        document.save(tmp_path / "report.kv")
        need = len(document.tokens)
    with LLM(tmp_path, max_requests=2, memory="2.2MiB", **common, cache=cache) as small:
        load_documents(small, {"report": str(tmp_path / "report.kv")})
        assert small.engine.tokens_alone < need < small.manager.max_tokens, "the pools must be too small for the whole"
        with serving(small, names=("tiny",)) as running:
            [want] = small.documents["report"].generate(["Why?"], GREEDY)
            status, found = chat(running, "Why?")
            assert status == 200 and found["choices"][0]["message"]["content"] == want.text, found
            room = small.manager.max_tokens
            status, found = chat(running, "a" * room)
            assert status == 400 and str(room - 1) in found["error"]["message"], found
            status, found = running.post(
                CHAT, {"messages": [{"role": "user", "content": "a" * need}], "hybridkv": {"budget": None}}
            )
            assert status == 400 and str(small.engine.tokens_alone - 1) in found["error"]["message"], found
        small.documents["report"].close()
        small.owner.run(assert_nothing_held)


def test_what_cannot_follow_a_document_is_refused(server: Running) -> None:
    def refused(status: int, word: str, answer: tuple[int, Any]) -> None:
        assert answer[0] == status and word in answer[1]["error"]["message"], answer

    refused(404, "there are ids, report", chat(server, "Hello", name="nobody"))
    refused(404, "there are ids, report", server.post(TEXT, {"prompt": "a", "hybridkv": {"prefix": "nobody"}}))
    refused(400, "/v1/completions", chat(server, "Hello", name="ids"))
    refused(400, "kept whole", chat(server, "Hello", hybridkv={"prefix": "report", "budget": 30}))
    refused(400, "prefix", chat(server, "Hello", hybridkv={"prefix": 7}))
    refused(400, "its own system prompt", chat(server, messages=[{"role": "system", "content": "Shout."}]))
    asked = {"prompt": "a", "echo": True, "hybridkv": {"prefix": "report"}}
    refused(400, "not repeated", server.post(TEXT, asked))
    sends = {"kv_transfer_params": {"do_remote_decode": True}}
    refused(400, "do_remote_decode: what goes on from a document", chat(server, "Hello", **sends))
    asked = {"prompt": "a", "hybridkv": {"prefix": "report"}, **sends}
    refused(400, "do_remote_decode: what goes on from a document", server.post(TEXT, asked))
    assert chat(server, "Which month?")[0] == 200

    def held(engine: Engine) -> int:
        return len(engine.scheduler.held)

    assert server.llm.owner.run(held) <= 2 and not server.llm.owner.run(lambda engine: len(engine.scheduler.running))


def test_a_server_without_documents_says_so(tiny_one: Running) -> None:
    status, found = chat(tiny_one, "Hello")
    assert status == 404 and "--document" in found["error"]["message"]


def test_files_that_are_not_there_or_share_a_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    paths = [tmp_path / "one.kv", tmp_path / "a" / "one.kv"]
    for path in paths:
        path.write_bytes(b"")
    for given, word in (([tmp_path / "two.kv"], "no file"), (paths, "both be called 'one'")):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *(part for path in given for part in ("--document", str(path)))])
        assert ended.value.code == 2
        assert word in " ".join(capsys.readouterr().err.replace("│", " ").split())
