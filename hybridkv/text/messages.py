"""Messages and tools: checked, and in the form that chat templates expect.

What differs from template to template: content beside tool calls may be None, which some templates look for, and others
fail on or write as "None". Content may be a list of text parts, which many show as nothing or as Python: there they are
joined to one text. Arguments of a tool call come as JSON text from servers, and most templates want the object; the few
that want text get it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from hybridkv.errors import RequestError
from hybridkv.text.chat import ChatTemplate

Message = dict[str, Any]
_LOOKS_FOR_NONE = re.compile(r"\bcontent['\"\])]*\s+(is|==|!=)\s+(not\s+)?none", re.IGNORECASE)
MAX_LEVELS = 256  # of JSON objects and lists in each other; Python's own limit depends on who calls
TOOL = "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': {...}}}"


def nests_too_deeply(value: Any) -> bool:
    """Whether objects and lists lie in each other more than MAX_LEVELS deep."""
    level, depth = [value] if isinstance(value, (dict, list)) else [], 0
    while level and depth <= MAX_LEVELS:  # not by calling itself: a value may be deeper than Python's stack
        inner = (part for outer in level for part in (outer.values() if isinstance(outer, dict) else outer))
        level, depth = [part for part in inner if isinstance(part, (dict, list))], depth + 1
    return depth > MAX_LEVELS


def check_messages(messages: Any) -> None:
    """Refuse what no template can show."""
    if not isinstance(messages, (list, tuple)) or not all(isinstance(m, dict) for m in messages):
        raise RequestError("messages must be a list of objects such as {'role': 'user', 'content': 'Hello'}")
    if not messages:
        raise RequestError("there are no messages; give at least one, such as {'role': 'user', 'content': 'Hello'}")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise RequestError(f"message {i} must have a role: 'system', 'user', 'assistant' or 'tool'")
        content, thoughts, calls = (message.get(key) for key in ("content", "reasoning_content", "tool_calls"))
        if isinstance(content, (list, tuple)):
            _check_parts(i, content)
        elif not isinstance(content, str | None):
            raise RequestError(f"message {i}: content must be text, a list of text parts or None, not {_kind(content)}")
        if not isinstance(thoughts, str | None):
            raise RequestError(f"message {i}: reasoning_content must be text, not {_kind(thoughts)}")
        if calls is not None and not (isinstance(calls, (list, tuple)) and all(_named(call) for call in calls)):
            raise RequestError(
                f"message {i}: tool_calls must be a list of objects such as "
                "{'function': {'name': 'weather', 'arguments': {'city': 'Oslo'}}}"
            )


def _check_parts(i: int, parts: Any) -> None:
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            what = part.get("type", "an object") if isinstance(part, dict) else _kind(part)
            raise RequestError(
                f"message {i}: only text can be shown to the model; its content has a part that is {str(what)[:80]!r}, "
                "not {'type': 'text', 'text': ...}"
            )


def check_tools(tools: Any) -> None:
    """Tools are described by JSON objects with a name."""
    if not isinstance(tools, (list, tuple)) or not all(_named(tool) for tool in tools):
        raise RequestError(f"tools must be a list of objects such as {TOOL}")


def _named(value: Any) -> bool:
    inner = value.get("function", value) if isinstance(value, dict) else None
    return isinstance(inner, dict) and isinstance(inner.get("name"), str)


def _kind(value: Any) -> str:
    return type(value).__name__


def with_text_content(template: ChatTemplate, messages: list[Message]) -> list[Message]:
    """No content becomes empty text, where the template does not look for None; lists of text parts are joined by line
    ends, where it does not show lists itself.
    """
    empty = None if _LOOKS_FOR_NONE.search(template.source) else ""

    def shown(message: Message) -> Message:
        content = message.get("content")
        if content is None:
            return {**message, "content": empty}
        if isinstance(content, str) or template.takes_parts:
            return message
        return {**message, "content": "\n".join(part["text"] for part in content)}

    return [shown(message) for message in messages]


def with_object_arguments(messages: list[Message]) -> list[Message]:
    """Arguments of tool calls that are the JSON text of an object become that object."""

    def to_object(arguments: Any) -> Any:
        value, deep = None, True
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
            deep = nests_too_deeply(value)
        except ValueError:  # whatever the model wrote: shown as it is
            return arguments
        except RecursionError:  # deeper still
            pass
        if deep:
            raise RequestError(
                "arguments of a tool call are nested too deeply: objects and lists in each other may have "
                f"{MAX_LEVELS} levels"
            )
        return value if isinstance(value, dict) else arguments

    return _with_arguments(messages, to_object)


def with_text_arguments(messages: list[Message]) -> list[Message]:
    """Arguments of tool calls that are objects become JSON text."""

    def to_text(arguments: Any) -> Any:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments

    return _with_arguments(messages, to_text)


def _with_arguments(messages: list[Message], change: Callable[[Any], Any]) -> list[Message]:
    def changed(function: dict[str, Any]) -> dict[str, Any]:
        return function | {"arguments": change(function["arguments"])} if "arguments" in function else function

    def call(found: dict[str, Any]) -> dict[str, Any]:
        return found | {"function": changed(found["function"])} if "function" in found else changed(found)

    return [m | {"tool_calls": [call(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]
