"""Asking: what a caller wants of a model, as functions that begin its requests.

Prompts are encoded, and grammars compiled, on the caller's thread; the functions are called on the engine's
(engine/owner.py). How answers come back is answers.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any

from hybridkv.answers import Completion
from hybridkv.config import EvictionConfig, SamplingParams
from hybridkv.engine.engine import Engine
from hybridkv.engine.warm import WarmReader
from hybridkv.errors import RequestError
from hybridkv.prompts import Messages, Prompt, Prompts, Tools
from hybridkv.request import Request
from hybridkv.text.call_formats import calls_in
from hybridkv.text.constraint import Thoughts, thoughts_of
from hybridkv.text.reasoning import ReasoningSplitter, assistant_message, reasoning_of
from hybridkv.warming import offer_next_turn

Eviction = EvictionConfig | int | None | object  # object: INHERIT, what the LLM was opened with
Add = Callable[[Engine], Request]  # begins a request, on the engine's thread


@dataclass(frozen=True)
class ChatRequest:
    """A chat on its way: what begins its request, what makes the splitter of its answer, and what remembers it."""

    add: Add
    splitter: Callable[[], ReasoningSplitter]
    ended: Callable[[Completion], None]  # told of the answer, before it is divided


def one_answer(params: SamplingParams | None) -> None:
    """Refuse parameters that ask for several answers."""
    n = getattr(params, "n", 1)
    if n != 1:
        raise RequestError(f"a stream is one answer, {n} were asked for with n={n}; use generate or chat")


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; several as they are."""
    if (
        not isinstance(prompts, Sequence)
        or isinstance(prompts, str | bytes)
        or (prompts and isinstance(prompts[0], Integral))  # numpy's too
    ):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def adding(
    engine: Engine,
    tokens: list[int],
    params: SamplingParams | None,
    eviction: Eviction,
    thoughts: Thoughts | None = None,
    **how: Any,
) -> Add:
    """What the engine's thread does to begin a request; a grammar is compiled on this one."""
    ready = engine.compiled(params, thoughts) if isinstance(params, SamplingParams) else params
    return lambda engine: engine.add(tokens, ready, eviction=eviction, **how)


def adding_all(
    engine: Engine,
    encode: Callable[[Prompt], list[int]],
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    eviction: Eviction | Sequence[Eviction],
    cache: bool | str,
) -> list[Add]:
    """The same for each of several prompts, with parameters for all of them or one for each."""
    listed = listed_prompts(prompts)
    each = list(params) if isinstance(params, Sequence) else [params] * len(listed)
    if len(each) != len(listed):
        raise RequestError(f"{len(listed)} prompts were given with {len(each)} sampling parameters")
    evictions = list(eviction) if isinstance(eviction, list | tuple) else [eviction] * len(listed)
    if len(evictions) != len(listed):
        raise RequestError(f"{len(listed)} prompts were given with {len(evictions)} settings of eviction")
    asked = zip(listed, each, evictions, strict=True)
    return [adding(engine, encode(p), s, e, cache=cache) for p, s, e in asked]


def adding_chat(
    engine: Engine,
    prompts: Prompts,
    warm: WarmReader | None,
    messages: Messages,
    params: SamplingParams | None,
    tools: Tools,
    thinking: bool | None,
    eviction: Eviction,
    template_variables: Mapping[str, Any],
    cache: bool | str,
) -> ChatRequest:
    """A chat's request, how its answer is divided, and what is remembered of it. `warm`: what reads next turns before
    they come.
    """
    tokenizer, template = prompts.chat_parts()
    pieces = prompts.pieces(messages, tools, thinking, template_variables)
    text = "".join(text for text, _ in pieces)
    splitter = partial(reasoning_of, template, text)
    thoughts = thoughts_of(template, tokenizer, splitter())
    memory = prompts.chat_memory
    spelled = memory.spell(pieces, cache=cache)
    marks = memory.marks.marks(spelled.ids)
    begin = adding(engine, spelled.ids, params, eviction, thoughts, cache=cache, marks=marks)

    def add(engine: Engine) -> Request:
        request = begin(engine)
        request.text_memory = spelled.remembered
        return request

    def ended(found: Completion) -> None:
        for sample in found.samples:
            if sample.finish_reason in ("stop", "length"):
                ended = sample.finish_reason == "stop"
                memory.remember(spelled, sample.text, sample.token_ids, ended, cache)
        if cache is not True or found.others or engine.resolve_eviction(eviction) is not None:
            return
        if found.finish_reason != "stop" or (tools and calls_in(template, found.text)):
            return
        answer = found.divided(splitter)
        said = [*messages, assistant_message(answer.text, answer.reasoning)]

        def spell(text: str) -> list[int]:
            question = {"role": "user", "content": text}
            return memory.spell(prompts.pieces([*said, question], tools, thinking, template_variables)).ids

        offer_next_turn(warm, memory.marks, [*spelled.ids, *found.token_ids], len(spelled.ids), spell)

    return ChatRequest(add, splitter, ended)
