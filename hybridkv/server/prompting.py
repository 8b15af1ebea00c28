"""From a client's messages to token ids. All of it runs on a worker thread: templates and tokenizers take time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from hybridkv.config import SamplingParams
from hybridkv.errors import RequestError
from hybridkv.llm import LLM
from hybridkv.server.events import MAX_CALLS, CallDivider, Divider, Prompt
from hybridkv.server.problems import bad
from hybridkv.server.tools import NO_TOOLS, Tools, opening_token, shown_calls
from hybridkv.text.call_formats import format_of
from hybridkv.text.calls import CallParser
from hybridkv.text.chat import RESERVED, ChatTemplate
from hybridkv.text.prompt import encode_pieces, render_pieces
from hybridkv.text.reasoning import ReasoningSplitter, marks_in, reasoning_of
from hybridkv.text.thinking import MODE, SWITCHES
from hybridkv.text.tokenizer import Tokenizer

Message = dict[str, Any]
REMINDER = "<system-reminder>\n{}\n</system-reminder>"


@dataclass(frozen=True)
class Chat:
    """A conversation, whatever dialect it came in: roles system, user, assistant and tool, content as text.

    Args:
        messages: objects with role, content, reasoning_content, tool_calls.
        thinking: on, off, or as the template has it; ignored where there is no switch.
        variables: others that the template may read; those that it does not are left out.
        ending: as in text/prompt.py.
        thinking_budget: tokens after which thoughts are ended.
        tools: functions that the model may call.
    """

    messages: list[Message]
    thinking: bool | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    ending: str = "answer"
    thinking_budget: int | None = None
    tools: Tools = NO_TOOLS


@dataclass(frozen=True)
class Rendered:
    """A conversation as a prompt, the hook that ends thoughts at their budget, if there is one, and what the answer
    must not have: a token, or a text.
    """

    prompt: Prompt
    hook: Callable[[list[int], Any], Any] | None = None
    banned_token: int | None = None
    banned_text: str | None = None

    def params(self, given: SamplingParams) -> SamplingParams:
        """Sampling parameters with all of that."""
        bias = given.logit_bias if self.banned_token is None else {**given.logit_bias, self.banned_token: -100.0}
        words = given.bad_words if self.banned_text is None else (*given.bad_words, self.banned_text)
        return replace(given, logits_hook=self.hook, logit_bias=bias, bad_words=words)


def render_chat(llm: LLM, chat: Chat) -> Rendered:
    """The prompt of a conversation, or RequestError or ApiError."""
    if llm.tokenizer is None or llm.chat_template is None:
        raise bad("this model has no chat template; use /v1/completions with text or token ids")
    tokenizer, template = llm.tokenizer, llm.chat_template
    if taken := sorted((RESERVED | {"tools", "documents"}) & chat.variables.keys()):
        raise bad(f"chat_template_kwargs: {', '.join(taken)} cannot be set by a request", "chat_template_kwargs")
    read = template.variables
    variables = {name: value for name, value in chat.variables.items() if name in read}
    switch = any(name in read for name in (*SWITCHES, MODE)) and not variables.keys() & {*SWITCHES, MODE}
    messages, tools = chat.messages, chat.tools
    form = None
    if tools.listed or any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        form = tools.form or format_of(template)
        messages = shown_calls(form, messages, tools.listed)
    messages = settle_system_turns(template, messages)
    pieces = render_pieces(
        template,
        tokenizer,
        messages,
        tools=None if form is None or form.own_prompt else tools.listed or None,
        thinking=chat.thinking if switch else None,
        ending=chat.ending,
        **variables,
    )
    text = "".join(text for text, _ in pieces)
    make = partial(reasoning_of, template, text)
    hook = thinking_hook(tokenizer, template, make(), chat.thinking_budget)
    ids = encode_pieces(tokenizer, pieces)
    if form is None or not tools.listed:
        return Rendered(Prompt(ids, lambda choice: Divider(choice, make())), hook)
    token = opening_token(tokenizer, form)
    marks = marks_in(template.source)
    most = 0 if not tools.callable else 1 if tools.single else MAX_CALLS

    def divider(choice: int) -> Divider:
        mark = "" if marks is None else marks[1]
        parser = CallParser(form, make(), tools.schemas, token is not None, mark)
        return CallDivider(choice, parser, tokenizer, token, most)

    if tools.callable:
        return Rendered(Prompt(ids, divider), hook)
    # where letters open a call, another spelling of the tag may get past the ban: what it opens is left out
    return Rendered(Prompt(ids, divider), hook, token, None if token is not None else form.open or None)


# ---- system messages


def settle_system_turns(template: ChatTemplate, messages: list[Message]) -> list[Message]:
    """Leading system messages as one. Later ones stay where they are: as the role, where the template shows that, else
    as a reminder in the user's turn beside them. Moved to the front they would change every later prompt from its first
    token on, and no cache would fit any more.
    """
    lead = 0
    while lead < len(messages) and messages[lead]["role"] == "system":
        lead += 1
    head = [{"role": "system", "content": "\n".join(m["content"] or "" for m in messages[:lead])}] if lead else []
    rest = messages[lead:]
    if any(m["role"] == "system" for m in rest) and not _shows_later_system(template):
        rest = _as_reminders(rest)
    return [*head, *rest]


_SHOWS: WeakKeyDictionary[ChatTemplate, bool] = WeakKeyDictionary()


def _shows_later_system(template: ChatTemplate) -> bool:
    if template not in _SHOWS:
        probe = [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(("system", "user") * 2)]
        try:
            text = template.render(probe)
        except RequestError:
            text = ""
        at = [text.find(message["content"]) for message in probe]
        _SHOWS[template] = -1 not in at and at == sorted(at)
    return _SHOWS[template]


def _as_reminders(messages: list[Message]) -> list[Message]:
    """The text goes to the user's turn that follows, else to the one before, else it is one itself."""
    found: list[Message] = []
    for i, message in enumerate(messages):
        if message["role"] != "system":
            found.append(message)
            continue
        text = REMINDER.format(message["content"] or "")
        follows = next((m for m in messages[i + 1 :] if m["role"] != "system"), None)
        if follows is None and found and found[-1]["role"] == "user":
            found[-1] = found[-1] | {"content": f"{found[-1]['content']}\n\n{text}"}
        else:
            found.append({"role": "user", "content": text})
    joined: list[Message] = []
    for message in found:  # reminders and the user's turn after them are one turn
        if joined and message["role"] == "user" == joined[-1]["role"]:
            joined[-1] = message | {"content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


# ---- the budget of thoughts


def thinking_hook(
    tokenizer: Tokenizer, template: ChatTemplate, splitter: ReasoningSplitter, budget: int | None
) -> Callable[[list[int], Any], Any] | None:
    """What ends thoughts after `budget` tokens by writing their end mark; None: nothing to end."""
    marks = marks_in(template.source)
    if budget is None or marks is None or not splitter.marked:
        return None
    begin = tokenizer.encode(marks[0], bos=False, after=-1)
    end = tokenizer.encode(marks[1], bos=False, after=-1)

    def force(generated: list[int], logits: Any) -> Any:
        place = len(generated) - budget
        if not 0 <= place < len(end):
            return None
        thinking = splitter.opened or generated[: len(begin)] == begin
        if not thinking or _holds(generated[:budget], end):
            return None
        logits.fill_(float("-inf"))
        logits[end[place]] = 0.0
        return None

    return force


def _holds(ids: list[int], part: list[int]) -> bool:
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))
