"""From a client's messages to token ids. All of it runs on a worker thread: templates and tokenizers take time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from hybridkv.config import SamplingParams
from hybridkv.document import Document
from hybridkv.errors import RequestError
from hybridkv.llm import LLM
from hybridkv.request import Request
from hybridkv.server.documents import document_of, following
from hybridkv.server.events import COMMON, MAX_CALLS, CallDivider, Divider, Prompt, Sharing
from hybridkv.server.problems import bad
from hybridkv.server.reusing import MARKED, joined_marks, marked_tokens, named_marks
from hybridkv.server.structure import Structure, constraint_of
from hybridkv.server.tools import NO_TOOLS, Tools, shown_calls
from hybridkv.text.call_formats import CallFormat, format_of, opening_token
from hybridkv.text.calls import CallParser
from hybridkv.text.chat import RESERVED, ChatTemplate
from hybridkv.text.constraint import Constraint, thoughts_of
from hybridkv.text.framed import Pieces, text_of
from hybridkv.text.marks import MOST_CLIENT_MARKS
from hybridkv.text.memory import Replays, Spelled
from hybridkv.text.prompt import render_pieces
from hybridkv.text.reasoning import marks_in, reasoning_of
from hybridkv.text.thinking import MODE, SWITCHES
from hybridkv.warming import offer_next_turn

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
        structure: what the answer must look like.
        sharing: with whom it shares what it reads.
        marked_tools: whether the client wants a checkpoint behind the tools.
    """

    messages: list[Message]
    thinking: bool | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    ending: str = "answer"
    thinking_budget: int | None = None
    tools: Tools = NO_TOOLS
    structure: Structure | None = None
    sharing: Sharing = COMMON
    marked_tools: bool = False


@dataclass(frozen=True)
class Rendered:
    """A conversation as a prompt; what its answer must look like, compiled when it is asked for; and a text that it
    must not have.
    """

    prompt: Prompt
    constraint: Callable[[], Constraint | None]
    banned_text: str | None = None
    text: str = ""  # of the prompt; control tokens that a message spells cannot be told from real ones in it

    def params(self, given: SamplingParams) -> SamplingParams:
        """Sampling parameters without that text."""
        return given if self.banned_text is None else replace(given, bad_words=(*given.bad_words, self.banned_text))


def render_chat(llm: LLM, chat: Chat) -> Rendered:
    """The prompt of a conversation, or RequestError or ApiError."""
    if llm.tokenizer is None or llm.chat_template is None:
        raise bad("this model has no chat template; use /v1/completions with text or token ids")
    tokenizer, template = llm.tokenizer, llm.chat_template
    document = document_of(llm, chat.sharing)
    if document is not None:
        chat = replace(chat, messages=following(document, chat.messages))
    if taken := sorted((RESERVED | {"tools", "documents"}) & chat.variables.keys()):
        raise bad(f"chat_template_kwargs: {', '.join(taken)} cannot be set by a request", "chat_template_kwargs")
    read = template.variables
    variables = {name: value for name, value in chat.variables.items() if name in read}
    switch = any(name in read for name in (*SWITCHES, MODE)) and not variables.keys() & {*SWITCHES, MODE}
    messages, tools = chat.messages, chat.tools
    form = None
    if tools.listed or any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        form = tools.form or format_of(template)

    def render(messages: list[Message], marked: bool = False) -> tuple[Pieces, list[str]]:
        """The prompt, with names at the client's marks if it is `marked`, and these names."""
        shown = messages if form is None else shown_calls(form, messages, tools.listed)
        shown, names = settle_system_turns(template, shown), []
        if marked:
            shown, names = named_marks(shown)
        pieces = render_pieces(
            template,
            tokenizer,
            [{name: value for name, value in message.items() if name != MARKED} for message in shown],
            tools=None if form is None or form.own_prompt else tools.listed or None,
            thinking=chat.thinking if switch else None,
            ending=chat.ending,
            **variables,
        )
        return pieces, names

    known = _Known(llm, chat, form, render, document)
    pieces = known.pieces
    text = text_of(pieces)
    make = partial(reasoning_of, template, text)
    thoughts = thoughts_of(template, tokenizer, make(), chat.thinking_budget)
    constraint = partial(constraint_of, llm.engine.grammars, chat.structure, tools, form, thoughts)
    if form is None or not tools.listed:
        return Rendered(known.prompt(lambda choice: Divider(choice, make())), constraint, text=text)
    token = opening_token(tokenizer, form)
    marks = marks_in(template.source)
    most = 0 if not tools.callable else 1 if tools.single else MAX_CALLS

    def divider(choice: int) -> Divider:
        mark = "" if marks is None else marks[1]
        parser = CallParser(form, make(), tools.schemas, token is not None, mark)
        return CallDivider(choice, parser, tokenizer, token, most)

    # where letters open a call, another spelling of the tag may get past the ban: what it opens is left out
    banned = None if tools.callable or token is not None else form.open or None
    return Rendered(known.prompt(divider, form.name), constraint, banned, text)


