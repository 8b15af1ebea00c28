"""From messages to token ids, so that what a person wrote cannot forge a turn.

Control tokens that the template writes are real; those that a message, a tool or a template variable spells, anywhere
in it, stay plain text.
"""

from __future__ import annotations

import difflib
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from hybridkv.errors import RequestError
from hybridkv.text.chat import MAX_OUTPUT, RESERVED, ChatTemplate
from hybridkv.text.messages import (
    check_messages,
    check_tools,
    with_object_arguments,
    with_text_arguments,
    with_text_content,
)
from hybridkv.text.thinking import thinking_variables
from hybridkv.text.tokenizer import Tokenizer

NAME_DIGITS = 20  # random ones at either end of a name; digits stay as they are in capitals
COUNT_DIGITS = 8  # between them, which of the names it is
NAME = 2 * NAME_DIGITS + COUNT_DIGITS
TRACE_DIGITS = 12  # of the random ones, by which a name that was cut is known


def render_pieces(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    /,
    tools: list[dict[str, Any]] | None = None,
    thinking: bool | None = None,
    ending: str = "answer",
    **variables: Any,
) -> list[tuple[str, bool]]:
    """The prompt in pieces (text, whether control tokens in it are real).

    messages: objects with a role and content (text, a list of text parts, or None), tool_calls, reasoning_content.
    tools: what the model may call, as JSON schemas. thinking: on, off, or as the template has it.
    ending: "answer": ready for an answer; "turn": after the last turn, with nothing that begins an answer; "open": the
    last message is not ended, so that the model goes on with it.
    variables: others that the template reads.

    Almost always one piece. Where a text in any of these spells a control token, it is rendered with a random name that
    no one can guess in that place, and what it stands for is put back as a piece of its own, as often as the template
    shows it.
    """
    check_messages(messages)
    values = _variables(template, tools, thinking, variables)
    messages = with_object_arguments(with_text_content(template, messages))
    end = ""
    if ending == "open":
        messages, end = _with_open_end(messages)
    try:
        pieces = _render(template, tokenizer, messages, values, ending == "answer")
    except RequestError:
        texts = with_text_arguments(messages)
        if texts == messages:
            raise
        try:
            pieces = _render(template, tokenizer, texts, values, ending == "answer")
        except RequestError:
            pieces = None
        if pieces is None:  # then the first problem is the one to tell
            raise
    return _cut_at(pieces, end) if end else pieces


