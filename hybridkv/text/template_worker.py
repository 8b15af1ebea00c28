"""The process in which chat templates are rendered; started by `chat.py`, which says why. Needs jinja2 alone.

Frames on stdin and stdout: u32 length, u32 number (little endian), JSON. The first frame in is {"source", "seconds",
"memory", "output"}, answered by the names of the variables that the template reads, with spaces between them; every
further one is the variables of one rendering. Each is answered by {"text"} or {"error": kind, "message"} under the
number it came with, so that no answer can be taken for that to another question. A frame {"text": ""} with the number 0
says at the start that the process is ready.
"""

from __future__ import annotations

import contextlib
import json
import resource
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO, cast

import jinja2
import jinja2.debug  # otherwise imported at the first error, when no file can be opened
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MESSAGE = 2000  # characters of an error


class Generation(jinja2.ext.Extension):
    """{% generation %}: marks the assistant's words for training; here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """The body as it stands."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja's own filter writes < > & as escapes, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: Any = "") -> None:
    """For templates that refuse what they are given."""
    raise RefusedByTemplate(str(message))


def strftime_now(format: str) -> str:
    """The time now, for templates that tell the model the date."""
    return datetime.now().strftime(format)


def make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Python's dict, for templates."""
    return dict(*args, **kwargs)


class RefusedByTemplate(TemplateError):
    """The template itself said no."""


class OutputTooLong(Exception):
    """More text than asked for."""


def environment() -> ImmutableSandboxedEnvironment:
    """jinja2 as transformers sets it up for chat templates."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
        cache_size=0,
        optimized=False,  # constants such as 'x' * 10**8 are not worked out while compiling
    )
    env.filters["tojson"] = to_json
    names: dict[str, Any] = {"raise_exception": raise_exception, "strftime_now": strftime_now, "dict": make_dict}
    cast(dict[str, Any], env.globals).update(names)
    return env


def render(template: jinja2.Template, variables: dict[str, Any], longest: int) -> str:
    """The text, given up when it is longer than `longest`."""
    parts, size = [], 0
    for part in template.generate(**variables):
        size += len(part)
        if size > longest:
            raise OutputTooLong
        parts.append(part)
    return "".join(parts)


def answer(work: Any) -> dict[str, str]:
    """What `work` returns, or its error in words."""
    try:
        return {"text": work()}
    except TemplateSyntaxError as e:
        kind, message = "syntax", f"{e.message} (line {e.lineno})"
    except SecurityError as e:
        kind, message = "security", str(e)
    except RefusedByTemplate as e:
        kind, message = "refused", str(e)
    except OutputTooLong:
        kind, message = "output", ""
    except MemoryError:
        kind, message = "memory", ""
    except RecursionError:
        kind, message = "recursion", ""
    except Exception as e:  # whatever else the template's own operations raise: undefined values, wrong types
        kind, message = "failed", f"{type(e).__name__}: {e}" if not isinstance(e, TemplateError) else str(e)
    return {"error": kind, "message": message[:MAX_MESSAGE]}


def read_frame(stream: BinaryIO) -> tuple[int, Any]:
    """(number, value); the value is None when there is no more."""
    head = stream.read(8)
    if len(head) < 8:
        return 0, None
    size, number = struct.unpack("<II", head)
    return number, json.loads(stream.read(size))


def write_frame(stream: BinaryIO, number: int, value: Any) -> None:
    """One answer."""
    data = json.dumps(value).encode()
    stream.write(struct.pack("<II", len(data), number) + data)
    stream.flush()


def limit(what: int, value: int) -> None:
    """A limit of this process, never raised again."""
    with contextlib.suppress(ValueError, OSError):  # a lower limit is in force already
        hard = resource.getrlimit(what)[1]
        resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> None:
    """Answer until the pipe is closed."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    write_frame(stdout, 0, {"text": ""})
    number, settings = read_frame(stdin)
    if settings is None:
        return
    environment().from_string("{{ strftime_now('%c') }}").render()  # reads the time zone before files are out of reach
    limit(resource.RLIMIT_AS, settings["memory"])
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NOFILE, 3)  # no file and no socket can be opened
    limit(resource.RLIMIT_CORE, 0)
    template: jinja2.Template | None = None

    def compile_template() -> str:
        nonlocal template
        env = environment()
        template = env.from_string(settings["source"])
        return " ".join(sorted(jinja2.meta.find_undeclared_variables(env.parse(settings["source"]))))

    variables: Any = {}
    while variables is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit(
            resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + settings["seconds"]) + 2
        )  # if its parent is gone and cannot kill it
        current = template
        if current is None:
            write_frame(stdout, number, answer(compile_template))
        else:
            write_frame(stdout, number, answer(lambda t=current, v=variables: render(t, v, settings["output"])))
        number, variables = read_frame(stdin)


if __name__ == "__main__":
    main()
