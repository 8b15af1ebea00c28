"""Calls found in answers, in every family's form and however the text comes in pieces."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.text.argument_types import convert
from hybridkv.text.call_bodies import CallPiece
from hybridkv.text.call_formats import DSML, FORMATS, HERMES, LLAMA, PLAIN, QWEN_XML, CallFormat, format_of
from hybridkv.text.calls import CallParser
from hybridkv.text.chat import ChatTemplate
from hybridkv.text.reasoning import ReasoningSplitter

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "code": {"type": "string"},
        "list": {"type": "array"},
        "flag": {"type": "boolean"},
    },
}
TOOLS: dict[str, Any] = {"get_weather": SCHEMA, "f": SCHEMA, "g": {}}
THINK = ("<think>", "</think>")


def parser(form: CallFormat, opened: bool | None = None, by_token: bool = False) -> CallParser:
    """`opened`: the prompt opened thoughts; None: there are none."""
    splitter = ReasoningSplitter(None if opened is None else THINK, bool(opened))
    return CallParser(form, splitter, TOOLS, by_token, "" if opened is None else THINK[1])


def joined(pieces: list[CallPiece]) -> list[CallPiece]:
    """Neighbours of one kind as one."""
    found: list[CallPiece] = []
    for piece in pieces:
        if found and piece.kind == found[-1].kind and piece.kind in ("text", "reasoning", "arguments"):
            found[-1] = CallPiece(piece.kind, found[-1].text + piece.text)
        else:
            found.append(piece)
    return found


def run(
    form: CallFormat, pieces: list[str], complete: bool = True, tag_at: list[int] | None = None, **more: Any
) -> list[CallPiece]:
    """`tag_at`: where opening tokens are; None: letters decide."""
    found, reading, begun = parser(form, by_token=tag_at is not None, **more), [], 0
    for piece in pieces:
        places = tuple(at for at in tag_at or () if begun <= at < begun + len(piece))
        reading += found.push(piece, places)
        begun += len(piece)
    return joined(reading + found.finish(complete))


def every_cut(form: CallFormat, text: str, complete: bool = True, **more: Any) -> list[CallPiece]:
    """The same pieces all at once, one character at a time, and cut in two or three anywhere."""
    whole = run(form, [text], complete, **more)
    cuts = [list(text), *([text[:i], text[i:]] for i in range(len(text) + 1))]
    rng = random.Random(len(text))
    for _ in range(30):
        a, b = sorted(rng.choices(range(len(text) + 1), k=2))
        cuts.append([text[:a], text[a:b], text[b:]])
    for pieces in cuts:
        assert run(form, pieces, complete, **more) == whole, pieces
    return whole


def written(form: CallFormat, name: str, **given: Any) -> str:
    """A call as the family's models write it."""
    if form is LLAMA:
        return json.dumps({"name": name, "parameters": given})
    if form.function is None:
        return f'{form.open}\n{{"name": "{name}", "arguments": {json.dumps(given)}}}\n{form.close}'
    (f, after, f_end), (p, p_after, p_end) = form.function, form.parameter or ("", "", "")
    lines = [f"{f}{name}{after}"]
    for key, value in given.items():
        kind = "" if form is QWEN_XML else f'" string="{str(isinstance(value, str)).lower()}'
        between = "\n" if form is QWEN_XML else ""
        shown = value if isinstance(value, str) else json.dumps(value)
        lines.append(f"{p}{key}{kind}{p_after}{between}{shown}{between}{p_end}")
    return "\n".join([form.open, *lines, f_end, form.close])


def calls_of(pieces: list[CallPiece]) -> list[tuple[str, Any]]:
    """Names and arguments of calls that were ended."""
    found: list[tuple[str, Any]] = []
    name, arguments = "", ""
    for kind, text in pieces:
        if kind == "start":
            name, arguments = text, ""
        elif kind == "arguments":
            arguments += text
        elif kind == "end":
            found.append((name, json.loads(arguments)))
    return found


def said(pieces: list[CallPiece], kind: str = "text") -> str:
    return "".join(text for found, text in pieces if found == kind)


FAMILIES = [HERMES, QWEN_XML, LLAMA, DSML]
TAGGED = [HERMES, QWEN_XML, DSML]
each = pytest.mark.parametrize("form", FAMILIES, ids=lambda f: f.name)
tagged = pytest.mark.parametrize("form", TAGGED, ids=lambda f: f.name)


