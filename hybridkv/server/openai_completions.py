"""Completions: prompts as text or token ids, several at once, with echo and logprobs of prompts as lm-eval asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridkv.llm import LLM
from hybridkv.request import TokenLogprobs
from hybridkv.server import asked as common
from hybridkv.server import settings
from hybridkv.server.documents import document_of
from hybridkv.server.events import Event, Finish, Prompt, Said, Tokens
from hybridkv.server.fields import Fields
from hybridkv.server.generation import Generation, Job
from hybridkv.server.openai_common import (
    DONE,
    FINISH,
    Offsets,
    OpenAIFormat,
    StreamOptions,
    TokenNames,
    answers,
    new_id,
    refuse,
    sse,
    stream_options,
    usage_object,
)
from hybridkv.server.reusing import sharing_of
from hybridkv.server.service import Service
from hybridkv.server.structure import compiled, read_structure
from hybridkv.server.transfers import read_transfer

DEFAULT_TOKENS = 16  # of an answer, as OpenAI has it


@dataclass(frozen=True)
class CompletionCall:
    """A completion request, checked and ready to run."""

    model: str
    job: Job
    options: StreamOptions
    texts: list[str]  # of the prompts, where they are repeated
    echo: bool
    logprobs: int | None
    token_ids: bool


def read_completion(asked: Fields, service: Service) -> CompletionCall:
    """Check all of a request and tokenise its prompts. It runs on a worker thread."""
    model, llm = service.model_name(asked.text("model", settings.MAX_NAME)), service.llm
    options, n = stream_options(asked), answers(asked)
    structure = read_structure(asked)
    refuse(asked, ("suffix",), "text cannot be put between a beginning and an end here")
    best = asked.whole("best_of", 1, settings.MAX_ANSWERS)
    if best is not None and best > n:
        raise asked.wrong("best_of", "it must not be more than n")
    echo, logprobs = asked.flag("echo"), asked.whole("logprobs", 0, settings.MAX_LOGPROBS)
    most = asked.whole("max_tokens", 0, common.MAX_TOKENS)
    most = DEFAULT_TOKENS if most is None else most
    if most == 0 and not echo:
        raise asked.wrong("max_tokens", "0 is for echo: true, else it must be 1 or more")
    prompts = _prompts(asked, llm)
    params = common.sampling(
        asked,
        llm,
        max_tokens=max(1, most),
        n=n,
        stop=common.stops(asked, "stop"),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        **({"min_tokens": 0} if most == 0 else {}),
    )
    sharing = sharing_of(asked)
    document = document_of(llm, sharing)
    if document is not None and echo:
        raise asked.wrong("echo", "the text of a document that an answer goes on from is not repeated")
    tokens = [llm.encode(prompt) if document is None else document.asked(prompt) for prompt in prompts]
    if echo and logprobs is not None:
        count, most_scores = n * sum(map(len, tokens)) * (1 + logprobs), settings.MAX_PROMPT_LOGPROBS
        if count > most_scores:
            told = f"echo would repeat {count} logprobs of prompts (n x tokens x (1 + logprobs)), at most {most_scores}"
            raise asked.wrong("logprobs", f"{told} are given; ask for fewer, or send shorter prompts one by one")
    texts = [_text(prompt, llm) for prompt in prompts] if echo else []
    job = Job(
        [Prompt(ids, sharing=sharing, document=document) for ids in tokens],
        params,
        common.eviction(asked, llm),
        read_only=most == 0,
        transfer=read_transfer(asked),
        constraint=partial(compiled, llm.engine.grammars, structure),
    )
    return CompletionCall(model, job, options, texts, echo, logprobs, asked.flag("return_token_ids"))


def _prompts(asked: Fields, llm: LLM) -> list[str | list[int]]:
    given = asked.raw("prompt")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise asked.wrong("prompt", "it must be text, token ids, or a list of either")
    if isinstance(given[0], int):
        return [_ids(asked, given, llm)]
    if len(given) > settings.MAX_PROMPTS:
        raise asked.wrong("prompt", f"it has {len(given)} prompts, at most {settings.MAX_PROMPTS} are taken")
    return [prompt if isinstance(prompt, str) else _ids(asked, prompt, llm) for prompt in given]


def _ids(asked: Fields, ids: Any, llm: LLM) -> list[int]:
    vocab = llm.engine.vocab
    good = isinstance(ids, list) and ids
    if not good or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab for i in ids):
        raise asked.wrong("prompt", f"a list must hold texts, or token ids from 0 to {vocab - 1}, and not be empty")
    return ids


def _text(prompt: str | list[int], llm: LLM) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if llm.tokenizer is None else llm.tokenizer.decode(prompt)


class CompletionFormat(OpenAIFormat):
    """Events of one generation in OpenAI's form, whole or as chunks."""

    def __init__(self, call: CompletionCall, service: Service) -> None:
        self._call, self._tokenizer = call, service.llm.tokenizer
        self._names = TokenNames(self._tokenizer)
        self._about: dict[str, Any] = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time())}
        self._about["model"] = call.model
        self._offsets: dict[int, Offsets] = {}

    # streamed

    def weighs(self, events: list[Event]) -> bool:
        """A prompt that is repeated may be long, and each of its tokens has its logprobs."""
        return self._call.echo and any(event.choice not in self._offsets for event in events)

    def chunks(self, events: list[Event], generation: Generation) -> Iterator[bytes]:
        """The chunks of a step's events; with echo the prompt comes first."""
        for choice in dict.fromkeys(event.choice for event in events):
            mine = [event for event in events if event.choice == choice]
            if choice not in self._offsets:
                text, scores = self._echoed(choice, generation)
                if self._call.echo:
                    yield self._chunk(generation, choice, text, logprobs=scores)
            text, tokens = _joined(mine)
            scores = self._scores(choice, tokens)
            if text or (tokens.ids and (self._call.token_ids or self._call.logprobs is not None)):
                more = {"token_ids": list(tokens.ids)} if self._call.token_ids else {}
                yield self._chunk(generation, choice, text, logprobs=scores, **more)
            for end in mine:
                if isinstance(end, Finish):
                    reason = FINISH.get(end.reason, end.reason)
                    yield self._chunk(generation, choice, "", finish_reason=reason, stop_reason=end.stop)

    def _chunk(self, generation: Generation, choice: int, text: str, **more: Any) -> bytes:
        shown = {"index": choice, "text": text, "logprobs": None, "finish_reason": None, **more}
        found: dict[str, Any] = self._about | {"choices": [shown]}
        if self._call.options.continuous:
            found["usage"] = usage_object(generation.usage, generation.job)
        return sse(found)

    def end(self, generation: Generation) -> Iterator[bytes]:
        """What follows the last chunk."""
        if self._call.options.include_usage:
            yield sse(self._about | {"choices": [], "usage": usage_object(generation.usage, generation.job)})
        yield DONE

    # whole

    def whole(self, events: list[Event], generation: Generation) -> dict[str, Any]:
        """All of the answer at once."""
        choices = [
            self._choice(i, [e for e in events if e.choice == i], generation) for i in range(generation.job.choices)
        ]
        return self._about | {"choices": choices, "usage": usage_object(generation.usage, generation.job)}

    def _choice(self, index: int, events: list[Event], generation: Generation) -> dict[str, Any]:
        before, scores = self._echoed(index, generation)
        text, tokens = _joined(events)
        after = self._scores(index, tokens)
        if scores is not None and after is not None:
            scores = {name: scores[name] + after[name] for name in scores}
        end = next(event for event in events if isinstance(event, Finish))
        found = {"index": index, "text": before + text, "logprobs": scores if self._call.echo else after}
        found |= {"finish_reason": FINISH.get(end.reason, end.reason), "stop_reason": end.stop}
        if self._call.token_ids:
            prompt = generation.job.prompts[index // generation.job.params.n]
            found |= {"token_ids": list(tokens.ids), "prompt_token_ids": prompt.tokens}
        return found

    # logprobs

    def _echoed(self, choice: int, generation: Generation) -> tuple[str, dict[str, Any] | None]:
        """The prompt before an answer and its logprobs, as far as they were asked for."""
        self._offsets[choice] = Offsets(self._tokenizer)
        if not self._call.echo:
            return "", None
        number = choice // generation.job.params.n
        text = self._call.texts[number]
        if self._call.logprobs is None:
            return text, None
        request = generation.prompt_requests[number]
        tokens = generation.job.prompts[number].tokens
        return text, self._listed(choice, tokens, request.prompt_logprobs)

    def _scores(self, choice: int, tokens: Tokens) -> dict[str, Any] | None:
        if self._call.logprobs is None:
            return None
        return self._listed(choice, tokens.ids, tokens.logprobs)

    def _listed(self, choice: int, ids: Any, scores: Any) -> dict[str, Any]:
        """Legacy lists; None stands for the first token of a prompt, which nothing comes before."""
        names, offsets = self._names, self._offsets[choice]
        pairs: list[tuple[int, TokenLogprobs | None]] = list(zip(ids, scores))
        return {
            "tokens": [names.text(token) for token, _ in pairs],
            "token_logprobs": [None if s is None else max(s.token, -9999.0) for _, s in pairs],
            "top_logprobs": [
                None if s is None else {names.text(other): max(value, -9999.0) for other, value in s.top.items()}
                for _, s in pairs
            ],
            "text_offset": [offsets.push(token) for token, _ in pairs],
        }


def _joined(events: list[Event]) -> tuple[str, Tokens]:
    text = "".join(event.text for event in events if isinstance(event, Said))
    tokens = [event for event in events if isinstance(event, Tokens)]
    ids = tuple(i for event in tokens for i in event.ids)
    return text, Tokens(0, ids, tuple(s for event in tokens for s in event.logprobs))
