"""Grammars: what they let through, in each family's form of calls; what is refused, and in how much time."""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer

from hybridkv.errors import RequestError
from hybridkv.text import grammar
from hybridkv.text.call_formats import DSML, HERMES, LLAMA, QWEN_XML, CallFormat
from hybridkv.text.call_grammars import Called, calls_grammar
from hybridkv.text.calls import CallParser
from hybridkv.text.grammar import Grammar, Grammars, grammar_text
from hybridkv.text.reasoning import ReasoningSplitter
from hybridkv.text.schema_limits import MAX_DEPTH, MAX_ENUM, MAX_SCHEMA_BYTES
from hybridkv.text.tokenizer import Tokenizer
from text.test_calls import calls_of, written

pytest.importorskip("llguidance")
FAMILIES = (HERMES, QWEN_XML, LLAMA, DSML)
TAGS = ("<tool_call>", "</tool_call>", "｜DSML｜")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "code": {"type": "string", "pattern": "^[a-c]{2}/\\d$"},
        "days": {"type": "integer", "minimum": 0, "maximum": 30},
        "unit": {"enum": ["C", "F"]},
        "deep": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
        "on": {"type": ["boolean", "null"]},
    },
    "required": ["city", "on"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "number", "minimum": 0, "maximum": 9}},
}
FUNCTIONS = [Called("get_weather", SCHEMA), Called("g", None)]


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@cache
def grammars(by_token: bool) -> Grammars:
    tokenizer = byte_tokenizer(*TAGS if by_token else ())
    return Grammars(tokenizer, tokenizer.vocab_size + 5)  # models have rows of padding


def compiled(form: CallFormat, by_token: bool, **more: Any) -> tuple[Grammar, Tokenizer]:
    known = grammars(by_token)
    text = calls_grammar(form, known.tokenizer, FUNCTIONS, **more)
    return known.compile(text, "tools"), known.tokenizer