@each
def test_one_call(form: CallFormat) -> None:
    given = {"city": "Paris", "days": 1}
    pieces = every_cut(form, written(form, "get_weather", **given))
    assert [piece.kind for piece in pieces] == ["start", "arguments", "end"]
    assert calls_of(pieces) == [("get_weather", given)]


@each
def test_two_calls_in_a_row(form: CallFormat) -> None:
    between = "; " if form is LLAMA else "\n"
    pieces = every_cut(form, between.join([written(form, "f", city="a"), written(form, "g")]))
    assert calls_of(pieces) == [("f", {"city": "a"}), ("g", {})] and said(pieces) == ""


def test_several_functions_between_the_same_tags() -> None:
    one, two = written(DSML, "f", city="a"), written(DSML, "g", x=2)
    text = one.removesuffix(DSML.close) + two.removeprefix(DSML.open)
    assert calls_of(every_cut(DSML, text)) == [("f", {"city": "a"}), ("g", {"x": 2})]


@tagged
def test_text_before_and_after_is_kept_and_white_space_is_not(form: CallFormat) -> None:
    pieces = every_cut(form, f"I look.\n\n{written(form, 'f')}\n\nDone.")
    assert [p for p in pieces if p.kind == "text"] == [("text", "I look."), ("text", "Done.")]
    assert [p.kind for p in pieces] == ["text", "start", "arguments", "end", "text"]
    assert every_cut(form, " just text \n") == [CallPiece("text", " just text \n")]


VALUES = ["<", "</", "a < b && c > d", "\n\nblank\n\nlines\n", "def f():\n    return '</'\n", "{'a': [1}"]
VALUES += ['"quoted" \\ "', "</tool_call>", "12", "null", "ü𝄞"]


@each
@pytest.mark.parametrize("value", VALUES)
def test_values_are_kept_to_the_letter(form: CallFormat, value: str) -> None:
    """Braces, quotes and closing tags inside values included; an integer-like text stays a text."""
    assert calls_of(every_cut(form, written(form, "f", code=value))) == [("f", {"code": value})]


def test_json_in_any_order_and_with_text_for_an_object() -> None:
    for body in (
        '{"arguments": {"city": "a}"}, "name": "f"}',
        '{ "name" : "f" , "arguments" : {"city": "a}"} }',
        '{"id": {"name": "no"}, "name": "f", "arguments": "{\\"city\\": \\"a}\\"}"}',
        '{"name": "f", "parameters": {"city": "a}"}}',
    ):
        pieces = every_cut(HERMES, f"<tool_call>{body}</tool_call>after")
        assert calls_of(pieces) == [("f", {"city": "a}"})] and said(pieces) == "after"


def test_a_tag_that_is_written_twice_opens_one_call() -> None:
    pieces = every_cut(HERMES, f"<tool_call>\n{written(HERMES, 'f')}")
    assert calls_of(pieces) == [("f", {})] and said(pieces) == ""


def test_no_arguments_are_an_empty_object() -> None:
    assert calls_of(every_cut(HERMES, '<tool_call>{"name": "f"}</tool_call>')) == [("f", {})]
    assert calls_of(every_cut(QWEN_XML, "<tool_call><function=f></function></tool_call>")) == [("f", {})]


@tagged
def test_letters_are_text_where_a_token_opens(form: CallFormat) -> None:
    call = written(form, "f")
    text = f"Write {form.open} to call. {call}"
    pieces = every_cut(form, text, tag_at=[text.index(call)])
    assert said(pieces) == f"Write {form.open} to call." and len(calls_of(pieces)) == 1
    assert said(every_cut(form, text, tag_at=[])).startswith("Write ")
    thoughts = every_cut(form, f"Hm {form.open} x</think>Yes.", opened=True, tag_at=[])
    assert said(thoughts, "reasoning") == f"Hm {form.open} x" and said(thoughts) == "Yes."


def test_letters_in_a_code_fence_are_text() -> None:
    call = written(HERMES, "f")
    pieces = every_cut(HERMES, f"```\n{call}\n```\n{call}")
    assert len(calls_of(pieces)) == 1 and said(pieces) == f"```\n{call}\n```"


@tagged
def test_a_call_ends_thoughts_that_were_not_closed(form: CallFormat) -> None:
    text = f"I think\n{written(form, 'f')}"
    pieces = every_cut(form, text, opened=True, tag_at=[text.index(form.open)])
    assert said(pieces, "reasoning") == "I think" and len(calls_of(pieces)) == 1 and said(pieces) == ""