def _with_open_end(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a name that nobody can guess after the last one's text, and that name."""
    last, name = messages[-1], f"{secrets.randbelow(10**NAME_DIGITS):0{NAME_DIGITS}}"
    content = last.get("content")
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(content, str):
        raise RequestError("only a last message that is the assistant's, with text and no calls, can be continued")
    return [*messages[:-1], last | {"content": content + name}], name


def _cut_at(pieces: list[tuple[str, bool]], name: str) -> list[tuple[str, bool]]:
    """What stands before the name, or RequestError where the template does not write it once."""
    at = [i for i, (text, _) in enumerate(pieces) if name in text]
    if len(at) != 1 or pieces[at[0]][0].count(name) != 1:
        raise RequestError("the model's chat template does not write the last message as it is; it cannot be continued")
    text, real = pieces[at[0]]
    before = text[: text.index(name)]
    return [*pieces[: at[0]], *([(before, real)] if before else [])] or [("", True)]


def _variables(
    template: ChatTemplate, tools: list[dict[str, Any]] | None, thinking: bool | None, given: dict[str, Any]
) -> dict[str, Any]:
    """All variables but the messages; refuses what the template would not read."""
    if taken := sorted(RESERVED & given.keys()):
        raise RequestError(f"chat template variables cannot be set by a request: {', '.join(taken)}")
    if unread := sorted(given.keys() - template.variables):
        close = difflib.get_close_matches(unread[0], template.variables - RESERVED, n=1)
        hint = f"; is {close[0]} meant?" if close else ""
        raise RequestError(f"the model's chat template does not read {', '.join(unread)[:200]}{hint}")
    values = thinking_variables(template, thinking)
    if twice := sorted(values.keys() & given.keys()):
        raise RequestError(f"give thinking or {twice[0]}, not both: they are the same switch")
    values |= given
    if tools is not None:
        check_tools(tools)
    if tools:
        if "tools" not in template.variables:
            raise RequestError(f"the model's chat template takes no tools, and {len(tools)} were given")
        values["tools"] = list(tools)
    return values


def _render(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    values: dict[str, Any],
    add_generation_prompt: bool,
) -> list[tuple[str, bool]]:
    begin, end = (f"{secrets.randbelow(10**NAME_DIGITS):0{NAME_DIGITS}}" for _ in range(2))
    named: list[str] = []  # what the names stand for

    def name(text: str) -> str:
        named.append(text)
        return f"{begin}{len(named) - 1:0{COUNT_DIGITS}}{end}"

    shown = {key: _guarded(value, tokenizer, name) for key, value in values.items()}
    guarded = _guarded(messages, tokenizer, name)
    text = template.render(guarded, add_generation_prompt=add_generation_prompt, **shown)
    if not named:
        return [(text, True)]
    pieces = []
    for i, part in enumerate(re.split(f"{begin}([0-9]{{{COUNT_DIGITS}}}){end}", text)):
        if i % 2:
            pieces.append((named[int(part)], False))
        elif begin[:TRACE_DIGITS] in part or end[-TRACE_DIGITS:] in part:
            raise RequestError("a message spells a control token, and the chat template changes that text")
        elif part:
            pieces.append((part, True))
    return pieces or [("", True)]


def _guarded(value: Any, tokenizer: Tokenizer, name: Callable[[str], str]) -> Any:
    """The value with names for control tokens in all its strings, keys too."""

    def visit(value: Any) -> Any:
        if isinstance(value, str):
            spans = tokenizer.control_spans(value)
            size = len(value) + sum(begin - end + NAME for begin, end in spans)
            if spans and size > MAX_OUTPUT:  # which no template may write, and which takes long to encode
                raise RequestError(
                    f"a text spells control tokens {len(spans)} times; kept apart from real ones it has {size} "
                    f"characters, and at most {MAX_OUTPUT} are taken"
                )
            parts, at = [], 0
            for begin, end in spans:
                parts += [value[at:begin], name(value[begin:end])]
                at = end
            shown = "".join([*parts, value[at:]])
            # spelled otherwise, but the same for this tokenizer: the whole text is named
            return name(value) if tokenizer.spells_control(shown) else shown
        if isinstance(value, dict):
            return {visit(key): visit(item) for key, item in value.items()}
        return [visit(item) for item in value] if isinstance(value, (list, tuple)) else value

    try:
        return visit(value)
    except RecursionError:
        raise RequestError(
            "messages, tools and template variables must be plain JSON values, and these are nested too deeply"
        ) from None


def encode_pieces(tokenizer: Tokenizer, pieces: list[tuple[str, bool]], after: Sequence[int] = ()) -> list[int]:
    """Token ids of a prompt in pieces, with the token that begins a text where the template did not write it. `after`:
    ids that the pieces follow, which are then the first of the prompt.
    """
    ids = list(after)
    if not ids:
        first, real = pieces[0]
        wrote_bos = (
            real and bool(tokenizer.bos_text) and first.startswith(str(tokenizer.bos_text))
        )  # templates often do
        ids = [] if wrote_bos or not tokenizer.add_bos or tokenizer.bos_id is None else [tokenizer.bos_id]
        ids += tokenizer.encode(first, bos=False, special=real)
        pieces = pieces[1:]
    for text, real in pieces:
        ids += tokenizer.encode(text, bos=False, special=real, after=ids[-1] if ids else None)
    return ids
