"""Grammars of calls: how each family writes them (call_formats.py), with arguments by the functions' schemas.

    required        a call at once, of one of the functions; then others, or the end
    auto            free text; from what opens a call on, it is one of the functions, by their schemas

A tag, or a part of one, that is a token beside the vocabulary is that token and nothing else: the same letters spelled
by other tokens would be text to the parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridkv.errors import RequestError
from hybridkv.text.argument_types import DEPTH, schema_types
from hybridkv.text.call_formats import CallFormat
from hybridkv.text.grammar import json_rule, lead, regex_text
from hybridkv.text.schema_limits import MAX_TOOL_BYTES, checked_schema
from hybridkv.text.tokenizer import Tokenizer

ANY_OBJECT: dict[str, Any] = {"type": "object"}
ANY = "(?s:.*)"  # line breaks too


@dataclass(frozen=True)
class Called:
    """A function that may be called. `schema`: of its arguments; None: any."""

    name: str
    schema: Mapping[str, Any] | None


def calls_grammar(
    form: CallFormat,
    tokenizer: Tokenizer,
    functions: list[Called],
    *,
    free: bool = False,
    single: bool = False,
    after_thoughts: bool = False,
    instead: str | None = None,
) -> str:
    """The Lark text of answers that call functions.

    Args:
        form: how the family writes calls.
        tokenizer: that spells the tags.
        functions: those that may be called.
        free: text may stand around calls, and there may be none.
        single: one call at the most.
        after_thoughts: whether the answer may follow thoughts.
        instead: a part of a rule that may be the answer in place of calls.
    """
    if not functions:
        raise RequestError("there are no functions to choose from")
    writer = _Writer(form, tokenizer)
    size = 0
    for function in functions:
        if function.schema is not None:
            size += len(json.dumps(checked_schema(function.schema, f"tool {function.name}", MAX_TOOL_BYTES)))
        writer.add(function)
    if size > MAX_TOOL_BYTES:
        raise RequestError(f"tools: their schemas have {size} bytes together, at most {MAX_TOOL_BYTES} are taken")
    start = writer.around(single) if free else writer.at_once(single)
    if instead is not None:
        writer.rules.append(f"instead: {instead}")
        start = f"({start} | instead)"
    return f"start: {lead(after_thoughts and not free)}{start}\n" + "\n".join(writer.rules) + "\n"


class _Writer:
    """Rules of one family."""

    def __init__(self, form: CallFormat, tokenizer: Tokenizer) -> None:
        self._form, self._line = form, "\n" if form.lines else ""
        self.rules: list[str] = []
        self._functions: list[str] = []
        self._added = {text: i for i, text in tokenizer.added.items() if text}
        longest = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(longest) + ")") if longest else None

    # ---- whole answers

    def at_once(self, single: bool) -> str:
        """Calls, and nothing before them."""
        self._call(self._literal(self._form.open), single)
        if single or self._form.name == "dsml":  # whose calls are all between the same tags
            return "call"
        return f"call ({self._between} call)*"

    def around(self, single: bool) -> str:
        """Text with calls in it."""
        form, most = self._form, "?" if single else "*"
        if not form.open:  # an object at the beginning is a call, whatever follows it
            self._call("", single)
            self.rules.append(f"TEXT: /[^{{]{ANY}/")
            return ("call" if single else f"call ({self._between} call)*") + ' | TEXT | ""'
        parts = self._parts(form.open)
        token = next((i for i, part in enumerate(parts) if part in self._added), None)
        if token is None:
            self.rules += [f"TEXT: /{ANY}/", f"head[lazy]: TEXT {json.dumps(form.open)}"]
            self._call("head", single)
            return f"call{most} TEXT"
        self.rules.append(f"text: (<[^{self._added[parts[token]]}]>)*")
        self._call(" ".join(map(self._part, parts[token:])), single)
        return f"text (call text){most}"

    @property
    def _between(self) -> str:
        return '"\\n"' if self._form.open else '"; "'

    def _call(self, opening: str, single: bool) -> None:
        """The rule of one call, with its tags."""
        form, either = self._form, " | ".join(self._functions)
        if form.function is not None:
            several = "+" if form.name == "dsml" and not single else ""
            self.rules.append(f'call: {opening} "\\n" ({either}){several} {self._literal(form.close)}')
        else:
            head = json.dumps(("\n" if form.open else "") + '{"name": ')
            end = self._literal("}\n" + form.close if form.open else "}")
            self.rules.append(f"call: {opening} {head} ({either}) {end}")

    # ---- one function

    def add(self, function: Called) -> None:
        """The rules of a function."""
        rule = f"f{len(self._functions)}"
        self._functions.append(rule)
        if self._form.function is not None:
            self._tagged(rule, function)
            return
        key = "arguments" if self._form.open else "parameters"
        self.rules.append(f"{rule}: {json.dumps(f'{json.dumps(function.name)}, {json.dumps(key)}: ')} {rule}_given")
        self.rules.append(f"{rule}_given: {json_rule(dict(function.schema or ANY_OBJECT), spaced=True)}")

    def _tagged(self, rule: str, function: Called) -> None:
        """Parameters with tags of their own, in the order of the schema; those that are not required may be missing."""
        assert self._form.function is not None
        before, after, end = self._form.function
        parts, schema = [], function.schema
        properties = schema.get("properties") if schema is not None else None
        if schema is None or not isinstance(properties, Mapping):
            parts.append(self._any_parameters(rule))
        else:
            required = schema.get("required") or ()
            for i, (key, value) in enumerate(properties.items()):
                name = f"{rule}_{i}"
                self._parameter(name, key, value, schema)
                parts.append(name if key in required else f"{name}?")
        head, tail = self._literal(f"{before}{function.name}{after}\n"), self._literal(f"{end}\n")
        self.rules.append(f"{rule}: {head} {' '.join(parts)} {tail}")

    def _any_parameters(self, rule: str) -> str:
        assert self._form.parameter is not None
        before, after, _ = self._form.parameter
        kind = '" string="true' if self._form.name == "dsml" else ""
        head, text = self._literal(kind + after + self._line), self._text(rule, f"/{ANY}/")
        self.rules.append(f'{rule}_one: {self._literal(before)} /[^<>"\\n]{{1,64}}/ {head} {text}')
        return f"{rule}_one*"

    def _parameter(self, rule: str, key: str, schema: Any, root: Mapping[str, Any]) -> None:
        """<parameter=key> value </parameter>"""
        assert self._form.parameter is not None
        before, after, end = self._form.parameter
        types, ending = schema_types(schema, root, DEPTH), self._literal(f"{self._line}{end}\n")
        raw = "string" in types or (not types and _says_nothing(schema))
        if not raw:
            if not isinstance(schema, Mapping):
                raise RequestError(f"tools: the schema of parameter {key[:64]!r} is neither an object nor true")
            inner = {name: root[name] for name in ("$defs", "definitions") if name in root} | dict(schema)
            self.rules.append(f"{rule}_json: {json_rule(inner, spaced=True)}")
            value = f"{rule}_json {ending}"
        elif (words := _words(schema)) is not None:
            value = f"({' | '.join(map(json.dumps, words))}) {ending}"
        else:
            value = self._text(rule, _texts(schema))
        kind = f'" string="{str(raw).lower()}' if self._form.name == "dsml" else ""
        self.rules.append(f"{rule}: {self._literal(f'{before}{key}{kind}{after}{self._line}')} {value}")

    def _text(self, rule: str, texts: str) -> str:
        """A raw text up to the end of its parameter, which it cannot have inside. `texts`: what it may be."""
        assert self._form.parameter is not None and self._form.function is not None
        before, end, function_end = self._form.parameter[0], self._form.parameter[2], self._form.function[2]
        name, parts = f"{rule.upper()}_TEXT", self._parts(end)
        token = next((i for i, part in enumerate(parts) if part in self._added), None)
        if token is not None:  # no text has that token: what stands before it ends the text
            last = json.dumps(self._line + "".join(parts[:token])) if self._line or token else ""
            self.rules += [f"{name}_BODY: {texts}", f"{name}: {name}_BODY {last}"]
            return f'{name} {" ".join(map(self._part, parts[token:]))} "\\n"'
        ends = "|".join(map(_escaped, (end, f"\n{before}", f"\n{function_end}")))
        self.rules.append(f"{name}: {texts} & ~/{ANY}({ends}){ANY}/")
        self.rules.append(f"{rule}_text[suffix={json.dumps(f'{self._line}{end}' + chr(10))}]: {name}")
        return f"{rule}_text"

    # ---- tags

    def _parts(self, text: str) -> list[str]:
        return [part for part in self._split.split(text) if part] if self._split is not None else [text]

    def _part(self, part: str) -> str:
        return f"<[{self._added[part]}]>" if part in self._added else json.dumps(part)

    def _literal(self, text: str) -> str:
        """A fixed text as a part of a rule."""
        return " ".join(map(self._part, self._parts(text))) if text else ""


def _says_nothing(schema: Any) -> bool:
    """Whether a schema allows everything: what it says is for people."""
    return schema is True or (isinstance(schema, Mapping) and not schema.keys() - {"title", "description", "default"})


def _words(schema: Any) -> list[str] | None:
    """The texts that a schema names; None: it names none."""
    given = schema if isinstance(schema, Mapping) else {}
    values = given.get("enum", [given.get("const")])
    return [value for value in values if isinstance(value, str)] or None


def _texts(schema: Any) -> str:
    """What a text may be by its length and its pattern, as a terminal."""
    given = schema if isinstance(schema, Mapping) else {}
    low, high, pattern = given.get("minLength", 0), given.get("maxLength"), given.get("pattern")
    if not isinstance(low, int) or low < 0 or not isinstance(high, int | None) or (high is not None and high < low):
        low, high = 0, None  # a schema that nothing fits: the model's own affair
    found = f"/(?s:.{{{low},{'' if high is None else high}}})/"
    if isinstance(pattern, str):  # anywhere in the text, unless it says where
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[begins : len(pattern) - ends]
        found += f" & /{'' if begins else ANY}({regex_text(inner)}){'' if ends else ANY}/"
    return found


def _escaped(text: str) -> str:
    """A text inside a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")