def test_a_second_end_of_thoughts_is_dropped() -> None:
    pieces = every_cut(QWEN_XML, f"Hm.</think>\n\n</think>Yes.\n{written(QWEN_XML, 'f')}", opened=True)
    assert (said(pieces, "reasoning"), said(pieces)) == ("Hm.", "Yes.") and len(calls_of(pieces)) == 1


def test_white_space_between_thoughts_and_a_call_is_no_text() -> None:
    pieces = every_cut(QWEN_XML, f"Hm.</think>\n\n{written(QWEN_XML, 'f')}\n", opened=True)
    assert [p.kind for p in pieces] == ["reasoning", "start", "arguments", "end"]


@tagged
def test_empty_tags_swallow_nothing(form: CallFormat) -> None:
    assert said(every_cut(form, f"{form.open}{form.close}Hello {form.open}\n{form.close}there")) == "Hellothere"


@tagged
def test_what_is_no_call_between_tags_is_text(form: CallFormat) -> None:
    pieces = every_cut(form, f"{form.open}get it{form.close} now")
    assert said(pieces).replace(" ", "") == "getitnow" and calls_of(pieces) == []


def test_an_unknown_function_and_bad_json_are_passed_on() -> None:
    assert calls_of(every_cut(HERMES, '<tool_call>{"name": "what", "arguments": {}}</tool_call>')) == [("what", {})]
    pieces = every_cut(HERMES, '<tool_call>{"name": "f", "arguments": {"a": oops}</tool_call>x')
    assert [p.kind for p in pieces] == ["start", "arguments", "end", "text"]
    assert said(pieces, "arguments") == '{"a": oops}'
    assert calls_of(every_cut(QWEN_XML, "<tool_call><function=what></function></tool_call>")) == [("what", {})]


def test_a_bare_object_counts_only_if_it_names_a_function() -> None:
    for text in ('{"name": "what", "parameters": {}}', '{"name": "f", "parameters": {}', '{"a": 1}', "{oops} x"):
        pieces = every_cut(LLAMA, text)
        assert calls_of(pieces) == [] and said(pieces) == text
    later = f"See: {written(LLAMA, 'f')}"
    assert said(every_cut(LLAMA, later)) == later


def test_tags_that_are_missing() -> None:
    text = "<tool_call>\n<function=f>\n<parameter=city>\na\n<parameter=days>\n3\n</function>\n</tool_call>"
    assert calls_of(every_cut(QWEN_XML, text)) == [("f", {"city": "a", "days": 3})]
    text = '<tool_call>{"name": "f", "arguments": {}}\nThen <b>.'
    pieces = every_cut(HERMES, text)
    assert calls_of(pieces) == [("f", {})] and said(pieces) == "Then <b>."
    text = "<tool_call>\n<function=f>\n<parameter=city>\na\n"  # the model ends its answer
    assert calls_of(every_cut(QWEN_XML, text)) == [("f", {"city": "a"})]


@tagged
def test_a_call_that_a_limit_cut_is_none(form: CallFormat) -> None:
    call = written(form, "get_weather", city="Paris", days=1)
    for end in range(len(form.open), call.rindex("}" if form is HERMES else (form.function or ("", "", ""))[2])):
        pieces = run(form, [f"Yes. {call[:end]}"], complete=False)
        assert calls_of(pieces) == [] and said(pieces) == "Yes.", call[:end]
        assert [p.kind for p in pieces][-1] in ("text", "cut")


