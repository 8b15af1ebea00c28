"""What stands between the tags of a call, in each family's form: read character by character, given out as it comes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from hybridkv.text.argument_types import DEPTH, convert, schema_types
from hybridkv.text.call_formats import CallFormat
from hybridkv.text.reasoning import begun

MAX_HEADER = 512  # characters of a function's name, or of a parameter's


class CallPiece(NamedTuple):
    """What was found: "text" and "reasoning" with their text, "start" with a function's name, "arguments" with a piece
    of JSON, "end" of a whole call, "cut" of one that was not ended.
    """

    kind: str
    text: str = ""


class Body:
    """One call, or several between the same tags. It is `over` when its closing tag was met."""

    def __init__(self) -> None:
        self.over = False
        self._out: list[CallPiece] = []

    def push(self, text: str, last: bool) -> tuple[list[CallPiece], str]:
        """What is certain now, and the text that is left, for the next time or for whoever follows."""
        at = 0
        while at < len(text) and not self.over:
            used = self._read(text, at, last)
            if not used:
                break
            at += used
        out, self._out = self._out, []
        return out, text[at:]

    def finish(self, complete: bool, rest: str) -> list[CallPiece]:
        """No more text; `rest` was not used. `complete`: the model ended its answer."""
        raise NotImplementedError

    def _read(self, text: str, at: int, last: bool) -> int:
        """Use characters from `at` on; how many. 0: more must come first."""
        raise NotImplementedError

    def _give(self, kind: str, text: str = "") -> None:
        if text and self._out and self._out[-1].kind == kind:
            self._out[-1] = CallPiece(kind, self._out[-1].text + text)
        elif text or kind in ("start", "end", "cut"):
            self._out.append(CallPiece(kind, text))


def body_of(form: CallFormat, tools: Mapping[str, Any]) -> Body:
    """The reader of a family's calls. `tools`: JSON schemas of parameters by function."""
    return _TaggedCalls(form, tools) if form.function is not None else _JsonCall(form)


def bare_object(tools: Mapping[str, Any]) -> Body:
    """The reader of an object without tags."""
    return _BareObject(tools)


class _Json:
    """Where one is inside a JSON text: its depth, and whether in a string. Broken JSON is followed just as well."""

    def __init__(self) -> None:
        self.depth, self.in_string, self._escaped = 0, False, False

    def follow(self, char: str) -> None:
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class _JsonCall(Body):
    """{"name": ..., "arguments": {...}}, the keys in any order; arguments are given out as they come, verbatim."""

    def __init__(self, form: CallFormat) -> None:
        super().__init__()
        self._open, self._close = form.open, form.close
        self._state = "before"  # the object, in it, after it; or text: there is none
        self._json = _Json()
        self._raw: list[str] = []  # all of the object, for one that turns out to be no call
        self._key: str | None = None  # of the value that is being read
        self._part = ""  # the text of a key, or of a name
        self._name: str | None = None
        self._ready, self._space = "", ""  # arguments, and white space in them, that cannot be given out yet
        self._begun = self._quoted = False  # arguments have come; as a JSON text that holds them

    def _read(self, text: str, at: int, last: bool) -> int:
        char = text[at]
        if char == "<" and not self._json.in_string:
            rest = text[at : at + len(self._close)]
            if rest == self._close:
                self._end_object()
                self.over = True
                return len(self._close)
            if self._state == "before" and text.startswith(self._open, at):  # models stutter
                return len(self._open)
            begins = self._close.startswith(rest)
            begins |= self._state == "before" and self._open.startswith(text[at : at + len(self._open)])
            if begins and not last:
                return 0
        if self._state == "after":
            self.over = not char.isspace()  # the closing tag is missing
            return int(char.isspace())
        if self._state == "before" and not char.isspace():
            self._state = "object" if char == "{" else "text"
        if self._state == "text":
            self._give("text", char)
        elif self._state == "object":
            self._object(char)
        return 1

    def _object(self, char: str) -> None:
        json_, was_in_string = self._json, self._json.in_string
        self._raw.append(char)
        json_.follow(char)
        top = json_.depth == 1 and not was_in_string
        if json_.depth == 0:
            self._end_value()
            self._end_object()
        elif top and char == "," and not json_.in_string:
            self._end_value()
        elif top and char == ":" and self._key is None:
            self._key, self._part = _text_of(self._part) or "?", ""
        elif self._key in ("arguments", "parameters"):
            self._argument(char)
        elif len(self._raw) > 1:  # not the first brace
            self._part += char

    def _argument(self, char: str) -> None:
        if char.isspace() and not self._json.in_string:
            self._space += char if self._begun else ""
            return
        if not self._begun:
            self._begun, self._quoted = True, char == '"'
        text, self._space = self._space + char, ""
        if self._name is None or self._quoted:
            self._ready += text
        else:
            self._give("arguments", text)

    def _end_value(self) -> None:
        if self._key == "name" and self._name is None:
            self._name = _text_of(self._part)
            if self._name is not None:
                self._give("start", self._name)
                if not self._quoted:
                    self._give("arguments", self._ready)
                    self._ready = ""
        self._key, self._part, self._space = None, "", ""

    def _end_object(self) -> None:
        """The object is closed, or the closing tag came before that."""
        if self._state != "object":
            return
        self._state = "after"
        if self._name is None:
            self._give("text", "".join(self._raw))
            return
        if self._ready:
            inner = _text_of(self._ready)
            self._give("arguments", self._ready if inner is None else inner)
        elif not self._begun:
            self._give("arguments", "{}")
        self._give("end")

    def finish(self, complete: bool, rest: str) -> list[CallPiece]:
        """A call that the model left open is given as it is; one that a limit cut is not."""
        if self._state == "object" and complete:
            self._end_object()
        elif self._state == "object" and self._name is not None:
            self._give("cut")
        out, self._out = self._out, []
        return out


