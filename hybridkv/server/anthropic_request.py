"""Anthropic's Messages: a request read. Blocks become the messages that templates know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridkv.server import asked as common
from hybridkv.server import settings
from hybridkv.server.fields import Fields
from hybridkv.server.generation import Job
from hybridkv.server.problems import bad
from hybridkv.server.prompting import Chat, Message, Rendered, render_chat, with_joined_turns
from hybridkv.server.record import log_left_out
from hybridkv.server.reusing import MARKED, is_marked, sharing_of
from hybridkv.server.service import Service
from hybridkv.server.structure import read_format
from hybridkv.server.tools import read_anthropic_tools

BILLING = "x-anthropic-billing-header"  # a line that changes with every request, in front of everything
MEDIA = ("image", "document", "audio", "video")
DROPPED = frozenset(  # blocks of Anthropic's own tools: nothing here could read them
    {"tool_reference", "search_result", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result"}
    | {"code_execution_tool_result", "bash_code_execution_tool_result", "text_editor_code_execution_tool_result"}
    | {"mcp_tool_use", "mcp_tool_result", "container_upload", "tool_search_tool_result"}
)
EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = ("enabled", "adaptive", "between_tools", "disabled")


@dataclass(frozen=True)
class MessageCall:
    """A request, checked and ready to run."""

    model: str
    job: Job
    stream: bool
    show_thinking: bool


def read_message_request(asked: Fields, service: Service) -> MessageCall:
    """Check all of a request and render its prompt. It runs on a worker thread."""
    model, llm = service.model_name(asked.needed_text("model", settings.MAX_NAME)), service.llm
    most = asked.whole("max_tokens", 0, common.MAX_TOKENS)
    if most is None:
        raise asked.wrong("max_tokens", "it is missing")
    rendered = read_prompt(asked, service)
    params = common.sampling(
        asked,
        llm,
        max_tokens=max(1, most),
        stop=common.stops(asked, "stop_sequences"),
    )
    evicted, given = common.eviction(asked, llm), rendered.params(params)
    job = Job([rendered.prompt], given, evicted, most == 0, constraint=rendered.constraint)
    thinking = asked.object("thinking")
    show = thinking is None or thinking.text("display", 64) != "omitted"
    return MessageCall(model, job, asked.flag("stream"), show)


def read_count(asked: Fields, service: Service) -> dict[str, int]:
    """How many tokens the same request would be asked with."""
    service.model_name(asked.needed_text("model", settings.MAX_NAME))
    return {"input_tokens": len(read_prompt(asked, service).prompt.tokens)}


def read_prompt(asked: Fields, service: Service) -> Rendered:
    """The prompt of a request."""
    config = asked.object("output_config")
    variables: dict[str, Any] = {}
    structure = None
    if config is not None:
        structure = read_format(config.object("format"))
        effort = config.choice("effort", EFFORTS)
        variables = {} if effort is None else {"reasoning_effort": effort}
    thinking, budget = _thinking(asked)
    messages = _system(asked) + read_messages(asked)
    last = messages[-1]
    if last["role"] == "assistant" and last.get("tool_calls"):
        raise bad("messages: the last one calls tools; their results must follow", "messages")
    ending = "open" if last["role"] == "assistant" and last["content"] else "answer"
    if last["role"] == "assistant" and ending == "answer":
        messages.pop()
    if is_marked(asked):
        _mark_end(messages)
    tools = read_anthropic_tools(asked, service.settings.tool_format)
    marked = any(is_marked(tool) for tool in asked.objects("tools", settings.MAX_TOOLS))
    chat = Chat(messages, thinking, variables, ending, budget, tools, structure, sharing_of(asked), marked)
    return render_chat(service.llm, chat)


def _thinking(asked: Fields) -> tuple[bool | None, int | None]:
    given = asked.object("thinking")
    if given is None:
        return None, None
    kind = given.choice("type", THINKING)
    if kind is None:
        raise given.wrong("type", "it is missing")
    budget = given.whole("budget_tokens", 1, common.MAX_TOKENS)
    if kind == "enabled" and budget is None:
        raise given.wrong("budget_tokens", "it is missing")
    return {"enabled": True, "disabled": False}.get(kind), budget if kind == "enabled" else None


def _system(asked: Fields) -> list[Message]:
    given = asked.raw("system")
    if given is None:
        return []
    if isinstance(given, str):
        return [] if given.startswith(BILLING) else [{"role": "system", "content": given}]
    texts = _Texts("\n")
    for block in asked.objects("system", settings.MAX_PARTS):
        if block.raw("type") != "text":
            raise block.wrong("type", "a system prompt has text blocks alone")
        text = block.needed_text("text")
        if not text.startswith(BILLING):
            texts.add(text, is_marked(block))
    return [{"role": "system", **texts.content}] if texts.listed else []


class _Texts:
    """Texts of blocks, joined, and where in them the client wants checkpoints."""

    def __init__(self, between: str) -> None:
        self._between, self.listed, self._marks = between, list[str](), list[int]()

    def add(self, text: str, marked: bool) -> None:
        self.listed.append(text)
        if marked:
            self.mark_end()

    def mark_end(self) -> None:
        self._marks.append(len(self._between.join(self.listed)))

    @property
    def content(self) -> Message:
        found: Message = {"content": self._between.join(self.listed)}
        return found | {MARKED: self._marks} if self._marks else found


def _mark_end(messages: list[Message]) -> None:
    """A mark of the whole request: at the end of the last text."""
    for i, message in reversed(list(enumerate(messages))):
        if message["content"]:
            messages[i] = message | {MARKED: [*message.get(MARKED, ()), len(message["content"])]}
            return


# ---- messages


def read_messages(asked: Fields) -> list[Message]:
    """The messages in the form of templates; several of one role in a row are one turn."""
    if "messages" not in asked:
        raise asked.wrong("messages", "it is missing")
    found: list[Message] = []
    calls: dict[str, bool] = {}
    left_out: list[str] = []
    for message in asked.objects("messages", settings.MAX_MESSAGES):
        found += _read_message(message, calls, left_out)
    log_left_out(len(left_out), "blocks of Anthropic's own tools")
    if not found:
        raise asked.wrong("messages", "there must be at least one")
    return with_joined_turns(found, ("user", "assistant"))


def _read_message(message: Fields, calls: dict[str, bool], left_out: list[str]) -> list[Message]:
    """A message as turns: results of tools come before text. `calls`: ids of all calls so far, and whether each is
    marked; `left_out`: kinds of blocks that were.
    """
    role = message.choice("role", ("user", "assistant", "system"))
    if role is None:
        raise message.wrong("role", "it is missing")
    content = message.raw("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise message.wrong("content", "it must be text or a list of blocks")
    texts = _Texts("" if role == "assistant" else "\n")
    thoughts: list[str] = []
    made: list[dict[str, Any]] = []
    results: list[Message] = []
    for block in message.objects("content", settings.MAX_PARTS):
        kind, marked = block.needed_text("type", 64), is_marked(block)
        if kind == "text":
            texts.add(block.needed_text("text"), marked)
        elif kind == "thinking" and role == "assistant":
            thoughts.append(block.needed_text("thinking"))
        elif kind == "redacted_thinking" and role == "assistant":
            continue
        elif kind == "tool_use" and role == "assistant":
            made.append(_read_call(block, calls, marked))
        elif kind == "tool_result" and role == "user":
            results.append(_read_result(block, calls, marked))
        elif kind in MEDIA:
            raise block.wrong("type", f"{kind} blocks are not served: this is a text model")
        elif kind in DROPPED:
            left_out.append(kind)
        else:
            raise block.wrong("type", f"such a block is not known in a message of the {role}")
    turn: Message = {"role": role, **texts.content}
    if thoughts:
        turn["reasoning_content"] = "".join(thoughts)
    if made:
        turn["tool_calls"] = made
    empty = not texts.listed and not thoughts and not made
    return results if empty and results else [*results, turn]


def _read_call(block: Fields, calls: dict[str, bool], marked: bool) -> dict[str, Any]:
    name, id_, given = block.needed_text("name", 256), block.needed_text("id", 256), block.object("input")
    calls[id_] = marked
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": {} if given is None else given.data}}


def _read_result(block: Fields, calls: dict[str, bool], marked: bool) -> Message:
    """A result as a turn. A mark of its call is at its beginning: how a template ends a call is its own affair."""
    id_ = block.needed_text("tool_use_id", 256)
    if id_ not in calls:
        raise block.wrong("tool_use_id", "no call before it has this id")
    failed, content = block.flag("is_error"), block.raw("content")
    texts = _Texts("")
    if calls[id_]:
        texts.mark_end()
    if failed:
        texts.add("Error: ", marked=False)
    if isinstance(content, list):
        _add_parts(texts, block)
    elif isinstance(content, str | None):
        texts.add(content or "", marked=False)
    else:
        raise block.wrong("content", "it must be text or a list of text blocks")
    if marked:
        texts.mark_end()
    return {"role": "tool", "tool_call_id": id_, **texts.content}


def _add_parts(texts: _Texts, block: Fields) -> None:
    """The text blocks of a result."""
    between = ""
    for part in block.objects("content", settings.MAX_PARTS):
        kind, marked = part.raw("type"), is_marked(part)
        if kind in DROPPED:
            continue
        if kind != "text":
            raise part.wrong("type", "a result has text blocks alone: this is a text model")
        texts.add(between + part.needed_text("text"), marked)
        between = "\n"
