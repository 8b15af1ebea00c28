"""Chat Completions: a request read, and events written as OpenAI's clients expect them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridkv.request import TokenLogprobs
from hybridkv.server import asked as common
from hybridkv.server import settings
from hybridkv.server.events import CallArguments, CallStart, Event, Finish, Said, Tokens, whole_calls
from hybridkv.server.fields import Fields
from hybridkv.server.generation import Generation, Job
from hybridkv.server.openai_common import (
    DONE,
    FINISH,
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
from hybridkv.server.prompting import Chat, Message, Rendered, render_chat
from hybridkv.server.reusing import sharing_of
from hybridkv.server.service import Service
from hybridkv.server.structure import read_structure
from hybridkv.server.tools import read_openai_tools
from hybridkv.server.transfers import read_transfer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class ChatCall:
    """A chat request, checked and ready to run."""

    model: str
    job: Job
    options: StreamOptions
    show_reasoning: bool
    logprobs: bool
    token_ids: bool


def read_chat(asked: Fields, service: Service) -> ChatCall:
    """Check all of a request and render its prompt. It runs on a worker thread."""
    model, llm = service.model_name(asked.text("model", settings.MAX_NAME)), service.llm
    options = stream_options(asked)
    refuse(asked, ("audio", "functions", "function_call"), "it is not served; there is text, and tools")
    if asked.items("modalities", 8) not in (None, ["text"]):
        raise asked.wrong("modalities", "this is a text model")
    logprobs, top = asked.flag("logprobs"), asked.whole("top_logprobs", 0, settings.MAX_LOGPROBS)
    if top is not None and not logprobs:
        raise asked.wrong("top_logprobs", "it needs logprobs: true")
    most = asked.whole("max_completion_tokens", 1, common.MAX_TOKENS)
    if most is None:
        most = asked.whole("max_tokens", 1, common.MAX_TOKENS)
    rendered = read_chat_prompt(asked, service)
    params = common.sampling(
        asked,
        llm,
        max_tokens=most,
        n=answers(asked),
        stop=common.stops(asked, "stop"),
        logprobs=(top or 0) if logprobs else None,
    )
    evicted, transfer = common.eviction(asked, llm), read_transfer(asked)
    job = Job([rendered.prompt], rendered.params(params), evicted, transfer=transfer, constraint=rendered.constraint)
    show = asked.flag("include_reasoning", True)
    return ChatCall(model, job, options, show, logprobs, asked.flag("return_token_ids"))


def read_chat_prompt(asked: Fields, service: Service) -> Rendered:
    """The prompt of a chat request."""
    chat = Chat(
        read_messages(asked),
        thinking=_thinking(asked),
        variables=template_variables(asked, asked.choice("reasoning_effort", EFFORTS)),
        ending=_ending(asked),
        tools=read_openai_tools(asked, service.settings.tool_format),
        structure=read_structure(asked),
        sharing=sharing_of(asked),
    )
    return render_chat(service.llm, chat)


def _thinking(asked: Fields) -> bool | None:
    return False if asked.choice("reasoning_effort", EFFORTS) == "none" else None


def template_variables(asked: Fields, effort: str | None) -> dict[str, Any]:
    """`chat_template_kwargs`, and how hard to think; "none" is a switch, not a variable."""
    given = asked.object("chat_template_kwargs")
    found = {} if given is None else dict(given.data)
    return {"reasoning_effort": effort, **found} if effort not in (None, "none") else found


def _ending(asked: Fields) -> str:
    add, go_on = asked.flag("add_generation_prompt", True), asked.flag("continue_final_message")
    if go_on and asked.flag("add_generation_prompt"):
        raise asked.wrong("continue_final_message", "it cannot be true together with add_generation_prompt")
    return "open" if go_on else "answer" if add else "turn"


# ---- messages


def read_messages(asked: Fields) -> list[Message]:
    """The messages in the form of templates, content as text; or 400 with the path of what is wrong."""
    if "messages" not in asked:
        raise asked.wrong("messages", "it is missing")
    found = [_read_message(message) for message in asked.objects("messages", settings.MAX_MESSAGES)]
    if not found:
        raise asked.wrong("messages", "there must be at least one")
    return found


def _read_message(message: Fields) -> Message:
    role = message.choice("role", ("system", "developer", "user", "assistant", "tool"))
    if role is None:
        raise message.wrong("role", "it is missing")
    content = _read_content(message)
    found: Message = {"role": "system" if role == "developer" else role, "content": content}
    calls = list(message.objects("tool_calls", settings.MAX_TOOLS))
    if role == "assistant":
        thoughts = message.text("reasoning_content") or message.text("reasoning")
        if thoughts:
            found["reasoning_content"] = thoughts
        if calls:
            found["tool_calls"] = [_read_call(call) for call in calls]
    if content is None and not found.get("tool_calls") and role != "assistant":
        raise message.wrong("content", "it is missing")
    if role == "tool":
        found["tool_call_id"] = message.needed_text("tool_call_id", 256)
    return found


def _read_content(message: Fields) -> str | None:
    content = message.raw("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise message.wrong("content", "it must be text or a list of text parts")
    texts = []
    for part in message.objects("content", settings.MAX_PARTS):
        kind = part.raw("type")
        if kind not in ("text", "refusal", None):
            raise part.wrong("type", "only text parts are served; this is a text model")
        texts.append(part.needed_text("refusal" if kind == "refusal" else "text"))
    return "\n".join(texts)


def _read_call(call: Fields) -> dict[str, Any]:
    function = call.object("function")
    if function is None:
        raise call.wrong("function", "it is missing")
    name, arguments = function.needed_text("name", 256), function.raw("arguments")
    if not isinstance(arguments, str | dict | None):
        raise function.wrong("arguments", "it must be the JSON text of an object")
    shown = {"name": name, "arguments": "{}" if arguments is None else arguments}
    return {"id": call.text("id", 256), "type": "function", "function": shown}


# ---- answers


class ChatFormat(OpenAIFormat):
    """Events of one generation in OpenAI's form, whole or as chunks."""

    def __init__(self, call: ChatCall, service: Service) -> None:
        self._call, self._names = call, TokenNames(service.llm.tokenizer)
        self._about: dict[str, Any] = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": call.model}
        self._opened: set[int] = set()

    # streamed

    def chunks(self, events: list[Event], generation: Generation) -> Iterator[bytes]:
        """The chunks of a step's events; the first one of a choice says whose turn it is."""
        for choice in dict.fromkeys(event.choice for event in events):
            if choice not in self._opened:
                self._opened.add(choice)
                yield self._chunk(generation, choice, {"role": "assistant", "content": ""})
            mine = [event for event in events if event.choice == choice]
            tokens = next((event for event in mine if isinstance(event, Tokens)), None)
            shown = list(self._deltas(mine))
            extra = self._token_fields(tokens)
            if tokens is not None and extra and not shown:
                shown.append({})
            for i, delta in enumerate(shown):  # a step's logprobs stand in the last of its chunks
                yield self._chunk(generation, choice, delta, **(extra if i == len(shown) - 1 else {}))
            for end in mine:
                if isinstance(end, Finish):
                    reason = FINISH.get(end.reason, end.reason)
                    yield self._chunk(generation, choice, {}, finish_reason=reason, stop_reason=end.stop)

    def _deltas(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        for found in events:
            if isinstance(found, CallStart):
                function = {"name": found.name, "arguments": ""}
                call = {"index": found.index, "id": f"call_{found.id}", "type": "function", "function": function}
                yield {"tool_calls": [call]}
            elif isinstance(found, CallArguments):
                yield {"tool_calls": [{"index": found.index, "function": {"arguments": found.text}}]}
            elif isinstance(found, Said) and not found.reasoning:
                yield {"content": found.text}
            elif isinstance(found, Said) and self._call.show_reasoning:
                yield {"reasoning_content": found.text, "reasoning": found.text}

    def _chunk(self, generation: Generation, choice: int, delta: dict[str, Any], **more: Any) -> bytes:
        shown = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        found: dict[str, Any] = self._about | {"object": "chat.completion.chunk", "choices": [shown]}
        if self._call.options.continuous:
            found["usage"] = usage_object(generation.usage, generation.job)
        return sse(found)

    def end(self, generation: Generation) -> Iterator[bytes]:
        """What follows the last chunk."""
        if self._call.options.include_usage:
            usage = usage_object(generation.usage, generation.job)
            yield sse(self._about | {"object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield DONE

    def _token_fields(self, tokens: Tokens | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if tokens is not None and self._call.logprobs:
            found["logprobs"] = self._logprobs(list(zip(tokens.ids, tokens.logprobs)))
        if tokens is not None and self._call.token_ids:
            found["token_ids"] = list(tokens.ids)
        return found

    def _logprobs(self, scored: list[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        return {"content": [self._names.entry(token, scores) for token, scores in scored], "refusal": None}

    # whole

    def whole(self, events: list[Event], generation: Generation) -> dict[str, Any]:
        """All of the answer at once."""
        choices = [self._choice(i, [e for e in events if e.choice == i]) for i in range(generation.job.choices)]
        found: dict[str, Any] = self._about | {"object": "chat.completion", "choices": choices}
        if self._call.token_ids:
            found["prompt_token_ids"] = generation.job.prompts[0].tokens
        return found | {"usage": usage_object(generation.usage, generation.job)}

    def _choice(self, index: int, events: list[Event]) -> dict[str, Any]:
        said = [event for event in events if isinstance(event, Said)]
        content = "".join(event.text for event in said if not event.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        thoughts = "".join(event.text for event in said if event.reasoning)
        if thoughts and self._call.show_reasoning:
            message |= {"reasoning_content": thoughts, "reasoning": thoughts}
        if calls := whole_calls(events):
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": f"call_{start.id}", "type": "function", "function": {"name": start.name, "arguments": text}}
                for start, text in calls
            ]
        end = next(event for event in events if isinstance(event, Finish))
        found = {"index": index, "message": message, "logprobs": None}
        tokens = [event for event in events if isinstance(event, Tokens)]
        ids = tuple(i for event in tokens for i in event.ids)
        scores = tuple(s for event in tokens for s in event.logprobs)
        found |= self._token_fields(Tokens(index, ids, scores))
        return found | {"finish_reason": FINISH.get(end.reason, end.reason), "stop_reason": end.stop}