def _text_of(value: str) -> str | None:
    """What a JSON text says; None: it is none."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


class _BareObject(Body):
    """Llama's: an object that counts as a call if it parses and names a function that was given."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        super().__init__()
        self._tools, self._json, self._raw = tools, _Json(), []

    def _read(self, text: str, at: int, last: bool) -> int:
        self._raw.append(text[at])
        self._json.follow(text[at])
        if self._json.depth <= 0:
            self.over = True
            self._call("".join(self._raw))
        return 1

    def _call(self, raw: str) -> None:
        try:
            call = json.loads(raw)
        except (ValueError, RecursionError):
            call = None
        call = call if isinstance(call, dict) else {}
        name, given = call.get("name"), call.get("parameters", call.get("arguments", {}))
        if not isinstance(name, str) or name not in self._tools or not isinstance(given, dict):
            self._give("text", raw)
            return
        self._give("start", name)
        self._give("arguments", json.dumps(given, ensure_ascii=False))
        self._give("end")

    def finish(self, complete: bool, rest: str) -> list[CallPiece]:
        return [CallPiece("text", "".join(self._raw))]


class _TaggedCalls(Body):
    """<function=f> <parameter=key> value </parameter> ... </function>: raw values, from which we write the JSON."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Any]) -> None:
        super().__init__()
        assert form.function is not None and form.parameter is not None
        self._tools, self._close, self._lines = tools, form.close, form.lines
        self._function, self._after_name, self._function_end = form.function
        self._parameter, self._after_key, self._parameter_end = form.parameter
        self._state = "between"  # functions; name, inside a function, key, value; or text: there is none
        self._name, self._header = "", ""
        self._calls = self._given = 0  # functions begun, parameters of this one
        self._stray = ""  # text where none belongs: given out after the call
        self._searched = 0  # characters of the value in which no end was found
        self._ends = (  # what ends a value, and how much of it is used with that
            (self._parameter_end, len(self._parameter_end)),
            (f"\n{self._parameter}", 1),
            (f"\n{self._function_end}", 1),
        )
        # what may yet become one, with the line break before it
        self._endings = (*(end for end, _ in self._ends), *([f"\n{self._parameter_end}"] if self._lines else ()))
        self._is_text = self._opened = False  # the value is a text, whatever it is; its beginning was given out

    def _read(self, text: str, at: int, last: bool) -> int:
        return getattr(self, f"_read_{self._state}")(text, at, last)

    def _read_between(self, text: str, at: int, last: bool) -> int:
        if text[at].isspace():
            return 1
        found = self._tag(text, at, last, self._function, self._close)
        if found is None and not self._calls:
            self._state = "text"
            return self._read_text(text, at, last)
        if found is None:
            self.over = True  # the closing tag is missing
            return 0
        if found == self._function:
            self._state = "name"
        self.over = found == self._close
        return len(found)

    def _read_text(self, text: str, at: int, last: bool) -> int:
        found = self._tag(text, at, last, self._close)
        if found is None:
            self._give("text", text[at])
            return 1
        self.over = found == self._close
        return len(found)

    def _read_name(self, text: str, at: int, last: bool) -> int:
        used = self._read_header(text, at, self._after_name, "inside")
        if used and self._state == "inside":
            self._name, self._given = self._header.strip(), 0
            self._calls += 1
            self._give("start", self._name)
        return used

    def _read_key(self, text: str, at: int, last: bool) -> int:
        self._searched, self._opened = 0, False
        used = self._read_header(text, at, self._after_key, "value")
        if used and self._state == "value":
            _, about, wanted, schema = self._wanted()
            types = schema_types(wanted, schema, DEPTH)
            self._is_text = 'string="false' not in about and ('string="true' in about or types <= {"string"})
        return used

    def _read_header(self, text: str, at: int, end: str, then: str) -> int:
        """A name up to its end; one without an end is text."""
        found = text.find(end, at, at + MAX_HEADER)
        if found >= 0:
            self._header, self._state = text[at:found], then
            return found + len(end) - at
        if len(text) - at < MAX_HEADER:
            return 0
        self._stray += text[at : at + MAX_HEADER]
        self._state = "text" if then == "inside" and not self._calls else "inside" if then == "value" else "between"
        if self._state == "text":
            self._give("text", self._stray)
            self._stray = ""
        return MAX_HEADER

    def _read_inside(self, text: str, at: int, last: bool) -> int:
        found = self._tag(text, at, last, self._parameter, self._function_end, self._function, self._close)
        if found == "":
            return 0
        if found is None:
            self._stray += text[at]
            return 1
        if found == self._parameter:
            self._state = "key"
            return len(found)
        self._end_call()
        return len(found) if found == self._function_end else self._read_between(text, at, last)

    def _read_value(self, text: str, at: int, last: bool) -> int:
        found = [(place, used) for end, used in self._ends if (place := text.find(end, at + self._searched)) >= 0]
        if found:
            place, used = min(found)
            self._give_value(text[at:place])
            return place + used - at
        if self._is_text:  # given out as it comes, but for what may be its end
            sure = len(text) - at - max(begun(text[at:], end) for end in self._endings)
            self._searched = 0
            self._give_text(text[at : at + sure])
            return sure
        self._searched = max(0, len(text) - at - max(len(end) for end, _ in self._ends))
        return 0

    def _wanted(self) -> tuple[str, str, Any, Any]:
        """The parameter's key, what its tag says of it, its schema and the function's."""
        key, _, about = self._header.partition('"')
        schema = self._tools.get(self._name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return key, about, properties.get(key) if isinstance(properties, Mapping) else None, schema

    def _give_text(self, piece: str) -> None:
        """More of a value that is a text, without its quotation mark at the end."""
        if not piece:
            return
        if not self._opened:
            self._opened = True
            piece = piece.removeprefix("\n") if self._lines else piece
            self._give("arguments", self._before() + '"')
        self._give("arguments", json.dumps(piece, ensure_ascii=False)[1:-1])

    def _before(self) -> str:
        """What stands before a value."""
        return (", " if self._given else "{") + json.dumps(self._wanted()[0], ensure_ascii=False) + ": "

    def _give_value(self, value: str) -> None:
        """The whole of a value, or the rest of one that was begun."""
        if self._lines:  # exactly one line break goes at each end
            value = (value if self._opened else value.removeprefix("\n")).removesuffix("\n")
        if self._opened:
            self._give_text(value)
            self._give("arguments", '"')
        else:
            _, about, wanted, schema = self._wanted()
            found = value if 'string="true' in about else convert(value, wanted, schema)
            if 'string="false' in about:
                found = _json_or_text(value)
            self._give("arguments", self._before() + json.dumps(found, ensure_ascii=False))
        self._given += 1
        self._state = "inside"

    def _end_call(self) -> None:
        self._give("arguments", "}" if self._given else "{}")
        self._give("end")
        if self._stray.strip():
            self._give("text", self._stray)
        self._state, self._stray = "between", ""

    def finish(self, complete: bool, rest: str) -> list[CallPiece]:
        """A call that the model left open is ended; one that a limit cut is not given."""
        if self._state in ("inside", "key", "value") and complete:
            if self._state == "value":
                self._give_value(rest)
            self._end_call()
        elif self._state in ("inside", "key", "value"):
            self._give("cut")
        out, self._out = self._out, []
        return out

    @staticmethod
    def _tag(text: str, at: int, last: bool, *tags: str) -> str | None:
        """The tag that begins here; "": one may, once more has come; None: none does."""
        for tag in tags:
            if text.startswith(tag, at):
                return tag
        rest = text[at : at + max(map(len, tags))]
        return "" if not last and any(tag.startswith(rest) for tag in tags) else None


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
