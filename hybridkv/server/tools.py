"""Functions that a model may call: read from a request, and shown to models whose template does not know them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hybridkv.server import settings
from hybridkv.server.fields import Fields
from hybridkv.server.record import log_left_out
from hybridkv.text.call_formats import FORMATS, CallFormat

INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class Tools:
    """What may be called, and how.

    Args:
        listed: functions as OpenAI writes them.
        callable: False: they are shown, and not called.
        single: at most one call an answer.
        form: how the model writes calls; None: as its template says.
        required: a call has to come, at once.
        only: of this function.
        strict: functions whose arguments fit their schemas, whether a call has to come or not.
    """

    listed: list[dict[str, Any]] = field(default_factory=list)
    callable: bool = True
    single: bool = False
    form: CallFormat | None = None
    required: bool = False
    only: str | None = None
    strict: frozenset[str] = frozenset()

    @property
    def forced(self) -> bool:
        """Whether the answer is a call and nothing else."""
        return self.required or self.only is not None

    @property
    def schemas(self) -> dict[str, Any]:
        """JSON schemas of parameters by function."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.listed}


NO_TOOLS = Tools()


def read_openai_tools(asked: Fields, form: str | None) -> Tools:
    """`tools`, `tool_choice` and `parallel_tool_calls`."""
    listed, strict = [], set()
    for tool in asked.objects("tools", settings.MAX_TOOLS):
        if tool.choice("type", ("function",)) is None:
            raise tool.wrong("type", "it is missing; there are functions alone")
        function = tool.object("function")
        if function is None:
            raise tool.wrong("function", "it is missing")
        listed.append(_tool(function, "parameters", strict))
    return _openai_choice(asked, listed, strict, form)


def _openai_choice(asked: Fields, listed: list[dict[str, Any]], strict: set[str], form: str | None) -> Tools:
    """`tool_choice` in the form of Chat or of Responses, and `parallel_tool_calls`."""
    kind, only = asked.raw("tool_choice"), None
    if isinstance(kind, dict):
        named = Fields(kind, asked.where("tool_choice"))
        if named.choice("type", ("function",)) is None:
            raise named.wrong("type", "it is missing; a function can be named")
        kind, only = "required", (named.object("function") or named).needed_text("name", 64)
    else:
        asked.choice("tool_choice", ("none", "auto", "required"))
    return _chosen(asked, listed, kind, only, not asked.flag("parallel_tool_calls", True), form, strict)


def read_anthropic_tools(asked: Fields, form: str | None) -> Tools:
    """`tools` and `tool_choice`; tools that Anthropic's own servers run are left out."""
    listed, strict, others = [], set(), 0
    for tool in asked.objects("tools", settings.MAX_TOOLS):
        if tool.text("type", 64) in (None, "custom"):
            listed.append(_tool(tool, "input_schema", strict))
        else:
            others += 1
    log_left_out(others, "tools that only their own server runs")
    given = asked.object("tool_choice")
    kind = None if given is None else given.choice("type", ("auto", "any", "tool", "none"))
    if kind not in (None, "none", "auto") and not listed:
        raise asked.wrong("tool_choice", "there are no tools to choose from")
    only = given.needed_text("name", 64) if given is not None and kind == "tool" else None
    single = given is not None and given.flag("disable_parallel_tool_use")
    word = "required" if kind in ("any", "tool") else kind
    return _chosen(asked, listed, word, only, single, form, strict)


def read_responses_tools(asked: Fields, form: str | None) -> Tools:
    """`tools`, `tool_choice` and `parallel_tool_calls`; agents list tools that their own servers run beside functions,
    which are left out.
    """
    listed, strict, others = [], set(), 0
    for tool in asked.objects("tools", settings.MAX_TOOLS):
        if tool.needed_text("type", 64) == "function":
            listed.append(_tool(tool, "parameters", strict))
        else:
            others += 1
    log_left_out(others, "tools that are no functions")
    return _openai_choice(asked, listed, strict, form)


def _tool(function: Fields, schema: str, strict: set[str]) -> dict[str, Any]:
    name = function.needed_text("name", 64)
    found: dict[str, Any] = {"name": name}
    if (about := function.text("description")) is not None:
        found["description"] = about
    parameters = function.object(schema)
    found["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters.data
    if function.flag("strict"):
        strict.add(name)
    return {"type": "function", "function": found}


def _chosen(
    asked: Fields,
    listed: list[dict[str, Any]],
    choice: str | None,
    only: str | None,
    single: bool,
    form: str | None,
    strict: set[str],
) -> Tools:
    """`choice`: none, auto, required, or None for auto; `only`: the function that has to be called."""
    size = len(json.dumps(listed)) if listed else 0
    if size > settings.MAX_TOOL_BYTES:
        raise asked.wrong("tools", f"they have {size} bytes, at most {settings.MAX_TOOL_BYTES} are taken")
    if choice == "required" and not listed:
        raise asked.wrong("tool_choice", "there are no tools to choose from")
    if only is not None and only not in [tool["function"]["name"] for tool in listed]:
        raise asked.wrong("tool_choice", "it names a function that is not among the tools")
    known = None if form is None else FORMATS[form]
    single = single or only is not None
    return Tools(listed, choice != "none", single, known, choice == "required", only, frozenset(strict))


# ---- calls in prompts


def shown_calls(form: CallFormat, messages: list[dict[str, Any]], listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a family's template takes them."""
    if form.own_prompt:
        return _described(messages, listed)
    return _one_call_a_turn(messages) if form.name == "llama" else messages


def _one_call_a_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Llama's template takes one call a turn: several become turns of one, each with its result."""
    found: list[dict[str, Any]] = []
    results = {m.get("tool_call_id"): m for m in messages if m["role"] == "tool"}
    shown: set[Any] = set()
    for message in messages:
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            for i, call in enumerate(calls):
                found.append(message | {"tool_calls": [call], "content": message["content"] if i == 0 else None})
                if (result := results.get(call.get("id"))) is not None:
                    shown.add(call.get("id"))
                    found.append(result)
        elif message["role"] != "tool" or message.get("tool_call_id") not in shown:
            found.append(message)
    return found


def _described(messages: list[dict[str, Any]], listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that knows no tools: they are described in the system prompt, calls and results are text."""
    found: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            result = f"<observation>\n{content}\n</observation>"
            if found and found[-1]["role"] == "user" and found[-1].get("results"):
                found[-1]["content"] += f"\n{result}"
            else:
                found.append({"role": "user", "content": result, "results": True})
            continue
        calls = [_written(call) for call in message.get("tool_calls") or ()]
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        found.append(plain | {"content": "\n".join([*([content] if content else []), *calls])})
    if listed:
        text = INTRODUCTION.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in listed))
        first = found[0]["content"] + "\n\n" if found and found[0]["role"] == "system" else ""
        rest = found[1:] if first else found
        found = [{"role": "system", "content": first + text}, *rest]
    return [{name: value for name, value in message.items() if name != "results"} for message in found]


def _written(call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}\n</tool_call>'
