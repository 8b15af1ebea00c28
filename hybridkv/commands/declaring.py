"""How a command declares its options, and how their values are read.

A command takes a whole group of options (options.py) as one argument:

    @with_options
    def chat(model: ModelOptions, sampling: SamplingOptions, system: Annotated[...] = None) -> None: ...
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

from typer import BadParameter, Option

from hybridkv.bench.options import flag_of, is_list, read_list
from hybridkv.config import shown

KEYWORD = inspect.Parameter.KEYWORD_ONLY


def flowing(text: str) -> str:
    """A docstring with each paragraph in one line, for a terminal of any width; indented lines stay as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split()) for p in paragraphs)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Spread arguments that are groups of options into their fields, which is the form that typer reads. `--help` lists
    options in the order of the arguments.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=KEYWORD, annotation=_with_reader(hints[name])))
            continue
        inner = get_type_hints(groups[name], include_extras=True)
        for f in fields(groups[name]):
            annotation = _with_reader(_typer_annotation(f, inner[f.name]))
            parameters.append(inspect.Parameter(f.name, KEYWORD, default=f.default, annotation=annotation))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _typer_annotation(f: Field[Any], hint: Any) -> Any:
    """The field's own annotation; a benchmark's option, which is declared without typer, gets one."""
    if "metavar" not in f.metadata:
        return hint
    about: dict[str, Any] = {"help": f.metadata["help"]}
    if f.metadata["metavar"]:
        about["metavar"] = f.metadata["metavar"]
    if is_list(f):
        default: Any = f.default
        about["parser"] = functools.partial(read_list, f)
        about["show_default"] = ",".join(str(item) for item in default) or False
        hint = str
    return Annotated[hint, Option(flag_of(f), **about)]


def _with_reader(hint: Any) -> Any:
    """The annotation with a reader of its kind: a mistake is told in our words, and 32k is a number of tokens."""
    kind, *about = get_args(hint)
    [option] = about
    kinds = {k for k in get_args(kind) or (kind,) if k is not NoneType}
    reader = next((read for k, read in ((int, whole), (float, number)) if k in kinds), None)
    if option.metavar in ("TOKENS", "NAME"):
        reader = {"TOKENS": tokens, "NAME": str.lower}[option.metavar]
    if reader is None or option.parser is not None:
        return hint
    option = copy.copy(option)
    option.parser = reader
    return Annotated[kind, option]


def whole(text: str | int) -> int:
    """A whole number, as an option gives it."""
    if re.fullmatch(r"\s*[+-]?[0-9]{1,30}\s*", str(text)) is None:
        raise BadParameter(f"it takes a whole number, not {shown(text)}")
    return int(text)


def number(text: str | float) -> float:
    """A number, as an option gives it."""
    try:
        return float(text)
    except ValueError:
        raise BadParameter(f"it takes a number, not {shown(text)}") from None


def tokens(text: str | int) -> int:
    """A number of tokens: 32768, 32k (32 x 1024), 1m (1024 x 1024)."""
    match = re.fullmatch(r"\s*([+-]?[0-9]{1,30})\s*([kKmM]?)\s*", str(text))
    if match is None:
        raise BadParameter(f"it takes a number of tokens such as 32768 or 32k, not {shown(text)}")
    return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]


def utf8(text: str) -> str:
    """Text that a terminal gave, without the half characters that a wrong locale leaves in it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