class _Known:
    """A conversation, rendered, with what is known of it: calls as they were written, tokens as they were sampled, and
    where checkpoints are wished.

    Args:
        llm: the model.
        chat: the conversation.
        form: how calls are written; None: there are none.
        render: messages, and whether with names at the client's marks, to pieces and these names.
        document: that it goes on from; its tokens are the document's own then, and nothing of it is remembered.
    """

    def __init__(
        self,
        llm: LLM,
        chat: Chat,
        form: CallFormat | None,
        render: Callable[[list[Message], bool], tuple[Pieces, list[str]]],
        document: Document | None = None,
    ) -> None:
        self._llm, self._chat, self._form, self._render, self._document = llm, chat, form, render, document
        self._memory, self._sharing = llm.chat_memory, chat.sharing
        tokenizer = llm.chat_parts()[0]
        self.pieces, messages, put_back, self._replayed = self._written(chat.messages)
        if document is None:
            self._spelled = self._memory.spell(self.pieces, chat.sharing.salt, self._sharing.cache)
        else:
            self._spelled = Spelled(document.continued(self.pieces))
        ids, client = self._spelled.ids, list[int]()
        if any(message.get(MARKED) for message in messages):
            with suppress(RequestError):
                marked, names = render(messages, True)
                client = marked_tokens(tokenizer, ids, self.pieces, put_back(marked) or [], names)
        begins = [at for at, role in self._memory.marks.messages(ids) if role == "user" and at]
        if chat.marked_tools and begins:
            client = sorted({*client[: MOST_CLIENT_MARKS - 1], begins[0]})
        self._marks = self._memory.marks.marks(ids, client)

    def _written(self, messages: list[Message]) -> tuple[Pieces, list[Message], Callable[[Pieces], Pieces | None], int]:
        """Messages in pieces, with calls as they were written. With it what was rendered for them, what puts the text
        of calls back into that, and in how many answers.
        """
        if self._form is not None and self._sharing.cache in (True, "read"):
            tokenizer, pieces = self._llm.chat_parts()[0], None
            replays = Replays(tokenizer, self._form, self._memory.calls, self._sharing.salt)
            named = replays.named(messages)
            if len(replays):
                with suppress(RequestError):  # a template may refuse what the text stands for
                    pieces = replays.put_back(self._render(named, False)[0])
                if pieces is not None:
                    return pieces, named, replays.put_back, len(replays)
        return self._render(messages, False)[0], messages, lambda found: found, 0

    def prompt(self, divider: Callable[[int], Divider], call_format: str = "") -> Prompt:
        """What is handed to the engine."""
        return Prompt(
            self._spelled.ids,
            divider,
            call_format,
            self._sharing,
            self._marks,
            self._spelled.remembered,
            self._replayed,
            self._ended,
            self._document,
        )

    def _ended(self, request: Request, divider: Divider) -> None:
        """Remember an answer."""
        ids, text = request.generated, request.text.text
        ended = request.finish_reason == "stop" and request.text.stopped is None
        self._memory.remember(self._spelled, text, ids, ended, self._sharing.cache)
        made = divider.written(text)
        if made is not None and self._sharing.cache in (True, "write"):
            self._memory.calls.remember(made, self._sharing.salt)
        evicts = request.eviction is not None or bool(request.evictions)  # then a next turn goes on in that cache
        plain = self._sharing.cache is True and self._document is None and self._chat.ending == "answer"
        if plain and not evicts and request.finish_reason == "stop" and request.params.n == 1 and not divider.called:
            self._offer_next_turn(request, divider.message)

    def _offer_next_turn(self, request: Request, answer: Message) -> None:
        """The conversation's next turn may be read before it comes."""
        salt, said = self._sharing.salt, [*self._chat.messages, answer]

        def spell(text: str) -> list[int]:
            pieces = self._written([*said, {"role": "user", "content": text}])[0]
            return self._memory.spell(pieces, salt, self._sharing.cache).ids

        offer_next_turn(self._llm.warm, self._memory.marks, request.tokens, request.prompt_tokens, spell, salt)


# ---- turns


def with_joined_turns(messages: list[Message], roles: Sequence[str]) -> list[Message]:
    """The messages, those in a row that one of these roles has as one turn."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] in roles:
            found[-1] = _joined(found[-1], message)
        else:
            found.append(message)
    return found


def _joined(first: Message, second: Message) -> Message:
    between = "\n" if first["role"] == "user" and first["content"] and second["content"] else ""
    found = first | {"content": f"{first['content']}{between}{second['content']}"}
    found |= joined_marks(first, second, len(between))
    for name in ("reasoning_content", "tool_calls"):
        if name in first or name in second:
            empty: Any = "" if name == "reasoning_content" else []
            found[name] = first.get(name, empty) + second.get(name, empty)
    return found


# ---- system messages


def settle_system_turns(template: ChatTemplate, messages: list[Message]) -> list[Message]:
    """Leading system messages as one. Later ones stay where they are: as the role, where the template shows that, else
    as a reminder in the user's turn beside them. Moved to the front they would change every later prompt from its first
    token on, and no cache would fit any more.
    """
    lead = 0
    while lead < len(messages) and messages[lead]["role"] == "system":
        lead += 1
    head = messages[:lead]
    if lead > 1:
        head = [{"role": "system", "content": "\n".join(m["content"] or "" for m in messages[:lead])}]
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
