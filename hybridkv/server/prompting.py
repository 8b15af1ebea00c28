"""From a client's messages to token ids. All of it runs on a worker thread: templates and tokenizers take time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from hybridkv.errors import RequestError
from hybridkv.llm import LLM
from hybridkv.server.events import Divider, Prompt
from hybridkv.server.problems import bad
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
    """

    messages: list[Message]
    thinking: bool | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    ending: str = "answer"
    thinking_budget: int | None = None


@dataclass(frozen=True)
class Rendered:
    """A conversation as a prompt, and the hook that ends thoughts at their budget, if there is one."""

    prompt: Prompt
    hook: Callable[[list[int], Any], Any] | None = None


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
    messages = settle_system_turns(template, chat.messages)
    pieces = render_pieces(
        template,
        tokenizer,
        messages,
        thinking=chat.thinking if switch else None,
        ending=chat.ending,
        **variables,
    )
    text = "".join(text for text, _ in pieces)
    make = partial(reasoning_of, template, text)
    hook = thinking_hook(tokenizer, template, make(), chat.thinking_budget)
    return Rendered(Prompt(encode_pieces(tokenizer, pieces), lambda choice: Divider(choice, make())), hook)


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
