"""Conversations saved, loaded and forked on a GPU, while other requests run ahead of what the host knows."""

from pathlib import Path

import pytest
import tiny

from engine.ascii_tokenizer import TEMPLATE, write_tokenizer
from engine.driving import assert_nothing_held, prompt
from hybridkv import LLM, CacheConfig, Conversation, SamplingParams

pytestmark = pytest.mark.gpu
ASK = SamplingParams(max_tokens=12, temperature=1.0, seed=4)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("budget", [None, 24])
def test_a_conversation_goes_on_saved_and_forked(
    kind: str, budget: int | None, tmp_path: Path, device: str = "cuda"
) -> None:
    tiny.save(kind, tmp_path)
    write_tokenizer(tmp_path, TEMPLATE)
    cache = CacheConfig("f32", 16, budget=budget, window=8, recent=8)
    with LLM(tmp_path, device=device, dtype="float32", exact=True, cache=cache, max_requests=6, max_context=512) as llm:
        talk = Conversation(llm, "Be brief.", ASK)
        list(talk.send("Hello, how are you? I am well."))
        other = llm.stream(prompt(9), SamplingParams(max_tokens=300, ignore_eos=True))
        next(other)
        talk.save(tmp_path / "talk")
        talks = [talk, Conversation.load(llm, tmp_path / "talk", ASK), talk.fork()]
        found = []
        for each in talks:
            list(each.send("Go on"))
            assert each.last is not None and each.last.stats["cached_tokens"] > 0
            found.append(each.last.token_ids)
            each.close()
        assert found[0] == found[1] == found[2]
        other.close()
        assert_nothing_held(llm.engine)
