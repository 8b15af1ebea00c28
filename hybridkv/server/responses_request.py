"""OpenAI's Responses: a request read. Its items become the messages that templates know; nothing is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridkv.server import asked as common
from hybridkv.server import settings
from hybridkv.server.fields import Fields
from hybridkv.server.generation import Job
from hybridkv.server.openai_chat import EFFORTS, template_variables
from hybridkv.server.openai_common import refuse
from hybridkv.server.prompting import Chat, Message, Rendered, render_chat, with_joined_turns
from hybridkv.server.record import log_left_out
from hybridkv.server.reusing import sharing_of
from hybridkv.server.service import Service
from hybridkv.server.structure import read_format
from hybridkv.server.tools import Tools, read_responses_tools

STORED = ("previous_response_id", "conversation", "background", "prompt")
ROLES = ("user", "assistant", "system", "developer")
FORMAT = ("type", "name", "description", "schema", "strict")  # of text.format
TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
}  # a part's kind -> its field
UNKNOWN: Message = {}  # an item that nothing here can read


@dataclass(frozen=True)
class ResponseCall:
    """A request, checked and ready to run. `echoed`: what the answer repeats of it."""

    model: str
    job: Job
    stream: bool
    echoed: dict[str, Any]


def read_response_request(asked: Fields, service: Service) -> ResponseCall:
    """Check all of a request and render its prompt. It runs on a worker thread."""
    model, llm = service.model_name(asked.text("model", settings.MAX_NAME)), service.llm
    refuse(asked, STORED, "nothing is stored here; send the whole conversation as input")
    tools = read_responses_tools(asked, service.settings.tool_format)
    rendered = _read_prompt(asked, service, tools)
    most = asked.whole("max_output_tokens", 1, common.MAX_TOKENS)
    params = common.sampling(asked, llm, max_tokens=most)
    job = Job([rendered.prompt], rendered.params(params), common.eviction(asked, llm), constraint=rendered.constraint)
    echoed = {
        "instructions": asked.raw("instructions"),
        "max_output_tokens": most,
        "metadata": {},
        "parallel_tool_calls": not tools.single,
        "previous_response_id": None,
        "reasoning": {"effort": _effort(asked), "summary": None},
        "store": False,
        "temperature": asked.raw("temperature"),
        "text": {"format": _echoed_format(asked)},
        "tool_choice": _echoed_choice(asked, tools),
        "tools": [
            {"type": "function", **tool["function"], "strict": tool["function"]["name"] in tools.strict}
            for tool in tools.listed
        ],
        "top_p": asked.raw("top_p"),
        "truncation": "disabled",
    }
    return ResponseCall(model, job, asked.flag("stream"), echoed)


def _read_prompt(asked: Fields, service: Service, tools: Tools) -> Rendered:
    effort = _effort(asked)
    instructions = asked.text("instructions")
    messages = [] if not instructions else [{"role": "system", "content": instructions}]
    messages += read_items(asked)
    thinking, text = False if effort == "none" else None, asked.object("text")
    structure = None if text is None else read_format(text.object("format"))
    variables = template_variables(asked, effort)
    chat = Chat(messages, thinking, variables, tools=tools, structure=structure, sharing=sharing_of(asked))
    return render_chat(service.llm, chat)


def _effort(asked: Fields) -> str | None:
    reasoning = asked.object("reasoning")
    return None if reasoning is None else reasoning.choice("effort", EFFORTS)


# ---- what the answer repeats: fields that are known, not whatever came beside them


def _echoed_format(asked: Fields) -> dict[str, Any]:
    text = asked.object("text")
    form = None if text is None else text.object("format")
    return {"type": "text"} if form is None else {name: form.raw(name) for name in FORMAT if name in form}


def _echoed_choice(asked: Fields, tools: Tools) -> Any:
    return asked.raw("tool_choice") or "auto" if tools.only is None else {"type": "function", "name": tools.only}


# ---- items


def read_items(asked: Fields) -> list[Message]:
    """`input` as messages. What the model said, thought and called in a row is one turn."""
    given = asked.raw("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if given is None:
        raise asked.wrong("input", "it is missing")
    items = [_read_item(item) for item in asked.objects("input", settings.MAX_MESSAGES)]
    log_left_out(items.count(UNKNOWN), "items of unknown kinds")
    found = [message for message in items if message]
    if not found:
        raise asked.wrong("input", "there must be at least one message")
    return with_joined_turns(found, ("assistant",))


def _read_item(item: Fields) -> Message | None:
    """An item as a message; None: it says nothing; UNKNOWN: nothing here can read it."""
    kind = item.text("type", 64) or ("message" if "role" in item else None)
    if kind == "message":
        role = item.choice("role", ROLES)
        if role is None:
            raise item.wrong("role", "it is missing")
        text = _read_texts(item, "content", TEXTS)
        return {"role": "system" if role == "developer" else role, "content": text}
    if kind == "function_call":
        function = {"name": item.needed_text("name", 256), "arguments": item.text("arguments") or "{}"}
        call = {"id": item.needed_text("call_id", 256), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        id_ = item.needed_text("call_id", 256)
        return {"role": "tool", "tool_call_id": id_, "content": _read_texts(item, "output", TEXTS)}
    if kind == "reasoning":
        thoughts = _read_texts(item, "content", {"reasoning_text": "text", "text": "text"}) if "content" in item else ""
        return {"role": "assistant", "content": "", "reasoning_content": thoughts} if thoughts else None
    return UNKNOWN


def _read_texts(item: Fields, name: str, kinds: dict[str, str]) -> str:
    given = item.raw(name)
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise item.wrong(name, "it must be text or a list of text parts")
    texts = []
    for part in item.objects(name, settings.MAX_PARTS):
        kind = part.text("type", 64) or "text"
        if kind not in kinds:
            raise part.wrong("type", "only text parts are served; this is a text model")
        texts.append(part.needed_text(kinds[kind]))
    return "\n".join(texts)
