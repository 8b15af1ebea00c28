"""`hybridkv compress`: read a text once, keep a part of its cache in a file, and ask about it later."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, BadParameter, Option

from hybridkv.commands import completion
from hybridkv.commands.declaring import with_options
from hybridkv.commands.invocation import command_name
from hybridkv.commands.options import OpenOptions
from hybridkv.commands.panels import EVICTION, OUTPUT, PROMPT
from hybridkv.commands.prompts import read_text


@with_options
def compress(
    *,
    file: Annotated[
        str,
        Argument(metavar="FILE", help="the text; - is standard input", autocompletion=completion.any_file),
    ],
    output: Annotated[
        str,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="where the document is written",
            rich_help_panel=OUTPUT,
            autocompletion=completion.any_file,
        ),
    ],
    system: Annotated[
        str | None,
        Option("--system", metavar="TEXT", help="system message, which is kept whole", rich_help_panel=PROMPT),
    ] = None,
    ratio: Annotated[
        float | None,
        Option(
            "--ratio",
            metavar="X",
            help="how many times smaller the cache becomes; 4 without --budget",
            show_default=False,
            rich_help_panel=EVICTION,
        ),
    ] = None,
    budget: Annotated[
        int | None,
        Option(
            "--budget", metavar="TOKENS", help="tokens kept a stream, in place of --ratio", rich_help_panel=EVICTION
        ),
    ] = None,
    policy: Annotated[
        str,
        Option(
            "--policy",
            metavar="NAME",
            help="what is kept: replay (the text is read twice), or one that chooses at once: auto, heads, keydiff, "
            "leverage, ...",
            rich_help_panel=EVICTION,
        ),
    ] = "replay",
    model: OpenOptions,
) -> None:
    """Read a text and write a document: a part of its cache, for questions that are not known yet.

    With the policy replay the model reads the text twice: the second time it repeats it, and what it looks at stays.
    Ask with `hybridkv generate --document FILE "question"` or `hybridkv chat --document FILE`, with the same model and
    the same --dtype and --kv-dtype.
    """
    from hybridkv.commands.display import note, progress
    from hybridkv.document import check_settings
    from hybridkv.planner import human

    check_settings(ratio, budget, policy)
    _check_output(output, file)
    text = read_text(file, "FILE")
    if not text.strip():
        where = "standard input" if file == "-" else repr(file)
        raise BadParameter(f"FILE: {where} holds no text")
    with model.open(2) as llm:
        with progress() as bars:
            shown = {what: bars.show(f"{what} the text") for what in ("reading", "reading again")}

            def report(what: str, done: int, total: int) -> None:
                shown[what](done, total)

            document = llm.compress(text, ratio=ratio, budget=budget, policy=policy, system=system, progress=report)
        with document:
            document.save(output)
            stats = document.stats
    note(
        f"kept {stats['kept_tokens']:.0f} of {stats['tokens']} tokens a stream by {stats['policy']}, "
        f"KV {human(stats['kv_bytes_full'])} -> {human(stats['kv_bytes_kept'])}, in {stats['seconds']:.1f} s"
    )
    same = "" if model.model is None else f"--model {shlex.quote(model.model)} "
    note(f'ask with: {command_name()} generate {same}--document {shlex.quote(output)} "question"')


def _check_output(output: str, source: str) -> None:
    """Refuse, before a model is loaded, a file that cannot be written, or that is the text itself."""
    from hybridkv.cache.snapshot_file import check_place

    path, text = Path(output).expanduser(), Path(source).expanduser()
    check_place(path, "document")
    if source != "-" and path.exists() and text.exists() and path.samefile(text):
        raise BadParameter(f"--output: {output!r} is the text itself; give another name")