def takes(found: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar lets the text through and can end there."""
    matcher, ids = found.matcher(), tokenizer.encode(text, bos=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def walked(found: Grammar, tokenizer: Tokenizer, seed: int, most: int = 400) -> list[int] | None:
    """Tokens drawn from the masks until the grammar ends; None: it does not within so many."""
    matcher, rng, ids = found.matcher(), random.Random(seed), []
    row = np.zeros(found.words, np.int32)
    for _ in range(most):
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        plain = [i for i in allowed if not 129 <= i <= 256]  # half characters would seldom become whole ones
        token = 0 if 0 in allowed else rng.choice(plain or allowed)
        assert matcher.consume_token(token)
        if token == 0:
            return ids
        ids.append(token)
        if matcher.is_stopped():
            return ids
    return None


def valid(arguments: dict[str, Any]) -> bool:
    """Whether these fit SCHEMA."""
    checks: dict[str, Callable[[Any], bool]] = {
        "city": lambda x: isinstance(x, str) and len(x) <= 9,
        "code": lambda x: re.fullmatch("[a-c]{2}/[0-9]", x) is not None,
        "days": lambda x: isinstance(x, int) and 0 <= x <= 30,
        "unit": lambda x: x in ("C", "F"),
        "deep": lambda x: isinstance(x, list) and len(x) <= 2 and all(0 <= each <= 9 for each in x),
        "on": lambda x: x in (True, False, None),
    }
    return {"city", "on"} <= arguments.keys() <= checks.keys() and all(checks[k](v) for k, v in arguments.items())


def both(form: CallFormat, one: str, two: str) -> str:
    if form is DSML:
        return one.removesuffix(form.close) + two.removeprefix(f"{form.open}\n")
    return one + ("; " if form is LLAMA else "\n") + two


@pytest.mark.parametrize("by_token", (False, True))
@pytest.mark.parametrize("form", FAMILIES, ids=lambda form: form.name)
def test_calls_of_given_functions_with_arguments_by_their_schemas(form: CallFormat, by_token: bool) -> None:
    one = written(form, "get_weather", city="a <b>\nc", code="ab/7", days=3, unit="C", deep=[1, 2.5], on=None)
    other = written(form, "g", x="1")
    bad = [
        written(form, "get_weather", on=True),
        written(form, "get_weather", city="Rome", on="perhaps"),
        written(form, "get_weather", city="Rome", on=True, days=31),
        written(form, "get_weather", city="x" * 10, on=True),
        written(form, "get_weather", city="Rome", unit="K", on=True),
        written(form, "get_weather", city="Rome", code="ab/77", on=True),
        written(form, "get_news", city="Rome", on=True),
    ]
    free, forced = compiled(form, by_token, free=True), compiled(form, by_token)
    for found in (free, forced):
        assert takes(*found, one) and takes(*found, other) and takes(*found, both(form, one, other))
        assert not any(takes(*found, text) for text in bad)
    assert takes(*free, "Hello") and not takes(*forced, "Hello")
    assert not takes(*forced, f"Hello {one}") and not takes(*forced, "")
    single = compiled(form, by_token, single=True)
    assert takes(*single, one) and not takes(*single, both(form, one, other))
    thinking = compiled(form, by_token, after_thoughts=True)
    assert takes(*thinking, f"\n\n{one}") and takes(*thinking, one) and not takes(*thinking, f"\n\n\n{one}")


@pytest.mark.parametrize("by_token", (False, True))
@pytest.mark.parametrize("form", FAMILIES, ids=lambda form: form.name)
def test_whatever_the_masks_allow_is_a_call_that_the_parser_reads(form: CallFormat, by_token: bool) -> None:
    """Tokens drawn at random from the masks: the parser finds exactly one call, and its arguments fit."""
    known = grammars(by_token)
    text = calls_grammar(form, known.tokenizer, FUNCTIONS[:1], single=True)
    found, whole = known.compile(text, "tools"), 0
    for seed in range(12):
        ids = walked(found, known.tokenizer, seed)
        if ids is None:
            continue
        whole += 1
        said = known.tokenizer.decode(ids)
        opens = by_token and form.open in TAGS
        parser = CallParser(form, ReasoningSplitter(None), {"get_weather": SCHEMA}, by_token=opens)
        pieces = [*parser.push(said, (0,) if opens else ()), *parser.finish(True)]
        assert not [piece for piece in pieces if piece.kind in ("text", "cut")], said
        [(name, arguments)] = calls_of(pieces)
        assert name == "get_weather" and valid(arguments), said
    assert whole >= 8


def test_an_answer_may_be_a_value_in_place_of_calls() -> None:
    known = grammars(True)
    text = calls_grammar(HERMES, known.tokenizer, FUNCTIONS, instead=grammar.json_rule(of(a={"type": "integer"})))
    found = known.compile(text, "tools"), known.tokenizer
    assert takes(*found, '{"a":1}') and takes(*found, written(HERMES, "g", x=1)) and not takes(*found, '{"b":1}')


def test_names_cannot_write_a_grammar() -> None:
    known = grammars(False)
    for name in ('a" | "b', "a\n| b: c", "a/b", "<[5]>", "%json {}"):
        found = known.compile(calls_grammar(HERMES, known.tokenizer, [Called(name, None)]), "tools")
        good = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {{}}}}\n</tool_call>'
        assert takes(found, known.tokenizer, good) and not takes(found, known.tokenizer, good.replace("a", "b", 1))


def test_json_has_no_white_space_and_special_tokens_are_in_no_text() -> None:
    known = grammars(True)
    found = known.compile(grammar_text("json", of(a={"type": "string"}), "x"), "x")
    assert takes(found, known.tokenizer, '{"a":"b c"}') and not takes(found, known.tokenizer, '{"a": "b"}')
    assert not takes(found, known.tokenizer, '{"a":"<tool_call>"}')  # that is the token; its letters can be spelled
    loose = of(a={"type": "string"}) | {"x-guidance": {"whitespace_flexible": True}}
    assert not takes(known.compile(grammar_text("json", loose, "x"), "x"), known.tokenizer, '{"a": "b"}')


# ---- what is refused


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth - 1):
        found = {"items": found}
    return found


REFUSED = {
    "not": (of(a={"not": {"type": "string"}}), "not"),
    "remote": (of(a={"$ref": "https://example.com/a.json"}), "nothing is fetched"),
    "file": (of(a={"$ref": "file:///etc/passwd"}), "nothing is fetched"),
    "unknown reference": (of(a={"$ref": "#/$defs/none"}), "none"),
    "large": (of(a={"description": "x" * MAX_SCHEMA_BYTES}), "bytes, at most"),
    "enum": (of(a={"enum": list(range(MAX_ENUM + 1))}), f"at most {MAX_ENUM}"),
    "deep": (nested(MAX_DEPTH + 1), f"{MAX_DEPTH} levels"),
    "look-ahead": (of(a={"type": "string", "pattern": "^(?=a)b$"}), "look-around"),
    "back reference": (of(a={"type": "string", "pattern": r"^(a)\1$"}), "backreferences"),
    "unsatisfiable": (of(a=False), "nsatisfiable"),
    "a loop": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "grammar"),
    "no schema": ([], "is an object"),
    "no JSON": (of(a={"const": {1, 2}}), "plain JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_schema_that_cannot_be_served_is_refused_with_the_reason(case: str) -> None:
    schema, said = REFUSED[case]
    with pytest.raises(RequestError, match=said) as problem:
        grammars(False).compile(grammar_text("json", schema, "response_format"), "response_format")
    assert str(problem.value).startswith("response_format: ") and len(str(problem.value)) < 500


def test_schemas_at_their_limits_are_served() -> None:
    known = grammars(False)
    for schema in (of(a={"enum": [f"v{i}" for i in range(MAX_ENUM)]}), nested(MAX_DEPTH - 1) | {"type": "array"}):
        assert known.compile(grammar_text("json", schema, "x"), "x")
    text = "x" * (MAX_SCHEMA_BYTES - len(json.dumps({"description": ""})))
    assert known.compile(grammar_text("json", {"description": text}, "x"), "x")


def hostile(patterns: int) -> str:
    """Patterns that must all hold: every further one doubles the work."""
    every = [{"type": "string", "pattern": f".*{i}.*"} for i in range(patterns)]
    return grammar_text("json", of(a={"allOf": every}), "x")


def test_a_compilation_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "SECONDS", 1.0)
    known = Grammars(byte_tokenizer(), 300)
    assert known.compile(grammar_text("json", {"type": "object"}, "x"), "x")
    [worker] = known._workers
    with pytest.raises(RequestError, match="takes longer than 1 seconds"):
        known.compile(hostile(60), "x")
    assert not worker.alive() and not known._workers
    assert known.compile(grammar_text("json", of(a={"type": "null"}), "x"), "x")  # with a new one
    [worker] = known._workers
    known.close()
    assert not worker.alive() and not known._workers


PATTERNS = ("^(a+)+$", "^((a{1,99}){1,99}){1,99}$", "^(ab|cd|e.*f){1,100000}$", "^[a-z]{1,9999}$")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_that_explode_elsewhere_are_followed_or_given_up(pattern: str) -> None:
    """By derivatives, without going back, with a limit for each step: this ends."""
    known = grammars(False)
    found = known.compile(grammar_text("json", of(a={"type": "string", "pattern": pattern}), "x"), "x")
    matcher, row, taken = found.matcher(), np.zeros(found.words, np.int32), 0
    assert matcher.try_consume_tokens(known.tokenizer.encode('{"a":"', bos=False)) > 0
    for token in known.tokenizer.encode("ab" if "ab" in pattern else "a", bos=False) * 200:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if matcher.is_error() or not matcher.consume_token(token):
            break
        taken += 1
    assert taken >= 200 or "too" in matcher.get_error() or "fuel" in matcher.get_error(), matcher.get_error()


def test_grammars_are_kept_and_counted() -> None:
    known = Grammars(byte_tokenizer(), 300)
    text = grammar_text("choice", ["a", "b"], "x")
    first = known.compile(text, "x")
    assert known.compile(text, "x") is first and known.timer.phases["compile"][0] == 1
    for i in range(grammar.KEPT):
        known.compile(grammar_text("choice", [f"a{i}"], "x"), "x")
    assert known.compile(text, "x") is not first


def test_all_schemas_of_a_request_have_a_limit_together() -> None:
    known = grammars(False)
    large = of(a={"description": "x" * (60 << 10)})
    assert calls_grammar(HERMES, known.tokenizer, [Called(f"f{i}", large) for i in range(4)])
    with pytest.raises(RequestError, match="together"):
        calls_grammar(HERMES, known.tokenizer, [Called(f"f{i}", large) for i in range(5)])
    with pytest.raises(RequestError, match="no functions"):
        calls_grammar(HERMES, known.tokenizer, [])
