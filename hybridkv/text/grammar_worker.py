"""The process in which grammars are tried before ours builds them; started by `grammar.py`, which says why.

Frames as in `template_worker.py`. The first one in is {"seconds", "memory"}, every further one {"grammar"}, answered by
{"text"}: what is wrong with it, or "".
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import llguidance

sys.path.insert(0, str(Path(__file__).parents[2]))  # this very package, wherever another one is installed
from hybridkv.text.template_worker import limit, read_frame, write_frame


def tried(grammar: str) -> str:
    """What is wrong with a grammar; "": nothing."""
    limits = llguidance.LLParserLimits(verbose_errors=False)
    failed, said = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits)
    return said[0] if failed and said else ""


def main() -> None:
    """Answer until the pipe is closed."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    write_frame(stdout, 0, {"text": ""})
    number, settings = read_frame(stdin)
    if settings is None:
        return
    tried('{"grammars": [{"json_schema": {"type": "string", "pattern": "a"}}]}')  # reads all it needs from disk
    limit(resource.RLIMIT_AS, settings["memory"])
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NOFILE, 3)  # no file and no socket can be opened: nothing that a schema names is fetched
    limit(resource.RLIMIT_CORE, 0)
    asked: Any = {"grammar": ""}
    said = ""
    while asked is not None:
        write_frame(stdout, number, {"text": said})
        used = resource.getrusage(resource.RUSAGE_SELF)
        # if its parent is gone and cannot kill it
        limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + settings["seconds"]) + 2)
        number, asked = read_frame(stdin)
        said = "" if asked is None else tried(asked["grammar"])


if __name__ == "__main__":
    main()
