"""llm.chat: the template's own format, tools, thinking on and off, thoughts apart, whole and piece by piece."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from thinking_template import THINKING_TEMPLATE

from engine.ascii_tokenizer import write_tokenizer
from engine.driving import assert_nothing_held
from hybridkv import LLM, AsyncLLM, Conversation, SamplingParams
from hybridkv.errors import RequestError
from hybridkv.text.reasoning import ChatPiece

ASK = SamplingParams(max_tokens=40)
MESSAGES = [{"role": "user", "content": "What is it?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("chat")
    tiny.save("llama", folder)
    write_tokenizer(folder, THINKING_TEMPLATE)
    with LLM(folder, device="cpu", dtype="float32", max_context=1024, max_requests=4) as opened:
        yield opened


def saying(llm: LLM, text: str) -> SamplingParams:
    """Parameters under which the model says just this: a hook lets through one token at a time."""
    assert llm.tokenizer is not None
    said = [*llm.tokenizer.encode(text, bos=False), *llm.tokenizer.eos_ids]

    def only(generated: list[int], logits: Any) -> None:
        keep = logits[said[len(generated)]].clone()
        logits.fill_(-float("inf"))
        logits[said[len(generated)]] = keep

    return SamplingParams(logits_hook=only)


def test_thoughts_are_told_apart_from_the_answer(llm: LLM) -> None:
    params = saying(llm, "hm, a sea? yes</think>It is the sea.")
    out = llm.chat(MESSAGES, params)
    assert (out.reasoning, out.text, out.finish_reason) == ("hm, a sea? yes", "It is the sea.", "stop")
    stream = llm.chat_stream(MESSAGES, params)
    pieces = list(stream)
    assert all(isinstance(piece, ChatPiece) and piece.text for piece in pieces) and len(pieces) > 5
    assert "".join(p.text for p in pieces if p.reasoning) == out.reasoning
    assert "".join(p.text for p in pieces if not p.reasoning) == out.text
    assert stream.completion is not None and stream.completion.text == out.text
    assert_nothing_held(llm.engine)


def test_with_thinking_off_all_is_answer_and_a_cut_thought_is_no_answer(llm: LLM) -> None:
    off = llm.chat(MESSAGES, saying(llm, "The sea."), thinking=False)
    assert (off.reasoning, off.text) == (None, "The sea.")
    assert llm.render(MESSAGES, thinking=False).endswith("<think></think>")
    assert llm.chat(MESSAGES, saying(llm, "The sea."), enable_thinking=False).text == "The sea."
    cut = llm.chat(MESSAGES, ASK)
    assert cut.finish_reason == "length" and cut.text == "" and cut.reasoning


def test_tools_and_variables_reach_the_prompt(llm: LLM) -> None:
    assert '"look"' in llm.render(MESSAGES, tools=TOOLS) and "<tools>" not in llm.render(MESSAGES)
    plain, tooled = llm.chat(MESSAGES, ASK), llm.chat(MESSAGES, ASK, tools=TOOLS)
    assert tooled.prompt_tokens > plain.prompt_tokens + 20
    for bad, said in (
        ({"tools": "look"}, "tools"),
        ({"enable_thinkin": False}, "is enable_thinking meant"),
        ({"messages_": []}, "does not read"),
        ({"thinking": False, "enable_thinking": True}, "not both"),
    ):
        with pytest.raises(RequestError, match=said):
            llm.chat(MESSAGES, ASK, **bad)
    with pytest.raises(RequestError, match="Nobody asked"):
        llm.chat([{"role": "system", "content": "x"}], ASK)
    assert_nothing_held(llm.engine)


def test_a_conversation_keeps_thoughts_beside_answers(llm: LLM) -> None:
    talk = Conversation(llm, "Be brief.", saying(llm, "easy</think>Four."), tools=TOOLS)
    assert "".join(talk.send("2 + 2?")) == "Four."
    assert talk.messages[-1] == {"role": "assistant", "content": "Four.", "reasoning_content": "easy"}
    assert talk.last is not None and talk.last.reasoning == "easy" and talk.last.text == "Four."
    talk.thinking, talk.params = False, saying(llm, "Six.")
    pieces = [piece for piece in talk.pieces("3 + 3?") if piece.text]
    assert {piece.reasoning for piece in pieces} == {False} and talk.last.text == "Six."
    talk.thinking, talk.params = True, saying(llm, "hm</think>Eight.")
    pieces = [piece for piece in talk.pieces("4 + 4?") if piece.text]
    assert [piece.reasoning for piece in pieces] == sorted((p.reasoning for p in pieces), reverse=True)
    assert talk.last.text == "Eight." and talk.last.reasoning == "hm"
    talk.close()
    assert_nothing_held(llm.engine)


def test_the_same_in_asyncio(llm: LLM) -> None:
    async def main() -> None:
        served, params = AsyncLLM(llm), saying(llm, "hm</think>The sea.")
        out = await served.chat(MESSAGES, params)
        assert (out.reasoning, out.text) == ("hm", "The sea.")
        stream = served.chat_stream(MESSAGES, params)
        pieces = [piece async for piece in stream]
        assert "".join(p.text for p in pieces if not p.reasoning) == "The sea."
        assert stream.completion is not None and stream.completion.reasoning == "hm"
        async with served.chat_stream(MESSAGES, SamplingParams(max_tokens=900, ignore_eos=True)) as left:
            await anext(left)
        assert left.completion is not None and left.completion.finish_reason == "abort"
        with pytest.raises(RequestError, match="does not read"):
            await served.chat(MESSAGES, params, nothing=1)

    asyncio.run(main())
    assert_nothing_held(llm.engine)


def test_the_models_own_settings_are_the_defaults(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    write_tokenizer(tmp_path, THINKING_TEMPLATE)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 1.5, "top_k": 5}')
    with LLM(tmp_path, device="cpu", dtype="float32", max_context=256) as llm:
        own = llm.chat(MESSAGES, SamplingParams(max_tokens=20, seed=3))
        said = llm.chat(MESSAGES, SamplingParams(max_tokens=20, seed=3, temperature=1.5, top_k=5))
        greedy = llm.chat(MESSAGES, SamplingParams(max_tokens=20, seed=3, temperature=0))
        assert own.token_ids == said.token_ids != greedy.token_ids
        assert dict(llm.sampling_defaults) == {"temperature": 1.5, "top_k": 5}
        long = llm.generate("Hello", SamplingParams(ignore_eos=True))[0]
        assert long.finish_reason == "length" and long.prompt_tokens + len(long.token_ids) == 256
