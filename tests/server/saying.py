"""Answers that a test chooses, and the function that they call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridkv.engine.sampler import SampledTokens
from server.running import Running

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = "<tool_call><function=get_weather><parameter=days>3</parameter></function></tool_call>"


@contextmanager
def saying(running: Running, text: str | list[int]) -> Iterator[None]:
    """The model's answer is this text, in which <tool_call> is the token; then it ends."""
    tokenizer = running.llm.tokenizer
    assert tokenizer is not None
    left = [*(tokenizer.encode(text, bos=False) if isinstance(text, str) else text), 2]
    original = SampledTokens.wait

    def wait(self: SampledTokens) -> Any:
        tokens, problems = original(self)
        return [left.pop(0) for _ in tokens], problems

    SampledTokens.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        SampledTokens.wait = original  # type: ignore[method-assign]