NESTED = {
    "$defs": {"size": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "loop": {"$ref": "#/$defs/loop"}},
    "properties": {},
}


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("1.0", {"type": "integer"}, 1),
        ("1.5", {"type": "integer"}, "1.5"),
        ("1.5", {"type": "number"}, 1.5),
        ("3", {"type": "number"}, 3),
        ("True", {"type": "boolean"}, True),
        ("yes", {"type": "boolean"}, "yes"),
        ("null", {"type": "null"}, None),
        ("null", {"type": "string"}, "null"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string", "nullable": True}, None),
        ('["a"]', {"type": "array"}, ["a"]),
        ('["a"', {"type": "array"}, '["a"'),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ('{"a": 1}', {"anyOf": [{"type": "string"}, {"type": "object"}]}, {"a": 1}),
        ("5", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("5", {"$ref": "#/$defs/size"}, 5),
        ("null", {"$ref": "#/$defs/size"}, None),
        ("5", {"$ref": "#/$defs/loop"}, "5"),
        ("5", {"$ref": "http://example.org/x"}, "5"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("5", {"const": 5}, 5),
        ("5", {}, "5"),
        ("5", None, "5"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("1e9999", {"type": "number"}, "1e9999"),
        ("NaN", {"type": "number"}, "NaN"),
    ],
)  # fmt: skip
def test_values_get_the_type_of_their_schema(text: str, schema: Any, value: Any) -> None:
    found = convert(text, schema, NESTED)
    assert found == value and type(found) is type(value)


PARTS = ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=city>", "</parameter>", "\n", "{"]
PARTS += ["}", '"', "\\", '"name": "f"', '"arguments": ', "[", "]", ",", "<think>", "</think>", "```", "a", " "]
PARTS += ["<", "é"]
PARTS += [DSML.open, DSML.close, '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", "; "]


@settings(max_examples=300)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PARTS), max_size=25), st.data())
def test_any_text_in_any_pieces_gives_the_same(name: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    opened, complete = data.draw(st.sampled_from([None, True, False])), data.draw(st.booleans())
    whole = run(FORMATS[name], [text], complete, opened=opened)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert run(FORMATS[name], pieces, complete, opened=opened) == whole
    assert run(FORMATS[name], list(text), complete, opened=opened) == whole


def test_ten_thousand_texts_of_tags_and_quotes() -> None:
    rng = random.Random(5)
    for _ in range(10_000):
        text = "".join(rng.choices(PARTS, k=rng.randrange(20)))
        pieces = run(rng.choice(list(FORMATS.values())), [text], rng.random() < 0.5)
        starts, ends = (sum(p.kind in kinds for p in pieces) for kinds in (("start",), ("end", "cut")))
        assert starts == ends, text


def test_long_answers_take_linear_time() -> None:
    """What a model can be made to write must not stop the server."""
    for form, text in (
        (HERMES, "<tool_call>" * 20_000),
        (HERMES, '<tool_call>{"name": "f", "arguments": "' + "\\" * 200_000),
        (QWEN_XML, "<tool_call><function=f><parameter=code>" + "<" * 200_000),
        (QWEN_XML, "<tool_call><function=" + "f" * 200_000),
        (PLAIN, "`" * 200_000),
        (LLAMA, "{" * 200_000),
    ):
        found = parser(form)
        for at in range(0, len(text), 500):
            found.push(text[at : at + 500])
        found.finish(True)


def test_families_are_known_by_their_templates() -> None:
    for source, form in (
        ("{{ messages }}", PLAIN),
        ("{{ tools }}<tool_call>{{ messages }}", HERMES),
        ("{{ tools }}<tool_call><function={{ messages }}", QWEN_XML),
        ("{{ tools }}<|python_tag|>{{ messages }}", LLAMA),
        ("{{ tools }}<｜DSML｜invoke{{ messages }}", DSML),
        ("{{ tools }}[TOOL_CALLS]{{ messages }}", PLAIN),
    ):
        template = ChatTemplate(source, bos=None, eos=None)
        assert format_of(template) is form
        template.close()


@pytest.mark.parametrize("form", [QWEN_XML, DSML], ids=lambda f: f.name)
@pytest.mark.parametrize(
    "code", ['say "a\\b"\n\n\tif x </para and <function é\n', "\n", "\n\nx", "", 'a\n<param\n</func\n"', "\\"]
)
def test_texts_between_tags_are_given_out_as_they_come(form: CallFormat, code: str) -> None:
    text = written(form, "f", code=code, days=2)
    assert calls_of(every_cut(form, text)) == [("f", {"code": code, "days": 2})]
    reading, given, late = parser(form), "", 0
    for i, char in enumerate(text):
        given += said(reading.push(char), "arguments")
        known = json.dumps(code, ensure_ascii=False)[1:-1]
        begin = text.index(code) if code else len(text)
        read = i + 1 - begin  # characters of the value that have come
        if 0 < read <= len(code):  # what may be the end of a value is held, and its own line break
            shown = given.partition('"code": "')[2]
            assert known.startswith(shown)
            late = max(late, len(json.dumps(code[:read], ensure_ascii=False)) - 2 - len(shown))
    longest = max(len(end) for end in (form.parameter or ("",))) + 2
    assert late <= 2 * longest
    every_cut(form, text[: text.index("days")], complete=False)
