"""What an answer must look like, as clients ask for it. A grammar is compiled last, when all else is checked."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hybridkv.config import StructuredOutputs
from hybridkv.server.fields import Fields
from hybridkv.server.problems import bad
from hybridkv.server.tools import NO_TOOLS, Tools
from hybridkv.text.call_formats import CallFormat, opening_token
from hybridkv.text.call_grammars import Called, calls_grammar
from hybridkv.text.constraint import Constraint, Thoughts
from hybridkv.text.grammar import Grammars, grammar_text, json_rule
from hybridkv.text.schema_limits import checked_schema

KINDS = tuple(f.name for f in fields(StructuredOutputs))


@dataclass(frozen=True)
class Structure:
    """What was asked for, and the field that did, for messages."""

    outputs: StructuredOutputs
    where: str


def read_format(form: Fields | None) -> Structure | None:
    """`response_format` of Chat Completions, `output_config.format` of Messages, `text.format` of Responses: text,
    json_object, or json_schema with its schema here or one level below. None: text.
    """
    kind = None if form is None else form.choice("type", ("text", "json_object", "json_schema"))
    if form is None or kind == "text":
        return None
    if kind is None:
        raise form.wrong("type", "it is missing")
    if kind == "json_object":
        return Structure(StructuredOutputs(json_object=True), form.path)
    inner = form.object("json_schema") or form
    schema = inner.object("schema")
    if schema is None:
        raise inner.wrong("schema", "it is missing")
    return Structure(StructuredOutputs(json=schema.data), schema.path)


def read_structure(asked: Fields) -> Structure | None:
    """What requests of OpenAI's dialect ask for: response_format, vLLM's structured_outputs, or its older guided_*."""
    found = [read_format(asked.object("response_format"))]
    given = asked.object("structured_outputs")
    if given is not None:
        if unknown := [name for name in given.data if name not in KINDS]:
            raise given.wrong(unknown[0][:40], f"there is no such setting; there are {', '.join(KINDS)}")
        named = {name: value for name, value in given.data.items() if value not in (None, False)}
        if len(named) != 1:
            raise asked.wrong("structured_outputs", f"it takes exactly one of {', '.join(KINDS)}")
        found.append(Structure(StructuredOutputs(**named), f"structured_outputs.{next(iter(named))}"))
    for name in ("json", "regex", "choice", "grammar"):
        field = f"guided_{name}"
        if field in asked:
            found.append(Structure(StructuredOutputs(**{name: asked.raw(field)}), field))
    known = [each for each in found if each is not None]
    if len(known) > 1:
        raise asked.wrong(known[1].where.partition(".")[0], f"{known[0].where} asks for a structure already; give one")
    if "grammar" in asked:
        raise asked.wrong("grammar", "use structured_outputs: {grammar: ...}, in Lark")
    return known[0] if known else None


def compiled(grammars: Grammars, structure: Structure | None) -> Constraint | None:
    """What an answer without a chat must look like."""
    return constraint_of(grammars, structure, NO_TOOLS, None, None)


def constraint_of(
    grammars: Grammars,
    structure: Structure | None,
    tools: Tools,
    form: CallFormat | None,
    thoughts: Thoughts | None,
) -> Constraint | None:
    """What the answer to a chat must look like, or RequestError; None: it is free.

    Args:
        grammars: of the model.
        structure: what was asked for.
        tools: functions that may, must or must not be called.
        form: how the model writes calls; None: there are no functions.
        thoughts: of the answer, if it has any; they stay free.
    """
    text, where = None, "" if structure is None else structure.where
    calls = form is not None and tools.callable and bool(tools.listed)
    if form is not None and calls and (tools.forced or structure is not None or tools.strict):
        functions = [Called(name, schema) for name, schema in tools.schemas.items() if tools.only in (None, name)]
        free = not tools.forced and structure is None
        if free:  # whoever is not strict has a name, and any arguments
            functions = [Called(each.name, each.schema if each.name in tools.strict else None) for each in functions]
        settings = {"free": free, "single": tools.single, "after_thoughts": thoughts is not None}
        instead = None if tools.forced or structure is None else _value(structure)
        text = calls_grammar(form, grammars.tokenizer, functions, instead=instead, **settings)
        where = "tools"
    elif structure is not None:
        outputs = structure.outputs
        text = grammar_text(outputs.kind, outputs.given, structure.where, thoughts is not None)
    token = opening_token(grammars.tokenizer, form) if form is not None and tools.listed else None
    opening = () if token is None else (token,)
    banned = opening if not tools.callable else ()
    grammar = None if text is None else grammars.compile(text, where)
    found = Constraint(grammar, thoughts, opening, banned, grammars.timer)
    return found if found.follows or banned else None


def _value(structure: Structure) -> str:
    """A JSON answer that may come in place of calls."""
    outputs, where = structure.outputs, structure.where
    if outputs.kind not in ("json", "json_object"):
        raise bad(f"{where}: beside tools an answer can be JSON by a schema, or an object; use tool_choice none", where)
    return json_rule(checked_schema({"type": "object"} if outputs.json_object else outputs.given, where))
